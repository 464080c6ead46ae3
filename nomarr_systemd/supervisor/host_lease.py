"""This host's lease: what its document says of the workers, and the settler's thread's part, which
renews it and looks for hosts that are lost. Only for a store that hosts share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from nomarr_systemd import __version__
from nomarr_systemd.config.values import Config, StoreSettings
from nomarr_systemd.core.job import Outcome
from nomarr_systemd.core.lease import Lease, PoolRules, write_rules
from nomarr_systemd.core.text import clean
from nomarr_systemd.fleet.leases import HostLease
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.host.machine import host_of, name_of
from nomarr_systemd.jobs.lost_hosts import LostHosts
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.workers import Crash, Worker

MAX_WORKERS: Final = 20  # of each list in the document
_MAX_TEXT: Final = 200
_WELL: Final = ("healthy", "starting", "stopping")
_WORST: Final = ("failed", "crashed", "unhealthy", "recovering", "stopped")

About = dict[str, Any]


def describe_host(workers: Iterable[Worker], config: Config, system: str) -> About:
    """What a host's document says of its workers: how many are in which state, the worst of those
    that are not well, and the last crashes (docs/contract.md)."""
    pools: dict[str, dict[str, int]] = {pool.name: {} for pool in config.pools}
    trouble, crashes = [], []
    for worker in workers:
        states = pools.setdefault(worker.component.pool, {})
        states[worker.status] = states.get(worker.status, 0) + 1
        if worker.status not in _WELL:
            trouble.append(worker)
        if worker.crash:
            crashes.append((worker.crash, worker.component.instance))
    trouble.sort(key=lambda each: (_WORST.index(each.status), each.order))
    crashes.sort(reverse=True)
    rules = (
        PoolRules(pool.name, pool.crash_policy, pool.crash_max_retries, pool.job_max_crashes)
        for pool in config.pools
    )
    return {
        "version": __version__,
        "system": system,
        "pools": pools,
        "trouble": [
            {"worker": each.component.instance, "status": each.status}
            for each in trouble[:MAX_WORKERS]
        ],
        "crashes": [_describe_crash(*each) for each in crashes[:MAX_WORKERS]],
        "rules": write_rules(rules),
    }


def _describe_crash(crash: Crash, instance: str) -> dict[str, Any]:
    return {
        "worker": instance,
        "wall_ms": crash.wall_ms,
        "invocation": crash.invocation,
        "cause": clean(crash.error, _MAX_TEXT),
        "decision": clean(crash.decision, _MAX_TEXT),
    }


class LeaseKeeper:
    """The thread's part: all of it belongs to the thread alone."""

    def __init__(self) -> None:
        self._settings: StoreSettings | None = None
        self._host = ""
        self._rate = RateLimit(burst=3, every_s=60)
        # Another machine has the name of this host, or may have it: not known before a renewal.
        self.is_contested = True

    def keep(self, store: Store, config: Config, about: About) -> Iterator[Outcome]:
        """Renew the lease; then settle the jobs of hosts that are lost, and yield what became of
        them. May raise StoreUnavailable; then call it again."""
        if self._settings != config.store:
            self._settings, self._host = config.store, host_of(config.store)
            holder = f"{read_boot_id()}/{os.getuid()}"
            self._lease = HostLease(self._host, name_of(config.store), holder)
            self._lost = LostHosts(self._host, _log_lost)
        renewal = self._lease.renew(store, config.fleet.lease_s, about)
        if renewal.was_lost:
            log(WARNING, "the lease of this host was over: other hosts have settled its jobs")
        self.is_contested = renewal.is_contested or renewal.is_unsure
        if renewal.is_contested:
            hint = "set [fleet] host on each machine, or give each a machine-id of its own"
            self._rate.log(
                WARNING, "another machine has the name of this host", host=self._host, hint=hint
            )
        wall_ms = time.time_ns() // 1_000_000
        for lease, outcome in self._lost.look(store, time.monotonic(), wall_ms):
            log(
                NOTICE,
                "jobs of a lost host are settled",
                host=clean(lease.name, _MAX_TEXT),
                component=clean(outcome.component_id, _MAX_TEXT),
                invocation=clean(outcome.invocation, _MAX_TEXT),
                jobs=",".join(f"{each.job}:{each.status}" for each in outcome.settled),
            )
            yield outcome


def _log_lost(lease: Lease) -> None:
    log(
        WARNING,
        "a host is lost: its lease was not renewed",
        host=clean(lease.name, _MAX_TEXT),
        lease_s=lease.lease_ms / 1000,
    )
