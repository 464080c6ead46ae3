"""nomarr-web beside a supervisor that is run by hand: no systemd is needed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nomarr_systemd.config.values import WebSettings
from tests.support.supervision import Lab
from tests.support.waiting import PATIENCE_S
from tests.support.web_site import Client


@contextlib.contextmanager
def serve(lab: Lab, settings: WebSettings, client: Client) -> Iterator[int]:
    """Its pid, as soon as ``client`` is told that it is ready."""
    stored = json.loads(Path(lab.paths.resolved).read_text())
    stored["web"] = settings._asdict()
    Path(lab.paths.resolved).write_text(json.dumps(stored))
    places = [f"--runtime={lab.paths.runtime}", f"--state={lab.paths.state}", "--user"]
    program = [sys.executable, "-m", "nomarr_systemd.web.main", *places]
    with subprocess.Popen(program, stderr=lab.log) as child:
        try:
            wait_until_ready(client)
            yield child.pid
        finally:
            child.terminate()


def wait_until_ready(client: Client) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not client.is_ready():
        if time.monotonic() > ends:
            raise TimeoutError("nomarr-web is not ready")
        time.sleep(0.02)
