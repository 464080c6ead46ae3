"""Forty ways to die, or to be in trouble: programs, their pools in one nomarr.toml, and what
``nomarrctl why`` has to say of each.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from tests.support.installed import WORKERS

# Any program: it keeps the contract, until it dies in the way that its argument names.
PLAIN: Final = """\
#!/usr/bin/python3 -I
import json, os, signal, socket, sys, time

mode = sys.argv[1]
me = os.environ["NOMARR_COMPONENT_ID"]
pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)

def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])

def frame(**fields):
    line = json.dumps({"component_id": me, "job": "/m/a.flac", **fields})
    os.write(pipe, b"HEALTH|" + line.encode() + b"\\n")

def live(ping=True, **fields):
    while True:
        if ping:
            notify("WATCHDOG=1")
        frame(**(fields or {"status": "healthy"}))
        time.sleep(0.3)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else signal.SIG_DFL)
if mode == "mute":
    time.sleep(1000)
if mode == "stuck":
    while True:
        notify("EXTEND_TIMEOUT_USEC=60000000")
        frame(status="pending", phase="loading model")
        time.sleep(0.3)
notify("READY=1")
frame(status="healthy")
print("ready", flush=True)
if mode.startswith("exit"):
    if mode != "exit42":
        print("its last words", flush=True)
    time.sleep(0.3)
    sys.exit(int(mode[4:]))
if mode == "raise":
    try:
        raise KeyError("no tags")
    except KeyError as error:
        raise RuntimeError("cannot go on") from error
if mode == "abort":
    os.abort()
if mode == "forks":
    print("sh: 1: Cannot fork: Resource temporarily unavailable", flush=True)
    sys.exit(2)
if mode == "chroot":
    os.chroot("/")
if mode == "spin":
    while True:
        pass
if mode == "babble":
    while True:
        notify("WATCHDOG=1")
        os.write(pipe, b"HEALTH|{nonsense}\\n")
        time.sleep(0.3)
if mode == "recovering":
    live(status="recovering", recover_for_s=1000)
if mode == "sick":
    live(status="unhealthy", phase="database away")
live(ping=mode != "watchdog")
"""
# With our runtime, which turns on faulthandler.
PYTHON: Final = """\
import ctypes, os, re, signal, threading, time

from nomarr_systemd.worker.runtime import Waits, Worker


class Base(Worker):
    idle_waits = Waits(0.05, 1.0, 0.05)

    def next_job(self):
        return "/m/b.flac"


class Sleep(Base):
    def process(self, job):
        self.wait_for_the_gpu()

    def wait_for_the_gpu(self):
        time.sleep(1000)


class Deadlock(Base):
    def process(self, job):
        one, two = threading.Lock(), threading.Lock()

        def take_both(first, second):
            with first:
                time.sleep(0.2)
                second.acquire()

        other = threading.Thread(target=take_both, args=(two, one), daemon=True)
        other.start()
        take_both(one, two)


class Regex(Base):
    def process(self, job):
        re.match("(a+)+$", "a" * 64 + "b")


class Native(Base):
    def process(self, job):
        ctypes.CDLL(None).sleep(1000)


class NativeLocked(Base):
    def process(self, job):
        ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock


class Loop(Base):
    def process(self, job):
        while True:
            pass


class LoadHangs(Base):
    def load(self):
        self.read_the_model()

    def read_the_model(self):
        time.sleep(1000)


class LoadRaises(Base):
    def load(self):
        raise ValueError("the model is damaged")


class Unusual(Base):
    def process(self, job):
        raise GeneratorExit("not an Exception")


class Raises(Base):
    def process(self, job):
        raise ValueError("bad tags")


class Full(Base):
    def process(self, job):
        raise OSError(28, "No space left on device")


class Leaves(Base):
    def process(self, job):
        os._exit(3)


class Faults(Base):
    def process(self, job):
        self.decode_the_header()

    def decode_the_header(self):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


class Way(NamedTuple):
    """One pool of one worker. ``says``, ``stack``, ``job`` and ``next``: what must be in the line,
    in the trace, as the job and in the advice. ``action`` is what must have been decided."""

    pool: str
    does: str  # the mode of PLAIN, or the class of PYTHON
    kind: str
    code: int
    says: str
    next: str
    stack: str = ""
    job: str = ""
    action: str = "restart"
    signal: str = ""  # what a person sends it
    more: str = ""  # lines of its [pool.NAME]
    unit: str = ""  # lines of its [pool.NAME.unit]
    health: str = ""  # lines of its [pool.NAME.health]


