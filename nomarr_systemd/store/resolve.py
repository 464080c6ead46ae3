"""Addresses of a host name, within a deadline: the system's resolver has none that we could set."""

from __future__ import annotations

import socket
import time


def resolve(host: str, port: int, ends: float) -> list[str]:
    """Return the addresses of a host, in the resolver's order; OSError if there is none until
    ``ends`` (by ``time.monotonic``). A resolver that hangs is left behind in its thread."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return [host]
    import threading  # not needed for addresses

    found: list[str] = []
    errors: list[OSError | UnicodeError] = []

    def look_up() -> None:
        try:
            for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.append(str(address[0]))
        except (OSError, UnicodeError) as error:
            errors.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(max(0.0, ends - time.monotonic()))
    if errors and isinstance(errors[0], OSError):
        raise errors[0]
    if thread.is_alive() or not found:
        raise TimeoutError(f"the name {host} was not resolved in time")
    return list(dict.fromkeys(found))
