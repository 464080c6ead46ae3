"""Renders a report: as JSON, and by two templates as text or as an HTML page."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

from nomarr_systemd.core.death import recall
from nomarr_systemd.core.incident import Incident, pack
from nomarr_systemd.core.ledger_record import Record, crash_word
from nomarr_systemd.core.text import clean, describe_ms
from nomarr_systemd.core.time import age_ms
from nomarr_systemd.postmortem.advice import advise
from nomarr_systemd.postmortem.moments import show_clock, show_moment, show_zone
from nomarr_systemd.postmortem.present import describe_doing, describe_now
from nomarr_systemd.postmortem.report_model import Report
from nomarr_systemd.postmortem.run_log import Line
from nomarr_systemd.postmortem.witnesses import Witnesses

SCHEMA: Final = "nomarr.why/1"
LINES_SHOWN: Final = 25
FRAMES_SHOWN: Final = 6
_ABOVE: Final = "(the trace that is shown above)"
_NAME_WIDTH: Final = 10
_FRAME_FIELDS: Final = frozenset(
    [
        *("component_id", "seq", "status", "phase", "job", "progress_age_s", "pid", "invocation"),
        *("metrics", "recover_for_s", "received_ms"),
    ]
)
_RUNTIME: Final = "/nomarr_systemd/worker/"  # in a stack: our runtime, not the worker's own code
_HEALTH_KINDS: Final = ("watchdog", "stale", "invalid-heartbeat", "recovery-timeout")


def to_json(report: Report) -> dict[str, Any]:
    """Return the report in the schema of docs/json.md#why. Keys are added, never removed."""
    witnesses = report.witnesses
    death, trace = report.death, report.trace
    return {
        "schema": SCHEMA,
        "component": witnesses.component.component_id,
        "unit": witnesses.component.unit,
        "scope": "user" if witnesses.paths.user else "system",
        "verdict": report.verdict,
        "headline": report.headline,
        "state": {
            "active": witnesses.facts.get("ActiveState") or None,
            "load": witnesses.facts.get("LoadState") or None,
            "invocation": witnesses.invocation or None,
            "health": (witnesses.live.status or None) if witnesses.live else None,
            "held": witnesses.hold or None,
            "failure_reason": witnesses.account.failure_reason,
            "line": report.now,
            **_describe_run(witnesses),
        },
        "statistics": witnesses.statistics.to_json(),
        "death": death and death.to_dict(),
        "trace": trace
        and {
            "kind": trace.kind,
            "headline": trace.headline,
            "is_cause": report.trace_is_cause,
            "lines": list(trace.lines),
        },
        "fingerprint": report.fingerprint or None,
        "repeats": report.repeats and report.repeats._asdict(),
        "frames": list(report.frames),
        "journal": [
            {
                "at_ms": line.wall_us // 1000,
                "source": line.source,
                "pid": line.pid,
                "priority": line.priority,
                "text": line.text,
            }
            for line in report.lines
        ],
        "coredump": report.coredump and report.coredump._asdict(),
        "decision": report.record and record_to_json(report.record),
        "needs": list(report.broken),
        "notes": list(report.notes),
        "advice": [each._asdict() for each in advise(report)],
    }


def _describe_run(witnesses: Witnesses) -> dict[str, Any]:
    """Return the main process of the run, and its last frame; nulls if it does not run."""
    live = witnesses.live if witnesses.is_running else None
    age_s = live.frame_age_s if live else None
    pid = int(witnesses.facts.get("ExecMainPID") or 0) if witnesses.is_running else 0
    return {
        "pid": pid or None,
        "last_frame_wall_ms": None
        if age_s is None
        else witnesses.now.wall_ms - round(age_s * 1000),
        "metrics": (dict(live.metrics) or None) if live else None,
    }


def record_to_json(record: Record) -> dict[str, Any]:
    """Return one record of the ledger in the schema of docs/json.md#history."""
    return {
        "attempt": record.attempt,
        "at_ms": record.wall_ms,
        "invocation": record.invocation or None,
        "kind": record.kind or None,
        "code": record.code if record.kind else None,
        "word": crash_word(record) if record.kind else None,
        "reason": record.reason,
        "action": record.action,
        "delay_ms": record.delay_ms,
        "effect": record.effect,
        "run_ms": record.run_ms,
        "window": {"used": record.window_used, "limit": record.window_limit},
        "lifetime": {"used": record.lifetime_used, "limit": record.lifetime_limit},
        "k": record.k,
        "next_available_ms": record.next_available_ms,
        "text": record.text,
        "by": record.by or None,
    }


def incident_to_json(incident: Incident) -> dict[str, Any]:
    """Return one incident in the schema of docs/json.md#history."""
    return {
        "pool": incident.pool,
        "opened_ms": incident.opened.wall_ms,
        "closed_ms": incident.closed_wall_ms,
        "closed": incident.closed or None,
        "kind": incident.kind,
        "code": incident.code,
        "cause": recall(incident.kind, incident.code).line,
        "canary": incident.canary,
        "tried": list(incident.tried),
        "workers": len(incident.members),
        "members": pack(incident.members),
        "deaths": incident.deaths,
    }


