"""``nomarrctl events``: events of the supervisor and decisions of the controller, as lines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click

from nomarr_systemd.cli.common import echo_json
from nomarr_systemd.core.json import get_objects
from nomarr_systemd.core.text import clean
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.live import client
from nomarr_systemd.live.answers import parse_event, parse_workers
from nomarr_systemd.live.protocol import Patterns
from nomarr_systemd.systemd.journal import MESSAGE_IDS
from nomarr_systemd.systemd.journal_reader import Entry, Journal, Terms

DEFAULT_TOPICS = ("worker:*:status", "system:health", "queue:*")
PATIENCE_S = 2.0
IDLE_S, TOTAL_S = 1.0, 5.0  # waits without --follow: for one snapshot, for all
FOR_EVER = float("inf")
_KINDS = {message_id: kind for kind, message_id in MESSAGE_IDS.items()}
_COLOURS = {"healthy": "green", "crashed": "red", "failed": "red", "error": "red", "fail": "red"}


@click.command()
@click.option(
    "--follow", "-f", is_flag=True, help="Keep showing events as they happen, until Ctrl-C."
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Only this topic, * for any part: worker:tag:0:status, worker:*:status, system:health"
    " (repeatable).",
)
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Show the last N decisions first.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object in each line.")
@click.pass_obj
def events(scope: Scope, follow: bool, topics: tuple[str, ...], lines: int, as_json: bool) -> int:
    """Show the last decisions and, with --follow, everything that happens from now on.

    Health and crashes come from the supervisor, decisions of the controller from the journal. With
    --topic or --json, or without the right to read the journal, the present state of each topic
    follows. Without the supervisor only decisions are shown, and if it is needed the exit status
    is 3.
    """
    wanted = list(topics or DEFAULT_TOPICS)
    patterns = Patterns(wanted)
    with Journal(deadline=FOR_EVER if follow else time.monotonic() + PATIENCE_S) as journal:
        if not journal.is_there:
            hint = "The journal cannot be read: be root, or join the group systemd-journal."
            click.secho(hint, fg="yellow", err=True)
        shown_us = time.time_ns() // 1000  # later entries are new, also while we read
        past = list(journal.read_back(_terms(scope), limit=lines, until_us=shown_us))
        for entry in past:
            _show(_as_event(entry), patterns, as_json=as_json)
        if journal.is_there and not (follow or topics or as_json):
            if not past:
                click.echo("No decisions are in the journal. The present state: nomarrctl status")
            return 0
        expected = None if follow else _list_topics(scope, patterns)
        try:
            limits = {} if follow else {"timeout_s": IDLE_S, "total_s": TOTAL_S}
            with closing(client.subscribe(scope.paths.live, wanted, **limits)) as feed:
                _show_feed(feed, patterns, expected, as_json=as_json)
        except client.NoSupervisor:
            client.check_access(scope.paths.live)
            _say_alone("The supervisor does not answer")
        except TimeoutError:
            return 0
        else:
            if not follow:
                return 0
            _say_alone("The supervisor has closed the connection")
        if follow:
            for entry in journal.follow(_terms(scope), shown_us):
                _show(_as_event(entry), patterns, as_json=as_json)
    return 3


def _say_alone(reason: str) -> None:
    click.secho(f"{reason}: only the controller's decisions are shown.", fg="yellow", err=True)


def _list_topics(scope: Scope, patterns: Patterns) -> set[str]:
    """Return the topics of these patterns for which the supervisor sends a snapshot first."""
    names = parse_workers(client.ask(scope.paths.live, {"op": "snapshot"})) or {}
    topics = {f"{name}:{what}" for name in names for what in ("status", "frames")}
    return {topic for topic in (*topics, "system:health") if patterns.match(topic)}


def _show_feed(
    feed: Iterator[dict[str, Any]], patterns: Patterns, expected: set[str] | None, *, as_json: bool
) -> None:
    """Show events: without end, or until all ``expected`` topics have come."""
    for event in map(parse_event, feed):
        if event.get("ok") is False:
            raise click.ClickException(clean(str(event.get("error", "refused")), 300))
        _show(event, patterns, as_json=as_json)
        if expected is not None:
            expected.discard(str(event.get("topic")))
            if not expected:
                return


def _terms(scope: Scope) -> Terms:
    """Return matches for our controller's entries, by uid: any user can send a MESSAGE_ID."""
    uid = os.getuid() if scope.user else 0
    return [[f"_UID={uid}", f"MESSAGE_ID={message_id}"] for message_id in MESSAGE_IDS.values()]


