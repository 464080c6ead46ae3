"""What the API answers, as JSON values. These functions wait for systemd, files, the journal and
the supervisor; ``server`` calls them in threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import BadName, NomarrError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import INCIDENT
from nomarr_systemd.core.job import STATUSES
from nomarr_systemd.core.json import get_objects
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.simulate import simulate as replay
from nomarr_systemd.host import clock
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.ledger import health_series
from nomarr_systemd.ledger.public import read_incidents, read_whole
from nomarr_systemd.live import client
from nomarr_systemd.live.protocol import BLACKBOX, FLEET, HISTORY, JOBS_OF
from nomarr_systemd.operate import policies, simulation
from nomarr_systemd.operate.choose import choose, choose_one
from nomarr_systemd.operate.fleet import parse_fleet
from nomarr_systemd.operate.overview import Memory, Overview, look
from nomarr_systemd.operate.worker_view import View
from nomarr_systemd.postmortem.report import incident_to_json, record_to_json, render, to_json
from nomarr_systemd.postmortem.report_model import Report
from nomarr_systemd.postmortem.verdict import make_report
from nomarr_systemd.postmortem.witnesses import check_known, choose_run, gather

LIVE_S: Final = 5.0  # for an answer that the supervisor reads from the store
_PAGE: Final = 100  # workers in one question about history


class Unavailable(NomarrError):
    """The supervisor does not answer, and there is no other source."""

    code = "unavailable"


class NoSuchPool(NomarrError):
    """The pool is not configured."""

    code = "no-such-pool"


class State(NamedTuple):
    """One look at everything, which several answers share."""

    config: Config
    overview: Overview
    at: float  # CLOCK_MONOTONIC


def read_state(scope: Scope, names: tuple[str, ...] = (), memory: Memory | None = None) -> State:
    """Look at the named workers, or at all. ConfigError if there is no readable configuration."""
    config = scope.read_in_force()
    return State(config, look(scope, config, names, memory=memory), time.monotonic())


def show_worker(state: State, view: View) -> dict[str, Any]:
    """Return a worker as in docs/json.md#status, and totals of its account."""
    account = state.overview.accounts[view.worker.component_id]
    return view.to_json() | {
        "total_restarts": view.statistics.total_restarts,
        "recoveries": view.statistics.recoveries,
        "crashes": [each.wall_ms for each in map(Record.read, account.rows[-20:]) if each.kind],
    }


def list_workers(state: State) -> dict[str, Any]:
    about = state.overview.supervisor
    return {
        "now_ms": clock.wall_ms(),
        "supervisor": {"answers": bool(about), "unit": state.overview.supervisor_unit, **about},
        "scope": "user" if state.overview.user else "system",
        "workers": [show_worker(state, view) for view in state.overview.views],
    }


def find_worker(scope: Scope, config: Config, name: str) -> dict[str, Any]:
    """One worker, with its policy. NoSuchWorker suggests the nearest name."""
    worker = choose_one(config, name)
    state = read_state(scope, (worker.component_id,))
    view = state.overview.views[0]
    rules = policies.to_json(worker, policies.resolve(state.config, worker))
    return show_worker(state, view) | {"policy": rules["policy"]}


