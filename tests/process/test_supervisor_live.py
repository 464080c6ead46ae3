"""The live socket: requests, bounds, rights, and subscribers that do not read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.live.answers import parse_supervisor
from nomarr_systemd.supervisor import live_server
from nomarr_systemd.supervisor.loop import Loop
from nomarr_systemd.supervisor.pipe_store import PipeStore
from nomarr_systemd.supervisor.supervisor import Supervisor
from tests.support.capabilities import needs_root
from tests.support.supervision import Lab, Live, make_lab, status_of
from tests.support.waiting import PATIENCE_S

CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with make_lab() as lab:
        lab.configure(tag=2, library=1, health=CALM)
        lab.start()
        yield lab


def test_a_snapshot_shows_workers_and_supervisor(lab: Lab) -> None:
    answer = lab.live().ask(op="snapshot")
    assert answer["ok"] is True
    names = [worker["component"] for worker in answer["workers"]]
    assert names == ["worker:tag:0", "worker:tag:1", "worker:library:0"]
    assert answer["supervisor"]["pid"] == lab.pid
    assert answer["supervisor"]["since_wall_ms"] > 1_700_000_000_000
    assert answer["supervisor"]["notify_failures"] == 0


def test_notifications_that_fail_are_counted(lab: Lab) -> None:
    assert lab.child
    os.rename(lab.manager.path, f"{lab.manager.path}.away")
    try:
        lab.child.send_signal(signal.SIGHUP)  # a reload is told to systemd
        live, ends = lab.live(), time.monotonic() + PATIENCE_S
        while not parse_supervisor(live.ask(op="snapshot"))["notify_failures"]:
            assert time.monotonic() < ends
    finally:
        os.rename(f"{lab.manager.path}.away", lab.manager.path)
    assert "a notification to systemd failed" in lab.said()


def test_one_connection_may_ask_again_and_ahead(lab: Lab) -> None:
    live = lab.live()
    live.socket.sendall(b'{"op":"snapshot"}\n' * 500 + b'{"op":"blackbox","component":"tag-0"}\n')
    for _ in range(500):
        assert len(live.read()["workers"]) == 3
    assert live.read() == {"ok": True, "frames": [], "received": []}


def test_peers_that_do_not_read_delay_no_stop(lab: Lab) -> None:
    """Each delayed it by half a second, and with a few dozen systemd had to kill it."""
    peers = [lab.live() for _ in range(60)]
    for peer in peers:
        peer.socket.sendall(b'{"op":"snapshot"}\n' * 800)
    lab.live().ask(op="snapshot")  # the requests before it are being answered
    assert lab.child
    begun = time.monotonic()
    lab.child.send_signal(signal.SIGTERM)
    assert lab.child.wait(PATIENCE_S) == 0
    assert time.monotonic() - begun < 15


def test_a_peer_that_does_not_wait_is_still_heard(lab: Lab) -> None:
    live = lab.live()
    live.send(op="set_failed", component="tag-0")
    live.close()
    events = lab.subscribe()
    events.until(status_of("failed"))


def test_the_black_box_has_the_last_200(lab: Lab) -> None:
    events = lab.subscribe()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    for n in range(250):
        writer.frame(job=f"{n}", own="kept as it was")
    events.until(lambda event: event["worker"]["seq"] == 250)
    frames = lab.live().ask(op="blackbox", component="worker:tag:0")["frames"]
    numbers = [json.loads(frame.removeprefix("HEALTH|"))["seq"] for frame in frames]
    assert numbers == list(range(51, 251))
    assert "kept as it was" in frames[0]


@pytest.mark.parametrize(
    ("request_line", "error"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 10_000, "not JSON"),
        (b"[]", 'with "op"'),
        (b'{"op":7}', 'with "op"'),
        (b'{"op":"reboot"}', "unknown op; known are subscribe, snapshot"),
        (b'{"op":"settlement"}', "unknown op"),
        (b'{"op":"labels"}', "list of objects"),
        (b'{"op":"labels","runs":[7]}', "list of objects"),
        (b'{"op":"crashed","component":"tag-0"}', "list of objects"),
        (b'{"op":"crashed","deaths":[{"component":7}]}', "must be text"),
        (b'{"op":"blackbox"}', "is not a worker"),
        (b'{"op":"blackbox","component":7}', "must be text"),
        (b'{"op":"blackbox","component":"tag-7"}', "not configured"),
        (b'{"op":"subscribe"}', "list of 1 to 64"),
        (b'{"op":"subscribe","topics":[]}', "list of 1 to 64"),
        (b'{"op":"subscribe","topics":["a b"]}', "a topic is"),
        (b'{"op":"subscribe","topics":["*:*:*:*:*"]}', "3 stars"),
    ],
)
def test_broken_requests_are_answered(lab: Lab, request_line: bytes, error: str) -> None:
    live = lab.live()
    live.socket.sendall(request_line + b"\n")
    answer = live.read()
    assert answer["ok"] is False
    assert error in answer["error"]
    assert live.ask(op="snapshot")["ok"], "the connection can still be used"


def test_a_request_without_end_is_refused(lab: Lab) -> None:
    live = lab.live()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        live.socket.sendall(b"x" * (64 << 20))
    assert lab.snapshot()


def test_a_half_closed_connection_is_answered(lab: Lab) -> None:
    live = lab.live()
    live.send(op="snapshot")
    live.socket.shutdown(socket.SHUT_WR)
    assert live.read()["ok"]
    assert live.socket.recv(1) == b""


def test_topics_and_their_wildcards(lab: Lab) -> None:
    def shown(*topics: str) -> list[str]:
        live = lab.subscribe(*topics, "worker:library:0:status")
        events = live.until(lambda event: event["topic"] == "worker:library:0:status")
        assert {event["type"] for event in events} == {"snapshot"}
        return [event["topic"] for event in events][:-1]

    tags = ["worker:tag:0:status", "worker:tag:1:status"]
    assert shown("worker:tag:1:status") == tags[1:]
    assert shown("worker:tag:*:status") == tags
    assert shown("worker:*:status") == tags
    assert shown("worker:*:0:status") == tags[:1]
    assert shown("queue:jobs") == ["queue:jobs"]
    assert shown("system:health", *tags) == ["system:health", *tags]


def test_the_system_as_a_whole(lab: Lab) -> None:
    events = lab.subscribe("system:health")
    first = events.read()
    assert first["type"] == "snapshot"
    assert first["system"] == {
        "status": "error",
        "errors": ["pool tag has no healthy worker", "pool library has no healthy worker"],
    }
    for instance in ("tag-0", "library-0", "tag-1"):
        lab.begin_run(instance)
        lab.writer(instance).frame()
    seen = events.until(lambda event: event["system"]["status"] == "healthy")
    assert {event["type"] for event in seen} == {"system_update"}
    lab.end_run("tag-1")
    assert events.read()["system"]["status"] == "degraded"


def test_what_the_controller_tells(lab: Lab) -> None:
    events = lab.subscribe("worker:tag:0:status")
    invocation = lab.begin_run("tag-0")
    events.until(status_of("starting"))
    live = lab.live()
    cause = "killed by SIGSEGV after 3 s"
    told: dict[str, object] = {"component": "tag-0", "invocation": invocation, "cause": cause}
    told |= {"decision": "restart", "blamed": True, "failed": False}
    for _ in range(2):  # told again, it is not announced again
        answer = live.ask(op="crashed", deaths=[told])
        assert answer == {"ok": True, "outcomes": {invocation: {"settled": False}}}  # it runs
    crash = events.until(lambda event: event["type"] == "worker:crash")[-1]
    assert (crash["cause"], crash["decision"]) == (cause, "restart")
    assert crash["worker"]["last_crash"]["error"] == cause
    assert crash["worker"]["last_crash"]["worker_index"] == 0
    assert live.ask(op="set_failed", component="tag-0") == {"ok": True}
    seen = events.until(status_of("failed"))
    assert "worker:crash" not in {event["type"] for event in seen}
    writer = lab.writer("tag-0")
    writer.frame()
    assert live.ask(op="reset", component="tag-0") == {"ok": True}
    events.until(status_of("starting"))  # it runs
    writer.frame()
    events.until(status_of("healthy"))


def test_many_deaths_in_one_report(lab: Lab) -> None:
    """Of workers that are not configured, and of starts that failed: they had no jobs."""
    lists: dict[str, object] = {name: [] for name in ("jobs", "quarantined", "failed", "refund")}
    empty = {"settled": True, **lists, "fail_pool": ""}
    deaths: list[dict[str, object]] = [
        {
            "component": f"gone-{n}",
            "invocation": f"{n:032x}",
            "cause": "x" * 300,
            "decision": "hold",
        }
        for n in range(2000)
    ]
    start_job = f"{'b' * 32}#1"
    deaths.append(
        {"component": "tag-0", "invocation": start_job, "cause": "no start", "failed": True}
    )
    answer = lab.live().ask(op="crashed", deaths=deaths)
    assert len(answer["outcomes"]) == 2001
    assert answer["outcomes"][f"{7:032x}"] == answer["outcomes"][start_job] == empty
    shown = lab.snapshot()["worker:tag:0"]
    assert (shown["status"], shown["last_crash"]["error"]) == ("failed", "no start")


def test_only_runs_that_it_ended_itself_have_labels(lab: Lab) -> None:
    invocation = lab.begin_run("tag-0")
    runs = [
        {"component": component, "invocation": invocation}
        for component in ("worker:tag:0", "tag-1", "gone-7", "no name")
    ]
    assert lab.live().ask(op="labels", runs=runs) == {"ok": True, "labels": {}}


@needs_root
def test_a_long_request_of_another_user_is_refused(lab: Lab) -> None:
    code = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
live = socket.socket(socket.AF_UNIX)
live.connect(sys.argv[1])
live.sendall(b"x" * 20_000)
print(live.makefile("rb").readline())
"""
    group = str(os.stat(lab.paths.live).st_gid)
    command = [sys.executable, "-c", code, lab.paths.live, group]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "longer than 16384" in done.stdout


