"""``nomarrctl policy explain``: the window as a timeline, and what follows the next failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record, crash_word
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.simulate import Ahead, look_ahead, window_ages
from nomarr_systemd.core.text import count, describe_ms, one_line
from nomarr_systemd.core.time import Moment

_MAX_AHEAD = 8  # decisions listed one by one


class Explanation(NamedTuple):
    """A worker's restart window, and the decisions on its next failures."""

    worker: Component
    rules: Rules
    account: Account
    inside: list[tuple[int, str]]  # age and run of each restart in the window, oldest first
    ahead: list[Ahead]

    @property
    def window_ms(self) -> int:
        return round(self.rules.window_s * 1000)

    @property
    def frees_ms(self) -> list[int]:
        """Milliseconds until each restart leaves the window."""
        return [self.window_ms - age for age, _ in self.inside]

    @property
    def lifetime_used(self) -> int:
        return self.ahead[0].decision.evidence.lifetime_used

    def record_of(self, invocation: str) -> Record | None:
        return self.account.find(invocation)


def explain_worker(worker: Component, account: Account, rules: Rules, now: Moment) -> Explanation:
    window_ms = round(rules.window_s * 1000)
    inside = [each for each in window_ages(account, now) if each[0] < window_ms]
    return Explanation(worker, rules, account, inside, look_ahead(account, rules, now))


def to_json(each: Explanation) -> dict[str, Any]:
    limit = each.rules.max_lifetime_restarts
    return {
        "component": each.worker.component_id,
        "failure_reason": each.account.failure_reason,
        "window": {
            "used": len(each.inside),
            "limit": each.rules.max_restarts,
            "window_s": each.rules.window_s,
            "restarts": [
                {
                    "age_s": age / 1000,
                    "frees_in_s": (each.window_ms - age) / 1000,
                    "invocation": run,
                    "class": record.kind if record else None,
                    "code": record.code if record else None,
                }
                for age, run in each.inside
                for record in [each.record_of(run)]
            ],
        },
        "lifetime": {"used": each.lifetime_used, "limit": limit or None},
        "backoff": {"k": each.ahead[0].decision.evidence.k, "jitter": each.rules.backoff_jitter},
        "ahead": [
            {
                "action": decision.action,
                "delay_s": decision.delay_ms / 1000,
                "after_s": at_ms / 1000,
                "reason": decision.reason,
            }
            for decision, at_ms in each.ahead
        ],
    }


def draw(each: Explanation, width: int, ours: str) -> Iterator[str]:
    rules, used = each.rules, len(each.inside)
    within = describe_ms(each.window_ms)
    limit = f" of {rules.max_lifetime_restarts}" if rules.max_lifetime_restarts else ""
    yield click.style(each.worker.component_id, bold=True)
    if each.account.failure_reason:
        text = f"It has failed for good: {one_line(each.account.failure_reason, 200)}."
        yield click.style(text, fg="red")
        yield f"When mended: {ours} reset --start {each.worker.instance}"
    yield (
        f"{used} of {count(rules.max_restarts, 'restart')} within {within} are used,"
        f" {each.lifetime_used}{limit} in all."
    )
    yield ""
    yield from _draw_window(each, min(width, 100))
    yield ""
    if each.account.failure_reason:
        yield "It stays down until it is reset, and begins then with an empty window."
        return
    yield from _draw_ahead(each)
    if rules.never_restart:
        codes = ", ".join(map(str, rules.never_restart))
        yield f"Exit status {codes} is never restarted."


def _draw_window(each: Explanation, width: int) -> Iterator[str]:
    """Draw the window from left to right: x for a restart, a number for several in one column."""
    room = max(20, width - 4)
    marks = [0] * room
    for age, _ in each.inside:
        marks[min(room - 1, round((each.window_ms - age) / each.window_ms * (room - 1)))] += 1
    line = "".join("─" if not n else "x" if n == 1 else str(n) if n < 10 else "#" for n in marks)
    ago = f"{describe_ms(each.window_ms)} ago"
    yield f"  ├{line}┤"
    yield f"  {ago}{'now'.rjust(room + 2 - len(ago))}"
    for age, run in each.inside:
        record = each.record_of(run)
        word = one_line(crash_word(record), 30) if record else "not in the history any more"
        yield (
            f"  x {describe_ms(age)} ago: {word}; leaves the window in"
            f" {describe_ms(each.window_ms - age)}"
        )
    if not each.inside:
        yield "  No restart lies within the window."


def _draw_ahead(each: Explanation) -> Iterator[str]:
    first = each.ahead[0].decision
    jitter = each.rules.backoff_jitter
    about = f", give or take {jitter:.0%}" if jitter and first.delay_ms else ""
    if first.action == "restart":
        yield f"The next failure: restarted after {describe_ms(first.delay_ms)}{about}."
    else:
        yield click.style(f"The next failure: masked; {first.reason}.", fg="red")
    if len(each.ahead) > 1:
        delays = [
            describe_ms(step.decision.delay_ms)
            for step in each.ahead[:_MAX_AHEAD]
            if step.decision.action == "restart"
        ]
        last = each.ahead[-1]
        then = " …"
        if last.decision.action == "fail":
            dots = " …" if len(each.ahead) > _MAX_AHEAD + 1 else ""
            then = f"{dots}, then masked ({last.decision.reason})"
        yield f"If it fails at once each time: restarts after {', '.join(delays)}{then}."
    evidence = first.evidence
    if evidence.next_available_ms:
        yield f"The window has room again in {describe_ms(evidence.next_available_ms)}."
    if each.inside:
        yield f"It is empty in {describe_ms(max(each.frees_ms))}, if nothing fails until then."
    if evidence.k:
        stable = describe_ms(round(each.rules.stable_after_s * 1000))
        yield (
            f"The backoff has grown {count(evidence.k, 'time')}; after {stable} without a failure"
            " it begins again."
        )
