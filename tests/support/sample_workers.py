"""Workers that do what the tests tell them on stdin, line by line, and what they say on stderr."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
from typing import NoReturn

from nomarr_systemd.core import frames
from nomarr_systemd.worker import pulse
from nomarr_systemd.worker.errors import NonFatal, NotReady, OutOfMemory, Recovering
from nomarr_systemd.worker.runtime import Waits, Worker


def hear() -> str:
    return sys.stdin.readline().strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Told(Worker):
    """Each line is a job, or what to do about the one in hand."""

    idle_waits = Waits(0.002, 1.5, 0.01)
    backoff_waits = Waits(0.02, 2.0, 0.1)

    def next_job(self) -> str | None:
        line = hear()
        return None if line in ("", "none") else line

    def process(self, job: str) -> None:
        while True:
            match hear().split():
                case [] | ["done"]:
                    say(f"did {job}")
                    return
                case ["progress"]:
                    self.progress()
                case ["die"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                case ["nonfatal"]:
                    raise NonFatal("bad file")
                case ["error"]:
                    raise RuntimeError("broken")
                case ["open", *others]:  # the job's own file, or another
                    with open(others[0] if others else job, "rb"):
                        pass
                case ["format"]:
                    raise EOFError("the file ends too early")
                case ["memory"]:
                    raise MemoryError
                case ["oom", seconds]:
                    raise OutOfMemory(float(seconds))
                case ["recovering", seconds]:
                    raise Recovering(float(seconds))
                case ["notready"]:
                    raise NotReady("the GPU went away")


class Forgiving(Told):
    nonfatal = (EOFError,)


class PreflightReturns(Told):
    def preflight(self) -> None:
        return False  # type: ignore[return-value]


class Lazy(Told):
    lazy = True


class Loads(Told):
    """Loads until it is told to go on."""

    def load(self) -> None:
        while hear() != "loaded":
            self.progress()


class LoadsBadly(Worker):
    def load(self) -> None:
        raise RuntimeError("no such model")


class Evicts(Told):
    def load(self) -> None:
        say("load")

    def evict(self) -> None:
        say("evict")


class EvictsBadly(Evicts):
    def evict(self) -> None:
        super().evict()
        raise RuntimeError("stuck")


class Checks(Told):
    """Hears before each job whether it is ready."""

    def preflight(self) -> None:
        word = hear()
        say(f"preflight {word}")
        if word == "notready":
            raise NotReady("no GPU")
        if word == "error":
            raise FileNotFoundError("nvidia-smi")


class ChecksSlowly(Checks):
    backoff_waits = Waits(600.0, 2.0, 600.0)


class Sleeps(Worker):
    """Idle for ever, and for long."""

    idle_waits = Waits(600.0, 1.0, 600.0)


class SourceFails(Worker):
    idle_waits = Waits(0.001, 1.0, 0.001)

    def next_job(self) -> str | None:
        raise RuntimeError("no queue")


class Hangs(Worker):
    def next_job(self) -> str | None:
        return "song.flac"

    def process(self, job: str) -> None:
        hang_for_ever()


def hang_for_ever() -> NoReturn:
    while True:
        threading.Event().wait()


class Computes(Hangs):
    """Inside one call into C, which no signal interrupts."""

    def process(self, job: str) -> None:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)


class Forks(Told):
    """Its child must neither hold the pipe nor outlive a SIGTERM."""

    def process(self, job: str) -> None:
        child = os.fork()
        if child == 0:
            pipe = os.environ["NOMARR_HEALTH_PIPE"]
            held = [fd for fd in range(64) if _link(fd) == pipe]
            if not held:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        say(f"child: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


class PulseFails(Told):
    """From its first job on the frame thread cannot make a frame."""

    def process(self, job: str) -> None:
        def encode(component_id: str, status: str, **fields: object) -> bytes:
            if threading.current_thread() is threading.main_thread():
                return frames.encode(component_id, status, **fields)
            raise RuntimeError("no frame today")

        vars(pulse)["encode"] = encode
        super().process(job)


class NoWorker:
    pass


class FromQueue(Worker):
    """Takes its jobs from the store. What a path says is done."""

    idle_waits = Waits(0.002, 1.5, 0.02)
    backoff_waits = Waits(0.02, 2.0, 0.1)
    needs_gpu = True

    def process(self, job: str) -> object:
        say(f"begin {os.fsencode(job).hex()}")
        match os.path.basename(job):
            case "nonfatal":
                raise NonFatal("bad file")
            case "error":
                raise RuntimeError("broken")
            case "wait":
                hear()
            case "odd":
                return {"size": object()}
        return {"length": len(job)}


class Locks(Worker):
    """Keeps Python's lock in its first job, at once: no other thread runs from then on."""

    def next_job(self) -> str:
        return "at once"

    def process(self, job: str) -> None:
        ctypes.PyDLL(None).sleep(1000)


class Vanishes(Locks):
    """Is gone in its first job, at once."""

    def process(self, job: str) -> None:
        os._exit(3)