@needs_root
def test_only_root_and_its_own_user_may_tell_it_something(lab: Lab) -> None:
    code = """
import json, os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
live = socket.socket(socket.AF_UNIX)
live.connect(sys.argv[1])
lines = live.makefile("rwb")
for op in ("crashed", "set_failed", "reset", "snapshot", "blackbox", "label", "labels"):
    run = {"component": "tag-0", "invocation": "a" * 32}
    lines.write(json.dumps({"op": op, **run, "runs": [run], "deaths": [run]}).encode())
    lines.write(b"\\n")
    lines.flush()
    print(op, json.loads(lines.readline())["ok"])
"""
    group = os.stat(lab.paths.live).st_gid
    command = [sys.executable, "-c", code, lab.paths.live]
    done = subprocess.run([*command, str(group)], capture_output=True, text=True, check=True)
    answers = dict(line.split() for line in done.stdout.splitlines())
    allowed = dict.fromkeys(("snapshot", "blackbox", "label", "labels"), "True")
    assert answers == {"crashed": "False", "set_failed": "False", "reset": "False", **allowed}
    stranger = subprocess.run([*command, "65534"], capture_output=True, text=True, check=False)
    assert "PermissionError" in stranger.stderr
    assert lab.snapshot()["worker:tag:0"]["status"] == "stopped"


