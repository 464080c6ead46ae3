"""What this host's document says of its workers, in a store that hosts share. lease_keeper.py
writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nomarr_systemd import __version__
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.lease import PoolRules, write_rules
from nomarr_systemd.core.text import clean
from nomarr_systemd.supervisor.job_settler import About
from nomarr_systemd.supervisor.workers import Crash, Worker

MAX_WORKERS: Final = 20  # of each list in the document
_MAX_TEXT: Final = 200
_WELL: Final = ("healthy", "starting", "stopping")
_WORST: Final = ("failed", "crashed", "unhealthy", "recovering", "stopped")


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
