"""The restart policy: ``decide(history, death, rules, now)``, pure and deterministic.

The order of the questions is the contract (docs/policy.md); each answer carries its evidence.
Recording a decision and carrying it out happen elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, Literal
from zlib import crc32

from nomarr_systemd.core.death import EX_TEMPFAIL, Death
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import describe_ms
from nomarr_systemd.core.time import Moment, age_ms

Action = Literal["restart", "fail", "hold", "ignore"]
OnExhausted = Literal["mask", "cooldown"]
OnCleanExit = Literal["restart", "stay"]
LastChance = Literal["", "window", "lifetime"]

_DAY_MS: Final = 86_400_000
_LAST: Final = {
    "window": "; the last one in the window: another failure too soon masks it",
    "lifetime": "; the last one of its lifetime: the next failure masks it",
}


class Rules(NamedTuple):
    """The restart policy of one worker: ``[policy]``, overridden by ``[pool.X.policy]``."""

    max_restarts: int = 5
    window_s: float = 300.0
    max_lifetime_restarts: int = 20
    backoff_base_s: float = 1.0
    backoff_multiplier: float = 2.0
    backoff_max_s: float = 60.0
    backoff_jitter: float = 0.1
    stable_after_s: float = 600.0
    on_exhausted: OnExhausted = "mask"
    never_restart: tuple[int, ...] = (78,)
    lifetime_days: float = 0.0  # older restarts no longer count; 0: all since the last reset
    on_clean_exit: OnCleanExit = "restart"


class Evidence(NamedTuple):
    """The numbers a decision rests on, as they were before it."""

    window_used: int
    window_limit: int
    lifetime_used: int
    lifetime_limit: int  # 0: none
    k: int  # restarts since the last stable run: the exponent of the backoff
    next_available_ms: int | None  # until the window has room; 0: now, None: only a reset helps


class Decision(NamedTuple):
    """What to do about a failure, and why."""

    action: Action
    delay_ms: int
    reason: str  # one line for people
    evidence: Evidence

    @property
    def failure_reason(self) -> str:
        """What is recorded with a mask; empty for every other decision."""
        return self.reason if self.action == "fail" else ""


class History(NamedTuple):
    """What a decision needs to know of the past; a long past does not make a decision slower.

    Restarts in the window are kept by the clock that gives their age: those of this boot by
    boottime, those of earlier boots by wall time; both are sorted.
    """

    decided: Mapping[str, Decision] = {}
    this_boot_ms: Sequence[int] = ()
    other_boots_ms: Sequence[int] = ()
    lifetime: int = 0
    k: int = 0
    last_due: Moment | None = None  # when the last restart was due


def decide(history: History, death: Death, rules: Rules, now: Moment) -> Decision:
    """Decide about a death; the same death always gets the same decision."""
    earlier = history.decided.get(death.invocation)
    if earlier is not None:
        return earlier

    window_ms = round(rules.window_s * 1000)
    used = _count_younger(history, window_ms, now)
    has_room = used < rules.max_restarts
    lifetime = count_lifetime(history, rules, now)
    lifetime_spent = 0 < rules.max_lifetime_restarts <= lifetime
    never = death.code in rules.never_restart
    evidence = Evidence(
        used,
        rules.max_restarts,
        lifetime,
        rules.max_lifetime_restarts,
        _backoff_exponent(history, rules, now),
        None
        if never or lifetime_spent or not rules.max_restarts
        else 0
        if has_room
        else _wait_for_room(history, rules.max_restarts, window_ms, now),
    )

    excuse = _excuse(death, rules)
    if excuse is not None:
        return Decision(*excuse, evidence)
    if never:
        return _fail(f"exit status {death.code} is never restarted", evidence)
    delay_ms = _backoff_ms(evidence.k, death.invocation, rules)
    if death.job_at_fault:
        why = f"{death.job_at_fault}: restart after {describe_ms(delay_ms)}, which is refunded"
        return Decision("restart", delay_ms, why, evidence._replace(next_available_ms=None))
    if lifetime_spent:
        limit = rules.max_lifetime_restarts
        return _fail(f"{lifetime} restarts {_span(rules)}, the limit is {limit}", evidence)
    if not has_room:
        restarts = "1 restart" if used == 1 else f"{used} restarts"
        full = f"{restarts} within {describe_ms(window_ms)}, the limit is {rules.max_restarts}"
        if rules.on_exhausted == "mask" or evidence.next_available_ms is None:
            return _fail(full, evidence)
        delay_ms = max(delay_ms, evidence.next_available_ms)
        return Decision("restart", delay_ms, f"cooling down: {full}", evidence)
    limit_text = f"/{rules.max_lifetime_restarts}" if rules.max_lifetime_restarts else ""
    return Decision(
        "restart",
        delay_ms,
        f"restart {used + 1}/{rules.max_restarts} within {describe_ms(window_ms)},"
        f" {lifetime + 1}{limit_text} {_span(rules)}, after {describe_ms(delay_ms)}"
        f"{_LAST.get(find_last_chance(used + 1, lifetime + 1, rules), '')}",
        evidence,
    )


def count_lifetime(history: History, rules: Rules, now: Moment) -> int:
    """Count the restarts that the lifetime limit counts."""
    if not rules.lifetime_days:
        return history.lifetime
    return _count_younger(history, round(rules.lifetime_days * _DAY_MS), now)


def find_last_chance(window_used: int, lifetime_used: int, rules: Rules) -> LastChance:
    """Return which limit the next failure would break, if a mask would follow."""
    if 0 < rules.max_lifetime_restarts <= lifetime_used:
        return "lifetime"
    is_full = rules.max_restarts <= window_used
    return "window" if is_full and rules.on_exhausted == "mask" else ""


def _span(rules: Rules) -> str:
    if not rules.lifetime_days:
        return "in all"
    return f"within {describe_ms(round(rules.lifetime_days * _DAY_MS))}"


def decide_blind(death: Death, rules: Rules) -> Decision:
    """Decide while the store is away: the longest backoff, and never a mask."""
    evidence = Evidence(0, rules.max_restarts, 0, rules.max_lifetime_restarts, 0, None)
    excuse = _excuse(death, rules)
    if excuse is not None:
        return Decision(*excuse, evidence)
    delay_ms = round(rules.backoff_max_s * 1000)
    why = f"the store is away: restart after {describe_ms(delay_ms)}, to be booked later"
    return Decision("restart", delay_ms, why, evidence)


def _excuse(death: Death, rules: Rules) -> tuple[Action, int, str] | None:
    """Return the decision about a death that is not the worker's fault, or None."""
    if death.stop_asked:
        return "ignore", 0, "a stop was asked for"
    if death.shutting_down:
        return "ignore", 0, "the system is shutting down"
    if death.kind == "ended" and death.code == 0 and rules.on_clean_exit == "stay":
        return "ignore", 0, 'it has finished (on_clean_exit is "stay")'
    if death.held:
        return "hold", 0, death.held
    if death.code == EX_TEMPFAIL and death.supervisor_away:
        return "hold", 0, "its supervisor was away; it starts again when that is back"
    if death.incident:
        return "hold", 0, f"part of an incident: {death.incident}"
    return None


