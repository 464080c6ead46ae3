"""The certificate as others see it: JSON for scripts, and values for the two templates."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import clean, describe_ms
from nomarr_systemd.core.time import age_ms
from nomarr_systemd.postmortem.advice import advise, journal_command
from nomarr_systemd.postmortem.report_model import Certificate
from nomarr_systemd.postmortem.run_log import Line
from nomarr_systemd.postmortem.witnesses import Scene

SCHEMA: Final = "nomarr.why/1"
LINES_SHOWN: Final = 25
FRAMES_SHOWN: Final = 6
_ABOVE: Final = "(the trace that is shown above)"
_NAMES: Final = 10  # the width of what names a fact
_FRAME_FIELDS: Final = frozenset(
    [
        *("component_id", "seq", "status", "phase", "job", "progress_age_s", "pid", "invocation"),
        *("metrics", "recover_for_s"),
    ]
)
_HEALTH_KINDS: Final = ("watchdog", "stale", "invalid-heartbeat", "recovery-timeout")


def to_json(certificate: Certificate) -> dict[str, Any]:
    """The schema of docs/json.md. Keys are added, never removed or changed in meaning."""
    scene = certificate.scene
    death, trace = certificate.death, certificate.trace
    return {
        "schema": SCHEMA,
        "component": scene.component.component_id,
        "unit": scene.component.unit,
        "scope": "user" if scene.paths.user else "system",
        "verdict": certificate.verdict,
        "headline": certificate.headline,
        "state": {
            "active": scene.facts.get("ActiveState") or None,
            "load": scene.facts.get("LoadState") or None,
            "invocation": scene.invocation or None,
            "health": scene.live.get("status"),
            "held": scene.hold or None,
            "failure_reason": scene.account.failure_reason,
            "line": certificate.now,
        },
        "death": death and death._asdict() | {"never_ran": death.never_ran},
        "trace": trace
        and {
            "kind": trace.kind,
            "headline": trace.headline,
            "is_cause": certificate.trace_is_cause,
            "lines": list(trace.lines),
        },
        "fingerprint": certificate.fingerprint or None,
        "repeats": certificate.repeats and certificate.repeats._asdict(),
        "frames": list(certificate.frames),
        "journal": [
            {
                "at_ms": line.wall_us // 1000,
                "source": line.source,
                "pid": line.pid,
                "priority": line.priority,
                "text": line.text,
            }
            for line in certificate.lines
        ],
        "coredump": certificate.coredump and certificate.coredump._asdict(),
        "decision": certificate.record and record_to_json(certificate.record),
        "needs": list(certificate.broken),
        "notes": list(certificate.notes),
        "advice": [each._asdict() for each in advise(certificate)],
    }


def record_to_json(record: Record) -> dict[str, Any]:
    """One record of the ledger, for every verb that shows one."""
    return {
        "attempt": record.attempt,
        "at_ms": record.wall_ms,
        "invocation": record.invocation or None,
        "kind": record.kind or None,
        "code": record.code if record.kind else None,
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


def render(
    certificate: Certificate,
    template: str,
    *,
    width: int = 80,
    fold: bool = False,
    paint: Callable[[str, str], str] = lambda text, _style: text,
) -> str:
    """The report by a template. ``paint`` colours a text; ``fold`` breaks long lines of logs."""
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
        lead = " " * _NAMES
        return paint(f"{name:{_NAMES}}", "dim") + _wrap(text, width, lead, lead)[_NAMES:]

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
        "size": show_size,
        "frame": show_frame,
    }
    lines = _without_trace(certificate)
    shown = lines[-LINES_SHOWN:]
    return environment.get_template(template).render(
        c=certificate,
        scene=certificate.scene,
        death=certificate.death,
        record=certificate.record,
        trace=certificate.trace,
        repeats=certificate.repeats,
        lines=shown,
        hidden=len(lines) - len(shown),
        frames=certificate.frames[-FRAMES_SHOWN:],
        advice=advise(certificate),
        command=journal_command(certificate),
        facts=list(_facts_of(certificate)),
        made=show_moment(certificate.scene.now.wall_ms),
    )


def show_moment(wall_ms: int) -> str:
    """A moment in local time, to the second."""
    return _local(wall_ms).strftime("%Y-%m-%d %H:%M:%S")


def show_clock(wall_us: int) -> str:
    """A time of day, to the millisecond."""
    return _local(wall_us // 1000).strftime("%H:%M:%S.%f")[:-3]


def _local(wall_ms: int) -> datetime.datetime:
    bounded = min(max(wall_ms, 0), 253_000_000_000_000)  # a clock may have been anywhere
    return datetime.datetime.fromtimestamp(bounded / 1000).astimezone()


def show_size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):,.2f} GiB"


def show_frame(fields: dict[str, Any]) -> str:
    """One frame in a line; what is not known here stays as it was said."""
    parts = []
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


def _facts_of(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """The short facts, each with its name."""
    death, dump = certificate.death, certificate.coredump
    if death:
        ago = describe_ms(max(0, certificate.scene.now.wall_ms - death.at_ms))
        ran = death.run_ms is not None and not death.never_ran
        after = f", after a run of {describe_ms(death.run_ms or 0)}" if ran else ""
        yield "when", f"{show_moment(death.at_ms)} ({ago} ago){after}"
        yield "class", death.kind + (f", code {death.code}" if death.kind != "start-job" else "")
        if death.invocation:
            yield "run", death.invocation
        if death.job:
            yield "job", death.job
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
    for need in certificate.broken:
        yield "needs", need
    yield "now", certificate.now


def _without_trace(certificate: Certificate) -> list[Line]:
    """The journal's lines; those that are shown as the trace already, in one."""
    own = frozenset(certificate.trace.lines) if certificate.trace else frozenset()
    found: list[Line] = []
    for line in certificate.lines:
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


def describe_now(scene: Scene) -> str:
    """What has become of the worker, in one line."""
    state = scene.facts.get("ActiveState", "")
    if scene.is_masked:
        reason = scene.account.failure_reason
        if reason:
            return f"masked, and stays down until it is reset: {clean(reason)}"
        return "masked, but not by a decision on record: somebody masked it by hand"
    if scene.facts.get("LoadState") == "not-found":
        return "there is no unit of that name: nomarrctl apply installs it"
    if scene.is_running:
        since_ms = scene.wall_ms_of("ActiveEnterTimestampMonotonic")
        ago = f" for {describe_ms(max(0, scene.now.wall_ms - since_ms))}" if since_ms else ""
        health = scene.live.get("status")
        said = f", {clean(str(health), 40)}" if health else ""
        return f"{'running' if state == 'active' else state}{ago}{said}"
    if scene.hold:
        return f"held: {scene.hold}"
    last = next((each for each in reversed(scene.account.records) if each.kind), None)
    if last and (last.action, last.effect) == ("restart", "scheduled") and scene.is_failed:
        left_ms = last.delay_ms - age_ms(last.moment, scene.now)
        return f"failed; it is restarted in {describe_ms(max(0, left_ms))}"
    return {"failed": "failed", "inactive": "not running"}.get(state, state or "unknown")