def list_pools(state: State, queues: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each pool: its workers by state, and its queue as the supervisor saw it last."""
    pools = []
    for pool in state.config.pools:
        mine = [view for view in state.overview.views if view.worker.pool == pool.name]
        states: dict[str, int] = {}
        for view in mine:
            states[view.state] = states.get(view.state, 0) + 1
        pools.append(
            {
                "pool": pool.name,
                "workers": len(mine),
                "states": states,
                "crash_policy": pool.crash_policy,
                "program": pool.entrypoint or " ".join(pool.command),
                "queue": queues.get(pool.name),
            }
        )
    return {"pools": pools}


def list_policies(state: State, names: list[str]) -> dict[str, Any]:
    workers = choose(state.config, names) if names else state.config.components()
    return {
        "policies": [
            policies.to_json(each, policies.resolve(state.config, each)) for each in workers
        ]
    }


def list_jobs(scope: Scope, config: Config, query: Mapping[str, str]) -> dict[str, Any]:
    """Jobs of a pool in one status. The supervisor reads the store: this process may not."""
    pool = query.get("pool") or (config.pools[0].name if config.pools else "")
    if pool not in {each.name for each in config.pools}:
        raise NoSuchPool(f"there is no pool {pool!r:.40}", hint="GET /api/pools lists them")
    status = query.get("status", "running")
    if status not in STATUSES:
        raise BadName(f"status is one of {', '.join(STATUSES)}")
    if len(query.get("after", "")) > 254:
        raise BadName("after is the key of a job, which has at most 254 characters")
    request = {
        "op": JOBS_OF,
        "pool": pool,
        "status": status,
        "limit": _whole(query, "limit", 50, 1, 200),
        "after": query.get("after", ""),
    }
    answer = _ask(scope, request)
    counts = answer["counts"] if isinstance(answer.get("counts"), dict) else {}
    return {
        "pool": pool,
        "status": status,
        "counts": {name: n for name in STATUSES if type(n := counts.get(name)) is int},
        "jobs": [_trim(job) for job in get_objects(answer, "jobs")],
    }


def read_history(scope: Scope, worker: Component, query: Mapping[str, str]) -> dict[str, Any]:
    """Health in buckets, and every record of the account, between two moments."""
    now_ms = clock.wall_ms()
    until_ms = _whole(query, "until_ms", now_ms, 1, 1 << 50)
    since_ms = _whole(query, "since_ms", max(0, until_ms - 86_400_000), 0, 1 << 50)
    since_ms = min(since_ms, until_ms - 1)  # a span without length has no samples
    points = _whole(query, "points", 300, 1, health_series.MAX_POINTS)
    answer = _ask_history(scope, [worker], since_ms, until_ms, points, records=False)
    buckets, _ = health_series.parse_answer(answer, worker.component_id)
    account, problem = read_whole(scope.paths.public, worker)
    records = [each for each in account.records if since_ms <= each.wall_ms < until_ms]
    return {
        "component": worker.component_id,
        "since_ms": since_ms,
        "until_ms": until_ms,
        "step_ms": health_series.choose_step(since_ms, until_ms, points),
        "health": [bucket.to_json() for bucket in buckets],
        "records": [record_to_json(each) for each in records],
        "notes": ([] if answer else [_NO_HISTORY]) + ([problem] if problem else []),
    }


def read_sparklines(
    scope: Scope, config: Config, *, hours: int = 6, points: int = 36
) -> dict[str, Any]:
    """Return the worst status of each step for every worker, one letter each; ``-``: no sample."""
    now_ms = clock.wall_ms()
    step_ms = hours * 3_600_000 // points
    until_ms = now_ms - now_ms % step_ms + step_ms
    since_ms = until_ms - step_ms * points
    everyone = config.components()
    lines = {}
    for first in range(0, len(everyone), _PAGE):
        page = everyone[first : first + _PAGE]
        answer = _ask_history(scope, page, since_ms, until_ms, points, records=False)
        for worker in page:
            line = ["-"] * points
            for bucket in health_series.parse_answer(answer, worker.component_id)[0]:
                place = (bucket.start_ms - since_ms) // step_ms
                if 0 <= place < points:
                    line[place] = min(line[place], bucket.worst, key=_order)
            lines[worker.component_id] = "".join(line)
    return {
        "since_ms": since_ms,
        "step_ms": step_ms,
        "letters": health_series.STATUS_OF,
        "workers": lines,
    }


def read_frames(scope: Scope, worker: Component) -> dict[str, Any]:
    answer = _ask(scope, {"op": BLACKBOX, "component": worker.component_id})
    frames = answer.get("frames")
    lines = [str(line)[:4096] for line in frames] if isinstance(frames, list) else []
    return {"component": worker.component_id, "frames": lines}


def make_postmortem(scope: Scope, config: Config, worker: Component, invocation: str) -> Report:
    check_known(scope.paths, config, worker)
    witnesses = gather(scope.paths, worker)
    return make_report(witnesses, *choose_run(witnesses, invocation))


def show_postmortem(report: Report, form: str) -> str | dict[str, Any]:
    if form == "html":
        return render(report, "why.html.j2")
    return render(report, "why.txt.j2", width=100) if form == "text" else to_json(report)


def try_policy(
    scope: Scope, config: Config, worker: Component, changes: list[str]
) -> dict[str, Any]:
    """Return what another policy would have done; docs/json.md#policy-simulate."""
    settings = simulation.read_settings(changes)
    rules = simulation.change(config.rules_for(worker), settings)
    account = read_whole(scope.paths.public, worker).account
    result = replay(account, rules, clock.now())
    return simulation.to_json([simulation.Replayed(worker, rules, result)], settings)


def read_fleet(scope: Scope) -> dict[str, Any]:
    """Return all hosts that share the store, the worst first; the supervisor reads them. ``shared``
    is false if the store is for one host."""
    fleet = parse_fleet(_ask(scope, {"op": FLEET}))
    return {
        "shared": bool(fleet.mine),
        "host": fleet.mine,
        "now_ms": fleet.now_ms,
        "cut": fleet.is_cut,
        "hosts": [each.to_json() for each in fleet.hosts],
    }


def list_incidents(scope: Scope, state: State) -> dict[str, Any]:
    """Incidents as the controller publishes them: open ones first, then the newest. Which workers
    an open one holds is taken from ``state``."""
    found, problem = read_incidents(scope.paths.public)
    held: dict[str, list[str]] = {}
    for view in state.overview.views:
        if view.held.startswith(INCIDENT):
            held.setdefault(view.worker.pool, []).append(view.worker.component_id)
    shown = [
        incident_to_json(each)
        | {
            "open": not each.closed,
            "text": each.text,
            "held": [] if each.closed else held.get(each.pool, []),
        }
        for each in reversed(found)
    ]
    shown.sort(key=lambda each: not each["open"])
    return {"incidents": shown, "notes": [problem] if problem else []}


def _ask_history(
    scope: Scope,
    workers: list[Component] | tuple[Component, ...],
    since_ms: int,
    until_ms: int,
    points: int,
    *,
    records: bool,
) -> dict[str, Any]:
    request = {
        "op": HISTORY,
        "components": [each.component_id for each in workers],
        "since_ms": since_ms,
        "until_ms": until_ms,
        "points": points,
        "records": records,
    }
    return client.ask(scope.paths.live, request, timeout_s=LIVE_S)


def _ask(scope: Scope, request: Mapping[str, object]) -> dict[str, Any]:
    answer = client.ask(scope.paths.live, request, timeout_s=LIVE_S)
    if not answer:
        raise Unavailable(
            "the supervisor does not answer", hint="systemctl status nomarr-supervisor.service"
        )
    return answer


def _trim(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job with a short result: it may have any size, and the page does not show it."""
    result = job.get("result")
    return {**job, "result": None if result is None else str(result)[:500]}


def _whole(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= number <= most:
        raise BadName(f"{name} must be a whole number from {least} to {most}")
    return number


def _order(letter: str) -> int:
    return (
        len(health_series.WORST_FIRST) if letter == "-" else health_series.WORST_FIRST.index(letter)
    )


_NO_HISTORY: Final = "the supervisor does not answer: history of health is missing"
