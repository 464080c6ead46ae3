"""What only concerns PostgreSQL: its schema, its users and their rights, its indexes, TLS."""

from __future__ import annotations

import os
import subprocess
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.store_url import PostgresUrl
from nomarr_systemd.core.errors import (
    BadDocument,
    NomarrError,
    SchemaTooNew,
    StoreRefused,
    StoreUnavailable,
)
from nomarr_systemd.store.postgresql import statements
from nomarr_systemd.store.postgresql.store import PostgresStore
from nomarr_systemd.store.protocol import DOMAINS, POLICY_LEDGER, Domain
from tests.support.places import DATABASE, Place
from tests.support.postgres import ADMIN, PASSWORD, Postgres, give, run_postgres
from tests.support.racers import RACERS, begin, run_race
from tests.support.users import open_to_all

SECRET = "of workers"
OPENED: list[PostgresStore] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def open_as(
    server: Postgres,
    user: str = ADMIN,
    password: str = PASSWORD,
    domain: Domain = "policy",
    **options: object,
) -> PostgresStore:
    host = str(options.pop("host", server.host))
    tls = bool(options.pop("tls", False))
    url = PostgresUrl(user, ((host, server.port),), DATABASE, tls)
    settings: dict[str, Any] = {"timeout_s": 20.0, **options}
    store = PostgresStore(url, domain, password=password, **settings)
    OPENED.append(store)
    return store


def whole_text(error: NomarrError) -> str:
    chain = "".join(traceback.format_exception(error))
    return f"{chain} {error!r} {error.args} {error.hint}"


class TestSchema:
    def test_tables_and_indexes_are_as_designed(self, postgres: Postgres) -> None:
        for domain in DOMAINS:
            with closing(open_as(postgres, domain=domain)) as store:
                store.find(DOMAINS[domain][0].name)
            schema = statements.SCHEMAS[domain]
            tables = postgres.sql(
                f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'", database=DATABASE
            )
            assert {name for (name,) in tables} == {"about", *(c.name for c in DOMAINS[domain])}
            indexes = postgres.sql(
                f"SELECT indexname FROM pg_indexes WHERE schemaname = '{schema}'", database=DATABASE
            )
            assert {name for (name,) in indexes} == {
                *(f"{c.name}_pkey" for c in DOMAINS[domain]),
                *statements.make_indexes(domain),
            }

    @pytest.mark.usefixtures("forks")
    def test_eight_processes_make_it_at_once(self, postgres: Postgres) -> None:
        names = run_race(begin, Place("", postgres, DATABASE))
        assert len(names) == RACERS
        with closing(open_as(postgres)) as store:
            assert len(store.find("meta")) == RACERS

    def test_a_missing_index_is_made(self, postgres: Postgres) -> None:
        open_as(postgres, domain="work").count("jobs", {})
        postgres.sql("DROP INDEX nomarr_work.jobs_by_pool_status", database=DATABASE)
        open_as(postgres, domain="work").count("jobs", {})
        sql = "SELECT 1 FROM pg_indexes WHERE indexname = 'jobs_by_pool_status'"
        assert postgres.sql(sql, database=DATABASE) == [(1,)]

    def test_a_newer_version_is_left_alone(self, postgres: Postgres) -> None:
        open_as(postgres).get("meta", "a")
        postgres.sql("UPDATE nomarr_policy.about SET version = 2", database=DATABASE)
        with pytest.raises(SchemaTooNew, match="version 2"):
            open_as(postgres).get("meta", "a")

    def test_tables_that_were_removed_are_made_again(self, postgres: Postgres) -> None:
        with closing(open_as(postgres)) as store:
            store.insert("meta", {"_key": "a"})
            postgres.sql("DROP SCHEMA nomarr_policy CASCADE", database=DATABASE)
            with pytest.raises(StoreUnavailable, match="does not exist"):
                store.get("meta", "a")
            assert store.get("meta", "a") is None

    def test_an_older_encoding_is_refused(self, postgres: Postgres) -> None:
        make = "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'"
        postgres.sql("DROP DATABASE IF EXISTS latin", make)
        url = PostgresUrl(ADMIN, ((postgres.host, postgres.port),), "latin", tls=False)
        store = PostgresStore(url, "policy", password=PASSWORD, timeout_s=20)
        with pytest.raises(StoreRefused, match="not UTF8"):
            store.get("meta", "a")


