"""Every error this project raises on purpose: one base, a stable code, a hint what to do.

The code is for scripts and records, the message for people. OSError and the databases' own
exceptions are turned into these at the edge where they happen.
"""

from __future__ import annotations

from nomarr_systemd.core.named_tuple import NamedTuple


class NomarrError(Exception):
    """What went wrong and where; ``hint`` says what to do about it."""

    code = "error"
    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class BadName(NomarrError):
    """A name or value that is not well formed."""

    code = "bad-name"
    exit_status = 2


class Mistake(NamedTuple):
    """One thing wrong in the configuration file; ``suggestion`` says what to write instead."""

    line: int
    key: str
    problem: str
    suggestion: str = ""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        suggestion = f"; {self.suggestion}" if self.suggestion else ""
        return f"{self.line}: {key}{self.problem}{suggestion}"


class ConfigError(NomarrError):
    """The configuration cannot be used; ``mistakes`` are all that were found in it."""

    code = "config"
    exit_status = 78

    def __init__(self, message: str, *, hint: str = "", mistakes: tuple[Mistake, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.mistakes = mistakes


class NoSuchWorker(NomarrError):
    """A well-formed name of a worker that is not configured."""

    code = "no-such-worker"
    exit_status = 4


class NotPermitted(NomarrError):
    """This user lacks a right; the hint names what would give it."""

    code = "not-permitted"
    exit_status = 77  # EX_NOPERM of sysexits.h


class StoreError(NomarrError):
    """The store refused or could not be used."""

    code = "store"


class BadDocument(StoreError):
    """A key, field or value that the store cannot keep; nothing was written."""

    code = "bad-document"


class KeyExists(StoreError):
    """An insert found the key taken."""

    code = "key-exists"


class StaleRevision(StoreError):
    """A replace or delete found another revision, or no document, under the key."""

    code = "stale-revision"


class StoreUnavailable(StoreError):
    """The store cannot be reached, is full or stayed locked; retry later."""

    code = "store-unavailable"


class StoreRefused(StoreError):
    """The store answers and refuses: credentials, rights or its configuration are wrong."""

    code = "store-refused"


class SchemaTooNew(StoreError):
    """The store was written by a newer version of this program."""

    code = "schema-too-new"


class NotReady(NomarrError):
    """Nothing can be done now: no GPU, no memory, no store. The job goes back, the worker waits."""

    code = "not-ready"
