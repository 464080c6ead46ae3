"""``[pool.NAME.unit]``: which systemd directives a pool may set, and which are reserved.

A directive that is not in the table is allowed; ``systemd-analyze verify`` checks whether systemd
knows it. Directives are rendered into a drop-in by ``systemd.unit_files``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nomarr_systemd.config.settings import Fault
from nomarr_systemd.core.text import quote, show

_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")


class Owned(NamedTuple):
    """A directive, or with a star a family of them, that a pool cannot set, and why."""

    name: str
    why: str
    instead: str = ""

    def covers(self, directive: str) -> bool:
        if self.name.endswith("*"):
            return directive.startswith(self.name[:-1])
        return directive == self.name


OWNED = (
    Owned("Type", "every worker is Type=notify: it says itself when it is ready"),
    Owned("NotifyAccess", "it follows from entrypoint or command"),
    Owned("ExitType", "a worker ends when its main process does"),
    Owned("ExecStart", "it is made from the pool's program", "set entrypoint or command"),
    Owned("ExecStop", "it leaves the mark that tells a wanted stop from a failure"),
    Owned("RemainAfterExit", "a worker that is gone must not look active"),
    Owned("SuccessExitStatus", "a failure called success would never reach the policy"),
    Owned("RestartPreventExitStatus", "the restart policy decides", "set never_restart"),
    Owned("Restart*", "systemd must not restart what the restart policy decides", "set [policy]"),
    Owned("StartLimit*", "the restart policy is the only limit", "set max_restarts and window_s"),
    Owned("OnFailure*", "it reports failures to the controller"),
    Owned("OnSuccess*", "the controller decides what follows a worker's end"),
    Owned("FailureAction*", "the restart policy decides what follows a failure"),
    Owned("SuccessAction*", "the controller decides what follows a worker's end"),
    Owned("CollectMode", "a failed unit must stay until its failure is booked"),
    Owned("WatchdogSec", "it is made from the pool's settings", "set watchdog_s"),
    Owned("WatchdogSignal", "SIGABRT leaves every thread's stack in the journal"),
    Owned("TimeoutStopSec", "it is made from the pool's settings", "set stop_timeout_s"),
    Owned("TimeoutSec", "it sets the timeouts of start and stop", "set stop_timeout_s"),
    Owned("TimeoutStartSec", "a worker extends it while it loads", "set startup_timeout_s"),
    Owned("Timeout*", "the times between two signals are fixed"),
    Owned("RuntimeMax*", "the worker would look stopped on request and stay stopped"),
    Owned("OOMPolicy", "any value but kill runs ExecStop=, as a requested stop does"),
    Owned("KillMode", "a stop lets the worker finish its job, then ends its children"),
    Owned("KillSignal", "SIGTERM is how a worker is asked to finish"),
    Owned("FinalKillSignal", "after the stop timeout nothing less than SIGKILL helps"),
    Owned("SendSIG*", "the worker contract says which signals a worker gets"),
    Owned("RefuseManual*", "operator and controller start and stop workers"),
    Owned("PartOf", "a worker is stopped with nomarr-workers.target"),
    Owned("ConditionPathExists", "pause and hold prevent a start by it"),
    Owned("Slice", "each pool has a slice", "limit the pool: systemctl edit nomarr-POOL.slice"),
    Owned("LogExtraFields", "it marks the worker's journal entries"),
    Owned("LogNamespace", "post-mortems read the worker's entries from the default journal"),
    Owned("User", "the worker could not open its health pipe", "set user of [pool.NAME]"),
    Owned("Group", "workers run as the group of the package", "set SupplementaryGroups"),
    Owned("DynamicUser", "workers run as the user of the package"),
    Owned("RuntimeDirectory*", "it could take the pipes' or the controller's directory away"),
    Owned("StateDirectory*", "it could give the controller's ledger to the worker"),
    Owned("FileDescriptorStore*", "only the supervisor keeps descriptors"),
    Owned("WantedBy", "nomarrctl apply decides what starts", "set workers"),
    Owned("RequiredBy", "nomarrctl apply decides what starts", "set workers"),
    Owned("UpheldBy", "nomarrctl apply decides what starts", "set workers"),
    Owned("Also", "nomarrctl apply decides what starts", "set workers"),
    Owned("Alias", "a worker has one name"),
)
# An empty text clears what the unit itself sets; these may only be added to.
NEVER_EMPTIED = ("After", "Environment")


def find_owned(name: str) -> Owned | None:
    """Return the row of the table that reserves this directive; None if a pool may set it."""
    return next((owned for owned in OWNED if owned.covers(name)), None)


def check_directive(name: str, value: object) -> Iterator[Fault]:
    """Yield everything that is wrong with one directive."""
    if not _NAME.fullmatch(name):
        yield Fault("that is not the name of a systemd directive", 'write e.g. MemoryMax = "4G"')
        return
    owned = find_owned(name)
    if owned:
        yield Fault(f"a pool cannot set {name}: {owned.why}", owned.instead)
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from (fault._replace(at=(n,)) for fault in _check_value(name, item))
    elif not isinstance(value, bool | int):
        yield from _check_value(name, value)
    elif abs(value) >= 2**64:
        yield Fault(f"{show(value)} is more than systemd can count")


def _check_value(name: str, value: object) -> Iterator[Fault]:
    if not isinstance(value, str):
        yield Fault(f"{show(value)} is not text", "put it into quotes")
    elif any(ord(sign) < 32 and sign != "\t" for sign in value) or value.rstrip().endswith("\\"):
        yield Fault(
            f"{quote(value)} would write more than one directive",
            "leave out line breaks, control characters and a backslash at the end",
        )
    elif not value.strip() and name in NEVER_EMPTIED:
        yield Fault(f"an empty {name} would undo what the unit itself needs")
