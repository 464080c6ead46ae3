"""Saying to systemd that we are ready, and taking what it hands over."""

from __future__ import annotations

from systemd import daemon


def notify(*lines: str) -> bool:
    """Send sd_notify lines; False where nobody listens."""
    return bool(daemon.notify("\n".join(lines)))


def listen_fds() -> list[int]:
    """The file descriptors that socket activation has passed."""
    return list(daemon.listen_fds())
