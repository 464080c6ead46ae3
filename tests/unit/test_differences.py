"""Two configurations compared in the words of the file; a clock that was set, by its records."""

from __future__ import annotations

from nomarr_systemd.config.file import parse
from nomarr_systemd.core.account import Account, record_manual
from nomarr_systemd.core.time import Moment
from nomarr_systemd.operate.differences import Change, compare
from nomarr_systemd.operate.doctor.system import find_clock_step, is_from_future

OLD = """\
[policy]
max_restarts = 3
[pool.tag]
workers = 2
command = ["/bin/a"]
[pool.tag.policy]
window_s = 60
[pool.tag.unit]
MemoryMax = "1G"
Nice = 5
[pool.gone]
command = ["/bin/b"]
[worker.tag-1.policy]
max_restarts = 9
"""
NEW = """\
[health]
startup_timeout_s = 90
[pool.tag]
workers = 4
command = ["/bin/a", "-v"]
[pool.tag.health]
startup_timeout_s = 600
[pool.tag.unit]
MemoryMax = "2G"
[pool.new]
command = ["/bin/c"]
workers = 3
"""


def test_settings_are_compared_in_the_words_of_the_file() -> None:
    assert compare(parse(OLD), parse(NEW)) == [
        Change("policy", "max_restarts", 3, 5),
        Change("health", "startup_timeout_s", 60.0, 90.0),
        Change("pool.tag", "workers", 2, 4),
        Change("pool.tag", "command", ("/bin/a",), ("/bin/a", "-v")),
        Change("pool.tag.policy", "window_s", 60.0, None),
        Change("pool.tag.health", "startup_timeout_s", None, 600.0),
        Change("pool.tag.unit", "MemoryMax", "1G", "2G"),
        Change("pool.tag.unit", "Nice", 5, None),
        Change("pool.new", "workers", None, 3),
        Change("pool.gone", "workers", 1, None),
        Change("worker.tag-1.policy", "max_restarts", 9, None),
    ]
    assert compare(parse(OLD), parse(OLD)) == []


def test_a_clock_that_was_set_shows_in_the_records() -> None:
    then = Moment(1_000_000_000, "b" * 32, 50_000)
    account, _ = record_manual(Account("worker:tag:0"), "a" * 32, then, "a person")
    day_ms = 86_400_000
    for step_ms, found in ((0, 0), (59_000, 0), (day_ms, day_ms), (-day_ms, -day_ms)):
        now = Moment(then.wall_ms + 10_000 + step_ms, then.boot_id, then.boottime_ms + 10_000)
        assert find_clock_step([account], now) == found
        assert is_from_future([account], now) == (step_ms < 0)
    after_boot = Moment(then.wall_ms + day_ms, "c" * 32, 5)
    assert find_clock_step([account], after_boot) == 0
