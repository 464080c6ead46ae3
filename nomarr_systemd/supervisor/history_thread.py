"""The thread of the store's helper that writes the history of workers' health (snapshots.py), and
copies records for readers on other hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import NomarrError, StoreRefused, StoreUnavailable
from nomarr_systemd.core.health import Sample
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.health_history import append
from nomarr_systemd.ledger.health_series import condense
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.supervisor.helper import Message
from nomarr_systemd.supervisor.work_store import POLITE_S, Inbox, open_bounded

if TYPE_CHECKING:
    from nomarr_systemd.ledger.shared_archive import Archivist

_CONDENSE_EVERY_MS: Final = 600_000


class HistoryThread:
    """All of it belongs to the thread alone. ``report`` sends a message to the loop. ``public`` is
    the directory of published accounts, which hosts that share a store copy there."""

    def __init__(
        self, inbox: Inbox, public: str, report: Callable[[Message], None], are_jobs_done: Event
    ) -> None:
        self._inbox = inbox
        self._are_jobs_done = are_jobs_done
        self._public = public
        self._report = report
        self._store: Store | None = None
        self._opened: StoreSettings | None = None
        self._archivist: Archivist | None = None

    def run(self) -> None:
        rows: list[list[Any]] = []
        while (message := self._inbox.get()) is not None:
            if message[0] == "samples":
                rows += message[1]
                continue
            _, settings, condensed_ms = message
            self._are_jobs_done.wait(POLITE_S)
            try:
                store, host = self._open(StoreSettings(*settings))
                samples = [Sample(*row)._replace(line=row[-1].encode()) for row in rows]
                append(store, samples, host)
                self._report(["written"])
                self._report(["tidied", self._tidy(store, host, condensed_ms)])
            except Exception as error:  # the thread's outermost loop
                self._close()
                is_away = isinstance(error, StoreUnavailable | StoreRefused)
                hint = error.hint if isinstance(error, NomarrError) else type(error).__name__
                self._report(["unwritten", is_away, str(error), hint])
            rows = []
        self._close()

    def _open(self, settings: StoreSettings) -> tuple[Store, str]:
        """Return the store, and this host's id in it."""
        host = host_of(settings)
        if self._store is None or settings != self._opened:
            self._close()
            self._store, self._opened = open_bounded(settings), settings
            self._archivist = None
            if host:
                from nomarr_systemd.ledger.shared_archive import Archivist

                self._archivist = Archivist(self._public, host)
        return self._store, host

    def _tidy(self, store: Store, host: str, condensed_ms: int) -> int:
        """Copy records, and condense if that was not done in these ten minutes. ``condensed_ms`` is
        when it was, and returned."""
        if self._archivist is not None:
            self._archivist.run(store)
        now_ms = time.time_ns() // 1_000_000
        if now_ms // _CONDENSE_EVERY_MS != condensed_ms // _CONDENSE_EVERY_MS:
            condense(store, now_ms, host)
            condensed_ms = now_ms
        return condensed_ms

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
