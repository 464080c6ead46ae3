"""Workers that are killed: ``python -m tests.support.jobbers PLACE COMPONENT INVOCATION MARKS
BATCH``.

Each takes jobs from the queue through ``Claims``, as the worker's runtime does, and says on stdout
what it begins and ends. A lock on a file of each job's own tells whether two have it in hand at
once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.core.job import Owner, path_of
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.store.protocol import Doc
from tests.support.places import Place, dump_place, load_place

POISON = "poison"  # in its path: whoever begins it dies
BROKEN = "broken"  # fails


def start(
    place: Place, component: str, invocation: str, marks: str, batch: int, out: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.jobbers"),
            *(dump_place(place), component, invocation, marks, str(batch)),
        ],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=out,
    )


def work(claims: Claims, marks: str, batch: int) -> None:
    docs: list[Doc] = []
    while True:
        if not docs:
            with contextlib.suppress(StoreUnavailable):  # the machine is busy
                docs = claims.in_hand() or claims.take_batch(batch)
        if not docs:
            time.sleep(0.02)  # as any polite loop would; the parent ends us
            continue
        doc = docs.pop(0)
        key, path = doc["_key"], path_of(doc)
        fd = os.open(f"{marks}/{key.rpartition(':')[2]}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"TWICE {key}")
        say(f"begin {key}")
        if POISON in path:
            os.kill(os.getpid(), signal.SIGKILL)
        if random.random() < 0.1:
            time.sleep(0.005)
        end = End("error", error={"type": "E", "message": "e"}) if BROKEN in path else End("done")
        os.close(fd)
        try:
            if docs:
                claims.end(key, end)
            else:
                _, docs = claims.end_and_take(key, end, batch)
        except StoreUnavailable:
            finish(claims, key, end)
            docs = []  # what it has taken all the same is found in hand
        say(f"end {key}")


def finish(claims: Claims, key: str, end: End) -> None:
    while True:
        with contextlib.suppress(StoreUnavailable):
            claims.end(key, end)
            return


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece, for the others share it


def main() -> int:
    place, component, invocation, marks, batch = sys.argv[1:]
    with contextlib.closing(load_place(place).open("work")) as store:
        work(Claims(store, "tag", Owner(component, invocation)), marks, int(batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
