"""The live socket's client and the parser of its answers beside a server that is out for harm."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from click import unstyle
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nomarr_systemd.cli.events import describe
from nomarr_systemd.cli.health_history import draw
from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host import clock
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.scope import make_scope
from nomarr_systemd.jobs.view import view_job
from nomarr_systemd.ledger.health_series import parse_answer
from nomarr_systemd.ledger.public import Published
from nomarr_systemd.live import answers, client
from nomarr_systemd.live.client import Batch
from nomarr_systemd.operate import job_reading, overview, worker_view
from nomarr_systemd.operate.job_reading import LiveReader
from nomarr_systemd.web import readers
from nomarr_systemd.web.broker import Broker
from nomarr_systemd.web.metrics import Metrics, Sources
from nomarr_systemd.web.upstream import Upstream
from tests.support.depth import times

TAG = Component("tag", 0)
DEADLINE_S = 20.0  # of questions that are answered somehow: never waited for
POISON = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\n<0>forged\u202e\u2066\x7f\x00\ud800"
NAMES = (
    "workers", "component", "status", "phase", "current_job", "invocation", "disagreement",
    "labels", "label", "job", "outcomes", "settled", "quarantined", "refund", "fail_pool",
    "frames", "run", "topic", "type", "timestamp", "worker", "system", "queue", "errors",
    "last_crash", "supervisor", "progress_age_s", "frame_age_s", "metrics",
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20) | st.sampled_from(
        [POISON, 5, 10**300, -1, "HEALTH|{}", 'HEALTH|{"job":[[1]],"seq":"x"}']
    )
)  # fmt: skip
ANY = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=25,
)


class Server:
    """Serves each connection with ``self.answer``; ``asked`` counts them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.asked = 0
        self.done = threading.Event()
        self.answer: Callable[[socket.socket], None] = lambda _connection: None
        self._threads: list[threading.Thread] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen()
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()

    def close(self) -> None:
        self.done.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.asked += 1
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.makefile("rb").readline()
            self.answer(connection)

    def drip(self, connection: socket.socket) -> None:
        """A byte now and then, without end."""
        while not self.done.wait(0.01):
            connection.sendall(b" ")

    def flood(self, connection: socket.socket) -> None:
        while not self.done.is_set():
            connection.sendall(b"x" * 65_536)

    def hang(self, _connection: socket.socket) -> None:
        self.done.wait()

    def chatter(self, connection: socket.socket) -> None:
        """Events that are about nothing, without end."""
        while not self.done.wait(0.01):
            connection.sendall(b'{"topic":"worker:no:1:status","type":"x"}\n')


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(str(tmp_path / "live.sock"))
    yield server
    server.close()


def look_at(value: object) -> None:
    """Raise unless every text in a value is printable."""
    if isinstance(value, str):
        assert value.isprintable()
        assert len(value) <= 4096
    elif isinstance(value, dict):
        for name, inner in value.items():
            look_at(name)
            look_at(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            look_at(inner)


def parse_all(answer: dict[str, Any]) -> None:
    """All parsers on one answer: values of their types, or nothing."""
    for worker in (answers.parse_workers(answer) or {}).values():
        *texts, progress_age_s, frame_age_s, metrics, note = worker
        assert all(type(field) is str for field in (*texts, note))
        for number in (progress_age_s, frame_age_s):
            assert number is None or (type(number) is float and isfinite(number) and number >= 0)
        assert all(abs(number) < 1e15 for number in metrics.values())
        assert len(metrics) <= 100
        look_at([*worker._replace(job=""), *metrics])
        assert len(worker.job) <= answers.MAX_JOB
    for run, label in answers.parse_labels(answer).items():
        assert type(run) is type(label) is str
        look_at(label)
    look_at(answers.parse_run(answer))
    for outcome in answers.parse_outcomes(answer).values():
        assert all(type(each) is str for each in (*outcome.quarantined, *outcome.refund))
        assert type(outcome.fail_pool) is bool
        look_at(outcome)
    for frame in answers.parse_frames(answer):
        assert type(frame) is dict
        look_at(frame)
    event = answers.parse_event(answer)
    look_at(event)
    line = describe(event)
    assert "\n" not in line


@settings(max_examples=times(300), deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), ANY))
@example({"workers": 5})
@example({"workers": [1, {"component": [], "status": {}, "current_job": 10**300}]})
@example({"outcomes": {"a": {"settled": True, "quarantined": 5, "refund": [1, "r"]}}})
@example({"outcomes": [1], "labels": {"a": ["x"], "b": POISON}, "label": 1, "job": {"x": 1}})
@example({"frames": ["HEALTH|" + "[" * 2000, 5, "HEALTH|{}", "x" * 10_000]})
def test_any_answer_is_a_value_or_nothing(answer: dict[str, Any]) -> None:
    parse_all(answer)