class TestRights:
    @pytest.fixture
    def users(self, postgres: Postgres) -> Iterator[Postgres]:
        """As docs/security.md has it."""
        postgres.sql(
            f"CREATE ROLE ledger LOGIN PASSWORD '{SECRET}'",
            f"CREATE ROLE worker LOGIN PASSWORD '{SECRET}'",
            f"REVOKE ALL ON DATABASE {DATABASE} FROM PUBLIC",
            f"GRANT CONNECT ON DATABASE {DATABASE} TO ledger, worker",
        )
        yield postgres
        schemas = ", ".join(statements.SCHEMAS.values())
        postgres.sql(
            f"DROP SCHEMA IF EXISTS {schemas} CASCADE",
            f"REVOKE ALL ON DATABASE {DATABASE} FROM ledger, worker",
            f"GRANT CONNECT, TEMPORARY ON DATABASE {DATABASE} TO PUBLIC",  # as it was
            "DROP ROLE ledger, worker",
            database=DATABASE,
        )

    def test_each_has_its_own_schema_and_no_other(self, users: Postgres) -> None:
        users.sql(
            "CREATE SCHEMA nomarr_policy AUTHORIZATION ledger",
            "CREATE SCHEMA nomarr_work AUTHORIZATION worker",
            database=DATABASE,
        )
        ledger = open_as(users, "ledger", SECRET)
        work = open_as(users, "worker", SECRET, "work")
        ledger.insert("meta", {"_key": "a"})
        work.insert("jobs", {"_key": "a"})
        assert not work.may_read(POLICY_LEDGER)
        with pytest.raises(StoreRefused, match="permission denied") as caught:
            open_as(users, "worker", SECRET).get("meta", "a")
        assert 'CREATE SCHEMA nomarr_policy AUTHORIZATION "worker"' in caught.value.hint
        users.sql("GRANT ledger TO worker", database=DATABASE)
        assert work.may_read(POLICY_LEDGER)
        users.sql("REVOKE ledger FROM worker", "ALTER ROLE worker SUPERUSER", database=DATABASE)
        assert work.may_read(POLICY_LEDGER)

    def test_who_may_not_make_the_schema_is_told_what_to_do(self, users: Postgres) -> None:
        with pytest.raises(StoreRefused, match="no right to nomarr_policy") as caught:
            open_as(users, "ledger", SECRET).get("meta", "a")
        assert DATABASE in caught.value.hint
        users.sql(caught.value.hint.partition(": ")[2], database=DATABASE)
        assert open_as(users, "ledger", SECRET).get("meta", "a") is None

    def test_no_such_database(self, users: Postgres) -> None:
        url = PostgresUrl("ledger", ((users.host, users.port),), "none", tls=False)
        with pytest.raises(StoreRefused, match="does not exist") as caught:
            PostgresStore(url, "policy", password=SECRET, timeout_s=20).get("meta", "a")
        assert "createdb" in caught.value.hint

    def test_no_right_to_connect(self, users: Postgres) -> None:
        users.sql("REVOKE CONNECT ON DATABASE nomarr FROM worker")
        with pytest.raises(StoreRefused, match="permission denied for database"):
            open_as(users, "worker", SECRET).get("meta", "a")


class TestCredentials:
    @pytest.mark.parametrize("user", [ADMIN, "nobody we know"])
    def test_a_wrong_password_is_refused_and_said_nowhere(
        self, postgres: Postgres, user: str
    ) -> None:
        wrong = "not the right one"
        store = open_as(postgres, user, wrong)
        with pytest.raises(StoreRefused, match="password authentication failed") as caught:
            store.get("meta", "a")
        assert "password_file" in caught.value.hint
        assert wrong not in whole_text(caught.value) + repr(store)

    def test_the_environment_leads_nowhere_else(
        self, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "pass").write_text(f"*:*:*:*:{PASSWORD}\n")
        (tmp_path / "pass").chmod(0o600)
        for name, value in {
            "PGHOST": "host.invalid",
            "PGHOSTADDR": "192.0.2.1",
            "PGPORT": "1",
            "PGUSER": "x",
            "PGPASSWORD": PASSWORD,
            "PGPASSFILE": str(tmp_path / "pass"),
            "PGSSLMODE": "require",
            "PGOPTIONS": "-c search_path=public",
            "PGTARGETSESSIONATTRS": "standby",
            "PGDATABASE": "x",
            "PGCLIENTENCODING": "LATIN1",
        }.items():
            monkeypatch.setenv(name, value)
        with closing(open_as(postgres)) as store:
            store.insert("meta", {"_key": "a", "t": "ä€"})
            assert (store.get("meta", "a") or {})["t"] == "ä€"
        with pytest.raises(StoreRefused):
            open_as(postgres, password="wrong").get("meta", "a")


