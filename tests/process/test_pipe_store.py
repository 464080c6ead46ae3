"""Pipes in systemd's store of descriptors: in parcels, found again, whatever is killed when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.supervisor.pipe_store import PARCEL, PipeStore, tell
from tests.support.supervision import Lab, holds, make_lab, read_all, sequences, status_of
from tests.support.waiting import PATIENCE_S, wait_for

CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        yield lab


def test_stored_pipes_that_are_not_wanted_or_not_in_place_are_given_up(lab: Lab) -> None:
    lab.configure(tag=3)
    lab.start()
    lab.kill()
    os.unlink(f"{lab.paths.health}/tag-1")
    lab.configure(tag=2)
    lab.start()
    assert sorted(os.listdir(lab.paths.health)) == ["tag-0", "tag-1"]
    assert lab.manager.pipes().keys() == {"tag-0", "tag-1"}
    lab.begin_run("tag-1")
    events = lab.subscribe()
    lab.writer("tag-1").frame()
    events.until(status_of("healthy", "worker:tag:1"))


def wait_is_over(messages: list[str], enough: int) -> bool:
    """So many were sent, or the last of a start or a reload."""
    return len(messages) >= enough or any("READY=1" in text for text in messages)


def test_it_can_be_killed_while_it_makes_its_pipes(lab: Lab) -> None:
    """At each message to systemd once: what is stored is used, what is not is made again."""
    count = 2 * PARCEL + 1
    lab.configure(tag=count)
    for messages in range(1, 9):
        before = len(lab.manager.messages)
        lab.start(ready=False)
        lab.manager.wait_for(lambda all_: wait_is_over(all_[before:], messages))  # noqa: B023
        lab.kill()
    lab.start()
    kept = lab.manager.pipes()
    assert len(kept) == count
    for name, pipes in kept.items():
        place = os.stat(f"{lab.paths.health}/{name}")
        assert [os.path.samestat(each, place) for each in pipes] == [True]
    events = lab.subscribe()
    for n in (0, PARCEL - 1, PARCEL, count - 1):
        lab.begin_run(f"tag-{n}")
        lab.writer(f"tag-{n}").frame()
        events.until(status_of("healthy", f"worker:tag:{n}"))


def test_it_can_be_killed_while_it_adds_and_removes_pipes(lab: Lab) -> None:
    """Also between the store of the new parcels and the removal of the old: a worker that goes on
    keeps its pipe, with the frames in it."""
    lab.configure(tag=PARCEL + 1, health=CALM)
    lab.start()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    seen: list[dict[str, Any]] = []
    events = lab.subscribe("worker:*:frames")
    for turn in range(12):
        before = len(lab.manager.messages)
        enough = turn // 2 + 2  # the first says that it reloads
        lab.configure(tag=PARCEL + (2, 1)[turn % 2], health=CALM)
        assert lab.child
        lab.child.send_signal(signal.SIGHUP)
        lab.manager.wait_for(lambda all_: wait_is_over(all_[before:], enough))  # noqa: B023
        lab.kill()
        seen += read_all(events)
        writer.frame()
        events = lab.subscribe("worker:*:frames")
        lab.start()
    seen += events.until(holds(12))
    assert sequences(seen) == list(range(1, 13))
    assert {len(pipes) for pipes in lab.manager.pipes().values()} == {1}
    assert len(lab.manager.pipes()) == PARCEL + 1


def test_pipes_of_version_0_1_are_used_again(lab: Lab) -> None:
    """It had systemd keep each by itself, with the instance as its name."""
    lab.configure(tag=2, health=CALM)
    os.makedirs(lab.paths.health)
    for name in ("tag-0", "tag-1"):
        os.mkfifo(f"{lab.paths.health}/{name}", 0o600)
        fd = os.open(f"{lab.paths.health}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(fd, True)  # as systemd passes it
        lab.manager.stored[name] = [fd]
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    writer.frame()
    lab.start()
    events = lab.subscribe("worker:*:frames")
    writer.frame()
    assert sequences(events.until(holds(2))) == [1, 2]
    assert lab.manager.stored.keys() == {"pipes.1", "live.sock"}
    lab.kill()
    lab.start()
    writer.frame()


def test_pipes_that_could_not_be_stored_are_stored_later(lab: Lab) -> None:
    lab.configure(tag=1, health=CALM)
    lab.environment = {"WATCHDOG_USEC": "200000"}
    lab.start()
    assert lab.snapshot_of_itself()["stored_pipes"] == 1
    away = f"{lab.manager.path}.away"
    os.rename(lab.manager.path, away)
    lab.configure(tag=2, health=CALM)
    assert lab.child
    lab.child.send_signal(signal.SIGHUP)
    wait_for(lambda: len(lab.snapshot()) == 2, PATIENCE_S, "it has reloaded")
    assert lab.snapshot_of_itself()["stored_pipes"] == 1
    os.rename(away, lab.manager.path)
    lab.manager.wait_for(lambda _: "pipes.1" not in lab.manager.stored)
    assert lab.manager.pipes().keys() == {"tag-0", "tag-1"}
    assert lab.snapshot_of_itself()["stored_pipes"] == 2


def test_without_a_configuration_no_pipe_is_removed(lab: Lab) -> None:
    """Also not one that was not stored: its worker still writes."""
    lab.configure(tag=2, health=CALM)
    lab.start()
    lab.kill()
    os.unlink(lab.paths.resolved)
    for fd in lab.manager.stored.pop("pipes.1"):
        os.close(fd)
    lab.start()
    assert sorted(os.listdir(lab.paths.health)) == ["tag-0", "tag-1"]


def test_what_cannot_be_stored_anew_is_still_stored(lab: Lab) -> None:
    pipes = [os.pipe() for _ in range(2)]
    read, write = ({f"tag-{n}": pair[side] for n, pair in enumerate(pipes)} for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTIFY_SOCKET", lab.manager.path)
        store = PipeStore({})
        store.keep({"tag-0": read["tag-0"]})
        store.keep({**read, "tag-2": 99_999})  # no such descriptor: the kernel takes no parcel
        patch.setenv("NOTIFY_SOCKET", f"{lab.root}/nobody")
        store.keep(read)
        assert (store.is_whole, store.count) == (False, 1)
        patch.setenv("NOTIFY_SOCKET", lab.manager.path)
        tell("STATUS=has been read")
        lab.manager.wait_for(lambda all_: "STATUS=has been read" in all_)
        assert lab.manager.pipes().keys() == {"tag-0"}
        assert "pipes.1" in lab.manager.stored
        store.keep(read)
        lab.manager.wait_for(lambda _: "pipes.1" not in lab.manager.stored)
    assert lab.manager.pipes().keys() == {"tag-0", "tag-1"}
    for fd in read.values():
        os.close(fd)
    for fd in write.values():
        os.write(fd, b"x")  # no EPIPE: what is in a parcel is open
        os.close(fd)
