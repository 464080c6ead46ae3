"""Workers that are killed. Each takes jobs from the queue through ``Claims``, as the worker's
runtime does, and says in a pipe what it begins and ends. A lock on a file of each job's own tells
whether two have it in hand at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess as Process

from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.core.job import Owner, path_of
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.store.protocol import Doc
from tests.support.forks import CONTEXT
from tests.support.places import Place

POISON = "poison"  # in its path: whoever begins it dies
BROKEN = "broken"  # fails


def start(
    place: Place, component: str, invocation: str, marks: str, batch: int, out: Connection
) -> Process:
    child = CONTEXT.Process(target=_run, args=(place, component, invocation, marks, batch, out))
    child.start()
    return child


def _run(
    place: Place, component: str, invocation: str, marks: str, batch: int, out: Connection
) -> None:
    with contextlib.closing(place.open("work")) as store:
        work(Claims(store, "tag", Owner(component, invocation)), marks, batch, out.fileno())


def work(claims: Claims, marks: str, batch: int, out: int) -> None:
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
            say(out, f"TWICE {key}")
        say(out, f"begin {key}")
        if POISON in path:
            os.kill(os.getpid(), signal.SIGKILL)
        if random.random() < 0.1:
            time.sleep(0.005)
        end = End("error", error={"type": "E", "message": "e"}) if BROKEN in path else End("done")
        os.close(fd)
        try:
            _, docs = claims.end_and_take(key, end, batch, docs)
        except StoreUnavailable:
            finish(claims, key, end)
            docs = []  # what it has taken all the same is found in hand
        say(out, f"end {key}")


def finish(claims: Claims, key: str, end: End) -> None:
    while True:
        with contextlib.suppress(StoreUnavailable):
            claims.end(key, end)
            return


def say(out: int, line: str) -> None:
    os.write(out, f"{line}\n".encode())  # in one piece, for the others share it
