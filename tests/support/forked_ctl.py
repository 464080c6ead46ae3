"""``nomarrctl`` without the start of Python: a server that has imported it forks for each call. The
call is a process of its own in the lab's namespaces, with its own environment, streams and exit
status; what it lacks is an interpreter that begins, which the process and booted tiers have.

One server for all tests of a process, started by the first call; it ends with that process.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).parents[2]
_START: Final = "from tests.support.forked_ctl import serve; serve()"
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_NOT_IMPORTED: Final = ("demo",)
# What most calls of a command import only when they need it.
_IMPORTED_LATE: Final = (
    *("jinja2", "nomarr_systemd.cli.status_table", "nomarr_systemd.config.file"),
    "nomarr_systemd.store.sqlite.store",
)


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    namespaces: Sequence[str],
) -> subprocess.CompletedProcess[str]:
    """Run ``nomarrctl`` with these arguments; ``namespaces`` are files of /proc to enter."""
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": directory,
        "namespaces": list(namespaces),
    }
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        link.connect(_start_server())
        socket.send_fds(link, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        status = json.loads(link.recv(64))
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(["nomarrctl", *arguments], status, *said)


@functools.cache
def _start_server() -> str:
    """The address of the server, which is nobody's child: tests look for children that are left.
    It ends when this process closes its end of a pipe, which is when it ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.run(
            [sys.executable, "-c", _START],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd=CHECKOUT,
            check=True,
        )
    with ours.makefile() as lines:
        address = lines.readline()
    ours.detach()  # it stays open
    return address.removesuffix("\n").replace("@", "\0")


def serve() -> None:
    """The server: until its standard input ends."""
    if os.fork():
        os._exit(0)
    cli = import_module("nomarr_systemd.cli.main")
    for name, verb in cli.VERBS.items():
        if name not in _NOT_IMPORTED:
            import_module(verb.module)
    for name in _IMPORTED_LATE:
        import_module(name)
    gc.freeze()
    parent = socket.socket(fileno=os.dup(0))
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.bind("")  # the kernel finds a name
    asked.listen(16)
    parent.sendall(asked.getsockname().replace(b"\0", b"@") + b"\n")
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (parent, asked, woken):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is parent:
                return
            if key.fileobj is asked:
                link, _ = asked.accept()
                pid = _fork_call(link, cli.main)
                callers[pid] = link
            else:
                os.read(woken, 4096)
                _tell_ends(callers)


def _tell_ends(callers: dict[int, socket.socket]) -> None:
    while callers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with callers.pop(pid) as link:
            link.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _fork_call(link: socket.socket, main: Any) -> int:
    message, fds, _, _ = socket.recv_fds(link, 1 << 16, 2)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    status = 1
    try:
        _become(json.loads(message), fds)
        sys.exit(main())
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def enter(environment: Mapping[str, str], directory: str, namespaces: Sequence[str]) -> None:
    """Put this process, which was forked for it, into a lab."""
    libc = ctypes.CDLL(None, use_errno=True)
    entered = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in namespaces]
    for fd in entered:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.umask(0o022)


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    enter(request["environment"], request["directory"], request["namespaces"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    out, err = sys.stdout, sys.stderr
    to_out, to_err = io.BufferedWriter(io.FileIO(1, "w")), io.BufferedWriter(io.FileIO(2, "w"))
    sys.stdout = io.TextIOWrapper(to_out, out.encoding, out.errors)
    sys.stderr = io.TextIOWrapper(to_err, err.encoding, err.errors, line_buffering=True)
    sys.argv = ["-c", *request["arguments"]]
