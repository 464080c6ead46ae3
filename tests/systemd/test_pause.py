"""A pause is a switch: it also holds what is added later, and it may end by itself."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation

OTHER = '[pool.other]\nworkers = {workers}\ncommand = ["{program}"]\nwatchdog_s = 3600\n'


@pytest.fixture
def site(lab: Lab) -> Installation:
    site = Installation(lab)
    site.bring_up(1, more=more(site))
    site.wait_until_healthy("other-0")
    return site


def more(site: Installation, workers: int = 1) -> str:
    return OTHER.format(workers=workers, program=site.worker)


def grow(site: Installation) -> None:
    """One more worker in each pool, by an apply."""
    site.configure(2, more=more(site, 2))
    site.good("apply")


def states(site: Installation) -> dict[str, str]:
    return {row["instance"]: row["state"] for row in site.status().values()}


def test_a_pause_of_everything_holds_what_is_added_later(site: Installation) -> None:
    site.good("pause", "--reason", "a new disk")
    grow(site)
    assert set(states(site).values()) == {"paused"}
    assert site.row("other-1")["held"].endswith(": a new disk")
    assert site.lab.get("other-1", "InvocationID") == "", "it was never started"
    # One pool is let go: the other is still paused as a whole.
    site.good("resume", "other")
    site.wait_until_healthy("other-0", "other-1")
    site.configure(3, more=more(site, 3))
    site.good("apply")
    site.wait_until_healthy("other-2")
    assert {name for name, state in states(site).items() if state == "paused"} == {
        "tag-0",
        "tag-1",
        "tag-2",
    }
    site.good("resume")
    site.wait_until_healthy("tag-0", "tag-1", "tag-2")
    site.configure(4, more=more(site, 3))
    site.good("apply")
    site.wait_until_healthy("tag-3")


def test_a_pause_of_a_pool_holds_what_is_added_to_it(site: Installation) -> None:
    site.good("pause", "tag")
    grow(site)
    site.wait_until_healthy("other-0", "other-1")
    assert [states(site)[name] for name in ("tag-0", "tag-1")] == ["paused", "paused"]


def test_a_pause_of_a_worker_is_none_of_its_pool(site: Installation) -> None:
    site.good("pause", "tag-0")
    grow(site)
    site.wait_until_healthy("tag-1")
    assert states(site)["tag-0"] == "paused"


def test_a_pause_ends_by_itself(site: Installation) -> None:
    before = site.lab.get("tag-0", "InvocationID")
    site.good("pause", "tag", "--for", "8s", "--reason", "a new disk")
    row = site.row("tag-0")
    assert row["state"] == "paused"
    assert ": a new disk (until 2" in row["held"]
    assert row["trouble"] is None
    grow(site)  # it begins with the same pause
    site.wait_until_healthy("tag-0", "tag-1")
    assert site.lab.get("tag-0", "InvocationID") != before
    said = site.lab.journal("-o", "cat", "NOMARR_ACT=resumed", "NOMARR_INSTANCE=tag-0")
    assert said.strip() == "tag-0: resumed by the end of its pause"
    acts = [(each.action, each.by) for each in site.records() if each.action != "restart"]
    assert [word for word, _ in acts] == ["pause", "resume"]
    assert acts[-1][1] == "nomarr-controller"
    # What is added after its end runs.
    site.configure(3, more=more(site, 2))
    site.good("apply")
    site.wait_until_healthy("tag-2")


def test_a_pause_ends_by_the_wall_clock(site: Installation) -> None:
    """Also after the clock was set, or the machine slept: systemd's timer has that time."""
    site.good("pause", "tag", "--for", "1h")
    until_s = hold_until_ms(site) / 1000
    said = site.lab.show("nomarr-pause-end.timer", "TimersCalendar")["TimersCalendar"]
    end = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(math.ceil(until_s)))
    assert end in said


def test_a_pause_whose_timer_was_early_goes_on(site: Installation) -> None:
    """As after a clock that was set back: its end has not come."""
    site.good("pause", "tag", "--for", "2s")
    hold = site.state / "hold" / "tag-0"
    later_ms = hold_until_ms(site) + 3_600_000
    hold.write_text(hold.read_text().partition("until=")[0] + f"until={later_ms}\n")

    def is_armed_again() -> bool:
        said = site.lab.show("nomarr-pause-end.timer", "TimersCalendar").get("TimersCalendar", "")
        return time.strftime("%H:%M:%S UTC", time.gmtime(math.ceil(later_ms / 1000))) in said

    site.lab.wait_for(is_armed_again, what="the timer has the new end")
    assert site.row("tag-0")["state"] == "paused"


def hold_until_ms(site: Installation) -> int:
    return int((site.state / "hold" / "tag-0").read_text().rpartition("until=")[2])


def test_a_later_word_counts(site: Installation) -> None:
    """Without an end after one with an end, and the other way round."""
    site.good("pause", "tag", "--for", "1h")
    site.good("pause", "tag")
    assert "(until" not in site.row("tag-0")["held"]
    site.good("pause", "tag", "--for", "4s")
    site.wait_until_healthy("tag-0")


def test_a_worker_that_failed_for_good_does_not_start_with_the_end_of_its_pause(
    site: Installation,
) -> None:
    for _ in range(3):
        before = site.lab.get("tag-0", "InvocationID")
        os.kill(site.lab.main_pid("tag-0"), signal.SIGKILL)
        site.lab.wait_for(
            lambda before=before: (  # type: ignore[misc]
                site.lab.get("tag-0", "LoadState") == "masked"
                or (
                    site.lab.get("tag-0", "ActiveState") == "active"
                    and site.lab.get("tag-0", "InvocationID") != before
                )
            ),
            what="it runs again, or is masked",
        )
    site.lab.wait_for(lambda: site.lab.get("tag-0", "LoadState") == "masked", what="a mask")
    site.good("pause", "tag", "--for", "2s")
    site.lab.wait_for(lambda: not site.row("tag-0")["held"], what="the pause is over")
    assert site.row("tag-0")["state"] == "masked"
    assert site.lab.get("tag-0", "ActiveState") != "active"


@pytest.mark.parametrize("span", ["0", "-1h", "soon", "1e9d", ""])
def test_a_time_that_is_none(site: Installation, span: str) -> None:
    done = site.ctl("pause", "tag", f"--for={span}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert site.row("tag-0")["held"] is None
