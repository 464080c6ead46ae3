"""Workers that die, each pool in a way of its own, for the tests of post-mortems."""

from __future__ import annotations

from pathlib import Path

from tests.support.lab import Lab

# With the runtime: faulthandler is on, frames name job and invocation.
WORKERS = """\
import os
import signal
import threading
import time

from nomarr_systemd.worker.runtime import Waits, Worker


class Base(Worker):
    idle_waits = Waits(0.05, 1.0, 0.05)
    left = 1

    def next_job(self):
        self.left -= 1
        return f"/music/{self.song}" if self.left >= 0 else None


class Segv(Base):
    song = "broken.flac"

    def process(self, job):
        self.decode_the_header()

    def decode_the_header(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Hang(Base):
    song = "endless.flac"

    def process(self, job):
        threading.Thread(target=self.prefetch, daemon=True).start()
        self.wait_for_the_gpu()

    def prefetch(self):
        time.sleep(1000)

    def wait_for_the_gpu(self):
        while True:
            time.sleep(1000)


class Fine(Base):
    song = "\\x1b[31mred\\x1b]0;owned\\x07\\u202e.flac"

    def process(self, job):
        while True:
            self.progress()
            time.sleep(0.05)
"""
# Without it: nothing but a program.
RAISER = """\
#!/usr/bin/python3 -I
import os, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
print("a \\x1b[1;31mred\\x1b[0m line, a bell \\x07 and <script>alert(1)</script>", flush=True)

def read_tags(path):
    raise KeyError(f"no tags in {path} by {os.getpid()}")

def main():
    try:
        read_tags("a.flac")
    except KeyError as error:
        raise RuntimeError("cannot go on") from error

main()
"""
CONFIG = """\
[policy]
backoff_base_s = 600
backoff_max_s = 600
backoff_jitter = 0

[health]
frame_interval_s = 0.1
stall_timeout_s = 1

[pool.raise]
command = ["{d}/raiser"]

[pool.raise.policy]
backoff_base_s = 0.1
max_restarts = 2

[pool.segv]
entrypoint = "mortals:Segv"

[pool.segv.unit]
LimitCORE = 0
Environment = ["PYTHONPATH={d}"]

[pool.hang]
entrypoint = "mortals:Hang"
watchdog_s = 2

[pool.hang.unit]
LimitCORE = 0
Environment = ["PYTHONPATH={d}"]

[pool.fine]
workers = 2
entrypoint = "mortals:Fine"

[pool.fine.unit]
Environment = ["PYTHONPATH={d}"]

[pool.conf]
command = ["/bin/sh", "-c", "echo the model path is not set >&2; exit 78"]

[pool.lost]
command = ["{d}/lost"]

[pool.dep]
command = ["/bin/sleep", "1000"]

[pool.dep.unit]
Requires = "broken.service"
After = "broken.service"
"""
BROKEN = "[Service]\nType=oneshot\nExecStart=/bin/false\n"


def write(lab: Lab) -> str:
    """Put them into the lab; the configuration."""
    lab.write_program("raiser", RAISER)
    lab.write_program("lost", "#!/there/is/no/such/interpreter\n")
    lab.write_unit("broken.service", BROKEN)
    Path(lab.directory, "mortals.py").write_text(WORKERS)
    return CONFIG.replace("{d}", lab.directory)
