"""The password of the store: from a file, or from the credentials systemd gave to the unit.

Never from the command line or the environment, where others could read it.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from nomarr_systemd.core.errors import StoreRefused
from nomarr_systemd.store.protocol import Domain

_NAMES: Final = {"arangodb": "nomarr-arango", "postgresql": "nomarr-postgresql"}
_MAX_BYTES: Final = 4096


def read_password(domain: Domain, *, password_file: str | None, engine: str = "arangodb") -> str:
    """Return the password for ``domain`` in ``engine``, a URL's scheme; an explicit file wins.

    StoreRefused says what is missing. There is no credential for both domains: workers must not
    hold the ledger's.
    """
    if password_file is not None:
        return _read(password_file)
    directory, name = os.environ.get("CREDENTIALS_DIRECTORY"), f"{_NAMES[engine]}-{domain}"
    if directory and os.path.lexists(path := os.path.join(directory, name)):
        return _read(path)
    setting = "password_file" if domain == "policy" else "work_password_file"
    raise StoreRefused(
        f"there is no password for the {domain} store",
        hint=f"set {setting} under [store], or LoadCredential={name}:/path in the unit",
    )


def _read(path: str) -> str:
    try:
        # Opening a FIFO must not wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(fd).st_mode
            content = os.read(fd, _MAX_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreRefused(
            f"cannot read the password file {path}: {error.strerror}",
            hint="does it exist, and may this user read it?",
        ) from error
    if mode & stat.S_IROTH:
        raise StoreRefused(
            f"every user may read the password file {path}", hint=f"chmod o-rwx {path}"
        )
    if not content or len(content) > _MAX_BYTES:
        raise _bad(path, f"has no content, or more than {_MAX_BYTES} bytes")
    try:
        password = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise _bad(path, "is not UTF-8") from None  # the cause would quote the password
    if not password:
        raise _bad(path, "is empty")
    return password


def _bad(path: str, why: str) -> StoreRefused:
    return StoreRefused(f"the password file {path} {why}", hint="it holds one line: the password")
