"""Journal entries about what a person did to a worker, shown by ``systemctl status`` of it."""

from __future__ import annotations

from typing import Final

from systemd import journal

from nomarr_systemd.core.ids import Component

MESSAGE_ID: Final = "0d4c7f5b1c2e4c7b8f0e3a96d21b7c58"
_NOTICE: Final = 5


def write_act(component: Component, act: str, by: str, *, user: bool) -> None:
    """One entry: ``act`` is a word such as paused, ``by`` who did it."""
    unit_field = "OBJECT_SYSTEMD_USER_UNIT" if user else "OBJECT_SYSTEMD_UNIT"
    journal.send(
        f"{component.instance}: {act} by {by}",
        MESSAGE_ID=MESSAGE_ID,
        PRIORITY=_NOTICE,
        SYSLOG_IDENTIFIER="nomarrctl",
        NOMARR_COMPONENT_ID=component.component_id,
        NOMARR_INSTANCE=component.instance,
        NOMARR_ACT=act,
        NOMARR_BY=by,
        **{unit_field: component.unit},
    )
