"""What the kernel logged about the end of a run: memory, processes that it refused, system calls.

systemd does not always learn that the kernel killed a process for memory: never with cgroup v1, and
with v2 not if it looks too early. Only the kernel and root can write such a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from nomarr_systemd.systemd.journal_reader import Entry, Journal

_TERMS: Final = (("_TRANSPORT=kernel",), ("_TRANSPORT=audit",))
_LIMIT: Final = 500
_GRACE_US: Final = 5_000_000  # the kernel's lines may be read late
_KILLED: Final = re.compile(r"Killed process ([0-9]{1,9}) .*?anon-rss:([0-9]{1,15})kB")
_VICTIM: Final = re.compile(r"oom-kill:.*\btask_memcg=([^,]*),task=.*\bpid=([0-9]{1,9})")
_REFUSED: Final = re.compile(r"fork rejected by pids controller in (\S+)")
_FORBIDDEN: Final = re.compile(
    r"(?:type=1326|SECCOMP)\b.*\bpid=([0-9]{1,9})\b.*\bsig=31\b.*\bsyscall=([0-9]{1,9})"
)


class KernelFacts(NamedTuple):
    """What the kernel logged about one run."""

    oom_killed: bool = False
    memory: int = 0  # bytes that the killed process had; 0: unknown
    forks_refused: bool = False  # TasksMax= was reached
    system_call: int | None = None  # the number of the one that was forbidden


def read_kernel(
    journal: Journal, unit: str, pids: Collection[int], *, since_us: int, died_us: int
) -> KernelFacts:
    """Read the kernel's lines from the start of a run to a few seconds after its end."""
    entries = journal.read_back(
        _TERMS, limit=_LIMIT, until_us=died_us + _GRACE_US, since_us=since_us - _GRACE_US
    )
    return find_facts(entries, unit, pids)


def find_facts(entries: Iterable[Entry], unit: str, pids: Collection[int]) -> KernelFacts:
    """Return what lines say that name a process of the run, or the cgroup of its unit."""
    found = KernelFacts()
    killed = set(pids)
    for entry in entries:
        text = entry.text
        if match := _VICTIM.search(text):
            if _is_in(match[1], unit):
                killed.add(int(match[2]))
        elif match := _KILLED.search(text):
            if int(match[1]) in killed:
                found = found._replace(oom_killed=True, memory=int(match[2]) * 1024)
        elif match := _REFUSED.search(text):
            if _is_in(match[1], unit):
                found = found._replace(forks_refused=True)
        elif (match := _FORBIDDEN.search(text)) and int(match[1]) in pids:
            found = found._replace(system_call=int(match[2]))
    return found


def _is_in(cgroup: str, unit: str) -> bool:
    return unit in cgroup.split("/")
