"""A real PostgreSQL for tests: in a directory of its own, as a plain user, on a loopback port.

Debian's package has the server's programs. Durable as in use: fsync is on.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pytest

from tests.support.capabilities import IS_ROOT
from tests.support.users import NOBODY

ADMIN, PASSWORD = "postgres", "Pässwörd '€\\"
_PATIENCE_S = 60
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "fsync": "on",
    "password_encryption": "scram-sha-256",
    "log_min_messages": "fatal",
    "autovacuum_naptime": "1min",
}
_ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
# It refuses to run as root. Root of a user namespace that has no other users is one in another one.
if IS_ROOT:
    _BECOME = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
elif os.geteuid() == 0:
    _BECOME = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--"]
else:
    _BECOME = []


class Postgres(NamedTuple):
    """Where a server listens, and its administrator's password."""

    host: str
    port: int
    password: str = PASSWORD
    directory: str = ""

    def sql(self, *lines: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements as the administrator; the rows of the last one."""
        connection = psycopg2.connect(
            host=self.host,
            port=self.port,
            user=ADMIN,
            password=self.password,
            dbname=database,
            connect_timeout=_PATIENCE_S,
        )
        with contextlib.closing(connection):
            connection.autocommit = True
            with connection.cursor() as cursor:
                for line in lines:
                    cursor.execute(line)
                return cursor.fetchall() if cursor.description else []


def programs() -> Path:
    """The directory of the server's programs; skips where there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    if (on_path := shutil.which("initdb")) is not None:
        return Path(on_path).parent
    pytest.skip("PostgreSQL's server is missing: install postgresql")


def _make_verifier(password: str) -> str:
    """The password as the server keeps it (RFC 5803), but of one round instead of 4,096: those are
    half of the 12 ms of processor time that a login takes."""
    salt, rounds = os.urandom(16), 1
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
    client, server = (
        hmac.digest(salted, word, "sha256") for word in (b"Client Key", b"Server Key")
    )
    kept = (salt, hashlib.sha256(client).digest(), server)
    salt_text, client_text, server_text = (base64.b64encode(each).decode() for each in kept)
    return f"SCRAM-SHA-256${rounds}:{salt_text}${client_text}:{server_text}"


class Running:
    """A server in ``directory``, made by ``initdb`` unless there is one already."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> Postgres:
        return Postgres("127.0.0.1", self.port, PASSWORD, str(self.directory))

    def make(self) -> None:
        """A new cluster; the administrator logs in by password only."""
        secret = self.directory / "password"
        secret.write_text(_make_verifier(PASSWORD))
        for path in (self.directory, secret):
            give(path)
        self._run(
            *("initdb", "--pgdata", str(self.data), "--username", ADMIN),
            *("--pwfile", str(secret), "--auth", "scram-sha-256", "--encoding", "UTF8"),
            *("--locale", "C.UTF-8", "--no-sync"),
        )

    def start(self, **settings: str) -> None:
        """Start it, and wait until it answers or ends."""
        options = [f"{name}={value}" for name, value in {**_SETTINGS, **settings}.items()]
        command = [*_BECOME, str(programs() / "postgres")]
        command += ["-D", str(self.data), "-p", str(self.port)]
        command += ["-k", str(self.directory)]
        log = open(self.directory / "log", "ab")  # noqa: SIM115 (closed below)
        self._process = subprocess.Popen(
            [*command, *(word for each in options for word in ("-c", each))],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=_ENVIRONMENT,
        )
        log.close()
        self.wait_ready()

    def wait_ready(self) -> None:
        for _ in range(_PATIENCE_S * 20):
            assert self._process is not None
            assert self._process.poll() is None, (self.directory / "log").read_text()
            probe = [str(programs() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
            if subprocess.run(probe, check=False).returncode == 0:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        raise AssertionError("PostgreSQL did not become ready")

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: SIGINT at once and cleanly, SIGQUIT without a shutdown, SIGKILL as a crash."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(number)
        self._process.wait(_PATIENCE_S)
        self._process = None

    def clone(self, directory: Path, port: int) -> Running:
        """A streaming standby of this server, to be started."""
        standby = Running(directory, port)
        directory.mkdir()
        give(directory)
        login = f"host=127.0.0.1 port={self.port} user={ADMIN}"
        self._run(
            *("pg_basebackup", "--pgdata", str(standby.data), "--dbname", login),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--no-password"),
            PGPASSWORD=PASSWORD,
        )
        return standby

    def wait_for_copy(self, primary: Running) -> None:
        """Wait until this standby has all that the primary has."""
        [(place,)] = primary.server.sql("SELECT pg_current_wal_lsn()")
        for _ in range(_PATIENCE_S * 20):
            [(has,)] = self.server.sql(f"SELECT pg_last_wal_replay_lsn() >= '{place}'")
            if has:
                return
            time.sleep(0.05)
        raise AssertionError("the standby does not follow")

    def _run(self, program: str, *arguments: str, **environment: str) -> None:
        subprocess.run(
            [*_BECOME, str(programs() / program), *arguments],
            check=True,
            capture_output=True,
            cwd="/",
            env=_ENVIRONMENT | environment,
        )


@contextlib.contextmanager
def run_postgres(**settings: str) -> Iterator[Running]:
    """A new server for as long as it is wanted."""
    with tempfile.TemporaryDirectory(prefix="nomarr-postgres-") as directory:
        running = Running(Path(directory))
        running.make()
        running.start(**settings)
        try:
            yield running
        finally:
            running.stop()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def give(path: Path) -> None:
    """Let it be the server's own."""
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY)
