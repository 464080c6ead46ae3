"""A booted Debian of its own under systemd-nspawn: a tree, or this machine's root, copied on write.
It can be rebooted and have its power cut.

A power cut ends every process at once; what they had written is kept, synced or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.demo import cgroup
from tests.support import properties, waiting
from tests.support.capabilities import IS_ROOT
from tests.support.supervision import Live
from tests.support.waiting import PATIENCE_S

_PREFIX: Final = "nomarr-booted-"
CONFIG: Final = "/etc/nomarr/nomarr.toml"
STATE: Final = "/var/lib/nomarr"
LIVE: Final = "/run/nomarr/live.sock"
_ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/root",
}
# Mounts that nobody else sees, and that are gone with the process that keeps them. What this
# machine itself would start at boot is left out, if it is a copy of this one.
# So are Debian's generators, for disks and consoles: they are two fifths of each daemon-reload.
_KEEP: Final = """
cd "$1" && mount -t tmpfs tmpfs disk && mkdir disk/upper disk/work disk/root || exit
mount -t overlay overlay -o "lowerdir=$3,upperdir=disk/upper,workdir=disk/work" disk/root || exit
cp -a "$2/." disk/root || exit
[ "$3" != / ] || rm -rf disk/root/etc/systemd/system/*.wants disk/root/etc/rc?.d/S*
mkdir -p disk/root/var/log/journal
cd disk/root && mkdir -p etc/systemd/system-generators || exit
for each in usr/lib/systemd/system-generators/*; do
    ln -sf /dev/null "etc/systemd/system-generators/${each##*/}"