def test_a_subscriber_that_does_not_read_loses_the_oldest_and_is_told(lab: Lab) -> None:
    slow = lab.subscribe("worker:tag:0:status")
    quick = lab.subscribe("worker:tag:0:status")
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    count = 5000
    for n in range(1, count + 1):
        writer.frame(job=f"{n}")
        quick.until(lambda event: event["worker"]["current_job"] == f"{n}")  # noqa: B023
    events = slow.until(
        lambda event: event["type"] != "lost" and event["worker"]["current_job"] == f"{count}"
    )
    lost = [event for event in events if event["type"] == "lost"]
    assert len(lost) == 1
    assert lost[0]["topic"] == "worker:tag:0:status"
    assert lost[0]["count"] > 0
    jobs = [
        int(event["worker"]["current_job"])
        for event in events
        if event["type"] == "worker_update" and event["worker"]["current_job"]
    ]
    assert jobs == sorted(jobs)
    assert len(jobs) + lost[0]["count"] == count
    place = events.index(lost[0])
    before = int(events[place - 1]["worker"]["current_job"])
    after = int(events[place + 1]["worker"]["current_job"])
    assert after - before - 1 == lost[0]["count"], "it was told at the place of the loss"


def test_many_who_never_read_cost_little(lab: Lab) -> None:
    idle = [lab.subscribe("worker:*:status", "worker:*:frames") for _ in range(50)]
    quick = lab.subscribe("worker:tag:0:status")
    before = lab.rss_kb()
    lab.begin_run("tag-0")
    writer = lab.writer("tag-0")
    for n in range(1, 501):
        writer.frame(job=f"{n}", own="x" * 3000)
        quick.until(lambda event: event["worker"]["current_job"] == f"{n}")  # noqa: B023
    assert len(idle) == 50
    grown = lab.rss_kb() - before
    print(f"50 subscribers that never read: {grown} kB")
    assert grown < 100_000
    assert len(lab.snapshot()) == 3


