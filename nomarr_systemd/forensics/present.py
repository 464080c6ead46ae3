"""What has become of a worker, in one line."""

from __future__ import annotations

from nomarr_systemd.core.model import age_ms
from nomarr_systemd.core.plaintext import clean
from nomarr_systemd.core.words import describe_ms
from nomarr_systemd.forensics.scene import Scene


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
