"""A user's own installation with nomarr-web in it, and a client of its page."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.lab import Lab
from tests.support.operator_site import WORKER, Installation
from tests.support.steady import HEALTHY, make_worker

HOSTILE_NAME = '<img src=x onerror=\\"document.title=1\\">\\u001b[2J\\u202etxt.exe'
HOSTILE = make_worker(
    pause_s=0.2,
    frame=f'{HEALTHY},"phase":"<i>processing</i>","job":"{HOSTILE_NAME}","seq":1',
)
CONFIG = """\
[policy]
backoff_base_s = {backoff_s}
backoff_jitter = 0
max_restarts = 3
max_lifetime_restarts = 20
[health]
snapshot_interval_s = {snapshot_s}
[web]
listen = "127.0.0.1:{port}"
{web}
[pool.tag]
workers = 3
entrypoint = "tests.support.web_workers:Tagger"
job_max_crashes = 1
watchdog_s = 3600
[pool.ocr]
workers = {ocr}
command = ["{worker}"]
watchdog_s = 3600
[pool.odd]
workers = 1
command = ["{hostile}"]
watchdog_s = 3600
"""


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port: int = link.getsockname()[1]
        return port


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connect(address: int | str, timeout_s: float) -> http.client.HTTPConnection:
    """To a port of this machine, or to a Unix socket."""
    if isinstance(address, str):
        return UnixConnection(address, timeout_s)
    return http.client.HTTPConnection("127.0.0.1", address, timeout=timeout_s)


class Client:
    """Plain HTTP, as a program that is no browser speaks it."""

    def __init__(self, port: int, path: str = "") -> None:
        self.port = port
        self._address = path or port

    def ask(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = connect(self._address, 20.0)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str, status: int = 200) -> Any:
        found, _, body = self.ask(path)
        assert found == status, (path, found, body[:400])
        return json.loads(body)

    def events(self, topics: str, **headers: str) -> EventStream:
        return EventStream(self._address, topics, **headers)

    def is_ready(self) -> bool:
        """Whether it is connected to the supervisor."""
        try:
            return self.ask("/readyz")[0] == 200
        except OSError:
            return False


class EventStream:
    """Events of the stream, one after the other."""

    def __init__(self, address: int | str, topics: str, **headers: str) -> None:
        self._connection = connect(address, 30.0)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("GET", f"/events?topics={topics}", headers=given)
        self.answer = self._connection.getresponse()
        self.last_id = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self.answer.readline():
            if line.startswith(b"id: "):
                self.last_id = line[4:].strip().decode()
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])

    def until(self, **wanted: object) -> dict[str, Any]:
        """The first event that has these values."""
        for event in self:
            if all(event.get(name) == value for name, value in wanted.items()):
                return event
        raise AssertionError(f"the stream ended before {wanted}")

    def close(self) -> None:
        self._connection.close()


class WebSite(Installation):
    """Pools ``tag`` (jobs of the store), ``ocr`` (steady workers) and ``odd`` (hostile names)."""

    def __init__(
        self,
        lab: Lab,
        *,
        backoff_s: float = 0.1,
        ocr: int = 2,
        snapshot_s: float = 1,
        web: str = "",
    ) -> None:
        super().__init__(lab)
        needs = 'exit 1 if -e "$0.out";\n$SIG'  # what it cannot do without is out of order
        self.ocr = lab.write_program("ocr", WORKER.replace("$SIG", needs, 1))
        self.port = find_port()
        self.client = Client(self.port)
        hostile = lab.write_program("hostile", HOSTILE)
        self.config.write_text(
            CONFIG.format(
                backoff_s=backoff_s,
                snapshot_s=snapshot_s,
                port=self.port,
                web=web,
                ocr=ocr,
                worker=self.ocr,
                hostile=hostile,
            )
        )
        self.good("apply")
        self.wait_until_healthy("tag-0", "tag-1", "tag-2", "ocr-0", "odd-0")
        self.start_web()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_web(self) -> None:
        """Started, and connected to the supervisor."""
        self.lab.systemctl("start", "nomarr-web.service")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self.lab.wait_for(self.client.is_ready, what="nomarr-web is ready")

    def kill_unit(self, unit: str) -> None:
        self.lab.systemctl("kill", "--signal=KILL", "--kill-who=main", unit)

    @contextmanager
    def outage(self, *instances: str) -> Iterator[None]:
        """These of ``ocr`` die at once, and none of the pool can start until the end."""
        self.wait_until_reconciled()
        pids = [self.wait_for_worker(each, state="healthy")["pid"] for each in instances]
        Path(f"{self.ocr}.out").touch()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        try:
            yield
        finally:
            Path(f"{self.ocr}.out").unlink()

    def add_jobs(self, *names: str) -> None:
        for name in names:
            Path(self.lab.directory, name).touch()
        paths = [f"{self.lab.directory}/{name}" for name in names]
        self.good("jobs", "add", "--pool", "tag", *paths)

    def wait_for_worker(self, instance: str, **wanted: object) -> dict[str, Any]:
        """The worker's own answer of the API, as soon as it has these values."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.client.json(f"/api/workers/{instance}")
            return found if all(found[name] == value for name, value in wanted.items()) else None

        found = self.lab.wait_for(look, what=f"{instance}: {wanted}")
        assert found
        return found