def render(
    report: Report,
    template: str,
    *,
    width: int = 80,
    fold: bool = False,
    paint: Callable[[str, str], str] = lambda text, _style: text,
) -> str:
    """Return the report by a template. ``paint`` colours text; ``fold`` breaks long log lines."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from nomarr_systemd.systemd.unit_files import find_data

    environment = Environment(
        loader=FileSystemLoader(find_data("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=template.endswith(".html.j2"),
    )

    def wrap(text: str, indent: int = 2, hang: int = 0) -> str:
        return _wrap(text, min(width, 100), " " * indent, " " * (indent + hang))

    def fact(text: str, name: str) -> str:
        lead = " " * _NAME_WIDTH
        return paint(f"{name:{_NAME_WIDTH}}", "dim") + _wrap(text, width, lead, lead)[_NAME_WIDTH:]

    def verbatim(text: str, indent: int = 2, hang: int = 4) -> str:
        lead = " " * indent
        if not fold or len(text) + indent <= width:
            return lead + text
        return _wrap(text, width, lead, lead + " " * hang, anywhere=True)

    environment.filters |= {
        "wrap": wrap,
        "fact": fact,
        "verbatim": verbatim,
        "paint": paint,
        "duration": describe_ms,
        "moment": show_moment,
        "clock": show_clock,
        "frame": show_frame,
    }
    lines = _without_trace(report)
    shown = lines[-LINES_SHOWN:]
    return environment.get_template(template).render(
        report=report,
        witnesses=report.witnesses,
        death=report.death,
        record=report.record,
        trace=report.trace,
        repeats=report.repeats,
        lines=shown,
        hidden=len(lines) - len(shown),
        frames=report.frames[-FRAMES_SHOWN:],
        advice=advise(report),
        facts=list(_list_facts(report, absolute=environment.autoescape is True)),
        made=show_moment(report.witnesses.now.wall_ms),
        zone=show_zone(report.witnesses.now.wall_ms),
        host=clean(socket.gethostname(), 100),
        is_own=lambda line: _RUNTIME in line,
    )


def show_size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):,.2f} GiB"


def show_frame(fields: dict[str, Any]) -> str:
    """Return one frame as a line; unknown fields are shown as they are."""
    at_ms = fields.get("received_ms")
    parts = [show_clock(at_ms * 1000)] if isinstance(at_ms, int) else []
    for name in ("seq", "status", "phase", "job", "progress_age_s"):
        value = fields.get(name)
        if value is None:
            continue
        match name:
            case "seq":
                parts.append(f"#{value}")
            case "job":
                parts.append(f"job {value}")
            case "progress_age_s":
                parts.append(f"progress {value} s ago")
            case _:
                parts.append(str(value))
    metrics = fields.get("metrics")
    if isinstance(metrics, dict):
        parts += [f"{name}={value}" for name, value in metrics.items() if value]
    parts += [f"{name}={value}" for name, value in fields.items() if name not in _FRAME_FIELDS]
    return clean("  ".join(parts).replace("\n", " "), 300)


def _list_facts(report: Report, *, absolute: bool) -> Iterator[tuple[str, str]]:
    """Yield the short facts, each with its name; ``absolute``: without ages."""
    death, dump = report.death, report.coredump
    if death:
        ago = "" if absolute else f" ({describe_ms(_find_age_ms(report, death.at_ms))} ago)"
        ran = death.run_ms is not None and not death.never_ran
        after = f", after a run of {describe_ms(death.run_ms or 0)}" if ran else ""
        yield "when", f"{show_moment(death.at_ms)}{ago}{after}"
        yield "class", death.kind + ("" if death.never_ran else f", code {death.code}")
        if death.invocation:
            yield "run", death.invocation
        if death.job:
            yield "job", death.job
        if death.phase:
            yield "phase", death.phase
        if death.bad_line:
            yield "bad line", death.bad_line
        age_s = death.progress_age_s
        if age_s is not None and (age_s >= 1 or death.kind in _HEALTH_KINDS):
            age = describe_ms(int(min(max(age_s, 0), 1e9) * 1000))
            yield "progress", f"the last was {age} before the last frame"
        if death.memory_peak or (death.kind == "oom" and death.memory_max):
            peak = show_size(death.memory_peak) if death.memory_peak else "unknown"
            limit = death.memory_max
            known = f", the limit is {show_size(int(limit))}" if limit.isdigit() else ""
            yield "memory", f"peak {peak}{known}"
    if dump:
        kept = "" if dump.file else " (the dump itself was not kept)"
        yield "core dump", f"coredumpctl info {dump.pid}{kept}"
    for need in report.broken:
        yield "needs", need
    if restarts := _describe_restarts(report.witnesses):
        yield "restarts", restarts
    yield "now", describe_now(report.witnesses, absolute=True) if absolute else report.now
    if doing := describe_doing(report.witnesses, absolute=absolute):
        yield "doing", doing


def _describe_restarts(witnesses: Witnesses) -> str:
    """Return the statistics of its account in one line; empty if it was never restarted."""
    total, _, recent, _, recoveries = witnesses.statistics
    if not total:
        return ""
    within = describe_ms(round(witnesses.window_s * 1000))
    rate = witnesses.statistics.rate_per_s * 3600
    often = f"{recent} within {within}, {rate:.3g} per hour" if recent else f"none within {within}"
    stable = "1 time" if recoveries == 1 else f"{recoveries} times"
    return f"{total} in all, {often}; it ran stably again {stable}"


def _find_age_ms(report: Report, at_ms: int) -> int:
    """Return the age of a death: within this boot by the time since boot, which cannot be set."""
    record, now = report.record, report.witnesses.now
    if record and record.boot_id == now.boot_id:
        return age_ms(record.moment, now)
    return max(0, now.wall_ms - at_ms)


def _without_trace(report: Report) -> list[Line]:
    """Return the lines of the journal, with one line in place of those shown as the trace."""
    own = frozenset(report.trace.lines) if report.trace else frozenset()
    found: list[Line] = []
    for line in report.lines:
        if line.text in own and line.text.strip():
            if found and found[-1].text == _ABOVE:
                continue
            line = line._replace(text=_ABOVE)
        found.append(line)
    return found


def _wrap(text: str, width: int, first: str, others: str, *, anywhere: bool = False) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=anywhere,
        break_on_hyphens=False,
    )
