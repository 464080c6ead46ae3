"""Renews this host's lease, and looks for hosts that are lost. Only for a store that hosts share;
part of settle_thread.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final

from nomarr_systemd.config.values import Config, StoreSettings
from nomarr_systemd.core.job import Outcome
from nomarr_systemd.core.lease import Lease
from nomarr_systemd.core.text import clean
from nomarr_systemd.fleet.leases import HostLease
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.log import NOTICE, WARNING, RateLimit, log
from nomarr_systemd.host.machine import host_of, name_of
from nomarr_systemd.jobs.lost_hosts import LostHosts
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.job_settler import About

_MAX_TEXT: Final = 200


class LeaseKeeper:
    """What is known of the lease. A new helper begins anew, as after a start of the supervisor."""

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
