"""A worker as it is now, in words: what it does and since when, or why it does not run."""

from __future__ import annotations

from typing import Final

from nomarr_systemd.core.start_table import due_in_ms
from nomarr_systemd.core.text import clean, describe_ms
from nomarr_systemd.postmortem.moments import show_moment
from nomarr_systemd.postmortem.witnesses import Witnesses, find_last_death

_VERBS: Final = {"active": "is running", "activating": "is starting", "deactivating": "is stopping"}
_SINCE: Final = {
    "active": "ActiveEnterTimestampMonotonic",
    "activating": "InactiveExitTimestampMonotonic",
    "deactivating": "ActiveExitTimestampMonotonic",
}
_DISAGREEMENTS: Final = {
    "hung-but-pinging": "its frames come, and say that the work makes no progress",
    "pipe-wedged": "it still pings systemd, but no frames come",
    "supervisor-blind": "systemd shows it running, but the supervisor has received nothing",
}


def describe_living(witnesses: Witnesses) -> str:
    """Return the headline about a worker that runs, starts or stops."""
    state = witnesses.facts.get("ActiveState", "")
    text = f"{witnesses.component} {_VERBS.get(state, state)}"
    if since_ms := _find_since(witnesses):
        text += f" for {describe_ms(max(0, witnesses.now.wall_ms - since_ms))}"
    said = witnesses.live
    if said and said.disagreement:
        return f"{text}, but {_DISAGREEMENTS.get(said.disagreement, said.disagreement)}"
    if state == "active" and said and said.status not in ("", "healthy", "starting"):
        return f"{text}, and is {said.status}"
    if state == "active" and find_last_death(witnesses.account) is None:
        return f"{text}, and no death of it is on record"
    return text


def describe_doing(witnesses: Witnesses, *, absolute: bool = False) -> str:
    """Return what a worker that runs does, by its last frame; empty if that is not known.
    ``absolute``: without ages."""
    said = witnesses.live
    if not said or not witnesses.is_running:
        return ""
    parts = [said.phase, f"job {clean(said.job, 500)}" if said.job else ""]
    if absolute:
        return ", ".join(filter(None, parts))
    if said.progress_age_s is not None and said.progress_age_s >= 1:
        parts.append(f"its last progress was {_age(said.progress_age_s)} before its last frame")
    if said.frame_age_s is not None:
        parts.append(f"last frame {_age(said.frame_age_s)} ago")
    elif said.invocation:
        parts.append("no frame has come of this run")
    return ", ".join(filter(None, parts))


def describe_now(witnesses: Witnesses, *, absolute: bool = False) -> str:
    """Return the state of the worker now in one line; ``absolute`` for a page that is read later:
    with moments instead of ages."""
    state = witnesses.facts.get("ActiveState", "")
    if not witnesses.is_applied:
        return "configured, but not applied yet: it has no unit"
    reason = witnesses.account.failure_reason
    if witnesses.is_masked:
        if reason:
            return f"masked, and stays down until it is reset: {reason}"
        return "masked, but not by a decision on record: it was masked by hand"
    if witnesses.facts.get("LoadState") == "not-found":
        return "there is no unit of that name: nomarrctl apply installs it"
    if witnesses.is_running:
        return _describe_running(witnesses, state, absolute=absolute)
    if reason:
        return f"failed for good, but not masked: {reason}"
    if witnesses.hold:
        return f"held: {witnesses.hold}"
    last = find_last_death(witnesses.account)
    text = {"failed": "failed", "inactive": "not running"}.get(state, state or "unknown")
    if last and last.is_scheduled and last.invocation.partition("#")[0] == witnesses.invocation:
        if absolute:
            return f"{text}; its restart is due at {show_moment(last.due.wall_ms)}"
        left_ms = due_in_ms(last, witnesses.now)
        return f"{text}; it is restarted in {describe_ms(max(0, left_ms))}"
    return text


def _describe_running(witnesses: Witnesses, state: str, *, absolute: bool) -> str:
    since_ms = _find_since(witnesses)
    since = ""
    if since_ms and absolute:
        since = f" since {show_moment(since_ms)}"
    elif since_ms:
        since = f" for {describe_ms(max(0, witnesses.now.wall_ms - since_ms))}"
    health = f", {witnesses.live.status}" if witnesses.live and witnesses.live.status else ""
    doing = f", {witnesses.live.phase}" if witnesses.live and witnesses.live.phase else ""
    return f"{'running' if state == 'active' else state}{since}{health}{doing}"


def _find_since(witnesses: Witnesses) -> int:
    """Return since when the worker is in its present state, as wall time; 0 if unknown."""
    state = witnesses.facts.get("ActiveState", "")
    return witnesses.wall_ms_of(_SINCE.get(state, "ActiveEnterTimestampMonotonic"))


def _age(seconds: float) -> str:
    return describe_ms(round(seconds * 1000))
