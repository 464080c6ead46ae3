"""All hosts that share the store, for people who may only read: from the supervisor, which answers
members of the group of readers, or from the store where this user may open it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import UNIT_PREFIX, Component, parse_component
from nomarr_systemd.core.json import get_objects
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import ask_for, quote
from nomarr_systemd.fleet.view import MAX_HOSTS, HostView, trim, view_hosts
from nomarr_systemd.host import clock
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger import shared_archive
from nomarr_systemd.ledger.health_series import parse_answer
from nomarr_systemd.ledger.shared_archive import HostArchive
from nomarr_systemd.live import client
from nomarr_systemd.live.protocol import ARCHIVE, FLEET, HISTORY
from nomarr_systemd.operate.job_reading import may_open
from nomarr_systemd.operate.job_store import open_as_owner
from nomarr_systemd.store.protocol import HOSTS, Store

_TIMEOUT_S: Final = 10.0  # the supervisor reads the store for the answer
_DAY_MS: Final = 86_400_000  # by which the clock of another host may differ
_PAGE: Final = 10  # workers or hosts in one question
MAX_INCIDENTS: Final = 500  # of a host


class NoSuchHost(NomarrError):
    """No host of this name has a lease in the store."""

    code = "no-such-host"
    exit_status = 4


class Fleet(NamedTuple):
    """The hosts, the worst first."""

    hosts: list[HostView]
    mine: str  # this host's id
    now_ms: int  # by the store's clock
    is_cut: bool  # there are more hosts than MAX_HOSTS

    def find(self, name: str) -> HostView:
        """Return the host of this name or id, or NoSuchHost."""
        for each in self.hosts:
            if name in (each.name, each.host):
                return each
        near = ask_for(name, [each.name for each in self.hosts])
        raise NoSuchHost(
            f"there is no host {quote(name)}", hint=near or "nomarrctl --fleet status lists all"
        )


def split_place(text: str) -> tuple[Component | None, str]:
    """Return the worker and the host in ``tag-0@beta``; no worker in ``beta``. BadName if the
    text before the @ names no worker."""
    prefix = UNIT_PREFIX if text.startswith(UNIT_PREFIX) else ""
    worker, at, host = text.removeprefix(prefix).rpartition("@")
    return (parse_component(prefix + worker), host) if at else (None, text)


def read_fleet(scope: Scope, config: Config) -> Fleet:
    """Return all hosts; NomarrError if the store is for one host, or does not answer."""
    host = host_of(config.store)
    if not host:
        raise NomarrError(
            "there is no fleet: the store is SQLite, which is for one host",
            hint="nomarrctl status shows its workers; see fleet.md for a store that hosts share",
        )

    def read(store: Store) -> dict[str, Any]:
        hosts = [trim(doc) for doc in store.find(HOSTS, limit=MAX_HOSTS + 1)]
        return {"now_ms": store.now_ms(), "hosts": hosts, "cut": len(hosts) > MAX_HOSTS}

    return parse_fleet(_ask(scope, config, {"op": FLEET}, read) | {"host": host})


def parse_fleet(answer: Mapping[str, Any]) -> Fleet:
    """Return the fleet in the supervisor's answer, which is untrusted."""
    now_ms, mine = answer.get("now_ms"), answer.get("host")
    now_ms = now_ms if type(now_ms) is int else 0
    docs = [each for each in get_objects(answer, "hosts") if isinstance(each.get("_key"), str)]
    hosts = view_hosts(docs[:MAX_HOSTS], now_ms)
    return Fleet(hosts, mine if isinstance(mine, str) else "", now_ms, answer.get("cut") is True)


def read_records(
    scope: Scope, config: Config, host: str, workers: Sequence[Component], since_ms: int = 0
) -> list[tuple[Component, Record]]:
    """Return the records of workers of any host, oldest first."""
    found: list[tuple[Component, Record]] = []
    for start in range(0, len(workers), _PAGE):
        page = workers[start : start + _PAGE]
        names = [each.component_id for each in page]

        def read(store: Store, page: Sequence[Component] = page) -> dict[str, Any]:
            until_ms = clock.wall_ms() + _DAY_MS
            kept = {
                each.component_id: shared_archive.read_records(
                    store, each, since_ms, until_ms, host
                )
                for each in page
            }
            rows = {name: [each.write() for each in records] for name, records in kept.items()}
            return {"workers": {name: {"records": rows[name]} for name in rows}}

        request = {"op": HISTORY, "components": names, "host": host, "since_ms": since_ms}
        answer = _ask(scope, config, request | {"points": 1, "records": True}, read)
        for each in page:
            _, records = parse_answer(answer, each.component_id)
            found += [(each, record) for record in records]
    return sorted(found, key=lambda pair: pair[1].wall_ms)


def read_archives(
    scope: Scope, config: Config, hosts: Sequence[str], limit: int
) -> dict[str, HostArchive]:
    """Return the workers and the newest ``limit`` incidents of hosts, by host."""
    found = {}
    for start in range(0, len(hosts), _PAGE):
        page = hosts[start : start + _PAGE]

        def read(store: Store, page: Sequence[str] = page) -> dict[str, Any]:
            return {"hosts": {each: shared_archive.get_host(store, each, limit) for each in page}}

        request = {"op": ARCHIVE, "hosts": list(page), "limit": min(limit, MAX_INCIDENTS)}
        answer = _ask(scope, config, request, read).get("hosts")
        for each in page:
            content = answer.get(each) if isinstance(answer, dict) else None
            found[each] = shared_archive.parse_host(content)
    return found


def _ask(
    scope: Scope,
    config: Config,
    request: Mapping[str, object],
    read: Callable[[Store], dict[str, Any]],
) -> dict[str, Any]:
    answer = client.ask(scope.paths.live, request, timeout_s=_TIMEOUT_S)
    if answer:
        return answer
    if may_open(config.store):
        with open_as_owner(config.store) as store:
            return read(store)
    client.check_access(scope.paths.live)
    raise NomarrError(
        "the supervisor does not answer about other hosts",
        hint="use sudo, which reads the store itself; or see nomarrctl doctor",
    )
