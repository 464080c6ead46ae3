"""The jobs of hosts that are lost: other hosts settle them by the crash policy of their pools.

A host is declared lost by compare-and-swap, so one of the others settles its jobs; settlement
itself may be repeated. If that one is killed in between, or workers of a lost host still take
jobs, the first of all hosts finds the claims within minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from nomarr_systemd.core.job import HOST_LOST, Outcome, RunEnd
from nomarr_systemd.core.lease import Lease, LeaseWatch
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.fleet import leases
from nomarr_systemd.host.log import WARNING, log
from nomarr_systemd.jobs.settlement import ClaimedRun, find_claimed_runs, settle
from nomarr_systemd.store.protocol import Store

REST_S: Final = 60.0  # between two looks at all claims


class Found(NamedTuple):
    """The outcome of one run of a lost host."""

    lease: Lease
    outcome: Outcome


class LostHosts:
    """Called from time to time by each host's supervisor. ``wall_ms`` is the time for records."""

    def __init__(self, host: str, on_lost: Callable[[Lease], None]) -> None:
        self._host = host
        self._on_lost = on_lost
        self._watch = LeaseWatch()
        self._rest_at = 0.0
        self._left: set[tuple[str, str]] = set()  # runs of lost hosts that had claims

    def look(self, store: Store, now_s: float, wall_ms: int) -> Iterator[Found]:
        """Settle the jobs of hosts whose lease has lapsed. May raise StoreUnavailable."""
        now_ms = store.now_ms()
        late = [each for each in leases.find_late(store, now_ms) if each.host != self._host]
        for lease in self._watch.judge(late, now_ms, now_s):
            if leases.declare_lost(store, lease):
                self._on_lost(lease)
                for run in find_claimed_runs(store, lease.host):
                    yield from _settle(store, lease, run, wall_ms)
        if now_s >= self._rest_at:
            self._rest_at = now_s + REST_S
            yield from self._look_for_rest(store, now_ms, wall_ms)

    def _look_for_rest(self, store: Store, now_ms: int, wall_ms: int) -> Iterator[Found]:
        """Settle runs of lost hosts that had claims at the last look, too. A host that comes back
        renews its lease at once, and keeps its claims."""
        left: set[tuple[str, str]] = set()
        if leases.is_first(store, self._host):
            leases.forget_old(store, now_ms)
            for lease in leases.find_lost(store):
                for run in find_claimed_runs(store, lease.host):
                    if (lease.host, run.invocation) in self._left:
                        yield from _settle(store, lease, run, wall_ms)
                    else:
                        left.add((lease.host, run.invocation))
        self._left = left


def _settle(store: Store, lease: Lease, run: ClaimedRun, wall_ms: int) -> Iterator[Found]:
    """Settle a run of a lost host. Its end counts against its jobs: one that takes its host down
    would take down one host after the other. It does not count against the worker or its pool."""
    end = RunEnd(
        run.component_id, run.invocation, HOST_LOST, wall_ms, counted=False, blames_job=True
    )
    pool = lease.rules_of(run.component_id.split(":")[1])
    try:
        outcome, _is_new = settle(store, pool, end, lease.host)
    except (KeyError, TypeError, ValueError) as error:
        # A damaged document must not keep other runs from being settled.
        log(
            WARNING,
            "a damaged job of a lost run cannot be settled",
            run=run.invocation,
            error=error,
        )
        return
    yield Found(lease, outcome)