def test_connections_are_limited(lab: Lab) -> None:
    """256, and 16 more for root and its own user, which this test is."""
    held = [lab.live() for _ in range(272)]
    assert all(live.ask(op="label", component="tag-0")["ok"] for live in held)
    refused = lab.live()
    assert refused.socket.recv(1) == b""
    held[0].close()
    held[1].ask(op="snapshot")  # by now the other's end was seen
    assert lab.live().ask(op="label", component="tag-0")["ok"]


@needs_root
def test_other_users_have_few_places_and_root_has_its_own(lab: Lab) -> None:
    code = """
import json, os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
held = []
for _ in range(40):
    live = socket.socket(socket.AF_UNIX)
    live.connect(sys.argv[1])
    held.append(live)
answered = 0
for live in held:
    try:
        live.sendall(b'{"op":"snapshot"}\\n')
        answered += bool(live.recv(10))
    except OSError:
        pass
print(answered, flush=True)
sys.stdin.read()
"""
    group = str(os.stat(lab.paths.live).st_gid)
    command = [sys.executable, "-c", code, lab.paths.live, group]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"%d\n" % live_server.MAX_OF_USER
        assert "worker:tag:0" in lab.snapshot()
        other.communicate(timeout=PATIENCE_S)


def test_who_asks_nothing_is_closed_and_subscribers_stay(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_server, "IDLE_S", 0.2)
    lab.kill()
    loop = Loop()
    supervisor = Supervisor(lab.paths, read_applied(lab.paths), loop, PipeStore({}))
    listening = socket.socket(fileno=os.dup(lab.manager.stored["live.sock"][0]))
    server = live_server.LiveServer(loop, listening, supervisor, owner=0)
    monkeypatch.setattr(server, "_trusted", frozenset())
    silent, slow, subscriber = (Live(lab.paths.live) for _ in range(3))
    slow.socket.sendall(b'{"op":')  # for ever half a request
    subscriber.send(op="subscribe", topics=["worker:*:status"])
    while len(server._connections) != 3:
        loop.turn()
    while len(server._connections) > 1:
        with contextlib.suppress(OSError):
            slow.socket.send(b" ")  # no request is ever whole
        loop.turn()
    assert [each.patterns is None for each in server._connections] == [False]
    for live in (silent, slow, subscriber):
        live.close()
    server.close()
    supervisor.close()
    loop.close()
