"""What a Python worker is made of: subclass ``Worker`` and implement ``process`` (docs/worker.md).

    from nomarr_systemd.worker import NotReady, Worker

Everything that is named here stays; other modules of the package may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from nomarr_systemd.jobs.source import Source as Source
    from nomarr_systemd.worker.errors import NonFatal as NonFatal
    from nomarr_systemd.worker.errors import NotReady as NotReady
    from nomarr_systemd.worker.errors import OutOfMemory as OutOfMemory
    from nomarr_systemd.worker.errors import Recovering as Recovering
    from nomarr_systemd.worker.runtime import Waits as Waits
    from nomarr_systemd.worker.runtime import Worker as Worker

_PLACES: Final = {
    "NonFatal": "nomarr_systemd.worker.errors",
    "NotReady": "nomarr_systemd.worker.errors",
    "OutOfMemory": "nomarr_systemd.worker.errors",
    "Recovering": "nomarr_systemd.worker.errors",
    "Source": "nomarr_systemd.jobs.source",
    "Waits": "nomarr_systemd.worker.runtime",
    "Worker": "nomarr_systemd.worker.runtime",
}

__all__ = [
    "NonFatal",
    "NotReady",
    "OutOfMemory",
    "Recovering",
    "Source",
    "Waits",
    "Worker",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more: a worker pays for what it uses."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
