"""Workers for the page: the name of a job says what becomes of it and of its worker."""

from __future__ import annotations

import os
import signal
import sys
import time

from nomarr_systemd.worker.errors import NonFatal
from nomarr_systemd.worker.runtime import Waits, Worker

HOSTILE_LINE = "<script>document.title='owned'</script> \x1b[2J <b>bold</b>"


class Tagger(Worker):
    idle_waits = Waits(0.05, 1.5, 0.2)

    def process(self, job: str) -> object:
        if "poison" in job:
            sys.stderr.write(f"{HOSTILE_LINE}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        if "broken" in job:
            raise NonFatal(f"cannot read {job}")
        while "slow" in job and os.path.exists(job):
            time.sleep(0.2)
            self.progress()
        return {"tags": 3}
