"""A database server that is slow, endless, mad or hostile: the store is away then, whatever it
answers, within bounded time and memory. Security findings 11, 16, 21 and 23.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.errors import StoreError, StoreRefused, StoreUnavailable
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host.machine import APPLICATION_ID, host_of
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.arango.store import ArangoStore
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.store.protocol import POLICY_LEDGER
from tests.arango_standin.running import Server
from tests.support.places import DATABASE, SECRET, ArangoOpener

TIMEOUT_S = 0.4
HOST = "h"
WORKER = "worker:tag:0"
NOW = Moment(1_700_000_000_000, "b" * 32, 1000)
SEEDS = 400
ODD = [
    "\xff\xfe",
    "5",
    "{{{",
    "{}",
    "[]",
    "null",
    '{"_key":5,"_rev":"a"}',
    '{"_key":"a","_rev":{}}',
    '{"_key":"b","_rev":"a"}',
    '{"_rev":"a","_key":"a","x":NaN}',
    '{"_rev":"a","_key":"a","x":"\\ud800"}',
    '{"result":[{"_key":"a","_rev":"a"}],"hasMore":true,"id":"1"}',
    '{"result":[],"hasMore":true,"id":"1"}',
    '{"result":5,"hasMore":false}',
    '{"result":[5],"hasMore":false}',
    '{"result":["x"],"hasMore":"perhaps","id":[]}',
    '{"created":"many","ignored":[],"errors":0,"empty":0,"updated":0}',
    '{"result":[],"hasMore":false,"extra":{"stats":{"modified":"x"}}}',
]


def die(number: int) -> Death:
    return Death(WORKER, f"{number:032x}", "exit", 1)


@pytest.fixture
def store(first: Server, open_arango: ArangoOpener) -> ArangoStore:
    """Open and with its schema; the server is told to misbehave afterwards."""
    store = open_arango(first)
    store.insert("meta", {"_key": "a"})
    store._find_s = TIMEOUT_S  # for one that has no end
    return store


def hurry(store: ArangoStore) -> None:
    """Wait no longer: what is asked from here on is never answered."""
    store._link._sender.request_timeout = TIMEOUT_S


def calls(store: ArangoStore) -> list[Callable[[], object]]:
    rev = "_abc"
    return [
        lambda: store.get("meta", "a"),
        lambda: store.insert("meta", {"_key": "new"}),
        lambda: store.replace("meta", {"_key": "a", "_rev": rev}),
        lambda: store.find("meta"),
        lambda: store.find("meta", {"host": HOST}, limit=3),
        lambda: store.count("job_crashes", {"job": "x"}),
        lambda: store.add("meta", [{"_key": "b"}]),
        lambda: store.append("job_crashes", [{"n": 1}]),
        lambda: store.prune("job_crashes", "wall_ms", 5),
    ]


class TestAnswers:
    @pytest.mark.parametrize("body", ODD)
    def test_an_answer_of_another_shape_means_away(
        self, first: Server, store: ArangoStore, body: str
    ) -> None:
        """What cannot be meant is refused; the few calls that it would do for take it."""
        first.fault(kind="body", status=200, body=body)
        refused = 0
        for call in calls(store):
            try:
                call()
            except StoreUnavailable:
                refused += 1
        assert refused >= 5

    @pytest.mark.parametrize("kind", ["trickle-head", "trickle-body"])
    def test_a_byte_now_and_then_is_no_answer(
        self, first: Server, store: ArangoStore, kind: str
    ) -> None:
        """That it returns at all is the proof: the server goes on for ever."""
        first.fault(kind=kind, status=200)
        hurry(store)
        for call in calls(store)[:3]:
            with pytest.raises(StoreUnavailable, match="timed out"):
                call()

    def test_a_ledger_that_is_always_changed_by_others(
        self, first: Server, store: ArangoStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nomarr_systemd.ledger.ledger._PATIENCE_MS", 50)
        first.fault(kind="answer", match="POST", status=409, number=1210)
        with pytest.raises(StoreUnavailable):
            Ledger(store, host=HOST).record_failure(die(1), Rules())

    def test_a_document_that_is_never_gone(
        self, first: Server, store: ArangoStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nomarr_systemd.ledger.ledger._PATIENCE_MS", 50)
        key = f"{WORKER}@{HOST}"
        first.fault(kind="body", status=200, body=f'{{"_key":"{key}","_rev":"a"}}')
        with pytest.raises(StoreUnavailable, match="cannot be removed"):
            Ledger(store, host=HOST).remove_restart_state(WORKER)

    def test_what_it_says_of_an_error_is_one_line_that_can_be_printed(
        self, first: Server, store: ArangoStore
    ) -> None:
        message = "boom\n<0>EMERGENCY \x1b[2J\x07\u202e" + "x" * 100_000
        for status, number in ((500, 4), (503, 503), (401, 11), (404, 1203), (400, 600)):
            first.fault(kind="answer", status=status, number=number, message=message)
            for call in calls(store):
                with pytest.raises(StoreError) as caught:
                    call()
                assert str(caught.value).isprintable()
                assert caught.value.hint.isprintable()
                assert len(str(caught.value)) < 1000

    def test_publishing_stops_when_it_goes_away(
        self, first: Server, open_arango: ArangoOpener, tmp_path: Path
    ) -> None:
        """Else each of 4096 accounts would wait for its time-out."""
        publisher = Publisher(str(tmp_path / "public"), host=HOST)
        store = open_arango(first, publisher=publisher)
        accounts = [{"_key": f"worker:tag:{n}@{HOST}", "host": HOST} for n in range(200)]
        store.add(POLICY_LEDGER, accounts)
        first.fault(kind="hang", match="cursor/")  # the first page begins, and does not go on
        store._link._sender.request_timeout = 2.0
        with pytest.raises(StoreUnavailable):
            store.publish_all()
        assert len(first.seen()) == 2


class TestDocuments:
    """Of accounts and incidents, as the server hands them out."""

    @pytest.fixture
    def account(self, store: ArangoStore) -> dict[str, object]:
        ledger = Ledger(store, host=HOST, clock=lambda: NOW)
        for number in range(3):
            ledger.record_failure(die(number), Rules())
        doc = store.get(POLICY_LEDGER, f"{WORKER}@{HOST}")
        assert doc is not None
        return doc

    @pytest.mark.parametrize(
        "wrong",
        [
            {"component_id": None},
            {"component_id": "worker:tag:1"},
            {"component_id": ["worker:tag:0"]},
            {"restart_count": "5"},
            {"restart_count": -1},
            {"attempts": 10**18},
            {"k": 1.5},
            {"window": []},
            {"window": {"b": 5}},
            {"window": {"b": ["x", 1]}},
            {"window": {"b": ["x", "1", 2]}},
            {"last_due": 5},
            {"last_due": [1, 2]},
            {"last_due": ["a", "b", "c"]},
            {"failure_reason": 5},
            {"failure_reason": "x" * 100_000},
            {"records": 5},
            {"records": [5]},
            {"records": ["1|2"]},
            {"records": ["x" * 100_000]},
            {"records": ["1|a|restart|exit|1|1|1|b|1|gone|1|1|1|1|1|1|1|text|"]},
            {"host": 5},
        ],
    )
    def test_an_account_of_another_shape_means_away(
        self, store: ArangoStore, account: dict[str, object], wrong: dict[str, object]
    ) -> None:
        store.replace(POLICY_LEDGER, {**account, **wrong})
        ledger = Ledger(store, host=HOST)
        with pytest.raises(StoreUnavailable, match="damaged"):
            ledger.account(WORKER)
        with pytest.raises(StoreUnavailable, match="damaged"):
            ledger.record_failure(die(9), Rules())

    def test_a_good_account_with_fields_of_a_newer_version(
        self, store: ArangoStore, account: dict[str, object]
    ) -> None:
        store.replace(POLICY_LEDGER, {**account, "newer": {"any": ["thing"]}})
        assert len(Ledger(store, host=HOST).account(WORKER).records) == 3

    @pytest.mark.parametrize(
        "wrong",
        [
            {"canary": "nobody"},
            {"canary": 5},
            {"members": 5},
            {"members": [5]},
            {"refunds": [["worker:tag:0"]]},
            {"refunds": "ab"},
            {"opened": [1]},
            {"code": "x"},
            {"pool": None},
        ],
    )
    def test_an_incident_of_another_shape_means_away(
        self, store: ArangoStore, wrong: dict[str, object]
    ) -> None:
        incidents = IncidentStore(store, HOST)
        incident = Incident("tag", "exit", 1, NOW, WORKER, (WORKER,), ((WORKER, "a" * 32),))
        assert incidents.open(incident) == incident
        doc = store.get("meta", f"incident_tag@{HOST}")
        assert doc is not None
        store.replace("meta", {**doc, **wrong})
        for call in (incidents.incidents, lambda: incidents.get("tag")):
            with pytest.raises(StoreUnavailable, match="damaged"):
                call()


def test_answers_with_one_thing_wrong(
    first: Server, open_arango: ArangoOpener, tmp_path: Path
) -> None:
    """Fuzzed: whatever is wrong in an answer, nothing but a StoreError comes of it."""
    publisher = Publisher(str(tmp_path), host=HOST)
    store = open_arango(first, publisher=publisher)
    ledger, incidents = Ledger(store, host=HOST), IncidentStore(store, HOST)
    incident = Incident("tag", "exit", 1, NOW, WORKER, (WORKER,), ((WORKER, "a" * 32),))
    ledger.record_failure(die(0), Rules())
    incidents.open(incident)
    kept = {
        path: first.call("GET", path).body
        for path in (
            f"/_db/{DATABASE}/_api/document/{POLICY_LEDGER}/{WORKER}@{HOST}",
            f"/_db/{DATABASE}/_api/document/meta/incident_tag@{HOST}",
        )
    }
    acts: list[Callable[[], object]] = [
        lambda: ledger.record_failure(die(seed), Rules()),
        lambda: [each.records for each in ledger.accounts()],
        lambda: ledger.account(WORKER).records,
        incidents.incidents,
        lambda: incidents.add("tag", "worker:tag:1"),
        lambda: ledger.refund(WORKER, f"{0:032x}", "why"),
        store.publish_all,
        lambda: store.insert("job_crashes", {"wall_ms": 1, "_key": f"k{seed}"}),
        lambda: store.prune("job_crashes", "wall_ms", 5),
    ]
    refused = 0
    for seed in range(SEEDS):
        first.fault(kind="mutate", seed=seed)
        try:
            acts[seed % len(acts)]()
        except StoreError:
            refused += 1
        first.fault()
        if seed % 20 == 19:  # what was read wrong may have been written back so
            for path, body in kept.items():
                first.call("PUT", path, body)
    assert refused > SEEDS / 4
    assert ledger.account(WORKER).records


MEMORY = """\
import sys
from nomarr_systemd.config.store_url import parse_store_url
from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.store.arango.store import ArangoStore

