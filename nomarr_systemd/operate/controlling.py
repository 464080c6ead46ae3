"""What nomarrctl needs of the controller: its lock, its ledger, its reconciler. The only module of
this package that imports the controller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.main import arm_next_end, end_incident
from nomarr_systemd.controller.main import reconcile as run_reconcile
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.errors import NotPermitted
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.core.text import one_line
from nomarr_systemd.host.files import locked
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.systemd.manager import Manager


class Unfinished(NamedTuple):
    """A decision that was not carried out to its end."""

    component: str
    invocation: str
    action: str
    effect: str


@contextmanager
def alone(scope: Scope) -> Iterator[None]:
    """Hold the controller's lock, so that it does not act; wait first until it has finished."""
    with locked(scope.paths.lock):
        yield


def note(
    scope: Scope, config: Config, workers: Sequence[Component], action: str, by: str, text: str = ""
) -> None:
    """Put what a person does to these workers on record."""
    with _open(scope, config) as site:
        site.ledger.note([each.component_id for each in workers], action, by, text)


def reset_counts(scope: Scope, config: Config, workers: Sequence[Component], by: str) -> None:
    """Reset the count, window and backoff of these workers."""
    with _open(scope, config) as site:
        for worker in workers:
            site.ledger.reset(worker.component_id, by=by)


def forget(scope: Scope, config: Config, workers: Sequence[Component]) -> None:
    """Remove the accounts of workers that are no longer configured."""
    with _open(scope, config) as site:
        for worker in workers:
            site.ledger.remove_restart_state(worker.component_id)


def open_ledger(scope: Scope, config: Config) -> None:
    """Open the ledger and read a little of it, to check that both are possible."""
    with _open(scope, config) as site:
        site.incidents.incidents()


def read_accounts(scope: Scope, config: Config) -> list[Account]:
    """Return every account of this host, from the ledger itself."""
    with _open(scope, config) as site:
        return site.ledger.accounts()


def arm_end_of_pauses(scope: Scope, config: Config) -> None:
    """Have the reconciler run when the next pause ends."""
    with _open(scope, config) as site:
        arm_next_end(site)


def is_incident(held: str) -> bool:
    """Return True if an incident is the reason of this hold."""
    return held.startswith(INCIDENT)


def end_incidents(scope: Scope, config: Config, pools: Sequence[str], why: str) -> set[str]:
    """Close the open incidents of these pools and start the workers that they hold.

    Returns the pools that had one. It takes the controller's lock itself.
    """
    if not pools:
        return set()
    with _open(scope, config) as site:
        return {pool for pool in pools if end_incident(site, pool, why)}


def reconcile(scope: Scope, config: Config) -> tuple[int, list[Unfinished]]:
    """Finish what was left undone. Return how many decisions that were, and those that are left."""
    with _open(scope, config) as site:
        before = len(site.ledger.unfinished())
        run_reconcile(site)
        after = [
            Unfinished(
                *map(
                    one_line,
                    (account.component_id, record.invocation, record.action, record.effect),
                )
            )
            for account, record in site.ledger.unfinished()
        ]
    return before, after


@contextmanager
def _open(scope: Scope, config: Config) -> Iterator[Site]:
    """Yield the installation as the controller uses it. Meanwhile root has the group of the state
    directory, since that group reads the published accounts."""
    if not scope.user and os.geteuid() != 0:
        raise NotPermitted("only root may use the ledger", hint="use sudo")
    group = os.getegid()
    with closing(Site(scope.paths, config, Manager(user=scope.user))) as site:
        if not scope.user and os.geteuid() == 0:
            os.setegid(os.stat(scope.paths.state).st_gid)
        try:
            yield site
        finally:
            if os.getegid() != group:
                os.setegid(group)
