"""What only concerns SQLite: durability, locks, a full disk, corruption, versions, modes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.errors import (
    SchemaTooNew,
    StaleRevision,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.ledger.publisher import Publisher
from nomarr_systemd.store.open import open_policy_store, open_store
from nomarr_systemd.store.protocol import POLICY_LEDGER, Domain, walk
from nomarr_systemd.store.sqlite.store import SqliteStore

DOC = {"_key": "worker:tag:0", "n": 1}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "state")


def pragma(store: SqliteStore, name: str) -> object:
    return store._file.run(lambda db: db.execute(f"PRAGMA {name}").fetchone()[0])


def test_every_commit_is_durable(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    assert pragma(store, "journal_mode") == "wal"
    assert pragma(store, "synchronous") == 2  # FULL
    store.close()


def test_files_and_modes(directory: str) -> None:
    for domain, name in (("policy", "ledger.db"), ("work", "work/work.db")):
        store = open_store(f"sqlite://{directory}", domain)  # type: ignore[arg-type]
        path = Path(directory, name)
        assert path.stat().st_mode & 0o777 == 0o600
        assert Path(f"{path}-wal").stat().st_mode & 0o777 == 0o600
        store.close()


def test_a_limit_beyond_all_bounds(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    assert len(store.find(POLICY_LEDGER, limit=10**30)) == 1
    store.close()


def test_the_policy_store_publishes_where_it_is_told(directory: str) -> None:
    store = open_policy_store(
        StoreSettings(f"sqlite://{directory}"), Publisher(f"{directory}/shown")
    )
    store.insert(POLICY_LEDGER, DOC)
    assert Path(directory, "shown", "tag-0.json").exists()
    store.close()


OLD_INDEXES = """
    DROP INDEX worker_claims_by_invocation; DROP INDEX jobs_by_pool_status;
    CREATE INDEX "worker_claims_0"
    ON "worker_claims"(CASE WHEN json_valid(body) THEN json_extract(body, '$.invocation') END, key);
    CREATE INDEX "worker_claims_1" ON "worker_claims"(json_extract(body, '$.component_id'), key);
    CREATE INDEX "jobs_0"
    ON "jobs"(json_extract(body, '$.pool'), json_extract(body, '$.status'), key);
""".replace("\n    ON", " ON")


def indexes_of(store: SqliteStore) -> set[str]:
    sql = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    return store._file.run(lambda db: {str(name) for (name,) in db.execute(sql)})


def test_a_database_of_an_older_version_gains_and_loses_indexes(directory: str) -> None:
    with closing(SqliteStore(directory, "work")) as store:
        now = indexes_of(store)
        store.insert("worker_claims", {"_key": "claim_a", "host": "alpha", "pool": "tag"})
        path = store.path
    with closing(sqlite3.connect(path)) as db:
        db.executescript(OLD_INDEXES)
    with closing(SqliteStore(directory, "work")) as store:
        # What was indexed before in the same way is not built again, whatever its name.
        assert indexes_of(store) == now - {"worker_claims_by_invocation"} | {"worker_claims_0"}
        assert len(store.find("worker_claims", {"host": "alpha"})) == 1


@pytest.mark.parametrize(
    ("domain", "collection", "field"),
    [
        ("policy", POLICY_LEDGER, "host"),
        ("work", "worker_claims", "host"),
        ("work", "worker_claims", "pool"),
    ],
)
def test_a_file_loses_an_index_that_each_write_had_to_keep(
    directory: str, domain: Domain, collection: str, field: str
) -> None:
    column = f"CASE WHEN json_valid(body) THEN json_extract(body, '$.{field}') END"
    with closing(SqliteStore(directory, domain)) as store:
        store.insert(collection, {"_key": "worker:tag:0", field: ""})
        path, now = store.path, indexes_of(store)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f'CREATE INDEX by_field ON "{collection}"({column}, key)')
    with closing(SqliteStore(directory, domain)) as store:
        assert indexes_of(store) == now
        assert len(store.find(collection, {field: ""})) == 1


def test_indexes_that_cannot_be_made_now_keep_nobody_away(directory: str) -> None:
    with closing(SqliteStore(directory, "work")) as store:
        path = store.path
    with closing(sqlite3.connect(path)) as db:
        db.executescript(OLD_INDEXES)
        db.execute("BEGIN IMMEDIATE")
        with closing(SqliteStore(directory, "work")) as store:
            assert store.find("worker_claims", {"host": "alpha"}) == []
            assert "jobs_by_pool_status" not in indexes_of(store)


def test_an_unknown_collection_is_refused(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    with pytest.raises(StoreError, match="no collection 'jobs'"):
        store.get("jobs", "x")
    store.close()


# Locks


HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_is_waited_for_and_then_reported(directory: str) -> None:
    store = SqliteStore(directory, "policy", patience_s=0.05)
    rev = store.insert(POLICY_LEDGER, DOC)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreUnavailable, match=r"stayed locked for 0\.05 s"):
            store.replace(POLICY_LEDGER, {**DOC, "_rev": rev, "n": 2})
        assert store.get(POLICY_LEDGER, "worker:tag:0") == {**DOC, "_rev": rev}  # readers read on
    finally:
        holder.kill()
        holder.communicate()
    store.replace(POLICY_LEDGER, {**DOC, "_rev": rev, "n": 2})
    store.close()


# Versions and strangers


def test_a_newer_schema_is_refused_and_untouched(directory: str) -> None:
    SqliteStore(directory, "policy").close()
    path = Path(directory, "ledger.db")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    with pytest.raises(SchemaTooNew, match="has schema 99; this version knows up to 1") as caught:
        SqliteStore(directory, "policy")
    assert "upgrade" in caught.value.hint
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(directory: str) -> None:
    os.makedirs(directory)
    path = Path(directory, "ledger.db")
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreRefused, match="another program"):
        SqliteStore(directory, "policy")
    assert path.read_bytes() == before


def test_a_file_that_was_only_created_is_completed(directory: str) -> None:
    os.makedirs(directory)
    Path(directory, "ledger.db").touch()
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    store.close()


def test_no_directory_to_write_in() -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot open /proc/nomarr/ledger\.db"):
        SqliteStore("/proc/nomarr", "policy")


def test_a_symbolic_link_is_not_followed(directory: str, tmp_path: Path) -> None:
    os.makedirs(directory)
    Path(directory, "ledger.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreRefused, match="symbolic link"):
        SqliteStore(directory, "policy")
    assert not (tmp_path / "elsewhere").exists()


# Corruption


def spoil(path: Path) -> None:
    """Settle the log into the file, then overwrite its first pages."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with path.open("r+b") as file:
        file.write(b"no database " * 1000)


