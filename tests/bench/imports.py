"""What it costs to start a controller on SQLite, beside Python alone."""

from __future__ import annotations

import subprocess
import sys

from tests.bench.timing import compare, report

NEEDED = (
    "nomarr_systemd.config.values, nomarr_systemd.core.death, nomarr_systemd.ledger.ledger,"
    " nomarr_systemd.ledger.spool, nomarr_systemd.store.open, nomarr_systemd.store.sqlite.store"
)


def measure() -> None:
    def run(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    bare, ours = compare([lambda: run("pass"), lambda: run(f"import {NEEDED}")], 40)
    report("python3 -c pass", f"{bare * 1e3:.1f} ms")
    report("the controller's imports", f"{ours * 1e3:.1f} ms, {ours / bare:.2f}", "bar 4, aim 3")
