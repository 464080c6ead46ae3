"""What the controller observes: the values that ``core.plan`` needs. ``controller.observe`` makes
them; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Decision, Rules
from nomarr_systemd.core.time import Moment

RUNNING: Final = ("active", "activating", "reloading", "deactivating", "maintenance")


class Unit(NamedTuple):
    """A worker's unit, its timer and its nomarr-wanted@ unit, as systemd shows them."""

    # ActiveState; "failed" as well if it is inactive although it is wanted: it ended unasked, or
    # could not be started.
    state: str = "inactive"
    invocation: str = ""  # of its wanted unit, if it could not be started since that began
    masked: bool = False
    has_job: bool = False
    wanted: bool = True  # False: a stop was requested since its last start
    kept_down: bool = False  # a hold prevented its last start
    timer: Literal["none", "waiting", "elapsed"] = "none"
    lacks: str = ""  # a unit that it requires and that is not active, and the state of that

    def is_still_failed(self, run: str) -> bool:
        """Return True if it is failed in this run, not masked, and has no job queued."""
        is_free = not self.masked and not self.has_job
        return is_free and self.state == "failed" and self.invocation == run


class Worker(NamedTuple):
    """One worker of the world."""

    component: Component
    rules: Rules
    unit: Unit = Unit()
    account: Account | None = None  # None: the ledger cannot be read
    hold: str = ""
    deaths: tuple[Death, ...] = ()  # reported and not cleared, oldest first, the unit's own last
    rang: bool = False  # a report says that its backoff is over
    resumes: bool = False  # its pause is over: by its time, or a resume was cut off


class Pool(NamedTuple):
    """What the plan has to know of a configured pool."""

    workers: int
    window_s: float = 300.0
    fails_after: int | None = None  # more crashes than this may fail the pool; None: never
    fails_by: str = ""  # the setting that decides this


class Turns(NamedTuple):
    """Restarts of a pool that may be under way at the same time, on all hosts."""

    free: int
    mine: frozenset[str] = frozenset()  # workers of this host that have a turn


class Spooled(NamedTuple):
    """A death that was decided about without the ledger, and when."""

    death: Death
    decision: Decision
    at: Moment


class Outcome(NamedTuple):
    """What the supervisor says of the jobs of a dead run. Untrusted: it can refund restarts, and
    report that a pool fails, which the plan checks by its own count of crashes."""

    component_id: str
    invocation: str
    quarantined: tuple[str, ...] = ()
    refund: tuple[str, ...] = ()  # invocations
    fail_pool: bool = False
    failed: tuple[str, ...] = ()  # jobs that failed for this death and are not tried again


class World(NamedTuple):
    """Everything that a plan rests on. Workers that run and owe nothing may be left out."""

    workers: tuple[Worker, ...] = ()
    pools: Mapping[str, Pool] = {}
    incidents: Mapping[str, Incident] = {}
    recent: Mapping[str, tuple[Death, ...]] = {}
    untold: frozenset[str] = frozenset()  # runs whose death only the supervisor has to be told
    spooled: tuple[Spooled, ...] = ()  # oldest first
    resumed: Mapping[str, str] = {}  # pools whose incident a person ends, and the reason
    outcomes: tuple[Outcome, ...] = ()
    refunded: frozenset[str] = frozenset()  # runs whose outcomes were refunded
    asked: frozenset[str] = frozenset()  # runs about which the supervisor was asked before a mask
    ledger: Literal["sound", "read-only", "away"] = "sound"
    supervisor_active: bool = True
    healthy: frozenset[str] = frozenset()  # canaries that the supervisor calls healthy
    turns: Mapping[str, Turns] = {}  # of pools whose restarts wait for each other
