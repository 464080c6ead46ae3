"""What the controller's look makes of the books and of systemd's facts, without a systemd."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from nomarr_systemd.config.values import Config, Pool, StoreSettings
from nomarr_systemd.controller.observe import Seen, _forget_reset, _recall
from nomarr_systemd.controller.reports import Report
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host import clock
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.systemd.manager import Manager
from nomarr_systemd.systemd.stop_intent import was_asked_before
from tests.support.moments import PLAIN, death, run

SECOND_US = 1_000_000


def test_the_mark_of_a_failed_pool_is_no_death_alike(tmp_path: Path) -> None:
    """After a reset of the pool the next death opened an incident that was none."""
    state = tmp_path / "state"
    state.mkdir()
    paths = Paths(str(tmp_path), str(state), user=True)
    config = Config(store=StoreSettings(f"sqlite://{state}"), pools=(Pool("tag", workers=3),))
    with contextlib.closing(Site(paths, config, Manager(user=True))) as site:
        names = [each.component_id for each in config.components()]
        for number, name in enumerate(names):
            site.ledger.mark_failed(name, "its pool failed", run(number))
        died = death(run(9))._replace(component_id=names[0])
        site.ledger.record_failure(died, PLAIN)
        report = Report(Component("tag", 0), run(8), "exit-code", "exited", "1")
        found = _recall(site, [report], Seen({}, {}), clock.now())
    assert [each.invocation for each in found["tag"]] == [run(9)]


@pytest.mark.parametrize("is_reset", [False, True])
def test_deaths_before_a_reset_make_no_incident(tmp_path: Path, is_reset: bool) -> None:
    """Two workers died, the pool was reset, and the next death within ten seconds opened an
    incident, so that the pool did not fail by its policy."""
    state = tmp_path / "state"
    state.mkdir()
    paths = Paths(str(tmp_path), str(state), user=True)
    config = Config(store=StoreSettings(f"sqlite://{state}"), pools=(Pool("tag", workers=3),))
    with contextlib.closing(Site(paths, config, Manager(user=True))) as site:
        first, *others = config.components()
        for number, each in enumerate(others):
            earlier = death(run(number))._replace(component_id=each.component_id)
            site.ledger.record_failure(earlier, PLAIN, at=clock.now().later(-1000))
        if is_reset:
            for each in others:
                site.ledger.reset_restart_count(each.component_id)
        died = death(run(9))._replace(component_id=first.component_id)
        report = Report(first, run(9), "exit-code", "exited", "1")
        recent = _recall(site, [report], Seen({}, {}), clock.now())
        _forget_reset(site, recent, {first: [died]}, clock.now())
        assert len(recent["tag"]) == len(site.recent["tag"]) == (0 if is_reset else 2)


@pytest.mark.parametrize(
    ("stopped_s", "started_s", "died_s", "is_asked"),
    [
        (100, 0, 110, True),  # stopped and not started again
        (100, 100.01, 110, True),  # a restart
        (100, 120, 110, True),  # started after the death
        (100, 105, 110, False),  # the stop was that of the run before
        (0, 90, 110, False),
        (100, 0, 90, False),
        (100, 0, 900, False),
    ],
)
def test_a_stop_excuses_the_run_that_it_ended(
    stopped_s: float, started_s: float, died_s: float, is_asked: bool
) -> None:
    wanted = {
        "InactiveEnterTimestampMonotonic": str(int(stopped_s * SECOND_US)),
        "InactiveExitTimestampMonotonic": str(int(started_s * SECOND_US)),
    }
    assert was_asked_before(int(died_s * SECOND_US), wanted) is is_asked
