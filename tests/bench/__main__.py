"""``make bench``: what the parts cost, as ratios to the barest program that does the same job."""

from __future__ import annotations

import compileall
import gc
import os
import sys
from collections.abc import Callable

import nomarr_systemd
from tests.bench import (
    books,
    cli,
    decisions,
    fleet,
    frames,
    imports,
    jobs,
    live,
    resident,
    scale,
    web,
)

PARTS: dict[str, Callable[[], None]] = {
    "decisions": decisions.measure,
    "frames": frames.measure,
    "books": books.measure,
    "jobs": jobs.measure,
    "fleet": fleet.measure,
    "imports": imports.measure,
    "cli": cli.measure,
    "live": live.measure,
    "resident": resident.measure,
    "scale": scale.measure,
    "web": web.measure,
}


def main(wanted: list[str]) -> int:
    # As the packages do: a service cannot write what it compiles, and would do so at each start.
    compileall.compile_dir(os.path.dirname(nomarr_systemd.__file__), quiet=1)
    for name in wanted or PARTS:
        gc.collect()
        PARTS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
