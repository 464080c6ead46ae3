"""The one grammar of --since, and every verb that has the option with every form of it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click
import pytest

from nomarr_systemd.cli.main import VERBS, main, nomarrctl
from nomarr_systemd.cli.since import parse_since
from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import BadName

NOON = datetime(2026, 11, 16, 12, 0).astimezone()
NOW_MS = int(NOON.timestamp() * 1000)
HOUR_MS = 3_600_000
FORMS = {
    "30s": NOW_MS - 30_000,
    "15min": NOW_MS - 15 * 60_000,
    "10 m": NOW_MS - 10 * 60_000,
    "2h": NOW_MS - 2 * HOUR_MS,
    "2 hours ago": NOW_MS - 2 * HOUR_MS,
    "1 hour ago": NOW_MS - HOUR_MS,
    "-3d": NOW_MS - 72 * HOUR_MS,
    "3 days": NOW_MS - 72 * HOUR_MS,
    "1w": NOW_MS - 7 * 24 * HOUR_MS,
    "now": NOW_MS,
    "today": NOW_MS - 12 * HOUR_MS,
    "Yesterday": NOW_MS - 36 * HOUR_MS,
    "03:00": NOW_MS - 9 * HOUR_MS,
    "13:00": NOW_MS - 23 * HOUR_MS,  # not in the future: yesterday's
    "2026-11-16": NOW_MS - 12 * HOUR_MS,
    "2026-11-16 03:00": NOW_MS - 9 * HOUR_MS,
    "2026-11-16T03:00:00": NOW_MS - 9 * HOUR_MS,
    " 2026-11-16 03:00:00 ": NOW_MS - 9 * HOUR_MS,
}


@pytest.mark.parametrize(("text", "moment"), FORMS.items())
def test_what_is_meant(text: str, moment: int) -> None:
    assert parse_since(text, NOW_MS) == moment


def test_another_time_zone_may_be_named() -> None:
    assert parse_since("2026-11-16T03:00:00+02:00", NOW_MS) == parse_since(
        "2026-11-16T01:00:00Z", NOW_MS
    )


@pytest.mark.parametrize(
    "text",
    ["", "soon", "3 fortnights", "2026-13-01", "25:00", "\x1b[31m", "9" * 400, "999999999w"],
)
def test_no_moment(text: str) -> None:
    with pytest.raises(BadName) as found:
        parse_since(text, NOW_MS)
    assert str(found.value).isprintable()
    assert "yesterday" in found.value.hint


def find_verbs() -> list[list[str]]:
    """Every command with the option, as it is typed."""

    def walk(command: click.Command, names: list[str]) -> list[list[str]]:
        if isinstance(command, click.Group):
            return [
                each
                for name, below in command.commands.items()
                for each in walk(below, [*names, name])
            ]
        has = any("--since" in option.opts for option in command.params)
        return [names] if has else []

    context = click.Context(nomarrctl)
    found = []
    for name in VERBS:
        command = nomarrctl.get_command(context, name)
        assert command is not None
        found += walk(command, [name])
    return found


def test_all_that_have_it_are_known() -> None:
    assert find_verbs() == [["history"], ["policy", "simulate"]]


@pytest.mark.parametrize("verb", find_verbs(), ids=" ".join)
@pytest.mark.parametrize("text", FORMS)
def test_every_verb_takes_every_form(
    verb: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / ".local/state/nomarr"
    state.mkdir(parents=True)
    config = Config(pools=(Pool("tag", command=("/bin/true",)),))
    (state / "config.json").write_text(json.dumps(config.to_dict()))
    assert main(["--user", *verb, "--since", text]) == 0
    assert main(["--user", *verb, "--since", "soon"]) == 2
