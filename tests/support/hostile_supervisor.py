#!/usr/bin/python3
"""A program in the supervisor's place that answers whatever a file says, in its unit and as its
user: ``hostile_supervisor.py FILE SOCKET``.

FILE is JSON, read for every request: for each operation (``*``: for any other) an object with
``lines`` to send, ``every_s`` between two bytes (``drip``) or lines, ``flood`` to send a text for
ever, or ``hang`` to say nothing. Standard library only: it runs where nothing of ours is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any


def main(file: str, path: str) -> None:
    listening = find_listening() or bind(path)
    notify()
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection, file), daemon=True).start()


def find_listening() -> socket.socket | None:
    """The socket that systemd hands over, if there is one."""
    for fd in range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))):
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(fd))
            found.setblocking(True)
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return found
    return None


def bind(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    os.chmod(path, 0o660)
    listening.listen(128)
    return listening


def notify() -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(b"READY=1", address.replace("@", "\0", 1))


def serve(connection: socket.socket, file: str) -> None:
    with connection, contextlib.suppress(OSError):
        request = json.loads(connection.makefile("rb").readline() or b"{}")
        with contextlib.suppress(OSError), open(f"{file}.asked", "a") as asked:
            asked.write(f"{request.get('op')}\n")
        with open(file) as answers:
            known = json.load(answers)
        answer(connection, known.get(request.get("op")) or known.get("*") or {})


def answer(connection: socket.socket, how: dict[str, Any]) -> None:
    every_s = how.get("every_s", 0)
    for line in how.get("lines", ()):
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        if how.get("drip"):
            for byte in data:
                connection.sendall(bytes([byte]))
                time.sleep(every_s)
        else:
            connection.sendall(data)
            time.sleep(every_s)
    while how.get("flood"):
        connection.sendall(how["flood"].encode())
        time.sleep(every_s)
    if how.get("hang"):
        connection.recv(1)  # until the client leaves


if __name__ == "__main__":
    main(*sys.argv[1:])
