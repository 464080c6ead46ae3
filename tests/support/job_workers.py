"""A worker for the lab that takes jobs from the store; one kind of job kills it."""

from __future__ import annotations

import os
import signal

from nomarr_systemd.worker.runtime import Waits, Worker


class Tagger(Worker):
    idle_waits = Waits(0.05, 1.5, 0.2)

    def process(self, job: str) -> object:
        if "poison" in job:
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"pid": os.getpid()}
