"""What the threads of the store's helper share. Workers may write anything into the work store, and
that must not take all memory (docs/security.md).
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store

# The worst JSON takes 26 times its size in memory: 416 MiB.
MAX_READ: Final = 16 << 20
POLITE_S: Final = 1.0  # history waits for jobs: at once both would take twice the processor time

Inbox = SimpleQueue[list[Any] | None]  # of a thread; None: leave


def open_bounded(settings: StoreSettings) -> Store:
    """Open the work store; no more than MAX_READ is read at once, else StoreUnavailable."""
    return open_work_store(settings, most=MAX_READ)
