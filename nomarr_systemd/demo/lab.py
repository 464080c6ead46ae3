"""A lab: a private user manager of systemd, for the demo and for tests.

It runs in a mount namespace with an empty /run, with a journal and in a cgroup of its own, so that
it neither sees nor touches the machine's systemd; its end ends every process that it started.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.demo import cgroup

SYSTEMD: Final = "/lib/systemd"  # right also where /usr is not merged
START_TIMEOUT_S: Final = 60.0  # a busy machine is no failure
_PREFIX: Final = "nomarr-lab-"
_UMASK: Final = 0o022  # a login of Debian 13 has 002, and a store that a group can write is refused
# A process joins its cgroups before it executes its program.
_JOIN: Final = """
for cgroup in $CGROUPS; do echo $$ > "$cgroup/cgroup.procs" || exit 100; done
unset CGROUPS
"""
# /run has only the directory by which programs detect systemd. Units that the machine would start
# for a user are hidden, and so are its journal and the generators that it runs for a user, which
# take longer than the rest of a daemon-reload. Sandboxes find systemd's inaccessible files under
# /run. The journal is kept in memory and has no messages of the kernel.
_MOUNT: Final = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/systemd/journald.conf.d || exit 101
for directory in /etc/systemd/user /usr/lib/systemd/user/*.wants /var/log/journal \
    /usr/lib/systemd/user-generators /usr/lib/systemd/user-environment-generators; do
    [ ! -d "$directory" ] || mount -t tmpfs tmpfs "$directory" || exit 101
done
ln -s "$XDG_RUNTIME_DIR/systemd/inaccessible" /run/systemd/inaccessible
cat > /run/systemd/journald.conf.d/lab.conf <<END
[Journal]
Storage=volatile
RuntimeMaxUse=64M
RateLimitBurst=0
ReadKMsg=no
Audit=no
ForwardToSyslog=no
ForwardToWall=no
END
"""
# A host name, and a machine-id, of its own.
_NAME: Final = """
if [ -n "$LAB_NAME" ]; then
    hostname "$LAB_NAME" && printf %s "$LAB_NAME" | md5sum | cut -c 1-32 > /run/machine-id &&
        mount --bind /run/machine-id /etc/machine-id || exit 101
fi
unset LAB_NAME
"""
_BECOME: Final = 'exec "$@"'


class LabError(NomarrError):
    """The private systemd does not start, or a command in it failed."""

    code = "lab"


class LabUnavailable(LabError):
    """This machine or user lacks what a private systemd needs; the message names it."""

    code = "lab-unavailable"