def test_a_corrupt_file_is_set_aside_with_its_companions(
    directory: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    path = Path(directory, "ledger.db")
    spoil(path)
    Path(directory, "ledger.db-wal").write_bytes(b"old log")
    Path(directory, "ledger.db-shm").write_bytes(b"old index")
    store = SqliteStore(directory, "policy")
    assert store.find(POLICY_LEDGER) == []
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    aside = [name for name in os.listdir(directory) if ".corrupt-" in name]
    assert {name.rpartition("Z")[2] for name in aside} == {"", "-wal", "-shm"}
    (kept,) = (name for name in aside if name.endswith("Z"))
    assert Path(directory, kept).read_bytes().startswith(b"no database")
    assert Path(directory, f"{kept}-wal").read_bytes() == b"old log"
    said = capfd.readouterr().err
    assert kept in said
    assert "Masks in systemd still hold" in said


def test_corruption_that_shows_up_under_a_running_store(directory: str) -> None:
    store, other = (SqliteStore(directory, "policy") for _ in range(2))
    rev = store.insert(POLICY_LEDGER, DOC)
    assert other.get(POLICY_LEDGER, "worker:tag:0")
    spoil(Path(store.path))
    assert store.get(POLICY_LEDGER, "worker:tag:0") is None
    # The other one holds the file that was set aside: what it writes there would be lost.
    with pytest.raises(StaleRevision):
        other.replace(POLICY_LEDGER, {**DOC, "_rev": rev})
    other.insert(POLICY_LEDGER, DOC)
    assert store.get(POLICY_LEDGER, "worker:tag:0")
    assert len([n for n in os.listdir(directory) if ".corrupt-" in n and n.endswith("Z")]) == 1
    store.close()
    other.close()


@pytest.mark.parametrize("body", ["{garbage", "[]", "5", "null", "", b'{"a": "\xff"}'])
def test_a_document_that_is_no_json_is_put_aside_alone(
    directory: str, body: str | bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    store.insert(POLICY_LEDGER, {**DOC, "_key": "worker:tag:1"})
    with sqlite3.connect(store.path) as db:
        db.execute(
            f'UPDATE "{POLICY_LEDGER}" SET body = CAST(? AS TEXT) WHERE key = ?',
            (body, DOC["_key"]),
        )
    db.close()
    assert [doc["_key"] for doc in store.find(POLICY_LEDGER)] == ["worker:tag:1"]
    assert store.get(POLICY_LEDGER, "worker:tag:0") is None
    assert "moved to the table 'damaged'" in capfd.readouterr().err
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    with sqlite3.connect(store.path) as db:
        db.text_factory = bytes
        kept = db.execute("SELECT key, body FROM damaged").fetchall()
    db.close()
    assert kept == [(b"worker:tag:0", body.encode() if isinstance(body, str) else body)]


DEEP = '{"a":' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize("body", [DEEP, '{"a": NaN}', '{"a": "\\ud800"}', b"{}", 5, None])
@pytest.mark.parametrize("rev", ["r", None])
def test_rows_that_another_program_wrote_are_read_or_left_out(
    directory: str, body: object, rev: str | None
) -> None:
    """The workers' own database may have any tables: these have neither types nor constraints."""
    store = SqliteStore(directory, "work")
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute("DROP TABLE jobs")
        db.execute("CREATE TABLE jobs (key, rev, body)")
        rows = [("a", "r", '{"n": 1}'), ("b", rev, body), (7, "r", "{}"), ("c", "r", '{"n": 2}')]
        db.executemany("INSERT INTO jobs VALUES (?, ?, ?)", rows)
    db.close()
    store = SqliteStore(directory, "work")
    assert [doc["n"] for doc in store.find("jobs") if doc["_key"] in "ac"] == [1, 2]
    assert (store.get("jobs", "b") or {}).get("a") is None
    assert [doc["n"] for doc in walk(store, "jobs", {"n": 2})] == [2]
    store.close()


def test_no_more_is_read_at_once_than_fits(directory: str) -> None:
    store = SqliteStore(directory, "work")
    for number in range(5):
        store.insert("jobs", {"_key": str(number), "text": "x" * 300_000})
    small = SqliteStore(directory, "work", most=1 << 20)
    assert len(small.find("jobs", limit=3)) == 3
    with pytest.raises(StoreUnavailable, match="more than 1 MiB at once"):
        small.find("jobs")
    store.insert("jobs", {"_key": "a", "text": "x" * 2_000_000})
    with pytest.raises(StoreUnavailable, match="too big"):
        small.get("jobs", "a")
    assert store.get("jobs", "a")
    store.close()
    small.close()


ASIDE = """
import os, sys
from nomarr_systemd.store.sqlite.store import SqliteStore

store = SqliteStore(sys.argv[1], "policy")
done = 0
real = os.rename
def rename(*names):
    global done
    if done == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    done += 1
    real(*names)
os.rename = rename
store._file.set_aside("a test says so")
"""


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_setting_aside_killed_halfway_is_finished_by_the_next(
    directory: str, renamed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)  # in the log only
    killed = subprocess.run(
        [sys.executable, "-c", ASIDE, directory, str(renamed)], capture_output=True, check=False
    )
    assert killed.returncode == -9
    fresh = SqliteStore(directory, "policy")
    assert fresh.find(POLICY_LEDGER) == []
    assert "ledger.db is corrupt" in capfd.readouterr().err
    (aside,) = (n for n in os.listdir(directory) if n.endswith("Z"))
    # The old database is whole: it was never opened without its log.
    old = sqlite3.connect(Path(directory, aside))
    assert old.execute(f'SELECT key FROM "{POLICY_LEDGER}"').fetchall() == [("worker:tag:0",)]
    old.close()
    assert not Path(directory, "ledger.db.setting-aside").exists()
    store.close()
    fresh.close()


def test_a_note_cut_short_means_nothing_was_renamed(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    Path(directory, "ledger.db.setting-aside").write_text("half a na")
    store = SqliteStore(directory, "policy")
    assert store.get(POLICY_LEDGER, "worker:tag:0")
    assert not Path(directory, "ledger.db.setting-aside").exists()
    store.close()


def test_a_directory_that_is_taken_away_is_no_raw_error(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    os.rename(directory, f"{directory}-away")
    Path(directory).write_text("in the way")
    for call in (
        lambda: store.get(POLICY_LEDGER, "worker:tag:0"),
        lambda: store.insert(POLICY_LEDGER, {**DOC, "_key": "b"}),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    Path(directory).unlink()
    os.rename(f"{directory}-away", directory)
    assert store.get(POLICY_LEDGER, "worker:tag:0")
    store.close()


def test_nothing_of_a_lost_transaction_is_kept(directory: str) -> None:
    store = SqliteStore(directory, "policy")

    def lose() -> None:
        with store.batch():
            store.insert(POLICY_LEDGER, DOC)
            store.close()  # as an error of the disk would
            store.insert(POLICY_LEDGER, {**DOC, "_key": "worker:tag:1"})

    with pytest.raises(StoreUnavailable, match="was lost"):
        lose()
    assert store.find(POLICY_LEDGER) == []
    store.insert(POLICY_LEDGER, DOC)
    store.close()


def test_a_batch_on_a_file_that_was_lost_reports_itself_lost(directory: str) -> None:
    store, other = (SqliteStore(directory, "policy") for _ in range(2))

    def write_and_lose() -> None:
        with store.batch():
            store.insert(POLICY_LEDGER, DOC)
            other._file.set_aside("a test says so")

    with pytest.raises(StoreUnavailable, match="set aside meanwhile"):
        write_and_lose()
    assert store.find(POLICY_LEDGER) == []
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    other.close()


def test_a_handle_on_the_old_file_does_no_harm_to_the_new_one(directory: str) -> None:
    """Whoever closes a database last removes its log by name, and that name is the new one's:
    SQLite itself looks first whether its file was moved, and this holds it to that."""
    store, other, third = (SqliteStore(directory, "policy") for _ in range(3))
    store.insert(POLICY_LEDGER, {**DOC, "_key": "old"})
    store._file.set_aside("a test says so")
    store.insert(POLICY_LEDGER, DOC)
    assert third.get(POLICY_LEDGER, "worker:tag:0")  # it has noticed and moved to the new file
    other.close()  # it has not
    assert Path(directory, "ledger.db-wal").stat().st_size > 0
    fresh = SqliteStore(directory, "policy")
    assert fresh.get(POLICY_LEDGER, "worker:tag:0")
    for each in (store, third, fresh):
        each.close()


def test_two_handles_of_one_process_keep_their_locks(directory: str) -> None:
    """Opening and closing the file anew would drop the POSIX locks of the first handle."""
    store = SqliteStore(directory, "policy")
    with store.batch():
        store.insert(POLICY_LEDGER, DOC)
        SqliteStore(directory, "policy", patience_s=0.05).close()
        code = (
            "import sqlite3, sys\n"
            "db = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
            "db.execute('BEGIN IMMEDIATE')"
        )
        tried = subprocess.run(
            [sys.executable, "-c", code, store.path], capture_output=True, text=True, check=False
        )
        assert "database is locked" in tried.stderr
    store.close()


def test_a_removed_file_is_begun_again(directory: str) -> None:
    store = SqliteStore(directory, "policy")
    store.insert(POLICY_LEDGER, DOC)
    for name in os.listdir(directory):
        if name != "ledger.db.lock":
            Path(directory, name).unlink()
    assert store.get(POLICY_LEDGER, "worker:tag:0") is None
    store.insert(POLICY_LEDGER, DOC)
    store.close()
    again = SqliteStore(directory, "policy")
    assert again.get(POLICY_LEDGER, "worker:tag:0")
    again.close()


OPENER = """
import sys
from nomarr_systemd.store.protocol import POLICY_LEDGER, walk
from nomarr_systemd.store.sqlite.store import SqliteStore
print("ready", flush=True)
sys.stdin.readline()
store = SqliteStore(sys.argv[1], "policy", patience_s=30)
store.insert(POLICY_LEDGER, {"_key": sys.argv[2], "n": 1})
store.close()
"""


@pytest.mark.parametrize("corrupt", [False, True])
def test_eight_processes_begin_one_file(directory: str, corrupt: bool) -> None:
    if corrupt:
        SqliteStore(directory, "policy").close()
        spoil(Path(directory, "ledger.db"))
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, directory, f"k{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    try:
        for opener in openers:
            assert opener.stdout
            assert opener.stdout.readline() == "ready\n"
        for opener in openers:
            opener.stdin.write("go\n")  # type: ignore[union-attr]
            opener.stdin.flush()  # type: ignore[union-attr]
        for opener in openers:
            _, complaint = opener.communicate(timeout=60)
            assert opener.returncode == 0, complaint
    finally:
        for opener in openers:
            opener.kill()
            opener.communicate()
    store = SqliteStore(directory, "policy")
    assert len(store.find(POLICY_LEDGER)) == 8
    store.close()
    aside = [n for n in os.listdir(directory) if ".corrupt-" in n and n.endswith("Z")]
    assert len(aside) == corrupt


# A full disk: RLIMIT_FSIZE refuses to let files grow, as a full disk would

FILLER = """
import resource, signal, sys
from nomarr_systemd.core.errors import StoreUnavailable
from nomarr_systemd.store.protocol import POLICY_LEDGER, walk
from nomarr_systemd.store.sqlite.store import SqliteStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqliteStore(sys.argv[1], "policy")
rev = store.insert(POLICY_LEDGER, {"_key": "a", "text": "before"})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    store.replace(POLICY_LEDGER, {"_key": "a", "_rev": rev, "text": "x" * 1_000_000})
    print("kept")
except StoreUnavailable as error:
    print("refused:", error)
doc = store.get(POLICY_LEDGER, "a")
print(doc["text"], doc["_rev"] == rev)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.replace(POLICY_LEDGER, {**doc, "text": "after"})
print(store.get(POLICY_LEDGER, "a")["text"])
store.close()
"""


def test_a_full_disk_loses_nothing_and_passes(directory: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLER, directory], capture_output=True, text=True, check=True
    )
    refused, before, after = done.stdout.splitlines()
    assert refused.startswith("refused:")
    assert (before, after) == ("before True", "after")
