"""A failure ready to be booked."""

from __future__ import annotations

from typing import NamedTuple

from nomarr_systemd.core.death import Exit, Failure
from nomarr_systemd.core.ids import Component


class Death(NamedTuple):
    """What failed, and how."""

    component: Component
    failure: Failure
    exit: Exit
    unmoved: bool = False  # the unit still is as this run left it, and nothing is about to start it

    @property
    def is_to_blame(self) -> bool:
        """Whether nothing that systemd knows excuses the worker."""
        failure = self.failure
        return not (
            failure.stop_asked or failure.shutting_down or failure.held or failure.supervisor_away
        )