def test_lists_and_texts_are_cut() -> None:
    many = {
        "settled": True,
        "quarantined": ["x" * 9999] * 9999,
        "refund": [],
        "fail_pool": "y" * 9999,
    }
    outcome = answers.parse_outcomes({"outcomes": {"run": many}})["run"]
    assert len(outcome.quarantined) <= 100
    assert max(map(len, outcome.quarantined)) <= answers.MAX_TEXT


CHUNKS = st.lists(
    st.binary(max_size=40)
    | st.just(b"\n")
    | st.just(b'{"ok":true,')
    | st.just(b'"a":[')
    | st.just(b"]}\n")
    | ANY.map(lambda value: json.dumps({"ok": True, "x": value}).encode() + b"\n"),
    max_size=6,
)


@settings(
    max_examples=times(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(CHUNKS)
@example([b'{"ok":true,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"])
@example([b'{"ok":true}\n{"ok":true}\n'])
@example([b'{"ok":true,"n":1e999}\n'])
@example([b'{"ok":1}\n'])
@example([b"\xff\xfe{\x00}\x00\n"])
def test_any_bytes_are_an_answer_or_none(server: Server, chunks: list[bytes]) -> None:
    def answer(connection: socket.socket) -> None:
        for chunk in chunks:
            connection.sendall(chunk)

    server.answer = answer
    said = client.ask(server.path, {"op": "snapshot"}, timeout_s=DEADLINE_S)
    assert said == {} or said["ok"] is True
    parse_all(said)
    for event in client.subscribe(server.path, ["worker:*"], total_s=DEADLINE_S):
        parse_all(event)


@pytest.mark.parametrize("how", ["drip", "flood", "hang", "chatter"])
def test_a_batch_ends_with_the_first_question_without_an_answer(server: Server, how: str) -> None:
    """The controller waits once, however many it has to ask."""
    server.answer = getattr(server, how)
    batch = Batch(server.path, max_bytes=client.MAX_BRIEF)
    for _ in range(200):
        assert batch.ask({"op": "labels", "runs": []}, about=200, timeout_s=0.1) == {}
    assert batch.is_silent
    assert server.asked == 1


def test_a_refusal_is_an_answer(server: Server) -> None:
    server.answer = lambda connection: connection.sendall(b'{"ok":false,"error":"no"}\n')
    batch = Batch(server.path)
    assert [batch.ask({"op": "reset"}, timeout_s=DEADLINE_S) for _ in range(3)] == [{}] * 3
    assert server.asked == 3


def test_the_controllers_limit_is_the_smaller_one(server: Server) -> None:
    text = json.dumps({"ok": True, "x": "y" * 100_000}).encode() + b"\n"
    server.answer = lambda connection: connection.sendall(text)
    assert client.ask(server.path, {}, timeout_s=DEADLINE_S)["ok"] is True
    assert Batch(server.path, max_bytes=client.MAX_BRIEF).ask({}, timeout_s=DEADLINE_S) == {}
    brief = Batch(server.path, max_bytes=client.MAX_BRIEF)
    assert brief.ask({}, about=100, timeout_s=DEADLINE_S)["ok"] is True


def test_events_about_nothing_end_at_the_deadline(server: Server) -> None:
    server.answer = server.chatter
    with pytest.raises(TimeoutError):
        list(client.subscribe(server.path, ["worker:*"], timeout_s=5, total_s=0.2))
    server.answer = server.drip
    with pytest.raises(TimeoutError):
        list(client.subscribe(server.path, ["worker:*"], timeout_s=5, total_s=0.2))


def test_an_event_without_end_is_given_up_and_costs_what_it_is_long(server: Server) -> None:
    server.answer = server.flood
    assert list(client.subscribe(server.path, ["worker:*"], total_s=DEADLINE_S)) == []

    def in_pieces(connection: socket.socket) -> None:
        for byte in b'{"n":"' + b"x" * 50_000 + b'"}\n':
            connection.sendall(bytes([byte]))

    server.answer = in_pieces
    events = list(client.subscribe(server.path, ["worker:*"], total_s=DEADLINE_S))
    assert [len(event["n"]) for event in events] == [50_000]


def test_jobs_that_never_end_and_have_keys_of_another_type(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What members of nomarr-view are told about jobs is the supervisor's word."""
    monkeypatch.setattr(job_reading, "_WALK_S", 0.5)

    def lie(connection: socket.socket) -> None:
        job = {"id": f"tag:{server.asked:09}", "_key": 5, "path": [POISON], "raw": 7, "status": {}}
        answer = {"ok": True, "jobs": [job, 5, []], "counts": {"pending": POISON, "done": True}}
        connection.sendall(json.dumps(answer).encode() + b"\n")

    server.answer = lie
    reader = LiveReader(server.path)
    assert set(reader.count("tag").values()) == {0}
    look_at(view_job(reader.find("tag", "a")))
    with pytest.raises(NomarrError, match="the rest is left out"):
        look_at([view_job(job) for job in reader.walk("tag", "pending")])
    server.answer = lambda connection: connection.sendall(
        b'{"ok":true,"jobs":[{"id":"same","path":"x"}]}\n'
    )
    assert len(list(reader.walk("tag", "pending"))) == 2  # it does not go on


def test_a_link_in_place_of_the_socket_is_not_followed(server: Server, tmp_path: Path) -> None:
    """It may lead to any socket of root's, which would be believed."""
    link = tmp_path / "link.sock"
    link.symlink_to(server.path)
    assert client.ask(str(link), {"op": "snapshot"}) == {}
    with pytest.raises(client.NoSupervisor):
        client.Subscription(str(link), ["*"])
    assert server.asked == 0


def test_a_topic_takes_no_time_to_match() -> None:
    """A pattern with stars takes cubic time in the parts of a hostile topic."""
    from nomarr_systemd.live.protocol import Patterns

    patterns = Patterns(["*:*:*x"])
    assert not patterns.match("a:" * 100_000 + "a")
    assert patterns.match("a:b:cx")


HISTORY_NAMES = ("workers", "worker:tag:0", "health", "records", "jobs", "counts", "frames", "id")
ROW = "1|a|restart|exit|1|0|5|b|6|done||0|3|0|20|0||text|"
ROWS = st.lists(st.sampled_from([5, 0, -1, 10**300, "x", {"h": 1}, {"h": 0}, {"q": 1}, POISON]))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    answer=st.dictionaries(
        st.sampled_from(HISTORY_NAMES),
        st.dictionaries(
            st.sampled_from(HISTORY_NAMES),
            st.dictionaries(st.sampled_from(HISTORY_NAMES), ANY | st.lists(ANY | ROWS)) | ANY,
        )
        | ANY,
    )
)
@example(
    {"workers": {"worker:tag:0": {"health": [[5, {"h": 1}, 0, 0, 0], [5, {"h": 0}, 0, 0, 0]]}}}
)
@example({"workers": {"worker:tag:0": {"records": [ROW, ROW.replace("text", POISON), "1|2"]}}})
@example({"workers": {"worker:tag:0": {"records": [ROW.replace("|a|", f"|{POISON * 60}|")]}}})
def test_history_and_jobs_of_any_shape_are_shown_or_not(answer: dict[str, Any]) -> None:
    """To people by nomarrctl history --health, and to the page."""
    buckets, records = parse_answer(answer, "worker:tag:0")
    lines = list(draw(TAG, 0, 86_400_000, 50, buckets, records))
    look_at([unstyle(line) for line in lines])
    scope = make_scope(None, user=True)._replace(
        paths=Paths("/nowhere/run", "/nowhere/state", user=True)
    )
    config = Config(pools=(Pool("tag", command=("/bin/true",)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "ask", lambda *_, **__: {"ok": True, **answer})
        for found in (
            readers.read_history(scope, TAG, {}),
            readers.read_sparklines(scope, config),
            readers.list_jobs(scope, config, {}),
            readers.read_frames(scope, TAG),
        ):
            assert json.dumps(found, allow_nan=False).isascii()


@given(st.dictionaries(st.sampled_from(["frames", "drops", "frame_age_s"]), ANY))
@example({"drops": {"bad": "x", "worse": None, "long": 2}, "frames": 10**400})
@example({"frames": float("inf"), "frame_age_s": float("nan"), "drops": [1]})
def test_figures_of_any_shape_are_counted_or_not(said: dict[str, Any]) -> None:
    facts = dict.fromkeys(overview.FACTS, "") | {"ActiveState": "active", "LoadState": "loaded"}
    config = Config(pools=(Pool("tag", command=("/bin/true",)),))
    account = Account("worker:tag:0")
    view = worker_view.make_view(TAG, config, facts, None, "", Published(account), clock.now())
    seen = overview.Overview(
        [view],
        {},
        "active",
        True,
        1,
        accounts={"worker:tag:0": account},
        said={"worker:tag:0": said},
    )
    text = Metrics().render(readers.State(config, seen, 0.0), Sources({}, True, 0, 0)).decode()
    lines = [line for line in text.splitlines() if line.startswith("nomarr_worker_dropped_lines_")]
    if said.get("drops") == {"bad": "x", "worse": None, "long": 2}:
        assert lines == ['nomarr_worker_dropped_lines_total{pool="tag",worker="tag-0"} 2.0']
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rpartition(" ")[2]) < 1e19


def test_the_page_goes_on_after_an_event_of_no_shape(server: Server) -> None:
    events = (
        {"topic": "queue:jobs", "type": "snapshot", "jobs": 5},
        {"topic": "queue:jobs", "type": "snapshot", "jobs": [5, {"id": []}]},
        {"topic": [], "type": {}, "job": 7, "worker": 5},
        {"topic": "queue:jobs", "type": "job_update", "job": {"id": "a", "status": "running"}},
        {"topic": "queue:jobs", "job": {"id": "a", "status": "done", "updated_ms": 10**400}},
        {"type": "lost", "count": "many"},
    )

    def tell(connection: socket.socket) -> None:
        event = events[min(server.asked, len(events)) - 1]
        connection.sendall(json.dumps(event).encode() + b"\n")
        if server.asked > len(events):
            update = {"topic": "worker:tag:0:status", "type": "worker_update", "worker": {"id": 0}}
            connection.sendall(json.dumps(update).encode() + b"\n")

    server.answer = tell
    broker = Broker()

    async def follow() -> None:
        upstream = Upstream(server.path, broker, sleep=lambda _: asyncio.sleep(0.001))
        upstream.on_job = lambda _pool, seconds: float(seconds)  # type: ignore[assignment]
        task = asyncio.ensure_future(upstream.run())
        async with asyncio.timeout(60):
            while not list(broker.states("worker")):
                assert not task.done()
                await asyncio.sleep(0.005)
        task.cancel()

    asyncio.run(follow())