class Lab:
    """One private manager; use it as a context. With a ``uid`` it runs as that user, with a
    ``name`` it is a host of its own: it has that host name, and another machine-id."""

    def __init__(self, *, uid: int = 0, name: str = "") -> None:
        self.uid = uid
        self.name = name
        self._namespaces = ("--mount", "--uts") if name else ("--mount",)
        self.directory = ""
        self._journald: subprocess.Popen[bytes] | None = None
        self._manager: subprocess.Popen[bytes] | None = None
        self.cgroups: list[str] = []  # one in each hierarchy

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Start the manager and wait until it is ready. Nothing is left if that fails."""
        _check_capabilities()
        if not is_mapped(self.uid):
            raise LabUnavailable(
                f"uid {self.uid} is not mapped in this user namespace", hint="run it as root"
            )
        sweep()
        # Short, because the path of a socket has 107 characters at most.
        self.directory = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            self._prepare()
            self._start()
        except BaseException:
            self.end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def runtime(self) -> str:
        """systemd's %t in the lab; it is visible from outside, too."""
        return f"{self.directory}/run"

    @property
    def home(self) -> str:
        return f"{self.directory}/home"

    @property
    def units(self) -> str:
        """Where the manager looks for units first."""
        return f"{self.directory}/config/systemd/user"

    @property
    def log_file(self) -> str:
        """The output of both programs before the journal is there."""
        return f"{self.directory}/start.log"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every program in the lab."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": self.home,
            "XDG_RUNTIME_DIR": self.runtime,
            "XDG_CONFIG_HOME": f"{self.directory}/config",
        }

    @property
    def pid(self) -> int:
        """The pid of the manager."""
        if self._manager is None:
            raise LabError("the lab was not started")
        return self._manager.pid

    def run(
        self, command: Sequence[str], *, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the lab: with its /run, environment and user."""
        enter = ["nsenter", f"--target={self.pid}", *self._namespaces, "--"]
        done = subprocess.run(
            [*enter, *self._as_user(), *command],
            env=self.environment,
            cwd=self.directory,
            umask=_UMASK,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise LabError(f"{' '.join(command)}: exit status {done.returncode}: {said}")
        return done

    def systemctl(self, *arguments: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Return what ``systemctl --user`` prints."""
        command = ["systemctl", "--user", "--no-pager", *arguments]
        return self.run(command, check=check, timeout_s=timeout_s).stdout

    def journal(self, *arguments: str) -> str:
        """Return what ``journalctl`` prints: lines of the manager, the programs and the
        services."""
        command = ["nsenter", f"--target={self.pid}", "--mount", "--", "journalctl", "--no-pager"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        return done.stdout

    def end(self) -> None:
        """Kill everything in the lab and remove every trace; may be called twice."""
        for process in (self._manager, self._journald):  # first: it must not restart what dies
            if process is not None:
                process.kill()
                process.wait()
        for place in self.cgroups:
            cgroup.kill(place)
        self._manager = self._journald = None
        for place in self.cgroups:
            cgroup.remove(place)
        self.cgroups = []
        if self.directory:
            shutil.rmtree(self.directory)
            self.directory = ""

    def _prepare(self) -> None:
        for directory in (self.units, self.home):
            os.makedirs(directory)
        os.chmod(self.home, 0o755)  # noqa: S103 (a login's umask may let a group write it)
        os.mkdir(self.runtime, 0o700)
        # The owner is in the name, so that a later lab can sweep up after a killed one.
        end = os.path.basename(self.directory)[len(_PREFIX) :]
        name = f"{_PREFIX}{_pid_namespace()}.{os.getpid()}-{end}"
        for parent in cgroup.find_hierarchies():
            place = os.path.join(parent, name)
            try:
                os.mkdir(place)
            except OSError as error:
                raise LabUnavailable(
                    f"a writable cgroup tree is missing: {error}",
                    hint="in a container, run it with --privileged",
                ) from error
            self.cgroups.append(place)
            # Two below it: a cgroup with controllers for those below may have no processes itself.
            for part in ("journald", "manager"):
                os.mkdir(os.path.join(place, part))
        if self.uid:
            for place in self.cgroups:
                for path in cgroup.list_delegated(f"{place}/manager"):
                    os.chown(path, self.uid, self.uid)
            for path in _walk(self.directory):
                os.chown(path, self.uid, self.uid)

    def _start(self) -> None:
        script = _JOIN + _MOUNT + _NAME + _BECOME
        unshare = ("unshare", *self._namespaces, "--", "sh", "-c", script, "sh")
        program = f"{SYSTEMD}/systemd-journald"
        # Unless told so, it writes to the kernel's log, and that to the machine's console.
        more = {"LAB_NAME": self.name, "SYSTEMD_LOG_TARGET": "console"}
        self._journald = self._start_program("journald", *unshare, program, **more)
        self._start_manager()

    def _start_manager(self) -> None:
        if self._journald is None:
            raise LabError("the lab was not started")
        enter = ("nsenter", f"--target={self._journald.pid}", *self._namespaces, "--")
        self._manager = self._start_program(
            *("manager", *enter, "sh", "-c", _JOIN + _BECOME, "sh", *self._as_user()),
            *(f"{SYSTEMD}/systemd", "--user", "--unit=basic.target", "--log-target=journal"),
        )

    def _start_program(
        self, part: str, *command: str, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a program in its part of the cgroup, and wait until it is ready."""
        address = f"{self.directory}/ready"
        cgroups = " ".join(f"{place}/{part}" for place in self.cgroups)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
            open(self.log_file, "ab") as log,
        ):
            ready.bind(address)
            os.chmod(address, 0o666)  # noqa: S103 (the directory is closed to others)
            more = {"NOTIFY_SOCKET": address, "CGROUPS": cgroups, **environment}
            process = subprocess.Popen(
                command,
                env=self.environment | more,
                cwd=self.directory,
                umask=_UMASK,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is to reach only us
            )
            try:
                _wait_until_ready(part, ready, process, self.log_file)
            except BaseException:
                process.kill()
                process.wait()
                raise
        os.unlink(address)
        return process

    def _as_user(self) -> list[str]:
        if not self.uid:
            return []
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--"]


def go_where_a_lab_can_be(arguments: Sequence[str]) -> None:
    """Return if this is root. For a plain user, execute ``arguments`` as root of a new user
    namespace, in a cgroup that the user's own manager delegates; then this does not return.
    """
    if os.geteuid() == 0:
        return
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if not os.path.exists(f"{runtime}/systemd/private"):
        raise LabUnavailable(
            "this needs root, or a systemd user manager of your own",
            hint="run it as root, or log in; loginctl enable-linger keeps your manager running",
        )
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "--"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        raise LabUnavailable(
            "this system lets only root make user namespaces", hint="run it as root"
        )
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--property=Delegate=yes", "--"]
    os.environ["XDG_RUNTIME_DIR"] = runtime
    os.execvp(scope[0], [*scope, *namespace, *arguments])  # noqa: S606 (no shell is wanted)


def is_mapped(uid: int) -> bool:
    """Return True if there is such a user here; a user namespace may have only root."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)


def sweep() -> None:
    """Kill the processes and remove the files of labs whose owner was killed. Those of another pid
    namespace are left alone: a container may see the cgroups of its host.
    """
    ours = f"{_PREFIX}{_pid_namespace()}."
    for parent in cgroup.find_hierarchies():
        for name in os.listdir(parent):
            owner, _, end = name.removeprefix(ours).partition("-")
            if name.startswith(ours) and not os.path.exists(f"/proc/{owner}"):
                cgroup.kill(os.path.join(parent, name))
                with contextlib.suppress(FileNotFoundError):  # another lab sweeps, too
                    cgroup.remove(os.path.join(parent, name))
                directory = os.path.join(tempfile.gettempdir(), _PREFIX + end)
                shutil.rmtree(directory, ignore_errors=True)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _check_capabilities() -> None:
    if not os.path.exists(f"{SYSTEMD}/systemd"):
        raise LabUnavailable("systemd is missing", hint="install the package systemd")
    for tool in ("unshare", "nsenter", "setpriv", "systemctl"):
        if shutil.which(tool) is None:
            raise LabUnavailable(f"{tool} is missing", hint="install util-linux and systemd")
    if not cgroup.find_hierarchies():
        raise LabUnavailable("a cgroup tree is missing", hint="mount cgroup2 on /sys/fs/cgroup")
    if os.geteuid() != 0:
        raise LabUnavailable(
            "root is missing: a private systemd needs a mount namespace and a cgroup of its own",
            hint="run it as root; a plain user's own manager is not used",
        )


def _wait_until_ready(
    program: str, ready: socket.socket, process: subprocess.Popen[bytes], log_file: str
) -> None:
    """Wait until the program sends READY=1 to the socket, as it would to systemd."""
    ends = time.monotonic() + START_TIMEOUT_S
    pidfd = os.pidfd_open(process.pid)
    try:
        while (left_s := ends - time.monotonic()) > 0:
            readable, _, _ = select.select([ready.fileno(), pidfd], [], [], left_s)
            if ready.fileno() in readable and b"READY=1" in ready.recv(65536).split(b"\n"):
                return
            if pidfd in readable:
                break
    finally:
        os.close(pidfd)
    with open(log_file, encoding="utf-8", errors="replace") as log:
        said = log.read().strip()
    match process.poll():
        case 1 | 101 if "unshare" in said or "mount" in said:
            raise LabUnavailable(
                f"the right to make a mount namespace and to mount is missing: {said}",
                hint="in a container, run it with --privileged",
            )
        case None:
            raise LabError(f"{program} is not ready after {START_TIMEOUT_S:g} s: {said}")
        case status:
            raise LabError(f"{program} exited with status {status}: {said}")


def _walk(directory: str) -> Iterator[str]:
    for path, _, files in os.walk(directory):
        yield path
        yield from (os.path.join(path, name) for name in files)
