"""A job as it is shown: whatever is in the document, each field has its type and is one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nomarr_systemd.core.errors import KeyExists, StaleRevision, StoreUnavailable
from nomarr_systemd.core.job import make_job
from nomarr_systemd.jobs.queue import MAX_TRIES, write_again
from nomarr_systemd.jobs.view import MAX_LONG, JobView, view_job

POISON = "\x1b[2J\r\nforged\x9b\u202e\x00\ud800"
FIELDS = (
    "_key", "pool", "path", "raw", "status", "attempts", "component_id", "updated_wall_ms",
    "result", "error", "crashes", "type", "message", "cause", "invocation",
)  # fmt: skip
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(POISON),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(FIELDS), ANY))
@example({"_key": POISON, "path": {"a": 1}, "raw": "5", "status": [], "updated_wall_ms": "abc"})
@example({"raw": "/w==", "error": POISON, "crashes": 5, "attempts": POISON})
@example({"error": {"type": [], "message": {}}, "crashes": [5, {"cause": [POISON]}]})
def test_any_document_can_be_shown(doc: dict[str, Any]) -> None:
    shown = view_job(doc)
    for field in (*shown, *(text for crash in shown.crashes for text in crash)):
        assert isinstance(field, (str, int, tuple, type(None)))
        if isinstance(field, str):
            assert field.isprintable()
            assert len(field) <= MAX_LONG + 300


def test_a_deep_document_can_be_shown() -> None:
    deep: Any = POISON
    for _ in range(900):
        deep = [deep]
    shown = view_job({"result": deep, "error": deep, "crashes": deep})
    assert shown.result == shown.error == "(nested too deeply to be shown)"


def test_a_sound_document_is_shown_as_it_is() -> None:
    doc = make_job("tag", "/music/a.flac", 7) | {"error": {"type": "E", "message": "m"}}
    doc |= {"crashes": [{"component_id": "c", "cause": "x", "invocation": "i", "wall_ms": 1}]}
    shown = view_job(doc | {"result": {"n": 1}})
    assert shown == JobView(
        doc["_key"], "/music/a.flac", "pending", 0, "", "", 7, "E: m", "m", '{"n": 1}',
        (("c", "x", "i"),),  # type: ignore[arg-type]  # a Crash
    )  # fmt: skip


@pytest.mark.parametrize("error", [StaleRevision("x"), KeyExists("x")])
def test_a_write_that_is_always_overtaken_is_given_up(error: Exception) -> None:
    tries = 0

    def write() -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(StoreUnavailable, match="1000 times"):
        write_again(write)
    assert tries == MAX_TRIES


def test_a_write_that_gets_through_is_done_once() -> None:
    failures = [StaleRevision("x"), KeyExists("x")]

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    assert write_again(write) == "written"