def _as_event(entry: Entry) -> dict[str, Any]:
    """Return a decision in the journal in the form of the supervisor's events.

    A decision about a whole pool gets the topic of its queue.
    """
    component, pool = entry.get("NOMARR_COMPONENT_ID"), entry.get("NOMARR_POOL")
    delay = entry.get("NOMARR_DELAY_MS")[:18]
    return {
        "topic": f"{component or f'queue:{pool}'}:status",
        "type": "decision",
        "timestamp": entry.wall_us // 1000,
        "decision": entry.get("NOMARR_DECISION") or _KINDS.get(entry.message_id, ""),
        "delay_ms": int(delay) if delay.isascii() and delay.isdigit() else 0,
        "invocation": entry.get("NOMARR_INVOCATION_ID"),
        "text": entry.text,
    }


def _show(event: dict[str, Any], patterns: Patterns, *, as_json: bool) -> None:
    topic = event.get("topic")
    if not isinstance(topic, str) or not patterns.match(topic):
        return
    if as_json:
        echo_json(event, indent=None)
    else:
        click.echo(describe(event))


def describe(event: dict[str, Any]) -> str:
    """One event in one line."""
    from nomarr_systemd.postmortem.moments import show_moment

    stamp = event.get("timestamp")
    when = show_moment(stamp) if isinstance(stamp, int) else " " * 19
    kind = str(event.get("type"))
    subject = str(event.get("topic", "")).removesuffix(":status")
    match kind:
        case "decision":
            word, text = str(event.get("decision")), str(event.get("text", ""))
        case "lost":
            word, text = "lost", f"{event.get('count')} events: this reader was too slow"
        case "worker:crash":
            word = "crashed"
            decision = event.get("decision")
            text = f"{event.get('cause')}" + (f"; {decision}" if decision else "")
        case "settled" if isinstance(event.get("outcome"), dict):
            word, text = kind, _describe_outcome(event["outcome"])
        case "frames" | "snapshot" if isinstance(event.get("frames"), list):
            frames = event["frames"]
            word, text = "frames", str(frames[-1]) if frames else "none"
        case _:
            word, text = _describe_state(event)
    styled = click.style(f"{clean(word, 20):<10}", fg=_COLOURS.get(word))
    return f"{when}  {clean(subject, 60):<16}  {styled}  {clean(text, 400)}".rstrip()


def _describe_outcome(outcome: dict[str, Any]) -> str:
    """Return what became of the jobs of a worker that died, and of its pool."""
    jobs = get_objects(outcome, "settled")
    parts = [f"{each.get('path')} is {each.get('status')}" for each in jobs]
    if outcome.get("fail_pool"):
        parts.append(f"the pool has failed: {outcome['fail_pool']}")
    return f"{outcome.get('component_id')} has ended: {', '.join(parts) or 'it had no job'}"


def _describe_state(event: dict[str, Any]) -> tuple[str, str]:
    """Return the status of the worker, system, queue or job in an event, and its details."""
    for name in ("worker", "system", "queue", "job"):
        state = event.get(name)
        if isinstance(state, dict):
            parts = [
                f"{label} {state[key]}"
                for key, label in (
                    ("phase", "phase"), ("current_job", "job"), ("pid", "pid"),
                    ("disagreement", "witnesses disagree:"), ("pending", "pending"),
                    ("running", "running"), ("completed", "completed"), ("error", "error"),
                )
                if state.get(key) not in (None, "")
            ]  # fmt: skip
            crash = state.get("last_crash")
            if isinstance(crash, dict) and state.get("status") in ("crashed", "failed"):
                parts.append(str(crash.get("error", "")))
            errors = state.get("errors")
            parts += [str(each) for each in errors] if isinstance(errors, list) else []
            return str(state.get("status", name)), ", ".join(parts)
    return str(event.get("type")), ""
