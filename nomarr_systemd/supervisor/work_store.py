"""The work store as the supervisor reads it. Workers may write anything into it, and that must not
take the supervisor's memory (docs/security.md).
"""

from __future__ import annotations

from typing import Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import Store

# The worst JSON takes 26 times its size in memory: 416 MiB.
MAX_READ: Final = 16 << 20


def open_bounded(settings: StoreSettings) -> Store:
    """Open the work store; no more than MAX_READ is read at once, else StoreUnavailable."""
    return open_work_store(settings, most=MAX_READ)
