"""A worker as a real child, with a real FIFO and a real notification socket, and both watched.

Nothing here sleeps: ``until`` reads what comes until the test has seen what it waits for.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeVar

from nomarr_systemd.core.frames import Decoder, parse_fields
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
COMPONENT = "worker:tag:0"
INVOCATION = "0123456789abcdef" * 2

T = TypeVar("T")


class RunningWorker:
    """The child, and all that came from it so far."""

    def __init__(
        self,
        place: Path,
        command: Sequence[str],
        *,
        settings: Mapping[str, object],
        environment: Mapping[str, str | None],
        is_read: bool,
        is_heard: bool,
    ) -> None:
        self.frames: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.stderr = ""
        self.eof = False
        self.decoder = Decoder(COMPONENT)
        self._place = place
        self._selector = selectors.DefaultSelector()
        self.pipe = place / "health"
        os.mkfifo(self.pipe)
        self._reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notify.bind(str(place / "notify"))
        if is_read:
            self.read()
        else:
            fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, 4096)
        if is_heard:
            self.hear()
        else:
            self._fill_the_socket()
        variables: dict[str, str | None] = {
            "HOME": str(place),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "NOTIFY_SOCKET": str(place / "notify"),
            "WATCHDOG_USEC": "400000",
            "INVOCATION_ID": INVOCATION,
            "NOMARR_COMPONENT_ID": COMPONENT,
            "NOMARR_HEALTH_PIPE": str(self.pipe),
            "NOMARR_SETTINGS": json.dumps(
                {"frame_interval_s": 0.05, "stall_timeout_s": 60, "idle_evict_s": 0, **settings}
            ),
            **environment,
        }
        with (place / "stdout").open("wb") as out:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.PIPE,
                env={name: text for name, text in variables.items() if text is not None},
            )
        assert self.child.stderr
        os.set_blocking(self.child.stderr.fileno(), False)
        self._selector.register(self.child.stderr, selectors.EVENT_READ, self._read_stderr)
        self._pidfd = os.pidfd_open(self.child.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, lambda: None)

    @property
    def frame(self) -> dict[str, Any]:
        """The last one, or nothing."""
        return self.frames[-1] if self.frames else {}

    @property
    def stdout(self) -> str:
        return (self._place / "stdout").read_text()

    def count(self, message: str) -> int:
        """How many datagrams had this line, or one that begins so if it ends in "="."""
        return sum(
            any(line == message or (message[-1] == "=" and line.startswith(message)) for line in m)
            for m in (m.split("\n") for m in self.messages)
        )

    def statuses(self) -> list[str]:
        lines = [line for message in self.messages for line in message.split("\n")]
        return [line.removeprefix("STATUS=") for line in lines if line.startswith("STATUS=")]

    def tell(self, *lines: str) -> None:
        assert self.child.stdin
        self.child.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.child.stdin.flush()

    def until(self, seen: Callable[[], T]) -> T:
        """What ``seen`` says when that is something; reads on until then."""
        deadline = monotonic() + PATIENCE_S
        while not (result := seen()):
            left_s = deadline - monotonic()
            ended = self.child.poll() is not None
            ready = self._selector.select(0 if ended else max(left_s, 0))
            for key, _ in ready:
                key.data()
            idle = all(key.fileobj == self._pidfd for key, _ in ready)
            if (ended and idle and not seen()) or left_s <= 0:
                raise AssertionError(f"not seen; {self._describe()}")
        # What it said before that, on another of its ways: they are read in no order.
        for key, _ in self._selector.select(0):
            key.data()
        return result

    def until_frame(self, **fields: object) -> dict[str, Any]:
        """A frame that says all of this, among those that have not been looked at before."""
        done = len(self.frames)

        def find() -> dict[str, Any] | None:
            nonlocal done
            while done < len(self.frames):
                done += 1
                frame = self.frames[done - 1]
                if all(frame.get(name) == value for name, value in fields.items()):
                    return frame
            return None

        if all(self.frame.get(name) == value for name, value in fields.items()) and self.frame:
            return self.frame
        found = self.until(find)
        assert found
        return found

    def wait(self) -> int:
        """Its exit status (−N: signal N), with all that it said before."""
        self.until(lambda: self.child.poll() is not None)
        self._read_frames()
        self._read_messages()
        self._read_stderr()
        return self.child.returncode

    def stop(self) -> int:
        """SIGTERM, and nothing more to do; its exit status."""
        self.child.send_signal(signal.SIGTERM)
        assert self.child.stdin
        self.child.stdin.close()
        return self.wait()

    def read(self) -> None:
        """Begin to read the pipe."""
        self._selector.register(self._reader, selectors.EVENT_READ, self._read_frames)

    def hear(self) -> None:
        """Begin to read the notification socket."""
        self._selector.register(self._notify, selectors.EVENT_READ, self._read_messages)

    def leave(self) -> None:
        """Close the pipe, as a supervisor that is stopped."""
        self._selector.unregister(self._reader)
        os.close(self._reader)
        self._reader = -1

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        self._selector.close()
        for stream in (self.child.stdin, self.child.stderr):
            assert stream
            with suppress(BrokenPipeError):
                stream.close()
        os.close(self._pidfd)
        if self._reader >= 0:
            os.close(self._reader)
        self._notify.close()

    def _read_frames(self) -> None:
        while self._reader >= 0:
            try:
                chunk = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            if not chunk:
                # The end is level-triggered for ever; nobody opens the pipe a second time.
                self.eof = bool(self.frames)
                if self.eof and self._reader in self._selector.get_map():
                    self._selector.unregister(self._reader)
                return
            self.frames += [parse_fields(frame.line) for frame in self.decoder.feed(chunk)]

    def _read_messages(self) -> None:
        with suppress(BlockingIOError):
            while True:
                message = self._notify.recv(65536).decode()
                if message not in ("FILLER", "BARRIER=1"):
                    self.messages.append(message)

    def _read_stderr(self) -> None:
        stream = self.child.stderr
        assert stream
        while chunk := stream.read(65536):  # None: nothing now
            self.stderr += chunk.decode(errors="replace")
        if chunk == b"" and stream in self._selector.get_map():
            self._selector.unregister(stream)

    def _fill_the_socket(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.connect(str(self._place / "notify"))
            with suppress(BlockingIOError):
                while True:
                    sender.send(b"FILLER")

    def _describe(self) -> str:
        return (
            f"exit status {self.child.poll()}\nlast frames {self.frames[-3:]}\n"
            f"dropped {self.decoder.drops}\nlast messages {self.messages[-5:]}\n"
            f"stdout {self.stdout!r}\nstderr {self.stderr}"
        )


class Start(Protocol):
    def __call__(
        self,
        entrypoint: str | Sequence[str],
        settings: Mapping[str, object] = ...,
        environment: Mapping[str, str | None] = ...,
        *,
        is_read: bool = ...,
        is_heard: bool = ...,
    ) -> RunningWorker: ...


@contextmanager
def workers() -> Iterator[Start]:
    """Starts workers: by the name of a class in sample_workers, or by a command."""
    running: list[RunningWorker] = []
    # Not pytest's directory: a socket's path has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nomarr-") as directory:

        def start(
            entrypoint: str | Sequence[str],
            settings: Mapping[str, object] = {},
            environment: Mapping[str, str | None] = {},
            *,
            is_read: bool = True,
            is_heard: bool = True,
        ) -> RunningWorker:
            place = Path(directory, str(len(running)))
            place.mkdir()
            if isinstance(entrypoint, str):
                module = "" if ":" in entrypoint else "tests.support.sample_workers:"
                main = "import sys; from nomarr_systemd.worker.main import main; sys.exit(main())"
                entrypoint = [sys.executable, "-c", main, module + entrypoint]
            running.append(
                RunningWorker(
                    place,
                    entrypoint,
                    settings=settings,
                    environment=environment,
                    is_read=is_read,
                    is_heard=is_heard,
                )
            )
            return running[-1]

        try:
            yield start
        finally:
            for worker in running:
                worker.end()
