"""Documents from one store to another: all of them, also after an interruption, each compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from nomarr_systemd.cli.main import nomarrctl
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.health import Sample
from nomarr_systemd.ledger.health_history import append
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.ledger.past_records import find_newest, keep
from nomarr_systemd.operate import store_copy
from nomarr_systemd.operate.store_copy import Side, copy_domain
from nomarr_systemd.store.protocol import DOMAINS, HOSTS, POLICY_LEDGER, Domain, Store
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.incidents import close_first, open_second
from tests.support.places import Place

HOST = "a" * 32


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """A directory with documents of every kind, of one host."""
    directory = str(tmp_path / "old")
    with closing(SqliteStore(directory, "policy")) as policy:
        policy.insert(POLICY_LEDGER, {"_key": "worker:tag:0", "host": "", "text": "ä\0 🙂"})
        policy.insert("job_crashes", {"_key": "f" * 32, "host": "", "wall_ms": 1})
        with policy.batch():
            keep(policy, "worker:tag:0", "", ["1|a|b|c|1|2|3|d"])
    close_first(directory)
    open_second(directory)  # now one is among the past ones
    with closing(SqliteStore(directory, "work")) as work:
        work.add("jobs", [{"_key": f"tag:{n:04d}", "n": n} for n in range(1200)])
        work.insert("worker_claims", {"_key": "claim_1", "host": "", "job": "tag:0001"})
        work.insert("stats", {"_key": "pool:tag", "crashes": 2})
        work.insert("stats", {"_key": "health:index", "workers": {}})
        append(work, [Sample("worker:tag:0", 1, "healthy", "f" * 32, 0, 0, 0, "", b"")])
    return directory


def everything(store: Store, *collections: str) -> dict[str, list[dict[str, object]]]:
    return {
        name: [{k: v for k, v in doc.items() if k != "_rev"} for doc in store.find(name)]
        for name in collections
    }


POLICY, WORK = (
    tuple(each.name for each in DOMAINS[domain] if each.name != HOSTS)
    for domain in get_args(Domain)
)


def test_there_and_back(filled: str, place: Place, tmp_path: Path) -> None:
    """With the host in the keys on a server, and without it in SQLite."""
    host = HOST if place.server else ""
    back = str(tmp_path / "back")
    for domain, names in (("policy", POLICY), ("work", WORK)):
        with (
            closing(SqliteStore(filled, domain)) as old,  # type: ignore[arg-type]
            closing(place.open(domain)) as middle,  # type: ignore[arg-type]
            closing(SqliteStore(back, domain)) as new,  # type: ignore[arg-type]
        ):
            done = copy_domain(Side(old, ""), Side(middle, host), domain, lambda *_: None)  # type: ignore[arg-type]
            assert all(each.written == each.documents for each in done)
            if host and domain == "policy":
                assert middle.get(POLICY_LEDGER, f"worker:tag:0@{HOST}")
                there = IncidentStore(middle, HOST).history(10)
                assert [each.closed for each in there] == ["worker:tag:0 is healthy", ""]
                assert len(find_newest(middle, "worker:tag:0", HOST)) == 1
                middle.insert(POLICY_LEDGER, {"_key": "worker:tag:0@other", "host": "other"})
            done = copy_domain(Side(middle, host), Side(new, ""), domain, lambda *_: None)  # type: ignore[arg-type]
            assert everything(old, *names) == everything(new, *names)
            assert all(everything(old, *names).values()), "every collection has documents"
            assert sum(each.skipped for each in done) == (bool(host) and domain == "policy")


def test_an_interruption_and_a_change(filled: str, tmp_path: Path) -> None:
    with (
        closing(SqliteStore(filled, "work")) as old,
        closing(SqliteStore(str(tmp_path / "new"), "work")) as new,
    ):

        def stop(collection: str, documents: int) -> None:
            if collection == "jobs" and documents >= 1000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            copy_domain(Side(old, ""), Side(new, ""), "work", stop)
        doc = old.get("jobs", "tag:0003") or {}
        old.replace("jobs", {**doc, "changed": True})
        done = {
            each.collection: each
            for each in copy_domain(Side(old, ""), Side(new, ""), "work", lambda *_: None)
        }
        assert done["jobs"].documents == 1200
        assert done["jobs"].written == 201
        assert everything(old, *WORK) == everything(new, *WORK)


def test_what_differs_in_the_end_is_said(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Callable[..., int] = store_copy._write
    monkeypatch.setattr(store_copy, "_write", lambda s, c, docs: write(s, c, docs[:-1]))
    with (
        closing(SqliteStore(filled, "work")) as old,
        closing(SqliteStore(str(tmp_path / "new"), "work")) as new,
        pytest.raises(NomarrError, match="differs in the two stores"),
    ):
        copy_domain(Side(old, ""), Side(new, ""), "work", lambda *_: None)


def test_the_command(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["store", "copy", f"sqlite://{filled}", f"sqlite://{tmp_path}/new"]
    monkeypatch.setattr("nomarr_systemd.cli.store.find_running", lambda _: ["tag-0"])
    refused = CliRunner().invoke(nomarrctl, arguments)
    assert isinstance(refused.exception, NomarrError)
    assert "nomarrctl pause" in refused.exception.hint
    (tmp_path / "new" / "work").mkdir(parents=True)
    done = CliRunner().invoke(nomarrctl, [*arguments, "--while-running"])
    assert done.exception is None or done.exit_code == 0, done.output
    assert "jobs: 1200 documents, 1200 written" in done.output
    server = [*arguments[:3], "postgresql://user@host/database", "--while-running"]
    refused = CliRunner().invoke(nomarrctl, server)
    assert "do not belong on a command line" in str(refused.exception)
