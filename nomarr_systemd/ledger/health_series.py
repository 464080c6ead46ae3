"""Health of workers over hours, days and years: samples condensed into series, and the reader.

A series is a chain of documents in ``stats``, read by key (docs/contract.md#documents). A layer has
one step: 30 s for 3 days, 10 min for 90 days, 6 h for ever. Each document remembers up to where it
was filled, so whatever a kill left half done is done again without counting anything twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any, Final

from nomarr_systemd.core.errors import KeyExists, StaleRevision
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import one_line
from nomarr_systemd.ledger.documents import MAX_ROW, is_row
from nomarr_systemd.ledger.health_history import COLLECTION
from nomarr_systemd.store.protocol import Doc, Store, hosted, put, walk

SERIES: Final = "stats"
LETTERS: Final = {
    "healthy": "h",
    "starting": "s",
    "stopping": "t",
    "stopped": "o",
    "recovering": "r",
    "unhealthy": "u",
    "crashed": "c",
    "failed": "f",
}
STATUS_OF: Final = {letter: status for status, letter in LETTERS.items()}
WORST_FIRST: Final = "fcursoth"
MAX_POINTS: Final = 2000
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS
_MAX_SAMPLES: Final = 200_000  # 4,096 workers make 82,000 in ten minutes
_PAGE: Final = 100  # samples that are read at once: the memory for them stays with the process
_MAX_WORD: Final = 100
_LARGEST: Final = 1 << 50


class Layer(NamedTuple):
    """One step of time. ``chunk_ms`` is the span of a document, ``keep_ms`` 0 means for ever."""

    name: str
    step_ms: int
    chunk_ms: int
    keep_ms: int

    def key(self, component_id: str, chunk: int, host: str) -> str:
        return hosted(f"health:{component_id}:{self.name}:{chunk}", host)


FINE: Final = Layer("30s", 30_000, 3 * _HOUR_MS, 3 * _DAY_MS)
MIDDLE: Final = Layer("10min", 10 * _MINUTE_MS, 10 * _DAY_MS, 90 * _DAY_MS)
COARSE: Final = Layer("6h", 6 * _HOUR_MS, 360 * _DAY_MS, 0)


class Seen(NamedTuple):
    """A worker at one moment: what the series are made of, of a sample."""

    wall_ms: int
    letter: str
    invocation: str
    misses: int
    drops: int


class Bucket(NamedTuple):
    """A worker during one step: how many samples had which status (by LETTERS), how many runs
    began, and the highest counts of misses and drops."""

    start_ms: int
    counts: dict[str, int]
    runs: int
    misses: int
    drops: int

    @property
    def worst(self) -> str:
        """The letter of the worst status of all samples."""
        return min(self.counts, key=WORST_FIRST.index, default="o")

    def to_json(self) -> dict[str, Any]:
        """Return the step as an item of ``health`` in docs/json.md#history---health."""
        return {
            "at_ms": self.start_ms,
            "states": {STATUS_OF[letter]: count for letter, count in self.counts.items()},
            "worst": STATUS_OF[self.worst],
            "runs": self.runs,
            "misses": self.misses,
            "drops": self.drops,
        }


