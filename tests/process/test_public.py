"""The published accounts and their one reader: whole, missing, closed, and damaged in any way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import ascii_letters, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.json import JsonError, as_object, get_dict, get_int, get_str
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.ledger.public import list_published, read_published
from nomarr_systemd.ledger.publisher import Publisher, describe_past
from tests.support.capabilities import needs_root
from tests.support.moments import death
from tests.support.users import NOBODY, open_to_all, run_as

TAG = Component("tag", 0)
NOW = Moment(1_000_000, "b" * 32, 5_000)
ACCOUNT, _ = book_keeping.record_failure(Account(TAG.component_id), death("a" * 32), Rules(), NOW)
DOC = json.loads(json.dumps(book_keeping.to_doc(ACCOUNT)))


def test_the_past_is_one_plain_variable_of_the_unit(tmp_path: Path) -> None:
    """systemd reads it into the environment of a worker, whoever has written the records."""
    publisher = Publisher(str(tmp_path / "public"))
    publisher.publish(["worker:tag:0"], lambda keys: dict.fromkeys(keys, json.dumps(DOC)))
    [line] = (tmp_path / "past" / "tag-0").read_text().splitlines()
    expected = 'NOMARR_PAST="1 restart, last crash exit -1 at 1970-01-01 00:16:40 UTC"'
    assert line.rstrip(" ") == expected
    assert (tmp_path / "past" / "tag-0").stat().st_mode & 0o777 == 0o600
    publisher.publish(["worker:tag:0"], lambda _keys: {})
    assert list((tmp_path / "past").iterdir()) == []


def test_a_newer_past_is_written_over_the_old_one(tmp_path: Path) -> None:
    """In a sector of its own: a rename would have the next commit wait for its data. A file of
    another length, as an older version writes it, is replaced."""
    publisher = Publisher(str(tmp_path / "public"))
    past = tmp_path / "past" / "tag-0"

    def publish(restarts: int) -> str:
        text = json.dumps(DOC | {"restart_count": restarts})
        publisher.publish(["worker:tag:0"], lambda keys: dict.fromkeys(keys, text))
        return past.read_text()

    assert '"1 restart,' in publish(1)
    first = past.stat()
    assert '"123456 restarts,' in publish(123456)
    second = past.stat()
    assert (first.st_ino, first.st_size) == (second.st_ino, second.st_size)
    past.write_text('NOMARR_PAST="a text of another length"\n')
    assert '"2 restarts,' in publish(2)
    assert past.stat().st_size == first.st_size
    past.unlink()
    past.symlink_to(tmp_path / "elsewhere")
    assert '"3 restarts,' in publish(3)
    assert not past.is_symlink()
    assert publisher.error is None


@pytest.mark.parametrize("kind", ['x"\nLD_PRELOAD=/tmp/evil.so\n"', "$(id)", "\u00e9\u0663", "\\"])
def test_no_record_adds_a_variable(kind: str) -> None:
    row = ACCOUNT.records[-1]._replace(kind=kind).write()
    past = describe_past(json.dumps(DOC | {"records": [row]}))
    assert set(past) <= set(f"{ascii_letters}{digits} ,:-")


@pytest.mark.parametrize(
    "row",
    [
        5,
        None,
        "1|2",
        ACCOUNT.records[-1]._replace(wall_ms=10**30).write(),
        ACCOUNT.records[-1]._replace(wall_ms=-(10**30)).write(),
    ],
)
def test_a_damaged_record_has_no_past(row: object) -> None:
    """What a database server sends may have any shape."""
    assert describe_past(json.dumps(DOC | {"records": [row]})) == ""


def test_an_account_comes_back_as_it_was(tmp_path: Path) -> None:
    assert read_published(str(tmp_path), TAG) == (Account(TAG.component_id), "")
    (tmp_path / "tag-0.json").write_text(json.dumps(DOC))
    account, problem = read_published(str(tmp_path), TAG)
    assert not problem
    assert account.restart_count == 1
    assert account.records == ACCOUNT.records
    assert list_published(str(tmp_path)) == ({TAG}, "")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"component_id"',
        "[" * 100_000,
        json.dumps(DOC | {"component_id": "worker:tag:1"}),
        json.dumps(DOC | {"restart_count": "three"}),
        json.dumps(DOC | {"window": {"b": 7}}),
        json.dumps(DOC | {"records": ["1|2"]}),
        json.dumps(DOC | {"records": [7]}),
        json.dumps(DOC | {"last_due": [1]}),
    ],
)
def test_a_damaged_account_is_called_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "tag-0.json").write_text(content)
    account, problem = read_published(str(tmp_path), TAG)
    assert "are damaged" in problem
    assert account == Account(TAG.component_id)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from(sorted(DOC)), _JSON)
def test_no_document_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    directory = tmp_path_factory.mktemp("public")
    (directory / "tag-0.json").write_text(json.dumps(DOC | {name: value}))
    account, _ = read_published(str(directory), TAG)
    book_keeping.statistics(account, 300, NOW)
    assert account.records is not None


@needs_root
def test_what_is_closed_is_said_to_be_closed(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    file = tmp_path / "tag-0.json"
    file.write_text(json.dumps(DOC))
    file.chmod(0o640)
    assert "join the group" in run_as(NOBODY, lambda: read_published(str(tmp_path), TAG).problem)
    tmp_path.chmod(0o750)
    assert "join the group" in run_as(NOBODY, lambda: list_published(str(tmp_path))[1])


def test_getters_name_the_attribute() -> None:
    doc = {"name": "x", "n": True, "none": None}
    assert get_str(doc, "name") == "x"
    assert get_int(doc, "missing", 3) == 3
    with pytest.raises(JsonError, match="'n' is true, not a whole number"):
        get_int(doc, "n")
    with pytest.raises(JsonError, match="'none' is null, not a text"):
        get_str(doc, "none", "")
    with pytest.raises(JsonError, match="'missing' is missing"):
        get_dict(doc, "missing")
    with pytest.raises(JsonError, match="the answer is a list, not an object"):
        as_object([], "the answer")


def read_of(texts: Mapping[str, str]) -> Callable[[list[str]], Mapping[str, str]]:
    return lambda keys: {key: texts[key] for key in keys if key in texts}


def test_what_is_published_late_is_published_once_and_as_it_is_then(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path / "public"))
    other = DOC | {"component_id": "worker:tag:1"}
    texts = {"worker:tag:0": json.dumps(DOC), "worker:tag:1": json.dumps(other)}
    past = tmp_path / "past"
    with publisher.late():
        publisher.publish(texts, read_of(texts))
        assert not list((tmp_path / "public").iterdir())
        # What a unit reads at its next start does not wait.
        assert sorted(path.name for path in past.iterdir()) == ["tag-0", "tag-1"]
        texts["worker:tag:0"] = json.dumps(DOC | {"restart_count": 7})
        publisher.publish(["worker:tag:0"], read_of(texts))
    account, problem = read_published(str(tmp_path / "public"), TAG)
    assert (account.restart_count, problem) == (7, "")
    assert list_published(str(tmp_path / "public"))[0] == {TAG, Component("tag", 1)}
    assert "7 restarts" in (past / "tag-0").read_text()
    publisher.publish(["worker:tag:1"], read_of({}))
    assert list_published(str(tmp_path / "public"))[0] == {TAG}


def test_what_a_unit_reads_is_not_written_again_unless_it_changed(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path / "public"))
    texts = {"worker:tag:0": json.dumps(DOC)}
    publisher.publish(texts, read_of(texts))
    first = (tmp_path / "past/tag-0").stat().st_ino
    publisher.publish(texts, read_of(texts))
    assert (tmp_path / "past/tag-0").stat().st_ino == first