def _fail(why: str, evidence: Evidence) -> Decision:
    return Decision("fail", 0, why, evidence)


def _count_younger(history: History, window_ms: int, now: Moment) -> int:
    """Count the restarts that are younger than the window; one exactly as old is not."""
    here, elsewhere = history.this_boot_ms, history.other_boots_ms
    # An age is never negative: a restart in the future counts, however short the window is.
    return (
        len(here)
        - bisect_right(here, now.boottime_ms - window_ms)
        + len(elsewhere)
        - bisect_right(elsewhere, now.wall_ms - window_ms)
    )


def _wait_for_room(history: History, limit: int, window_ms: int, now: Moment) -> int:
    """Return the milliseconds until fewer than ``limit`` restarts are in the window."""
    here, elsewhere = history.this_boot_ms, history.other_boots_ms
    # The youngest limit-1 may stay; the next one has to reach the window's edge.
    if not elsewhere:
        age = now.boottime_ms - here[-limit]
    else:
        ages = [now.boottime_ms - then for then in here[-limit:]]
        ages += [now.wall_ms - then for then in elsewhere[-limit:]]
        age = sorted(ages)[limit - 1]
    return window_ms - max(0, age)


def _backoff_exponent(history: History, rules: Rules, now: Moment) -> int:
    due = history.last_due
    if due is not None and age_ms(due, now) >= rules.stable_after_s * 1000:
        return 0
    return history.k


def _backoff_ms(k: int, invocation: str, rules: Rules) -> int:
    try:
        growth = float(rules.backoff_multiplier) ** k
    except OverflowError:
        growth = inf
    delay_s = rules.backoff_base_s * growth if rules.backoff_base_s else 0.0
    # From the invocation, not random: the same death always gets the same delay.
    u = crc32(invocation.encode()) / 2**31 - 1
    return round(1000 * min(rules.backoff_max_s, delay_s * (1 + rules.backoff_jitter * u)))
