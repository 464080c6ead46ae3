"""When deaths are one outage, against a brute-force reading of docs/policy.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core.death import Death
from nomarr_systemd.core.incident import Incident, find_outage, pack, unpack
from nomarr_systemd.core.time import Moment

NOW = Moment(1_000_000, "a" * 32, 500_000)


def loss(worker: int, age_ms: int, kind: str = "exit", code: int = 1) -> Death:
    moment = Moment(NOW.wall_ms - age_ms, NOW.boot_id, NOW.boottime_ms - age_ms)
    return Death(f"worker:tag:{worker}", f"{worker:032x}", kind, code, at=moment)


def test_three_of_four_alike_are_an_outage() -> None:
    losses = [loss(2, 9_999), loss(0, 5_000), loss(1, 0)]
    assert find_outage(losses, 4, NOW) == [losses[1], losses[2], losses[0]]


def test_two_of_two_are_not() -> None:
    assert find_outage([loss(0, 0), loss(1, 0)], 2, NOW) == []


def test_three_of_seven_are_not() -> None:
    assert find_outage([loss(n, 0) for n in range(3)], 7, NOW) == []
    assert len(find_outage([loss(n, 0) for n in range(3)], 6, NOW)) == 3


def test_ten_seconds_ago_is_too_long_ago() -> None:
    assert find_outage([loss(0, 10_000), loss(1, 0), loss(2, 0)], 3, NOW) == []


def test_different_deaths_are_not_alike() -> None:
    assert find_outage([loss(0, 0), loss(1, 0, code=2), loss(2, 0, "signal", -9)], 3, NOW) == []


def test_one_that_dies_again_and_again_is_one() -> None:
    assert find_outage([loss(0, n) for n in range(9)], 3, NOW) == []


LOSSES = st.builds(
    loss, st.integers(0, 7), st.integers(0, 20_000), st.just("exit"), st.integers(0, 2)
)


@given(st.lists(LOSSES, max_size=30), st.integers(1, 8))
def test_against_the_words_of_the_design(losses: list[Death], workers: int) -> None:
    found = find_outage(losses, workers, NOW)
    possible = []
    for code in range(3):
        dead = {
            each.component_id
            for each in losses
            if each.code == code and NOW.boottime_ms - (each.at or NOW).boottime_ms < 10_000
        }
        if len(dead) >= 3 and len(dead) >= workers / 2:
            possible.append(sorted(dead))
    assert ([each.component_id for each in found] in possible) if possible else not found


def test_an_incident_comes_back_from_its_document() -> None:
    made = Incident("tag", "exit", 1, NOW, "worker:tag:0", ("worker:tag:0",), (("a", "b"),))
    stored = made.to_doc() | {"_key": "x", "of_a_newer_version": 1}
    stored["members"] = list(stored["members"])
    stored["refunds"] = [list(one) for one in stored["refunds"]]
    assert Incident.from_doc(stored) == made


@given(st.sets(st.integers(0, 4095)))
def test_numbers_of_members_are_short_and_whole(numbers: set[int]) -> None:
    names = tuple(f"worker:tag:{number}" for number in sorted(numbers))
    assert unpack("tag", pack(reversed(names))) == names


def test_numbers_of_many_members_are_a_few_characters() -> None:
    assert pack(f"worker:tag:{number}" for number in [*range(4096)]) == "0-4095"
    assert pack(f"worker:tag:{number}" for number in (7, 0, 1, 2, 3)) == "0-3,7"
    assert unpack("tag", "") == ()


@pytest.mark.parametrize("numbers", ["0-9999999999", "0-4095,0", "a", "-5", "1-2-3", "3,x"])
def test_numbers_that_nobody_wrote_are_refused(numbers: str) -> None:
    with pytest.raises(ValueError):
        unpack("tag", numbers)
