"""The configuration file that the packages install."""

from __future__ import annotations

from pathlib import Path

from nomarr_systemd.config.file import parse

EXAMPLE = Path(__file__).parents[2] / "packaging/nomarr.toml"


def test_the_example_in_the_configuration_is_good() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert parse("\n".join(lines)).components() == ()
    code = [line.removeprefix("#") for line in lines if line[:1] == "#" and line[1:2].strip()]
    config = parse("\n".join(code))
    assert {pool.name: pool.workers for pool in config.pools} == {
        "tag": 2,
        "library": 10,
        "calibration": 5,
    }
    # Nothing but the pools differs from the defaults that are shown.
    default = parse("")
    shown = (config.store, config.policy, config.health, config.web)
    assert shown == (default.store, default.policy, default.health, default.web)
