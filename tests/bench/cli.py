"""What nomarrctl costs before it does anything, beside importing click alone.

Both without the site module, whose work depends on how a Python is installed. ``status`` runs on
a configuration without workers: everything is imported, and the two questions it then asks, of
systemd and of the supervisor, are not ours to make quicker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

import nomarr_systemd
from nomarr_systemd.config.values import Config
from tests.bench.timing import compare, report

SEARCH = [str(Path(module.__file__ or "").parents[1]) for module in (nomarr_systemd, click)]
BAR = 1.6
_START = f"import sys; sys.path[:0] = {SEARCH!r};"
_RUN = "from nomarr_systemd.cli.main import main; main(sys.argv[1:])"


def measure() -> None:
    with tempfile.TemporaryDirectory() as home:
        state = Path(home, ".local/state/nomarr")
        state.mkdir(parents=True)
        (state / "config.json").write_text(json.dumps(Config().to_dict()))
        environment = os.environ | {"HOME": home, "XDG_RUNTIME_DIR": home}

        def run(code: str, *arguments: str) -> None:
            command = [sys.executable, "-I", "-S", "-c", _START + code, *arguments]
            nowhere = subprocess.DEVNULL  # nor is there a systemd that answers
            subprocess.run(command, check=False, stdout=nowhere, stderr=nowhere, env=environment)

        bare, helping, status = compare(
            [
                lambda: run("import click"),
                lambda: run(_RUN, "--help"),
                lambda: run(_RUN, "--user", "status"),
            ],
            40,
        )
    report("python3 -c 'import click'", f"{bare * 1e3:.1f} ms")
    report("nomarrctl --help", f"{helping * 1e3:.1f} ms, {helping / bare:.2f}", f"bar {BAR}")
    report(
        "nomarrctl status, until it asks",
        f"{status * 1e3:.1f} ms, {status / bare:.2f}",
        f"bar {BAR}",
    )
