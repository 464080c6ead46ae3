"""Samples of every worker's health, written from time to time for people and diagrams.

Nothing is decided by them. They are best effort; ``health_series`` condenses them soon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from nomarr_systemd.core.frames import PREFIX
from nomarr_systemd.core.health import Sample
from nomarr_systemd.store.protocol import Doc, Store, hosted

COLLECTION: Final = "health_history"
_FROM_FRAME: Final = ("phase", "job", "pid", "seq", "progress_age_s", "metrics")


def append(store: Store, samples: Sequence[Sample], host: str = "") -> None:
    """Write samples in one write. ``host`` is this host where several share a store.

    May be called again after an answer was lost: the keys are derived from the samples.
    """
    more = {"host": host} if host else {}
    docs = []
    for sample in samples:
        name = f"{sample.wall_ms:015d}:{sample.component_id}"  # keys sort by time
        docs.append({"_key": hosted(name, host), **_document(sample), **more})
    store.add(COLLECTION, docs)


def _document(sample: Sample) -> Doc:
    fields: dict[str, Any] = json.loads(sample.line[len(PREFIX) :]) if sample.line else {}
    document: Doc = sample._asdict()
    del document["line"]
    document |= {name: fields[name] for name in _FROM_FRAME if fields.get(name) is not None}
    return document