def peak_mib():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) / 1024

store = ArangoStore(parse_store_url(sys.argv[1]), "policy", password=sys.argv[2], timeout_s=60)
before = peak_mib()
try:
    store.find("meta")
except StoreUnavailable as error:
    print(peak_mib() - before, error)
"""


@pytest.mark.parametrize(
    ("fault", "most_mib"),
    [({"kind": "endless"}, 40), ({"kind": "body", "body": f"[{'[],' * 1_390_000}[]]"}, 250)],
)
def test_memory_is_bounded(first: Server, fault: dict[str, str], most_mib: int) -> None:
    """By the size of an answer; and as many objects as fit into one are not many."""
    first.fault(**fault, status=200)
    url = f"arangodb://root@127.0.0.1:{first.port}/{DATABASE}"
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, url, first.password],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    grown, _, error = done.stdout.partition(" ")
    print(f"{fault['kind']}: {grown} MiB; {error}")
    assert float(grown) < most_mib


# The driver, and who we are


def test_a_missing_driver_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "arango" or name.startswith("nomarr_systemd.store.arango"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "arango", None)
    settings = StoreSettings("arangodb://a@localhost/d", work_user="w")
    with pytest.raises(StoreRefused, match="driver is missing") as caught:
        open_work_store(settings)
    assert "python3-arango" in caught.value.hint


def test_workers_never_open_a_store_as_the_ledgers_user(tmp_path: Path) -> None:
    """Also not of a configuration that an older version has applied."""
    with pytest.raises(StoreRefused, match="no user of their own"):
        open_work_store(StoreSettings("arangodb://a@localhost/d", str(tmp_path / "password")))


def test_who_has_a_right_to_the_ledger(
    first: Server, store: ArangoStore, open_arango: ArangoOpener
) -> None:
    assert store.may_read(POLICY_LEDGER)
    assert open_arango(first, user="app", password=SECRET).may_read(POLICY_LEDGER)
    worker = open_arango(first, user="worker", password=SECRET)
    assert not worker.may_read(POLICY_LEDGER)
    assert worker.may_read("meta")


def test_the_machine_id_stays_at_home() -> None:
    with open("/etc/machine-id") as file:
        machine = file.read().strip()
    host = host_of(StoreSettings("arangodb://a@localhost/d"))
    assert host not in ("", machine)
    assert host_of(StoreSettings()) == ""
    command = ["systemd-id128", "machine-id", f"--app-specific={APPLICATION_ID.hex()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        assert host == done.stdout.strip()


@pytest.mark.parametrize("text", ["", "uninitialized\n", "abc\n", "00" * 40])
def test_without_a_machine_id_a_host_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    import builtins

    (tmp_path / "id").write_text(text)
    real = builtins.open
    monkeypatch.setattr(
        "builtins.open",
        lambda name, *args, **options: real(
            tmp_path / "id" if name == "/etc/machine-id" else name, *args, **options
        ),
    )
    assert host_of(StoreSettings("arangodb://a@localhost/d")) == "unknown"
