"""Workers for tests of the supervisor under a real systemd: Python ones by the runtime, and
programs that write to their pipes what no good worker would.
"""

from __future__ import annotations

# A job is a file that names what to do; it goes away when that is done.
TAGGER = '''\
import atexit, json, os, threading, time
from pathlib import Path
from nomarr_systemd.worker.runtime import Waits, Worker

PLACE = Path(os.environ["PLACE"])
PIPE = os.environ["NOMARR_HEALTH_PIPE"]

def leave():
    """What is left of the runtime when the interpreter ends."""
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{fd}")]
    threads = [thread.name for thread in threading.enumerate()]
    (PLACE / "left").write_text(json.dumps({"threads": threads, "pipe open": PIPE in opened}))

atexit.register(leave)

class Tagger(Worker):
    idle_waits = Waits(0.05, 1.0, 0.05)

    def load(self):
        ends = time.monotonic() + float(os.environ.get("LOAD_S", "0"))
        while time.monotonic() < ends:
            self.progress()
            time.sleep(0.1)

    def next_job(self):
        return next(map(str, sorted(PLACE.glob("*.job"))), None)

    def process(self, job):
        begun = time.monotonic()
        word, _, value = Path(job).read_text().partition(" ")
        if word == "sleep":
            time.sleep(float(value))
        while word == "until" and not os.path.exists(value):
            self.progress()
            time.sleep(0.02)
        os.unlink(job)
        Path(job).with_suffix(".done").write_text(str(time.monotonic() - begun))
'''

_HEAD = """\
#!/usr/bin/python3 -IS
import json, os, select, signal, socket, sys, time

me = os.environ["NOMARR_COMPONENT_ID"]
pipe = os.open(os.environ["NOMARR_HEALTH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)

def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])

def frame(**fields):
    text = json.dumps({"component_id": me, "status": "healthy", **fields})
    return b"HEALTH|" + text.encode() + b"\\n"

def write(data):
    select.select([], [pipe], [])
    try:
        return os.write(pipe, data)
    except BlockingIOError:
        return 0
"""

# At each SIGUSR1 a flood of one kind after the other; then it is a good worker again.
FLOODER = (
    _HEAD
    + """
FLOODS = [
    b"x" * 4096,
    b"HEALTH|" + b"y" * 8000 + b"\\n",
    b"HEALTH|{nonsense}\\n" * 200,
    b"HEALTH|" + b"[" * 2000 + b"\\n",
    b"\\xff\\x00\\n" * 1000,
    frame(component_id="worker:long:0", job="not mine" * 100) * 4,
    frame(job="mine" * 100) * 8,
]
go = [signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, go)
notify("READY=1")
while True:
    while not signal.sigtimedwait(go, 0.5):
        write(frame(job="calm"))
    begun, written = time.monotonic(), 0
    for flood in FLOODS * 5:
        part = 0
        while part < 1_000_000:
            part += write(flood)
        written += part
        write(b"\\n" + frame(job="between"))
    with open(sys.argv[1] + ".new", "w") as file:
        json.dump({"bytes": written, "seconds": time.monotonic() - begun}, file)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
"""
)

# systemd hears of it all the time, the supervisor only so many times.
ONE_SIDED = (
    _HEAD
    + """
notify("READY=1")
for _ in range(int(sys.argv[1])):
    write(frame())
while True:
    notify("WATCHDOG=1")
    time.sleep(0.05)
"""
)