A, B = "/m/a.flac", "/m/b.flac"
_QUICK: Final = "startup_timeout_s = 4"
WAYS: Final = (
    Way("words", "exit1", "exit", 1, "exited with status 1", "printed last", job=A),
    Way("conf", "exit78", "config", 78, "(configuration)", "configuration is wrong", job=A,
        action="fail"),
    Way("temp", "exit75", "exit", 75, "(temporary failure)", "printed last", job=A),
    Way("quiet", "exit42", "exit", 42, "exited with status 42", "printed", job=A),
    Way("chain", "raise", "exit", 1, "exited", "traceback", "RuntimeError: cannot go on", A),
    Way("abort", "abort", "signal", -6, "SIGABRT", "systemd-coredump", job=A),
    Way("kill", "live", "signal", -9, "SIGKILL", "not on record", job=A, signal="KILL"),
    # systemd or the supervisor ends it: both wait for the same time.
    Way("mute", "mute", "start-timeout", 0, "killed by SIGABRT", "READY=1", health=_QUICK),
    Way("mend", "recovering", "recovery-timeout", -2, "not recover", "max_recovery_s", job=A),
    Way("sick", "sick", "recovery-timeout", -2, "unhealthy", "max_unhealthy_s", job=A,
        health="max_unhealthy_s = 3"),
    Way("stop", "live", "stale", -2, "no frame", "NOMARR_HEALTH_PIPE", job=A, signal="STOP"),
    Way("spin", "spin", "stale", -2, "no frame", "NOMARR_HEALTH_PIPE", job=A,
        more="watchdog_s = 60"),
    Way("babble", "babble", "invalid-heartbeat", -3, "invalid", "NOMARR_HEALTH_PIPE", job=A),
    Way("hang", "watchdog", "watchdog", -2, "watchdog", "WATCHDOG=1", job=A, more="watchdog_s = 3"),
    Way("forks", "forks", "exit", 2, "exited with status 2", "TasksMax = (now 20)", job=A,
        unit="TasksMax = 20"),
    Way("seccomp", "chroot", "signal", -31, "SIGSYS", "SystemCallFilter", job=A,
        unit='SystemCallErrorNumber = "kill"'),
    Way("nodir", "live", "exit", 200, "working directory", "WorkingDirectory",
        unit='WorkingDirectory = "/nonexistent"'),
    Way("nofile", "live", "resources", -1, "lacked the resources", "systemctl status",
        unit='EnvironmentFile = "/nonexistent"'),
    Way("sleep", "Sleep", "watchdog", -2, "watchdog", "self.progress()", "wait_for_the_gpu", B),
    Way("lock", "Deadlock", "watchdog", -2, "watchdog", "self.progress()", "take_both", B),
    Way("regex", "Regex", "stale", -2, "no frame", "holds Python's lock", "in process", B,
        more="watchdog_s = 60"),
    Way("native", "Native", "watchdog", -2, "watchdog", "self.progress()", "in process", B),
    Way("locked", "NativeLocked", "stale", -2, "no frame", "Python's lock", "in process", B,
        more="watchdog_s = 60"),
    Way("loop", "Loop", "watchdog", -2, "watchdog", "self.progress()", "in process", B),
    Way("loads", "LoadHangs", "start-timeout", 0, "not ready", "stacks", "read_the_model",
        health="startup_timeout_s = 15"),
    Way("noload", "LoadRaises", "exit", 1, "exited", "traceback", "the model is damaged"),
    Way("odd", "Unusual", "exit", 1, "exited", "traceback", "GeneratorExit", B),
    Way("errors", "Raises", "exit", 70, "too many errors", "Too many jobs", "bad tags"),
    Way("full", "Full", "exit", 70, "too many errors", "disk is full", "No space left"),
    Way("leaves", "Leaves", "exit", 3, "exited with status 3", "printed", job=B),
    Way("faults", "Faults", "signal", -11, "SIGSEGV", "journal", "decode_the_header", B),
    Way("noclass", "Missing", "config", 78, "(configuration)", "configuration is wrong",
        action="fail"),
)  # fmt: skip
HEAD: Final = """\
[policy]
backoff_base_s = 600
backoff_max_s = 600
backoff_jitter = 0

[health]
frame_interval_s = 0.5
staleness_interval_s = 2
startup_timeout_s = 90
min_recovery_s = 0.5
max_recovery_s = 3
stall_timeout_s = 3
"""
# Without a death on record, or by other means than the table.
OTHERS: Final = f"""\
[pool.zero]
command = ["{WORKERS}/plain", "exit0"]

[pool.term]
command = ["{WORKERS}/plain", "live"]

[pool.asked]
command = ["{WORKERS}/plain", "live"]

[pool.stuck]
command = ["{WORKERS}/plain", "stuck"]

[pool.lost]
command = ["{WORKERS}/lost"]

[pool.noexec]
command = ["{WORKERS}/noexec"]

[pool.stubborn]
command = ["{WORKERS}/plain", "stubborn"]
stop_timeout_s = 1

[pool.need]
command = ["{WORKERS}/plain", "live"]

[pool.need.unit]
Requires = "broken.service"
After = "broken.service"

[pool.bound]
command = ["{WORKERS}/plain", "live"]

[pool.bound.unit]
BindsTo = "other.service"
After = "other.service"

[pool.core]
command = ["{WORKERS}/plain", "live"]

[pool.poison]
entrypoint = "dying:Poisoned"
job_max_crashes = 1

[pool.poison.unit]
LimitCORE = 0
Environment = ["PYTHONPATH={WORKERS}"]
"""
POISONED: Final = """

class Poisoned(Worker):
    idle_waits = Waits(0.05, 1.0, 0.05)

    def process(self, job):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def make_config() -> str:
    return "\n".join([HEAD, *map(_make_pool, WAYS), OTHERS])


def _make_pool(way: Way) -> str:
    is_python = way.does[0].isupper()
    program = json.dumps(f"dying:{way.does}" if is_python else [f"{WORKERS}/plain", way.does])
    lines = [
        f"[pool.{way.pool}]",
        f"{'entrypoint' if is_python else 'command'} = {program}",
        way.more or "watchdog_s = 10",
        f"[pool.{way.pool}.unit]",
        "LimitCORE = 0",
        f'Environment = ["PYTHONPATH={WORKERS}"]' if is_python else "",
        way.unit,
        f"[pool.{way.pool}.health]" if way.health else "",
        way.health,
    ]
    return "\n".join(filter(None, lines)) + "\n"
