"""A worker for the lab whose jobs do as they are called: wait-… until PATH.go is there, poison-…
kills it unless PATH.cured is there, and any other is done at once. It dies, idle or not, when the
file ``gone-POOL`` is beside its jobs, and is not ready while ``unready-POOL`` is.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from nomarr_systemd.worker.errors import NotReady
from nomarr_systemd.worker.runtime import Waits, Worker

PLACE = Path(os.environ.get("PLACE", "."))
POOL = os.environ.get("NOMARR_COMPONENT_ID", "::").split(":")[1]


class Tagger(Worker):
    idle_waits = Waits(0.05, 1.5, 0.2)
    backoff_waits = Waits(0.05, 1.0, 0.05)

    def load(self) -> None:
        self.look()
        with open(PLACE / f"loads-{POOL}", "a", encoding="ascii") as file:
            file.write("loaded\n")

    def evict(self) -> None:
        with open(PLACE / f"loads-{POOL}", "a", encoding="ascii") as file:
            file.write("evicted\n")

    def look(self) -> None:
        if (PLACE / f"gone-{POOL}").exists():
            os._exit(1)

    def preflight(self) -> None:
        if (PLACE / f"unready-{POOL}").exists():
            raise NotReady("what it needs is away")

    def process(self, job: str) -> object:
        name = os.path.basename(job)
        if name.startswith("poison") and not os.path.exists(f"{job}.cured"):
            os.kill(os.getpid(), signal.SIGSEGV)
        while name.startswith("wait") and not os.path.exists(f"{job}.go"):
            self.look()
            self.progress()
            time.sleep(0.02)
        return {"pid": os.getpid()}


class Recorder(Tagger):
    """Also notes each job that it begins, and its run, in the file ``begun-POOL``."""

    def process(self, job: str) -> object:
        line = f"{os.path.basename(job)} {os.environ['INVOCATION_ID']}\n".encode()
        fd = os.open(PLACE / f"begun-{POOL}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, line)
        os.close(fd)
        return super().process(job)