class TestDocuments:
    def test_an_indexed_text_that_no_index_can_hold_is_refused(self, postgres: Postgres) -> None:
        store = open_as(postgres, domain="work")
        long = os.urandom(6000).hex()
        with pytest.raises(BadDocument):
            store.insert("jobs", {"_key": "a", "pool": long})
        assert store.get("jobs", "a") is None

    def test_two_writers_that_wait_for_each_other(self, postgres: Postgres) -> None:
        """The server ends one of them: for its caller the document was changed meanwhile."""
        first, second = (open_as(postgres, timeout_s=20) for _ in range(2))
        revs = {key: first.insert("meta", {"_key": key}) for key in "ab"}
        barrier = threading.Barrier(2)
        outcomes: list[str] = []

        def write(store: PostgresStore, keys: str) -> None:
            try:
                with store.batch():
                    store.replace("meta", {"_key": keys[0], "_rev": revs[keys[0]], "n": 1})
                    barrier.wait(20)
                    store.replace("meta", {"_key": keys[1], "_rev": revs[keys[1]], "n": 1})
                outcomes.append("done")
            except NomarrError as error:
                outcomes.append(error.code)

        threads = [
            threading.Thread(target=write, args=pair) for pair in ((first, "ab"), (second, "ba"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["done", "stale-revision"]
        assert [doc.get("n") for doc in first.find("meta")] == [1, 1]

    def test_a_batch_with_a_failed_statement_is_undone_and_said(self, postgres: Postgres) -> None:
        store = open_as(postgres, domain="work")

        def write() -> None:
            with store.batch():
                store.insert("stats", {"_key": "a"})
                with pytest.raises(BadDocument):
                    store.insert("jobs", {"_key": "b", "pool": os.urandom(6000).hex()})

        with pytest.raises(StoreUnavailable, match="undone"):
            write()
        assert store.get("stats", "a") is None
        store.insert("stats", {"_key": "a"})

    def test_what_another_batch_holds_is_passed_over(self, postgres: Postgres) -> None:
        first, second = (open_as(postgres, domain="work") for _ in range(2))
        first.add("jobs", [{"_key": key, "pool": "tag", "status": "pending"} for key in "abc"])
        where = {"pool": "tag", "status": "pending"}
        with first.batch():
            assert first.first("jobs", where)[0]["_key"] == "a"
            with second.batch():
                assert second.first("jobs", where)[0]["_key"] == "b"
        with second.batch():
            assert second.first("jobs", where)[0]["_key"] == "a"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    request += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    for name in ("here", "there"):
        key = directory / f"{name}.key"
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", str(key), "-out", str(directory / f"{name}.pem")]
        subprocess.run(
            [*request, *names, *files],
            check=True,
            capture_output=True,
        )
        give(key)
        key.chmod(0o600)
    open_to_all(directory)
    return directory


@pytest.fixture(scope="module")
def secured(certificates: Path) -> Iterator[Postgres]:
    with run_postgres(
        ssl="on",
        ssl_cert_file=str(certificates / "here.pem"),
        ssl_key_file=str(certificates / "here.key"),
    ) as running:
        running.server.sql(f"CREATE DATABASE {DATABASE}")
        hba = running.data / "pg_hba.conf"
        hba.write_text("hostssl all all all scram-sha-256\n")
        running.server.sql("SELECT pg_reload_conf()")
        yield running.server


class TestTls:
    def test_certificates_are_checked(self, secured: Postgres, certificates: Path) -> None:
        here = str(certificates / "here.pem")
        with closing(open_as(secured, tls=True, host="localhost", ca_file=here)) as store:
            store.insert("meta", {"_key": "a"})
            assert store.get("meta", "a")
        for ca_file in (str(certificates / "there.pem"), None, "/nowhere"):
            with pytest.raises(StoreRefused, match="certificate") as caught:
                open_as(secured, tls=True, host="localhost", ca_file=ca_file).get("meta", "a")
            assert "ca_file" in caught.value.hint
        with pytest.raises(StoreRefused, match="does not match host name"):
            open_as(secured, tls=True, host="127.0.0.1", ca_file=here).get("meta", "a")
        with pytest.raises(StoreRefused, match=r"pg_hba\.conf") as caught:
            open_as(secured).get("meta", "a")
        assert "postgresql+tls://" in caught.value.hint

    def test_a_server_without_tls_is_refused(self, postgres: Postgres, certificates: Path) -> None:
        here = str(certificates / "here.pem")
        with pytest.raises(StoreRefused, match="does not support SSL"):
            open_as(postgres, tls=True, host="localhost", ca_file=here).get("meta", "a")
