"""``nomarrctl pause``, ``resume``, ``restart``, ``reset`` and ``reconcile``: what a person does to
workers. Everything may be said twice, and is on record with who said it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import click

from nomarr_systemd.cli.common import (
    Scope,
    choose,
    complete,
    complete_pool,
    count,
    echo_json,
    examples,
    json_option,
    load_applied,
    names_argument,
    warn,
    who,
)
from nomarr_systemd.cli.jobs import forget_failure
from nomarr_systemd.cli.progress import FACTS, is_down, is_idle, wait_for
from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.main import end_incident
from nomarr_systemd.controller.main import reconcile as run_reconcile
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.host.holds import Holds
from nomarr_systemd.live import client
from nomarr_systemd.systemd import journal
from nomarr_systemd.systemd.manager import Manager, queue, timer_of


@contextmanager
def open_controller(scope: Scope, config: Config) -> Iterator[Site]:
    """The controller's own means, for as long as a verb needs them.

    Root works with the controller's group meanwhile: published accounts are for it to read.
    """
    group = os.getegid()
    with closing(Site(scope.paths, config, Manager(user=scope.user))) as controller:
        if not scope.user and os.geteuid() == 0:
            os.setegid(os.stat(scope.paths.state).st_gid)
        try:
            yield controller
        finally:
            if os.getegid() != group:
                os.setegid(group)


class Act:
    """One thing that one person does to some workers, and what came of it for each."""

    def __init__(self, scope: Scope, config: Config, name: str) -> None:
        self.scope = scope
        self.by = who()
        self.holds = Holds(scope.paths.hold)
        self.manager = Manager(user=scope.user)
        self._config = config
        self._name = name
        self._results: dict[Component, tuple[str, str]] = {}

    def record(self, workers: Sequence[Component], action: str, text: str = "") -> None:
        """In the ledger, before it is done. A store that is away keeps nobody from acting."""
        if not workers:
            return
        try:
            with open_controller(self.scope, self._config) as controller:
                names = [worker.component_id for worker in workers]
                controller.ledger.note(names, action, self.by, text)
        except StoreError as error:
            warn(f"the ledger has no record of this: {error}", "the journal has one")

    def tell(
        self, workers: Sequence[Component], result: str, text: str = "", *, log: bool = False
    ) -> None:
        """What came of it, in a word for scripts and a text for people; ``log``: the journal."""
        for worker in workers:
            self._results[worker] = (result, text or result)
            if log:
                journal.write_act(worker, result, self.by, user=self.scope.user)

    def report(self, as_json: bool) -> None:
        rows = [(worker, *self._results[worker]) for worker in sorted(self._results)]
        if as_json:
            workers = [{"component": each.component_id, "result": word} for each, word, _ in rows]
            echo_json({"action": self._name, "by": self.by, "workers": workers})
            return
        for result in dict.fromkeys(text for _, _, text in rows):
            names = [each.component_id for each, _, text in rows if text == result]
            if len(names) > 3:
                names = [f"{count(len(names))} from {names[0]} to {names[-1]}"]
            click.echo(f"{', '.join(names)}: {result}")


@click.command(epilog=examples("pause", "pause tag", "pause tag-0 tag-1"))
@names_argument
@json_option
@click.pass_obj
def pause(scope: Scope, names: tuple[str, ...], as_json: bool) -> None:
    """Let workers finish their job and stay down, also after a reboot.

    All of them, or those that are named. Restarts that were due are cancelled; counts stay as
    they are. nomarrctl resume lets them run again.
    """
    config = load_applied(scope)
    workers = choose(config, names)
    act = Act(scope, config, "pause")
    # The hold comes first: whatever dies from here on stays down. The controller, which makes and
    # ends holds of its own, waits meanwhile.
    with open_controller(scope, config) as controller, controller.alone():
        new = [worker for worker in workers if act.holds.pause(worker, act.by)]
    old = [worker for worker in workers if worker not in new]
    act.record(new, "pause")
    queue("stop", [*map(timer_of, workers), *(each.unit for each in workers)], user=scope.user)
    wait_for(act.manager, workers, is_down, "finishing their jobs")
    act.tell(new, "paused", log=True)
    act.tell(old, "already-paused", "was paused already")
    act.report(as_json)


@click.command(epilog=examples("resume", "resume tag"))
@names_argument
@json_option
@click.pass_obj
def resume(scope: Scope, names: tuple[str, ...], as_json: bool) -> None:
    """Let paused workers run again; their counts are as they were.

    A pool that is held because its workers died alike is started as well, and its incident is
    closed. A worker that has failed for good stays down until nomarrctl reset.
    """
    config = load_applied(scope)
    workers = choose(config, names)
    act = Act(scope, config, "resume")
    ended = _end_incidents(act, config, workers)
    paused = [worker for worker in workers if act.holds.is_paused(worker)]
    shown = act.manager.show([each.unit for each in paused], FACTS)
    masked = [each for each in paused if shown[each.unit]["LoadState"] == "masked"]
    good = [each for each in paused if each not in masked]
    act.record(good, "resume")
    for worker in paused:
        act.holds.begin_resume(worker)
    queue("start", [each.unit for each in good], user=scope.user)
    for worker in paused:  # a kill before this, and it is resumed once more
        act.holds.end_resume(worker)
    act.tell(good, "resumed", log=True)
    act.tell(masked, "masked", "has failed for good: nomarrctl reset --start")
    others = [each for each in workers if each not in paused]
    act.tell([each for each in others if each.pool in ended], "resumed", "no longer held")
    act.tell([each for each in others if each.pool not in ended], "not-paused", "was not paused")
    act.report(as_json)


def _end_incidents(act: Act, config: Config, workers: Sequence[Component]) -> set[str]:
    """Close the incidents that hold any of these; the pools that had one."""
    held = {each.pool for each in workers if act.holds.read(each).startswith(INCIDENT)}
    if not held:
        return set()
    with open_controller(act.scope, config) as controller:
        why = f"resumed by {act.by}"
        return {pool for pool in held if end_incident(controller, pool, why)}


@click.command(epilog=examples("restart tag-0", "restart tag", "restart worker:tag:0 --json"))
@click.argument(
    "names", nargs=-1, required=True, metavar="POOL|COMPONENT...", shell_complete=complete
)
@json_option
@click.pass_obj
def restart(scope: Scope, names: tuple[str, ...], as_json: bool) -> int:
    """Let workers finish their job, and start them again.

    One that waits for its restart is started at once; one that does not run is started. This is
    on record and never counted. Paused workers, and those that failed for good, are left alone.
    """
    config = load_applied(scope)
    workers = choose(config, names)
    act = Act(scope, config, "restart")
    shown = act.manager.show([each.unit for each in workers], FACTS)
    held = [each for each in workers if act.holds.read(each)]
    masked = [
        each for each in workers if shown[each.unit]["LoadState"] == "masked" and each not in held
    ]
    good = [each for each in workers if each not in held and each not in masked]
    act.record(good, "manual", "restarted by hand")
    if good:
        act.manager.stop(map(timer_of, good))
    queue("restart", [each.unit for each in good], user=scope.user)
    before = {each.unit: shown[each.unit]["InvocationID"] for each in good}
    found = wait_for(act.manager, good, is_idle, "finishing their jobs and starting")
    up = [each for each in good if found[each]["ActiveState"] in ("active", "activating")]
    up = [each for each in up if found[each]["InvocationID"] != before[each.unit]]
    act.tell(up, "restarted", log=True)
    down = [each for each in good if each not in up]
    act.tell(down, "not-started", "did not start: see nomarrctl why")
    act.tell(held, "held", "is held; nomarrctl status says why, nomarrctl resume ends a pause")
    act.tell(masked, "masked", "has failed for good: nomarrctl reset --start")
    act.report(as_json)
    return 0 if len(up) == len(workers) else 1


@click.command(epilog=examples("reset tag-0", "reset tag-0 --start", "reset --pool tag --start"))
@click.argument("names", nargs=-1, metavar="[COMPONENT]...", shell_complete=complete)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="POOL",
    shell_complete=complete_pool,
    help="All workers of this pool; may be given again.",
)
@click.option("--start", is_flag=True, help="Start them, too.")
@json_option
@click.pass_obj
def reset(
    scope: Scope, names: tuple[str, ...], pools: tuple[str, ...], start: bool, as_json: bool
) -> None:
    """Begin a worker's counts again and unmask it, once the cause is mended.

    Window, lifetime and backoff begin at nothing; the history stays. The worker is not started
    unless --start says so. With --pool, also what was held because its pool failed.
    """
    if not names and not pools:
        raise click.UsageError("name the workers to reset, or a pool with --pool")
    config = load_applied(scope)
    workers = choose(config, [*names, *pools])
    act = Act(scope, config, "reset")
    with open_controller(scope, config) as controller:
        for worker in workers:
            controller.ledger.reset(worker.component_id, by=act.by)
    units = [worker.unit for worker in workers]
    act.manager.stop(map(timer_of, workers))
    act.manager.unmask(units)
    act.manager.reset_failed(units)
    for worker in workers:
        act.holds.release(worker)
        client.ask(scope.paths.live, {"op": "reset", "component": worker.component_id})
    for pool in pools:
        forget_failure(config, pool)
    paused = [worker for worker in workers if start and act.holds.read(worker)]
    started = [worker for worker in workers if start and worker not in paused]
    queue("start", [worker.unit for worker in started], user=scope.user)
    act.tell(workers, "reset", log=True)
    act.tell(started, "reset-and-started", "reset and started")
    act.tell(paused, "paused", "reset, and not started: paused; nomarrctl resume lets it run")
    act.report(as_json)


@click.command(epilog=examples("reconcile"))
@json_option
@click.pass_obj
def reconcile(scope: Scope, as_json: bool) -> None:
    """Look for failures and effects that were left undone, and finish them.

    This happens by itself every minute and after every boot; by hand it is never wrong.
    """
    with open_controller(scope, load_applied(scope)) as controller:
        before = len(controller.ledger.unfinished())
        run_reconcile(controller)
        after: list[dict[str, Any]] = [
            {
                "component": account.component_id,
                "invocation": record.invocation,
                "action": record.action,
                "effect": record.effect,
            }
            for account, record in controller.ledger.unfinished()
        ]
    if as_json:
        echo_json({"before": before, "unfinished": after})
    elif after:
        click.echo(f"{count(len(after), 'decision')} are still to be carried out:")
        for each in after:
            click.echo(f"  {each['component']}: {each['action']}, {each['effect']}")
    else:
        click.echo("Nothing is left undone.")
