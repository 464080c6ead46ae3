"""What the controller is to do: the values that ``core.plan`` returns and ``controller.act``
carries out. Each may be carried out twice.
"""

from __future__ import annotations

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import Spooled


class Schedule(NamedTuple):
    """Make a timer for a restart that is due later. A timer without a record starts nothing."""

    component: Component
    due: Moment


class OpenIncident(NamedTuple):
    incident: Incident


class Join(NamedTuple):
    pool: str
    member: str


class Elect(NamedTuple):
    pool: str
    canary: str


class Close(NamedTuple):
    pool: str
    why: str
    deaths: int  # of its members, as far as the ledger has them


class Hold(NamedTuple):
    component: Component
    why: str


class Release(NamedTuple):
    component: Component


class Book(NamedTuple):
    """Put a death on record; ``record`` is the decision that the plan expects."""

    component: Component
    death: Death
    rules: Rules
    current: bool
    record: Record


class BookSpooled(NamedTuple):
    component: Component
    entry: Spooled
    rules: Rules


class Spool(NamedTuple):
    component: Component
    entry: Spooled


class Refund(NamedTuple):
    component: Component
    invocation: str
    why: str


class MarkFailed(NamedTuple):
    """Put on record that the worker is to be masked because its pool failed."""

    component: Component
    invocation: str  # the death that failed the pool
    why: str


class BlameJobs(NamedTuple):
    """Note and log that restarts were refunded for jobs of this run."""

    component: Component
    invocation: str
    jobs: tuple[str, ...]
    refund: tuple[str, ...] = ()  # invocations
    quarantined: bool = True  # False: they have failed, and are not tried again


class Consult(NamedTuple):
    """Ask the supervisor, before a death masks its worker, whether a job is to blame."""

    component: Component
    death: Death


class Stop(NamedTuple):
    component: Component


class Mask(NamedTuple):
    component: Component


class Resume(NamedTuple):
    """End the pause of a worker; start it, unless it is masked."""

    component: Component
    start: bool


class TakeTurn(NamedTuple):
    """Take a turn for a restart, where restarts of a pool wait for each other; without one, the
    worker is not started."""

    component: Component


class GiveTurn(NamedTuple):
    """End the turn of a worker that runs, or does not start any more."""

    component: Component


class Start(NamedTuple):
    """Start the unit if it still is in this failed run and no stop was requested."""

    component: Component
    run: str


class CancelTimer(NamedTuple):
    component: Component


class Note(NamedTuple):
    """Note how far a decision has been carried out."""

    component: Component
    invocation: str
    effect: str


class Tell(NamedTuple):
    """Tell the journal and the supervisor of a death and its decision."""

    component: Component
    death: Death
    record: Record
    is_new: bool  # False: the journal has it, and the supervisor has not answered


class FailPool(NamedTuple):
    """Log that a whole pool was stopped and masked, also to each worker."""

    pool: str
    reason: str
    workers: tuple[Component, ...] = ()


class Clear(NamedTuple):
    """Forget the report of a death: nothing is owed for it."""

    component: Component
    invocation: str


Intent = (
    Schedule | OpenIncident | Join | Elect | Close | Hold | Release | Book | BookSpooled
    | Spool | Refund | MarkFailed | BlameJobs | Stop | Mask | Resume | Start | CancelTimer | Note
    | TakeTurn | GiveTurn | Tell | Consult | FailPool | Clear
)  # fmt: skip