def condense(store: Store, now_ms: int, host: str = "") -> int:
    """Move samples of past steps into the series; returns how many samples there were."""
    until_ms = now_ms - now_ms % MIDDLE.step_ms
    index = _read_index(store, host)
    by_worker = _read_samples(store, until_ms, host)
    chunk = until_ms // FINE.chunk_ms
    workers: dict[str, Any] = index.setdefault("workers", {})
    with store.batch():
        for component_id, group in by_worker.items():
            last = workers.get(component_id, {"chunk": group[0].wall_ms // FINE.chunk_ms})
            buckets = list(make_buckets(group, str(last.get("run", ""))))
            _add(store, FINE, component_id, host, buckets)
            last["run"] = next((each.invocation for each in reversed(group) if each.invocation), "")
            workers[component_id] = last
        for component_id, last in workers.items():
            if last["chunk"] < chunk:
                _fold(store, component_id, host, last["chunk"], chunk)
                last["chunk"] = chunk
        _put(store, index)
    # Last: until here samples can be condensed again.
    store.prune(COLLECTION, "wall_ms", until_ms, {"host": host or None})
    if host:  # samples of hosts that are gone
        store.prune(COLLECTION, "wall_ms", until_ms - _DAY_MS)
    return sum(map(len, by_worker.values()))


class SeriesReader:
    """Reads the series of one worker after the other, at one moment. The index, and with ``many``
    the samples that are not condensed yet, are read once for all of them."""

    def __init__(self, store: Store, now_ms: int, host: str = "", *, many: bool = False) -> None:
        self._store = store
        self._now_ms = now_ms
        self._host = host
        self._index: dict[str, Any] = _read_index(store, host).get("workers", {})
        self._samples = _read_samples(store, now_ms, host) if many else None

    def read(self, component_id: str, since_ms: int, until_ms: int, points: int) -> list[Bucket]:
        """Buckets of equal length between two moments, oldest first; those without a sample are
        left out. Each part of the time is read from the finest layer that still has it."""
        now_ms = self._now_ms
        until_ms = min(until_ms, now_ms)
        since_ms = max(0, min(since_ms, until_ms - 1))
        step_ms = choose_step(since_ms, until_ms, points)
        found: list[Bucket] = []
        entry = self._index.get(component_id)
        folded_ms = entry["chunk"] * FINE.chunk_ms if entry else 0  # without one: not condensed
        layers = _choose_layers(now_ms, folded_ms, step_ms) if entry else []
        for layer, from_ms, to_ms in layers:
            first, last = max(from_ms, since_ms - layer.step_ms + 1), min(to_ms, until_ms)
            if first < last:
                found += _read_layer(self._store, layer, component_id, self._host, first, last)
        if until_ms > now_ms - 2 * MIDDLE.step_ms:
            filled_ms = max(found[-1].start_ms + FINE.step_ms if found else 0, since_ms)
            mine = self._find_samples(component_id)
            found += make_buckets(
                (each for each in mine if filled_ms <= each.wall_ms < until_ms), ""
            )
        return [_merge(start, group) for start, group in _group(found, step_ms)]

    def _find_samples(self, component_id: str) -> list[Seen]:
        if self._samples is not None:
            return self._samples.get(component_id, [])
        found = _read_samples(self._store, self._now_ms, self._host, component_id)
        return found.get(component_id, [])


def _choose_layers(now_ms: int, folded_ms: int, step_ms: int) -> list[tuple[Layer, int, int]]:
    """Which layer to read from when to when: the finest that is kept, unless a coarser one is
    enough for the step. What is not folded yet is in the fine layer only."""
    enough = next(
        each for each in (COARSE, MIDDLE, FINE) if 2 * each.step_ms <= step_ms or each is FINE
    )
    fine_ms, middle_ms = (_first_kept_ms(layer, now_ms) for layer in (FINE, MIDDLE))
    return [
        (COARSE, 0, min(middle_ms, folded_ms)),
        (COARSE if enough is COARSE else MIDDLE, middle_ms, min(fine_ms, folded_ms)),
        (enough, fine_ms, folded_ms),
        (FINE, folded_ms, min(now_ms, folded_ms + FINE.keep_ms)),
    ]


def parse_answer(answer: Mapping[str, Any], component_id: str) -> tuple[list[Bucket], list[Record]]:
    """A worker's health and records in an answer of the supervisor, which is not trusted: what has
    another shape is left out, and texts are clean."""
    workers = answer.get("workers")
    mine = workers.get(component_id) if isinstance(workers, dict) else None
    rows, texts = (
        found if isinstance(mine, dict) and isinstance(found := mine.get(name), list) else []
        for name in ("health", "records")
    )
    buckets = [Bucket(*row) for row in rows[: MAX_POINTS + 1] if _is_bucket(row)]
    lines = (one_line(text, MAX_ROW) for text in texts if isinstance(text, str))
    records = [Record.read(line) for line in lines if is_row(line)]
    return buckets, records


def _is_bucket(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[1], dict):
        return False
    numbers = (row[0], *row[2:], *row[1].values())
    return (
        bool(row[1])
        and row[1].keys() <= set(LETTERS.values())
        and all(type(each) is int and 0 <= each <= _LARGEST for each in numbers)
        and sum(row[1].values()) > 0
    )


def choose_step(since_ms: int, until_ms: int, points: int) -> int:
    """The length of a bucket: the span over ``points``, and never less than the fine step."""
    return max(FINE.step_ms, -(-(until_ms - since_ms) // max(1, min(points, MAX_POINTS))))


def make_buckets(samples: Iterable[Seen], run: str) -> Iterator[Bucket]:
    """Group one worker's samples, oldest first, by the fine step. ``run`` is the invocation
    before the first sample."""
    for start_ms, group in groupby(
        samples, key=lambda sample: sample.wall_ms // FINE.step_ms * FINE.step_ms
    ):
        counts: dict[str, int] = {}
        runs = misses = drops = 0
        for sample in group:
            counts[sample.letter] = counts.get(sample.letter, 0) + 1
            invocation = sample.invocation or run
            runs += bool(run and invocation != run)
            run = invocation
            misses = max(misses, sample.misses)
            drops = max(drops, sample.drops)
        yield Bucket(start_ms, counts, runs, misses, drops)


def _first_kept_ms(layer: Layer, now_ms: int) -> int:
    """The first moment that is read from a layer: the end of the coarse step in which its
    ``keep_ms`` ends."""
    return (now_ms - layer.keep_ms) // COARSE.step_ms * COARSE.step_ms + COARSE.step_ms


def _group(buckets: list[Bucket], step_ms: int) -> Iterator[tuple[int, list[Bucket]]]:
    for start, group in groupby(buckets, key=lambda each: each.start_ms // step_ms * step_ms):
        yield start, list(group)


def _merge(start_ms: int, buckets: list[Bucket]) -> Bucket:
    counts: dict[str, int] = {}
    for each in buckets:
        for letter, count in each.counts.items():
            counts[letter] = counts.get(letter, 0) + count
    return Bucket(
        start_ms,
        counts,
        sum(each.runs for each in buckets),
        max(each.misses for each in buckets),
        max(each.drops for each in buckets),
    )


def _read_layer(
    store: Store, layer: Layer, component_id: str, host: str, from_ms: int, to_ms: int
) -> Iterator[Bucket]:
    for chunk in range(from_ms // layer.chunk_ms, (to_ms - 1) // layer.chunk_ms + 1):
        for start_ms, *rest in _get(store, layer, component_id, host, chunk)["rows"]:
            if from_ms <= start_ms < to_ms:
                yield Bucket(start_ms, *rest)


def _read_samples(
    store: Store, until_ms: int, host: str, component_id: str = ""
) -> dict[str, list[Seen]]:
    """The samples of a host, or of one worker of it, before a moment, by worker, oldest first; keys
    sort in the order of writing. They are many, so values that are the same are kept once."""
    if component_id:
        docs = walk(store, COLLECTION, {"component_id": component_id}, size=_PAGE)
    else:
        docs = walk(store, COLLECTION, {"host": host or None}, size=_PAGE)
    found: dict[str, list[Seen]] = {}
    same: dict[Any, Any] = {}
    for doc in islice(docs, _MAX_SAMPLES):
        if _is_sample(doc, until_ms, host):
            seen = Seen(*(same.setdefault(value, value) for value in _trim(doc)))
            found.setdefault(doc["component_id"], []).append(seen)
    for group in found.values():
        group.sort(key=lambda each: each.wall_ms)
    return found


def _is_sample(doc: Doc, until_ms: int, host: str) -> bool:
    name = doc.get("component_id")
    known = type(doc.get("wall_ms")) is int and isinstance(name, str) and len(name) <= _MAX_WORD
    return known and 0 <= doc["wall_ms"] < until_ms and doc.get("host", "") == host


def _trim(doc: Doc) -> Seen:
    """What the series are made of, of known types: another program may have written the sample."""
    status, invocation = (str(doc.get(name, ""))[:_MAX_WORD] for name in ("status", "invocation"))
    numbers = (doc.get(name) for name in ("misses", "drops"))
    misses, drops = (each if type(each) is int and 0 <= each < _LARGEST else 0 for each in numbers)
    return Seen(doc["wall_ms"], LETTERS.get(status, "o"), invocation, misses, drops)


def _fold(store: Store, component_id: str, host: str, done: int, chunk: int) -> None:
    """Add the fine documents from ``done`` to before ``chunk`` to the other layers, and delete
    what is too old."""
    kept = FINE.keep_ms // FINE.chunk_ms + 2
    rows: list[Bucket] = []
    for number in sorted({done, *range(max(done, chunk - kept), chunk)}):
        doc = _get(store, FINE, component_id, host, number)
        rows += [Bucket(*row) for row in doc["rows"]]
    for layer in (MIDDLE, COARSE):
        _add(store, layer, component_id, host, rows)
    for layer in (FINE, MIDDLE):
        gone = [
            (number * FINE.chunk_ms - layer.keep_ms - layer.chunk_ms) // layer.chunk_ms
            for number in (done, chunk)
        ]
        # Not all numbers between: a worker may write any into the index. Samples that waited when
        # the supervisor ended are in the document of the last fold, or in the next.
        last = min(gone[1], done * FINE.chunk_ms // layer.chunk_ms + 1)
        for number in range(gone[0], last + 1):
            store.delete(SERIES, layer.key(component_id, number, host))


def _add(
    store: Store, layer: Layer, component_id: str, host: str, buckets: Iterable[Bucket]
) -> None:
    """Merge buckets of the fine step into a layer; those that it has already are ignored."""
    for chunk, group in groupby(buckets, key=lambda each: each.start_ms // layer.chunk_ms):
        doc = _get(store, layer, component_id, host, chunk)
        new = [each for each in group if each.start_ms > doc["filled_ms"]]
        if not new:
            continue
        rows: list[Any] = doc["rows"]
        for start_ms, part in _group(new, layer.step_ms):
            if rows and rows[-1][0] == start_ms:
                part.insert(0, Bucket(*rows.pop()))
            rows.append(list(_merge(start_ms, part)))
        doc["filled_ms"] = new[-1].start_ms
        _put(store, doc)


def _get(store: Store, layer: Layer, component_id: str, host: str, chunk: int) -> Doc:
    key = layer.key(component_id, chunk, host)
    return store.get(SERIES, key) or {"_key": key, "filled_ms": -1, "rows": []}


def _read_index(store: Store, host: str) -> Doc:
    key = hosted("health:index", host)
    return store.get(SERIES, key) or {"_key": key}


def _put(store: Store, doc: Doc) -> None:
    """Write a document, unless another process wrote it meanwhile: only one per host condenses."""
    try:
        put(store, SERIES, doc)
    except (StaleRevision, KeyExists):
        return
