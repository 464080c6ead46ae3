"""One installation as the controller uses it: its files, its configuration, systemd, and the store,
which is opened when it is needed: the controller must also work without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.fleet.turns import TurnStore
from nomarr_systemd.host.files import locked
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.log import ERROR, log
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.ledger import Ledger, room_for
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.ledger.spool import Spool
from nomarr_systemd.store.open import open_policy_store
from nomarr_systemd.store.protocol import Store
from nomarr_systemd.systemd.journal import Journal
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.notify import feed_watchdog

if TYPE_CHECKING:
    from nomarr_systemd.live.client import Batch

_LOCK_PATIENCE_S: Final = 20.0
PUBLISHED: Final = 500  # incidents


class Site:
    """Call ``alone`` around everything that decides or acts, and ``close`` at the end."""

    def __init__(self, paths: Paths, config: Config, manager: Manager) -> None:
        self.paths = paths
        self.config = config
        self.manager = manager
        self.spool = Spool(paths.spool)
        self.holds = Holds(paths.hold)
        self.journal = Journal(paths)
        self.recent: dict[str, list[Death]] = {}  # by pool: booked and blamed in the last seconds
        self.observed_ms = 0  # when systemd was last asked about all that matters, monotonic
        self.ask_anew()
        self.host = host_of(config.store)
        self.publisher = Publisher(paths.public, host=self.host)
        self.in_turn: set[Component] = set()  # workers for which a turn was taken
        # When workers were last looked for: a death since then may not have started it again.
        self.hook_runs = False
        # The conditions in which failed units that are on record were observed.
        self.looked_at: set[tuple[str, str]] = set()
        self.started: dict[Component, int] = {}  # workers that were started, and when, monotonic
        self._store: Store | None = None

    def ask_anew(self) -> None:
        """Begin another batch of questions to the supervisor, which may have hung in the last."""
        self._live: Batch | None = None

    @property
    def live(self) -> Batch:
        """The questions to the supervisor. Most are asked after the restart: until then nothing
        of live/ is imported."""
        if self._live is None:
            from nomarr_systemd.live.client import MAX_BRIEF, Batch

            self._live = Batch(self.paths.live, max_bytes=MAX_BRIEF)
        return self._live

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_policy_store(self.config.store, self.publisher)
        return self._store

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store, host=self.host)

    @property
    def incidents(self) -> IncidentStore:
        return IncidentStore(self.store, self.host)

    def publish_incidents(self) -> None:
        """Show the newest incidents to people who may not read the ledger. What a kill or a store
        that is away prevents, the reconciler makes up for."""
        try:
            self.publisher.publish_incidents(self.incidents.history(PUBLISHED))
        except StoreError as error:
            log(ERROR, "incidents cannot be published", error=error, hint=error.hint)

    def keep_room(self) -> None:
        """Have the ledger keep room for itself, before workers fill its disk."""
        try:
            self.store.keep_room(room_for(len(self.config.components())))
        except StoreError as error:
            log(ERROR, "the ledger cannot keep room", error=error, hint=error.hint)

    @property
    def turns(self) -> TurnStore:
        return TurnStore(self.store, self.host, self.config.fleet.max_restarts_at_once)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process act at a time: doing the same twice is harmless, but is logged twice.
        While another one acts, the watchdog is fed: a restart of this program would not help."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(locked(self.paths.lock, _LOCK_PATIENCE_S))
                    break
                except TimeoutError as error:
                    log(ERROR, "another program keeps this one from acting", lock=error)
                    feed_watchdog()
                except OSError as error:  # a restart matters more than a line that is logged twice
                    log(ERROR, "the lock cannot be used: continuing without it", error=error)
                    break
            yield

    def forget_store(self) -> None:
        """Close the store; it is opened again when it is needed."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def close(self) -> None:
        self.forget_store()
        self.manager.close()
