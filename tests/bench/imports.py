"""What it costs to start a controller on SQLite, beside Python alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from tests.bench.timing import compare, report

STORE = "nomarr_systemd.store.sqlite.store"
LEDGER = (
    "nomarr_systemd.config.values, nomarr_systemd.core.death, nomarr_systemd.ledger.ledger,"
    f" nomarr_systemd.ledger.spool, nomarr_systemd.store.open, {STORE}"
)
CONTROLLER = f"nomarr_systemd.controller.main, {STORE}"


def measure() -> None:
    def run(code: str) -> None:
        found = f"import sys; sys.path.append({os.getcwd()!r})"
        subprocess.run([sys.executable, "-IS", "-c", f"{found}\n{code}"], check=True)

    def load(names: str) -> Callable[[], None]:
        return partial(run, f"import gc; gc.disable(); import {names}")

    bare, ledger, ours = compare([partial(run, "pass"), load(LEDGER), load(CONTROLLER)], 40)
    report("python3 -IS -c pass", f"{bare * 1e3:.1f} ms")
    report("  with the ledger", f"{ledger * 1e3:.1f} ms, {ledger / bare:.2f}", "bar 4")
    report("  with the whole controller", f"{ours * 1e3:.1f} ms, {ours / bare:.2f}")
