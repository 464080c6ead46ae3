"""A supervisor to test: the real program, with the socket, the stored file descriptors and the
links that systemd gives it made by hand. Kills, restarts and reloads go as systemd does them.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nomarr_systemd.config.values import Config, Pool, StoreSettings
from nomarr_systemd.core.frames import encode
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.live.answers import parse_supervisor
from tests.support.waiting import PATIENCE_S, wait_for

# dup2 the descriptors to 3, 4, … as systemd passes them, then become the program.
PASS = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds)) for fd in fds]
for n, fd in enumerate(high):
    os.dup2(fd, 3 + n, inheritable=True)
os.closerange(3 + len(fds), os.sysconf("SC_OPEN_MAX"))
if fds:
    os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "nomarr_systemd.supervisor.main", *sys.argv[2:]])
"""


class Manager:
    """The receiving end of NOTIFY_SOCKET, and a store of file descriptors."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.messages: list[str] = []
        self.stored: dict[str, list[int]] = {}
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        os.chmod(path, 0o777)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            data, control, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(64))
            if data == b"END":
                return
            fds = array.array("i")
            for _, kind, content in control:
                if kind == socket.SCM_RIGHTS:
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            self._take(data.decode(), list(fds))

    def _take(self, message: str, fds: list[int]) -> None:
        fields = dict(line.partition("=")[::2] for line in message.splitlines())
        with self._changed:
            self.messages.append(message)
            if fields.get("FDSTORE") == "1":
                assert fields["FDPOLL"] == "0"
                self.stored.setdefault(fields["FDNAME"], []).extend(fds)
            elif fields.get("FDSTOREREMOVE") == "1":
                for fd in self.stored.pop(fields["FDNAME"], []):
                    os.close(fd)
            self._changed.notify_all()

    def pipes(self) -> dict[str, list[os.stat_result]]:
        """The pipes in the parcels that are stored, by instance."""
        found: dict[str, list[os.stat_result]] = {}
        with self._changed:
            parcels = [fd for name, fds in self.stored.items() if name != "live.sock" for fd in fds]
            for parcel in parcels:
                with socket.socket(fileno=os.dup(parcel)) as end:
                    data, control, _, _ = end.recvmsg(65536, 4096, socket.MSG_PEEK)
                fds = array.array("i", b"".join(content for *_, content in control))
                for name, fd in zip(data.decode().split("\n"), fds, strict=True):
                    found.setdefault(name, []).append(os.fstat(fd))
                    os.close(fd)
        return found

    def wait_for(self, what: Callable[[list[str]], bool]) -> None:
        """Until the messages so far satisfy ``what``."""
        with self._changed:
            assert self._changed.wait_for(lambda: what(self.messages), PATIENCE_S), self.messages

    def count(self, line: str) -> int:
        with self._changed:
            return sum(line in message.splitlines() for message in self.messages)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"END", self.path)
        self._thread.join()
        self._socket.close()
        for fds in self.stored.values():
            for fd in fds:
                os.close(fd)


class Live:
    """A connection to the live socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)  # with a time limit it would fail when many connect at once
        self.socket.settimeout(PATIENCE_S)
        self._file = self.socket.makefile("rb")

    def send(self, **request: object) -> None:
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line.endswith(b"\n"), "the supervisor hung up"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def read_line(self) -> bytes:
        return self._file.readline()

    def ask(self, **request: object) -> dict[str, Any]:
        self.send(**request)
        return self.read()

    def until(self, what: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Events up to the first one that satisfies ``what``."""
        events: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            events.append(self.read())
            if what(events[-1]):
                return events
        raise AssertionError(events[-5:])

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def status_of(word: str, component: str = "") -> Callable[[dict[str, Any]], bool]:
    """Whether an event shows a worker in this status."""

    def is_it(event: dict[str, Any]) -> bool:
        worker = event.get("worker", {})
        return worker.get("status") == word and component in ("", worker["component"])

    return is_it


def sequences(events: list[dict[str, Any]]) -> list[int]:
    """The sequence numbers of all frames in events of the frames topic."""
    lines = [line for event in events for line in event.get("frames", [])]
    return [json.loads(line.removeprefix("HEALTH|"))["seq"] for line in lines]


def read_all(live: Live) -> list[dict[str, Any]]:
    """Everything up to the end of the connection."""
    events = []
    while line := live.read_line():
        if not line.endswith(b"\n"):
            break  # cut by the kill: nobody can have understood it
        events.append(json.loads(line))
    return events


def holds(last: int) -> Any:
    return lambda event: last in sequences([event])


class Writer:
    """A worker's end of a pipe."""

    def __init__(self, path: str, component_id: str) -> None:
        self.component_id = component_id
        self.fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self.seq = 0

    def frame(self, status: str = "healthy", **fields: object) -> None:
        self.seq += 1
        os.write(self.fd, encode(self.component_id, status, seq=self.seq, **fields))

    def raw(self, data: bytes) -> None:
        os.write(self.fd, data)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lab:
    """Directories, configuration, supervisor, writers; all gone at the end."""

    def __init__(self) -> None:
        self.root = tempfile.mkdtemp(prefix="nomarr-supervisor-")
        os.chmod(self.root, 0o755)
        self.paths = Paths(f"{self.root}/run", f"{self.root}/state", user=True)
        self.units = f"{self.root}/run/systemd/units"
        for directory in (self.units, self.paths.state):
            os.makedirs(directory)
        self.manager = Manager(f"{self.root}/notify")
        self.manager.stored["live.sock"] = [self._listen()]
        self.child: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self._open: list[Live | Writer] = []
        self._left: list[int] = []
        self._invocations = 0
        self.log = open(f"{self.root}/log", "ab", buffering=0)  # noqa: SIM115

    def _listen(self) -> int:
        """What nomarr-supervisor.socket does."""
        os.makedirs(os.path.dirname(self.paths.live))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.paths.live)
        os.chmod(self.paths.live, 0o660)
        listening.listen(256)
        return listening.detach()

    def configure(
        self, *, store: str = "", health: HealthRules | None = None, **pools: int | Pool
    ) -> None:
        health = health or HealthRules()
        given = [
            each if isinstance(each, Pool) else Pool(name, workers=each)
            for name, each in pools.items()
        ]
        config = Config(
            store=StoreSettings(store or f"sqlite://{self.paths.state}"),
            health=health,
            pools=tuple(each._replace(health=health) for each in given),
        )
        with open(self.paths.resolved + ".new", "w", encoding="utf-8") as file:
            json.dump(config.to_dict(), file)
        os.rename(self.paths.resolved + ".new", self.paths.resolved)

    def start(self, *, ready: bool = True) -> None:
        """As systemd starts it: with all that it has stored."""
        names = [(name, fd) for name, fds in self.manager.stored.items() for fd in fds]
        environment = {
            **os.environ,
            **self.environment,
            "NOTIFY_SOCKET": self.manager.path,
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in names),
        }
        places = [f"--runtime={self.paths.runtime}", f"--state={self.paths.state}", "--user"]
        fds = [fd for _, fd in names]
        before = self.manager.count("READY=1")
        self.child = subprocess.Popen(
            [sys.executable, "-c", PASS, ",".join(map(str, fds)), *places],
            env=environment,
            pass_fds=fds,
            stderr=self.log,
        )
        if ready:
            self.manager.wait_for(lambda _: self.manager.count("READY=1") > before)

    @property
    def pid(self) -> int:
        assert self.child
        return self.child.pid

    def helpers(self) -> list[int]:
        """The pids of the supervisor's helpers; none if it has ended."""
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{self.pid}/task/{self.pid}/children", encoding="ascii") as file,
        ):
            return [int(pid) for pid in file.read().split()]
        return []

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; the exit status."""
        assert self.child
        for pid in self.helpers():
            with contextlib.suppress(ProcessLookupError):
                self._left.append(os.pidfd_open(pid))
        self.child.send_signal(number)
        status = self.child.wait(PATIENCE_S)
        self.child = None
        return status

    def reload(self) -> None:
        assert self.child
        before = self.manager.count("READY=1")
        self.child.send_signal(signal.SIGHUP)
        self.manager.wait_for(lambda _: self.manager.count("READY=1") > before)

    def begin_run(self, instance: str, invocation: str = "") -> str:
        """What systemd does when a worker starts: its link, renamed into place."""
        self._invocations += 1
        invocation = invocation or f"{self._invocations:032x}"
        component = parse_component(instance)
        link = self._link(component.unit)
        os.symlink(invocation, link + ".new")
        os.rename(link + ".new", link)
        return invocation

    def end_run(self, instance: str) -> None:
        os.unlink(self._link(parse_component(instance).unit))

    def _link(self, unit: str) -> str:
        return f"{self.units}/invocation:{unit}"

    def writer(self, instance: str) -> Writer:
        component = parse_component(instance)
        writer = Writer(f"{self.paths.health}/{instance}", component.component_id)
        self._open.append(writer)
        return writer

    def live(self) -> Live:
        live = Live(self.paths.live)
        self._open.append(live)
        return live

    def subscribe(self, *topics: str) -> Live:
        live = self.live()
        live.send(op="subscribe", topics=list(topics or ["worker:*:status"]))
        return live

    def snapshot(self) -> dict[str, dict[str, Any]]:
        live = Live(self.paths.live)
        answer = live.ask(op="snapshot")
        live.close()
        return {worker["component"]: worker for worker in answer["workers"]}

    def snapshot_of_itself(self) -> dict[str, int]:
        with contextlib.closing(Live(self.paths.live)) as live:
            return parse_supervisor(live.ask(op="snapshot"))

    def wait_for_crashes(self, number: int) -> dict[str, dict[str, Any]]:
        """Return the snapshot in which so many workers have a crash."""

        def look() -> dict[str, dict[str, Any]] | None:
            shown = self.snapshot()
            crashes = [worker for worker in shown.values() if worker["last_crash"]]
            return shown if len(crashes) == number else None

        found = wait_for(look, PATIENCE_S, f"{number} crashes")
        assert found is not None
        return found

    def rss_kb(self) -> int:
        with open(f"/proc/{self.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    def said(self) -> str:
        """All that the supervisor logged."""
        with open(f"{self.root}/log", encoding="utf-8") as file:
            return file.read()

    def close(self) -> None:
        for each in self._open:
            each.close()
        if self.child:
            self.kill()
        for pidfd in self._left:  # they have no supervisor, and end; until then they may write
            select.select([pidfd], [], [], PATIENCE_S)
            os.close(pidfd)
        self.manager.close()
        self.log.close()
        shutil.rmtree(self.root)


@contextlib.contextmanager
def make_lab() -> Iterator[Lab]:
    lab = Lab()
    try:
        yield lab
    except BaseException:
        print(lab.said()[-4000:])
        raise
    finally:
        lab.close()
