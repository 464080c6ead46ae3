"""What a manager is asked, beside the answers of the real systemd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nomarr_systemd.systemd.dbus.connection import BusError, Call
from nomarr_systemd.systemd.manager import Manager


def keep_calls(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that it makes from now on."""
    asked: list[Call] = []
    ask_all = manager._bus.call_all

    def keep(calls: Sequence[Call]) -> list[list[Any] | BusError]:
        asked.extend(calls)
        return ask_all(calls)

    monkeypatch.setattr(manager._bus, "call_all", keep)
    return asked
