"""Figures in the store for other programs: averages per worker and pool, lengths of queues, and
the health of the GPU with the time of the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.jobs.queue import now_ms
from nomarr_systemd.jobs.settlement import STATS
from nomarr_systemd.store.protocol import Store, hosted

GPU: Final = "gpu:health"
AVERAGE: Final = "avg_time_s"


class GpuHealth(NamedTuple):
    available: bool
    reason: str = ""


def publish(store: Store, name: str, figures: Mapping[str, Any], host: str = "") -> None:
    """Replace the figures of a component id, or of ``queue:tag``. ``host`` is this host where
    several share a store: each has figures of its own."""
    key = hosted(name, host)
    document = {**figures, "_key": key, "wall_ms": now_ms()}
    try:
        there = store.get(STATS, key)
        if there is not None and figures.get(AVERAGE) == 0:  # a run that has done nothing yet
            document[AVERAGE] = there.get(AVERAGE, 0)
        if there is None:
            store.insert(STATS, document)
        else:
            store.replace(STATS, document | {"_rev": there["_rev"]})
    except (StaleRevision, KeyExists):
        return  # another process wrote newer figures


def read_average(store: Store, component_id: str, host: str = "") -> float:
    """Return the rolling average of a worker's job times, over its runs; 0 if there is none."""
    found = (store.get(STATS, hosted(component_id, host)) or {}).get(AVERAGE)
    return float(found) if isinstance(found, int | float) and 0 < found < 1e9 else 0.0


def report_gpu(store: Store, health: GpuHealth, host: str = "") -> None:
    """Record the health of a host's GPU; called by worker.gpu_probe (docs/contract.md)."""
    publish(store, GPU, health._asdict(), host)


def read_gpu(store: Store, max_age_s: float, host: str = "") -> GpuHealth | None:
    """Return the GPU's health; None if there was no recent check, also if the clock was set
    since."""
    doc = store.get(STATS, hosted(GPU, host))
    if doc is None or not isinstance(doc.get("wall_ms"), int):
        return None
    if abs(now_ms() - doc["wall_ms"]) > max_age_s * 1000:
        return None
    return GpuHealth(doc.get("available") is not False, str(doc.get("reason", "")))
