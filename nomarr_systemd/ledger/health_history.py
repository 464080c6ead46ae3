"""Samples of every worker's health, written from time to time for people and diagrams.

Nothing is decided by them. They are best effort, and pruned after a few days.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.store.protocol import Doc, Store

COLLECTION: Final = "health_history"
KEEP_DAYS: Final = 3
_DAY_MS: Final = 86_400_000
_FROM_FRAME: Final = ("phase", "job", "pid", "seq", "progress_age_s", "metrics")


class Sample(NamedTuple):
    """One worker at one moment. ``line`` is its last frame, decoded only when it is written."""

    component_id: str
    wall_ms: int
    status: str
    invocation: str
    misses: int
    late: int
    drops: int
    disagreement: str
    line: bytes


def append(store: Store, samples: Sequence[Sample]) -> None:
    """Write samples in one write."""
    store.append(COLLECTION, [_document(sample) for sample in samples])


def prune(store: Store, now_ms: int, *, keep_days: float = KEEP_DAYS) -> int:
    """Remove samples that are older; returns how many."""
    return store.prune(COLLECTION, "wall_ms", now_ms - int(keep_days * _DAY_MS))


def _document(sample: Sample) -> Doc:
    fields: dict[str, Any] = json.loads(sample.line[len(PREFIX) :]) if sample.line else {}
    document: Doc = sample._asdict()
    del document["line"]
    document |= {name: fields[name] for name in _FROM_FRAME if fields.get(name) is not None}
    return document
