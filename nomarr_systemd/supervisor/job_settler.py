"""The jobs of runs that have ended, as the loop sees them: what is not settled yet, which requests
wait for it, and when claims are looked at. The store's helper does the work (settle_thread.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.job import Outcome, RunEnd
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.loop import Loop, Timer
from nomarr_systemd.supervisor.store_process import StoreProcess, Taker, split

_MAX_OUTCOMES: Final = 1000

# An outcome is identified by its run and by whether the run was counted as a crash: one that was
# settled uncounted may be reported as a crash later.
Key = tuple[str, bool]
About = dict[str, Any]  # what this host's lease says
Outcomes = dict[str, Outcome | None]  # by invocation; None: not settled in time


class Sweep(NamedTuple):
    """What a look at all claims has to know of those before it. Times are monotonic seconds."""

    vanished: dict[str, float]  # when a run with claims was first found ended
    is_first: bool = True
    restore_due: float = 0.0  # of the next look for jobs without a claim


class Waiter:
    """A request that waits for outcomes."""

    def __init__(self, keys: Iterable[Key], reply: Callable[[Outcomes], None]) -> None:
        self.missing = set(keys)
        self.found: Outcomes = {invocation: None for invocation, _ in self.missing}
        self.reply = reply


class JobSettler:
    """``on_settled(outcome)`` is called for every new outcome, ``on_store(is_away)`` when the store
    becomes unavailable or available again."""

    def __init__(
        self,
        loop: Loop,
        process: StoreProcess,
        *,
        on_settled: Callable[[Outcome], None],
        on_store: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._on_settled = on_settled
        self._on_store = on_store
        self._config: Config | None = None  # None: the store of jobs is not known yet
        self._is_away = False
        self._owed: dict[Key, RunEnd] = {}
        self._sweep = Sweep({})
        self._is_sweeping = False
        self._sweep_timer: Timer | None = None
        self._has_ended = False  # a run, since the last sweep began
        self._question: dict[str, Any] | None = None
        self._lines: Sequence[tuple[str, bytes]] = ()
        self._answer_look: Callable[[Any], None] = lambda _look: None
        self._renewal: About | None = None
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._waiters: list[Waiter] = []
        takers: dict[str, Taker] = {
            "settled": self._take_settled,
            "swept": self._take_sweep,
            "looked": self._take_look,
            "renewed": self._take_renewal,
            "store": self._take_store,
        }
        process.add(self, takers)

    def configure(self, config: Config) -> None:
        is_first = self._config is None
        self._config = config
        self._is_sweeping = True
        self._arm_sweep()
        self._process.send(self._encode_all() if is_first else self._encode_basics(config))

    def expect(self) -> None:
        """Prepare for the end of a run, which was seen: its jobs are to be settled soon."""
        if not self._has_ended:  # thousands may end at once
            self._has_ended = True
            self._arm_sweep()
        self._process.warm()

    def settle(self, end: RunEnd) -> None:
        self._owed.setdefault((end.invocation, end.counted), end)
        self._process.linger()
        self._send("settle", end)

    def settle_and_wait(
        self, ends: Iterable[RunEnd], within_s: float, reply: Callable[[Outcomes], None]
    ) -> None:
        """Settle runs, and call ``reply`` once, when all are settled or the time is over."""
        ends = list(ends)
        waiter = Waiter([(end.invocation, end.counted) for end in ends], reply)
        if not ends:
            reply(waiter.found)
            return
        for end in ends:
            self.settle(end)
        self._waiters.append(waiter)
        self._loop.at(self._loop.now + within_s, partial(self._answer, waiter))

    def look(
        self,
        question: dict[str, Any],
        lines: Sequence[tuple[str, bytes]],
        answer: Callable[[Any], None],
    ) -> None:
        """Read queues and jobs. ``lines`` are the last frames of workers. There must be no other
        question that still waits."""
        self._question, self._lines, self._answer_look = question, lines, answer
        if not question["is_slow"]:
            self._process.linger()
        self._process.send(self._encode_look())

    def renew_lease(self, about: About) -> None:
        """Renew the lease of this host. What still waits is replaced by this."""
        self._renewal = about
        self._send("renew", about)

    def find_job(self, invocation: str) -> str:
        """The path of the job that a run had in hand when it ended; empty if not known."""
        outcome = self._outcomes.get(invocation)
        return outcome.settled[0].path if outcome and outcome.settled else ""

    # The helper

    def is_busy(self) -> bool:
        waits = self._owed or self._is_sweeping or self._question or self._renewal is not None
        return bool(waits) and self._config is not None

    def resend(self) -> None:
        self._process.send(self._encode_all())

    def lose(self) -> None:
        if self.is_busy() and not self._is_away:
            self._take_store(is_away=True)

    def _encode_all(self) -> Iterator[Message]:
        """Yield all that a new helper has to be told."""
        if self._config is None:
            return
        if self._renewal is not None:  # first: claims are looked at with what it finds
            yield ["renew", self._renewal]
        yield from self._encode_basics(self._config)
        for end in tuple(self._owed.values()):
            yield ["settle", end]
        yield from self._encode_look()

    def _encode_basics(self, config: Config) -> Iterator[Message]:
        yield ["configure", config.to_dict(), self._is_away]
        if self._is_sweeping:
            yield ["sweep", self._sweep]

    def _encode_look(self) -> Iterator[Message]:
        if self._question:
            for some in split(self._lines):
                yield ["lines", {name: line.decode() for name, line in some}]
            yield ["look", self._question]

    def _send(self, kind: str, value: Any) -> None:
        if self._config is not None:
            self._process.send([[kind, value]])

    def _begin_sweep(self) -> None:
        self._has_ended = False
        if not self._is_sweeping:
            self._is_sweeping = True
            self._send("sweep", self._sweep)
        self._arm_sweep()

    def _arm_sweep(self) -> None:
        """Set the time of the next look at claims: sooner if one may be of a run that has ended,
        later if a helper has to be started for it."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._config is None:
            return
        interval_s = get_sweep_s(self._config)
        if self._has_ended or self._sweep.vanished:
            interval_s /= 2
        elif not self._process.is_kept:
            interval_s *= 2
        self._sweep_timer = self._loop.at_next(interval_s, self._begin_sweep)

    def _take_settled(
        self, invocation: str, counted: bool, found: dict[str, Any] | None, is_new: bool
    ) -> None:
        """``found`` None: a document is damaged, and nothing can be done about the run."""
        key = (invocation, counted)
        self._owed.pop(key, None)
        if found is None:
            return
        outcome = Outcome.from_dict(found)
        self._outcomes[outcome.invocation] = outcome
        while len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)
        if is_new:
            self._on_settled(outcome)
        for waiter in tuple(self._waiters):
            if key in waiter.missing:
                waiter.missing.discard(key)
                waiter.found[outcome.invocation] = outcome
                if not waiter.missing:
                    self._answer(waiter)

    def _take_sweep(self, sweep: list[Any]) -> None:
        self._sweep = Sweep(*sweep)
        self._is_sweeping = False
        if self._sweep.vanished:
            self._arm_sweep()

    def _take_look(self, look: dict[str, Any]) -> None:
        self._question, self._lines = None, ()
        self._answer_look(look)

    def _take_renewal(self) -> None:
        self._renewal = None

    def _take_store(self, is_away: bool) -> None:
        self._is_away = is_away
        self._on_store(is_away)

    def _answer(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.reply(waiter.found)


def get_sweep_s(config: Config) -> float:
    """Return the time between two looks at claims."""
    return max(min((pool.claim_timeout_s for pool in config.pools), default=30.0), 0.2)


def describe(outcome: Outcome | None) -> Mapping[str, Any]:
    """An outcome in the form of the answer to ``crashed`` (docs/contract.md)."""
    if outcome is None:
        return {"settled": False}
    return {
        "settled": True,
        "jobs": [each.job for each in outcome.settled],
        "quarantined": outcome.quarantined,
        "failed": outcome.failed,
        "refund": outcome.refund,
        "fail_pool": outcome.fail_pool,
    }
