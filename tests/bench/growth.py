"""The growth of figures with the number of workers, as a drawing for docs/: two logarithmic axes,
a line for each figure. ``python -m tests.bench.growth`` draws it again from the figures beside it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FIGURES, DRAWING = DOCS / "growth.json", DOCS / "growth.svg"
LINES = (
    ("apply", "apply, until all run", "#1f6feb"),
    ("bare", "systemctl start of bare instances", "#8b949e"),
    ("death", "all killed, until all run", "#d1242f"),
    ("native", "the same with Restart=always", "#f0a0a0"),
    ("boot", "systemd started again, until all run", "#953800"),
    ("native_boot", "the same with bare instances", "#e0b080"),
    ("nothing", "apply without changes", "#2da44e"),
    ("status", "status", "#8250df"),
    ("doctor", "doctor", "#bf8700"),
    ("death_answer", "systemd's slowest answer while all die", "#0a7ea4"),
)
_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 300, 40, 50


def keep(rows: Sequence[dict[str, float]]) -> None:
    """Write the figures beside those of other counts that were taken on the same day, when and
    where they were taken, and the drawing of them."""
    kernel = ".".join(platform.release().split(".")[:2])
    about: dict[str, object] = {
        "taken": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} processors, Linux {kernel}",
    }
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    is_same = all(known.get(name) == value for name, value in about.items())
    found = {row["workers"]: row for row in (known["rows"] if is_same else [])}
    found |= {
        row["workers"]: {name: round(value, 4) for name, value in row.items()} for row in rows
    }
    whole: dict[str, object] = about | {"rows": [found[count] for count in sorted(found)]}
    FIGURES.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if len(found) > 1:
        DRAWING.write_text("\n".join(draw(whole)) + "\n", encoding="utf-8")


def draw(about: dict[str, object]) -> Iterator[str]:
    rows = about["rows"]
    assert isinstance(rows, list)
    counts = [row["workers"] for row in rows]
    values = [row[name] for row in rows for name, _, _ in LINES if row.get(name)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def at(count: float, value: float) -> tuple[float, float]:
        along = math.log10(count / counts[0]) / math.log10(counts[-1] / counts[0])
        up = (math.log10(value) - low) / (high - low)
        x = _LEFT + along * (_WIDTH - _LEFT - _RIGHT)
        return round(x, 1), round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    yield ' font-family="sans-serif" font-size="13">'
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    loads = ", ".join(f"{row['load']:.0f}" for row in rows)
    when = f"{about['taken']}, {about['machine']}, load {loads}"
    yield f'<text x="{_LEFT}" y="22" fill="#1f2328">Seconds by workers; {when}</text>'
    for power in range(low, high + 1):
        (left, y), (right, _) = at(counts[0], 10.0**power), at(counts[-1], 10.0**power)
        yield f'<path d="M{left} {y}H{right}" stroke="#d0d7de"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>'
    for count in counts:
        x, y = at(count, 10.0**low)
        yield f'<text x="{x}" y="{y + 20}" text-anchor="middle">{int(count)}</text>'
    lines = {name: [row for row in rows if row.get(name)] for name, _, _ in LINES}
    ends = sorted((at(counts[-1], lines[name][-1][name])[1], name) for name in lines)
    places: dict[str, float] = {}
    for y, name in ends:  # the words at the ends of the lines do not touch
        places[name] = max(y, *(place + 17 for place in places.values())) if places else y
    for name, words, colour in LINES:
        places_of = (at(row["workers"], row[name]) for row in lines[name])
        points = " ".join(f"{x},{y}" for x, y in places_of)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        x = at(counts[-1], 10.0**low)[0] + 10
        yield f'<text x="{x}" y="{places[name] + 4}" fill="{colour}">{words}</text>'
    yield "</svg>"


if __name__ == "__main__":
    DRAWING.write_text("\n".join(draw(json.loads(FIGURES.read_text()))) + "\n", encoding="utf-8")
    sys.exit(0)
