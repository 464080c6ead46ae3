"""Figures in the store, for whoever wants to see them: averages per worker and pool, the queue's
lengths, and the health of the GPU with the time it was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.jobs.queue import now_ms
from nomarr_systemd.jobs.settlement import STATS
from nomarr_systemd.store.protocol import Store

GPU: Final = "gpu:health"


class GpuHealth(NamedTuple):
    available: bool
    reason: str = ""


def publish(store: Store, key: str, figures: Mapping[str, Any]) -> None:
    """Keep figures under a key (a component id, or ``queue:tag``), in place of the last ones."""
    document = {**figures, "_key": key, "wall_ms": now_ms()}
    try:
        there = store.get(STATS, key)
        if there is None:
            store.insert(STATS, document)
        else:
            store.replace(STATS, document | {"_rev": there["_rev"]})
    except (StaleRevision, KeyExists):
        return  # somebody's newer figures are there


def report_gpu(store: Store, health: GpuHealth) -> None:
    """Say how the GPU is: for the program that looks after it."""
    publish(store, GPU, health._asdict())


def read_gpu(store: Store, max_age_s: float) -> GpuHealth | None:
    """How the GPU is; None if nobody looked lately, by a clock that may have been set."""
    doc = store.get(STATS, GPU)
    if doc is None or not isinstance(doc.get("wall_ms"), int):
        return None
    if abs(now_ms() - doc["wall_ms"]) > max_age_s * 1000:
        return None
    return GpuHealth(doc.get("available") is not False, str(doc.get("reason", "")))
