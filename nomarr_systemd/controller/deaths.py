"""Makes a Death of each report: with what systemd shows of the unit, whether a stop was requested,
and why the supervisor ended the run, if it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nomarr_systemd.controller.reports import ENDED_UNASKED, NOT_BEGUN, OVERTAKEN, Report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.death import EX_TEMPFAIL, Death, classify
from nomarr_systemd.core.ids import Component, next_start_job
from nomarr_systemd.core.time import Moment
from nomarr_systemd.systemd.manager import SHUTDOWN, SUPERVISOR, monotonic_ms
from nomarr_systemd.systemd.stop_intent import find_run, was_asked_before, was_asked_to_stop

Facts = Mapping[str, str]
_OWN_SIGNALS: Final = frozenset((-6, -9))  # SIGABRT, SIGKILL: the supervisor knows if it sent them
_OVERTAKEN: Final = "ended, and was started again before the controller looked"
_RUNNING: Final = ("active", "activating", "reloading")


def make_deaths(
    site: Site,
    reports: Sequence[Report],
    shown: Mapping[str, Facts],
    lacks: Mapping[Component, str],
    now: Moment,
) -> dict[Component, list[Death]]:
    """Make a Death of each report; by time, the one of the unit's present run last. ``lacks``:
    what workers need that could not be started."""
    shutdown = shown[SHUTDOWN]
    ending = bool(shutdown["Job"]) or shutdown["ActiveState"] == "active"
    found: dict[Component, list[tuple[bool, int, Death]]] = {}
    labels = _ask_labels(site, reports, shown)
    for each in reports:
        unit = shown[each.component.unit]
        is_own = find_run(unit, shown[each.component.wanted_unit]) == each.invocation
        runs = is_own and unit["ActiveState"] in _RUNNING
        if runs or each.result == "success" or (each.result == NOT_BEGUN and not is_own):
            continue  # a hook that ran again and saw a newer run, or a start that succeeded since
        if each.result == NOT_BEGUN:
            death = classify(
                "",
                start_job=True,
                lacks=lacks.get(each.component, ""),
                component_id=each.component.component_id,
                invocation=next_start_job(each.invocation),
                at=now.later(-each.age_ms),
            )
        else:
            death = _make_death(each, unit, shown, labels.get(each.invocation, ""), now)
        death = death._replace(shutting_down=ending)
        if death.code == EX_TEMPFAIL:
            death = death._replace(supervisor_away=_was_away(unit, shown[SUPERVISOR]))
        found.setdefault(each.component, []).append((is_own, -each.age_ms, death))
    return {
        component: [death for _, _, death in sorted(deaths, key=lambda row: row[:2])]
        for component, deaths in found.items()
    }


def _make_death(
    each: Report, unit: Facts, shown: Mapping[str, Facts], label: str, now: Moment
) -> Death:
    wanted = shown[each.component.wanted_unit]
    is_own = unit["InvocationID"] == each.invocation
    is_end = each.result == ENDED_UNASKED
    if is_end:
        asked = False  # that was checked when the report was written
    elif is_own:
        asked = was_asked_to_stop(unit, wanted)
    else:
        asked = was_asked_before((monotonic_ms() - each.age_ms) * 1000, wanted)
    death = classify(
        "success" if is_end else each.result,
        each.exit_code,
        each.exit_status,
        component_id=each.component.component_id,
        invocation=each.invocation,
        label=label,
        stop_asked=asked,
        unasked=is_end,
        run_ms=_run_ms(unit) if is_own else None,
        at=now.later(-each.age_ms),
    )
    return death._replace(line=_OVERTAKEN) if each.result == OVERTAKEN else death


def _run_ms(unit: Facts) -> int | None:
    """Return how long the last run of the unit was, by systemd's own clock."""
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    ended = int(unit["ExecMainExitTimestampMonotonic"] or 0)
    return (ended - started) // 1000 if ended >= started > 0 else None


def _was_away(unit: Facts, supervisor: Facts) -> bool:
    """Return True if the supervisor is not active, or was started after the run that missed it."""
    since = int(supervisor["ActiveEnterTimestampMonotonic"] or 0)
    started = int(unit["ExecMainStartTimestampMonotonic"] or 0)
    return supervisor["ActiveState"] != "active" or since > started


def _ask_labels(
    site: Site, reports: Sequence[Report], shown: Mapping[str, Facts]
) -> dict[str, str]:
    """Ask why the supervisor ended these runs, if it did; one question for all."""
    if shown[SUPERVISOR]["ActiveState"] != "active":
        return {}
    runs = [
        {"component": each.component.component_id, "invocation": each.invocation}
        for each in reports
        if not each.is_untold
        and classify(each.result, each.exit_code, each.exit_status).code in _OWN_SIGNALS
    ]
    if not runs:
        return {}
    from nomarr_systemd.live.answers import parse_labels

    return parse_labels(site.live.ask({"op": "labels", "runs": runs}, about=len(runs)))