done
echo kept
exec sleep infinity
"""
# nspawn makes its cgroups below the one that it is started in.
_JOIN: Final = """
for cgroup in $CGROUPS; do echo $$ > "$cgroup/cgroup.procs" || exit; done
unset CGROUPS
exec "$@"
"""

# On an overlay, as a container has it in /var/tmp, nobody may make the devices by which one says
# that a file was removed.
_SAVE: Final = """
cd "$1"
rm -rf root/* tmp/* var/log/* var/tmp/*
find . -type c -delete
cp -a . "$2"
"""

_Found = TypeVar("_Found")


class MachineError(Exception):
    """It does not boot, or what was asked of it failed."""


class MachineUnavailable(MachineError):
    """Here no machine can be booted; the message names what is missing."""


class Machine:
    """``base`` is the root that it has a copy of, with what others have saved as ``layers`` over
    it; ``added`` is copied onto that."""

    def __init__(self, base: Path, added: Path, *layers: Path) -> None:
        _check_capabilities()
        _sweep()
        # The owner's pid is in it, so that a later machine can sweep up after a killed one.
        self._name = f"{_ours()}{os.getpid()}-{secrets.token_hex(4)}"
        self.directory = os.path.join(tempfile.gettempdir(), self._name)
        os.makedirs(f"{self.directory}/disk", 0o700)
        self.leader = 0  # the pid here of its PID 1
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._cgroups = [f"{parent}/{self._name}" for parent in cgroup.find_hierarchies()]
        self._keeper = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig=KILL", "--", "unshare", "--mount", "--"),
                *("sh", "-c", _KEEP, "sh", self.directory, str(added)),
                ":".join(map(str, (*layers, base))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"kept\n":
            assert self._keeper.stderr is not None
            said = self._keeper.stderr.read().decode(errors="replace").strip()
            self.end()
            raise MachineUnavailable(f"an overlay of {base} on a tmpfs is missing: {said}")

    @property
    def processes(self) -> set[int]:
        """Ours that are there for as long as the machine is."""
        return {each.pid for each in (self._keeper, self._nspawn) if each is not None}

    def path(self, inside: str) -> Path:
        """A path of the running machine as it is seen from here, /run included."""
        return Path(f"/proc/{self.leader}/root{inside}")

    def boot(self) -> None:
        """Until everything that starts at boot has been started."""
        address = f"{self.directory}/ready"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            open(f"{self.directory}/console", "ab") as console,
        ):
            ready.bind(address)
            for place in self._cgroups:
                os.makedirs(place, exist_ok=True)
            self._nspawn = subprocess.Popen(
                [
                    *("sh", "-c", _JOIN, "sh"),
                    *("nsenter", f"--target={self._keeper.pid}", "--mount", "--"),
                    *("setpriv", "--pdeathsig=KILL", "--", "systemd-nspawn", "--quiet", "--boot"),
                    f"--directory={self.directory}/disk/root",
                    f"--machine={self._name}",
                    *("--register=no", "--keep-unit", "--private-network", "--notify-ready=yes"),
                ],
                # Only the unified tree shows what ran out of memory.
                env=_ENVIRONMENT
                | {"NOTIFY_SOCKET": address, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
                | {"CGROUPS": " ".join(self._cgroups)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # a Ctrl-C is for us to handle
            )
            try:
                self._wait_until_ready(ready)
            finally:
                os.unlink(address)

    def run(
        self, *command: str, check: bool = True, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root."""
        done = subprocess.run(
            self.command(*command),
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise MachineError(f"{' '.join(command)}: exit status {done.returncode}: {said}")
        return done

    def command(self, *command: str) -> list[str]:
        """The command here that runs this one inside, as root."""
        return ["nsenter", f"--target={self.leader}", "--all", "--", *command]

    def reboot(self) -> None:
        """Shut down in good order, then boot again."""
        self._shut_down()
        self.boot()

    def save(self, place: Path) -> None:
        """Shut down in good order, and keep what is on its disk beside the base, but for logs. What
        it has removed of the base is there again."""
        self._shut_down()
        disk = f"/proc/{self._keeper.pid}/root{self.directory}/disk"
        subprocess.run(["sh", "-ec", _SAVE, "sh", f"{disk}/upper", str(place)], check=True)

    def _shut_down(self) -> None:
        self.run("systemctl", "poweroff", "--no-block")
        self._wait_until_off()

    def power_cut(self) -> None:
        """Every process is gone at once, in the middle of whatever it did."""
        assert self._nspawn is not None
        if self._nspawn.poll() is None:
            # With its PID 1 the kernel kills the whole of its pid namespace.
            os.kill(self.leader or self._nspawn.pid, signal.SIGKILL)
        self._wait_until_off()

    def leave_free(self, size: int) -> None:
        """Let its disk, which has /etc and /var and keeps nothing for root, have so much left."""
        disk = f"{self.directory}/disk"
        facts = os.statvfs(f"/proc/{self._keeper.pid}/root{disk}")
        size += (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        there = ("nsenter", f"--target={self._keeper.pid}", "--mount", "--")
        limit = ("mount", "-o", f"remount,size={size}", disk)
        subprocess.run([*there, *limit], check=True)

    def free_bytes(self) -> int:
        """What is left of its disk."""
        facts = os.statvfs(f"/proc/{self._keeper.pid}/root{self.directory}/disk")
        return facts.f_bavail * facts.f_frsize

    def end(self) -> None:
        """Leave nothing; may be called twice."""
        if self._nspawn is not None:
            self.power_cut()
        self._keeper.kill()
        self._keeper.wait()
        for stream in (self._keeper.stdout, self._keeper.stderr):
            if stream is not None:
                stream.close()
        for place in self._cgroups:
            _remove_cgroup(place)
        shutil.rmtree(self.directory, ignore_errors=True)

    # Our system in it

    def apply(self, toml: str) -> None:
        """Configure it so, as an admin does; until every worker that can run has been started."""
        path = self.path(CONFIG)
        path.parent.mkdir(exist_ok=True)
        path.write_text(toml)
        self.run("nomarrctl", "apply", "--yes")

    def status(self, name: str) -> dict[str, Any]:
        """The worker's row of ``nomarrctl status``."""
        return self._statuses()[parse_component(name).component_id]

    def _statuses(self) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.run("nomarrctl", "status", "--json", check=False).stdout)
        return {row["component"]: row for row in rows}

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *arguments, check=check).stdout

    def journal(self, *arguments: str) -> str:
        return self.run("journalctl", "--no-pager", *arguments, check=False).stdout

    def show(self, name: str, *names: str) -> dict[str, str]:
        """Properties of a unit or of a worker."""
        unit = unit_of(name)
        if properties.ASKED.issuperset(names):
            # systemd's own socket refuses processes that have no pid in there; its bus does not.
            bus = str(self.path("/run/dbus/system_bus_socket"))
            return properties.ask((bus, True), [unit], names)[unit]
        text = self.systemctl("show", f"--property={','.join(names)}", unit)
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def get(self, name: str, wanted: str) -> str:
        return self.show(name, wanted)[wanted]

    def kill(self, name: str, number: str = "KILL") -> str:
        """Signal the worker's main process; returns the invocation that it was."""
        invocation = self.get(name, "InvocationID")
        self.systemctl("kill", "--kill-whom=main", f"--signal={number}", unit_of(name))
        return invocation

    def account(self, name: str) -> Account:
        """The worker's account, as published."""
        component = parse_component(name)
        path = self.path(f"{STATE}/public/{component.instance}.json")
        try:
            document: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return Account(component.component_id)
        return book.from_doc(document)

    # Waiting

    def wait_for(
        self, look: Callable[[], _Found], what: str, timeout_s: float = PATIENCE_S
    ) -> _Found:
        """What ``look`` finds, as soon as that is true."""
        return waiting.wait_for(look, timeout_s, what)

    def wait_until_running(self, *names: str, after: str = "") -> None:
        """Until the workers are active, and in another invocation than ``after``."""

        def run(name: str) -> bool:
            shown = self.show(name, "ActiveState", "InvocationID")
            return shown["ActiveState"] == "active" and shown["InvocationID"] != after

        for name in names:
            self.wait_for(lambda name=name: run(name), f"{name} runs")  # type: ignore[misc]

    def wait_until_healthy(self, *names: str) -> None:
        """Until ``nomarrctl status`` shows them as healthy. Its supervisor is asked first, from
        here: a look by nomarrctl takes a tenth of a second of the processor's time."""
        wanted = {parse_component(name).component_id for name in names}

        def seen_by_supervisor() -> bool:
            try:
                with contextlib.closing(Live(str(self.path(LIVE)))) as live:
                    live.socket.settimeout(1)
                    rows = live.ask(op="snapshot")["workers"]
            except (OSError, AssertionError):  # it is being started
                return False
            return wanted <= {row["component"] for row in rows if row["status"] == "healthy"}

        def shown() -> bool:
            rows = self._statuses()
            return {rows[name]["health"] for name in wanted} == {"healthy"}

        for look in (seen_by_supervisor, shown):
            self.wait_for(look, f"{', '.join(names)} healthy")

    def wait_until_settled(self, name: str) -> None:
        """Until nothing is owed of what was decided about the worker."""
        self.wait_for(
            lambda: all(record.effect == "done" for record in self.account(name).records),
            f"all that was decided about {name} is done",
        )

    def _wait_until_ready(self, ready: socket.socket) -> None:
        assert self._nspawn is not None
        ends = time.monotonic() + PATIENCE_S
        pidfd = os.pidfd_open(self._nspawn.pid)
        try:
            while (left_s := ends - time.monotonic()) > 0:
                readable, _, _ = select.select([ready.fileno(), pidfd], [], [], left_s)
                if ready.fileno() in readable:
                    words = ready.recv(65536).decode().split("\n")
                    for word in words:
                        if word.startswith("X_NSPAWN_LEADER_PID="):
                            self.leader = int(word.partition("=")[2])
                    if "READY=1" in words:
                        return
                elif pidfd in readable:
                    break
        finally:
            os.close(pidfd)
        raise MachineError(f"it does not boot: {self.console()}")

    def _wait_until_off(self) -> None:
        assert self._nspawn is not None
        try:
            self._nspawn.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            self._nspawn.kill()
            self._nspawn.wait()
            raise MachineError(f"it does not go off: {self.console()}") from error
        finally:
            self._nspawn = None
            self.leader = 0

    def console(self) -> str:
        """The end of what was said on it."""
        return Path(self.directory, "console").read_text(errors="replace")[-4000:]


def unit_of(name: str) -> str:
    """A worker's unit by any of its names; other units are named in full."""
    if "." in name and not name.startswith("nomarr-worker@"):
        return name
    return parse_component(name).unit


def _sweep() -> None:
    """End and remove machines whose owners were killed. Their cgroups name them: a directory in
    the owner's memory is gone, and the machine runs on."""
    parents = cgroup.find_hierarchies()
    for name in {name for place in (tempfile.gettempdir(), *parents) for name in os.listdir(place)}:
        owner = name.removeprefix(_ours()).partition("-")[0]
        if name.startswith(_ours()) and not _runs(owner):
            for parent in parents:
                _remove_cgroup(f"{parent}/{name}")
            shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)


def _ours() -> str:
    """How names begin in this pid namespace: a container may see the cgroups of its host."""
    return f"{_PREFIX}{os.stat('/proc/self/ns/pid').st_ino}-"


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"  # in a container nobody may wait for it


def _remove_cgroup(place: str) -> None:
    cgroup.kill(place)
    with contextlib.suppress(FileNotFoundError):  # another machine sweeps, too
        cgroup.remove(place)


def _check_capabilities() -> None:
    if not IS_ROOT:
        raise MachineUnavailable("needs root")
    needs: Sequence[tuple[str, str]] = (
        ("systemd-nspawn", "systemd-container"),
        ("dbus-daemon", "dbus"),
        ("nsenter", "util-linux"),
        ("/usr/bin/python3", "python3"),
    )
    for program, package in needs:
        if shutil.which(program) is None:
            raise MachineUnavailable(f"{program} is missing: install the package {package}")
