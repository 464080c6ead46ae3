"""What a report is made of, without a system: classes in words, the trace that tells most, hostile
text in every place that others can write to.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nomarr_systemd.cli.events import describe
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import LABELS, RESULTS, classify, name_signal, recall
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.text import clean
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.live.answers import parse_worker
from nomarr_systemd.postmortem.advice import advise
from nomarr_systemd.postmortem.repeats import choose_trace
from nomarr_systemd.postmortem.report import render, to_json
from nomarr_systemd.postmortem.report_model import DeathFacts, Repeats, Report
from nomarr_systemd.postmortem.run_log import Coredump, Line
from nomarr_systemd.postmortem.stack_traces import Trace
from nomarr_systemd.postmortem.witnesses import Witnesses
from tests.support.depth import times

RUN = "0123456789abcdef" * 2
PAGE = "why.html.j2"
NOW = Moment(1_800_000_000_000, "b" * 32, 1_000_000)
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
KINDS = sorted(
    {outcome.kind or "exit" for outcome in (*RESULTS.values(), *LABELS.values())}
    | {"signal", "config", "stop-timeout"}
)


def make(kind: str = "exit", code: int = 1, *, text: str = "", **fields: Any) -> Report:
    """A report with ``text`` wherever somebody else writes, clean as the readers make it."""
    shown = clean(text)
    record = Record(
        1, RUN, "restart", kind, code, 1000, NOW.wall_ms, NOW.boot_id, NOW.boottime_ms,
        "scheduled", 5, 0, 5, 0, 20, 0, 0, "restart 1/5",
    )  # fmt: skip
    facts = {"ActiveState": "failed", "LoadState": "loaded", "InvocationID": RUN}
    witnesses = Witnesses(
        Component("tag", 0), Paths("/run", "/var/lib/nomarr"), NOW, facts,
        Account("worker:tag:0"), "", parse_worker({"status": text}), (),
    )  # fmt: skip
    ended = recall(kind, code)._replace(invocation=RUN, run_ms=5)
    death = DeathFacts(ended, NOW.wall_ms, shown, 1 << 20, "1048576", 2.5)
    return Report(
        witnesses,
        "died",
        f"worker:tag:0 died: {death.line}",
        "failed",
        death,
        Trace("traceback", f"ValueError: {shown}", (f"  {shown}", f"ValueError: {shown}"), (), ()),
        True,
        "0" * 12,
        ({"status": text, "job": text, "seq": text, "metrics": {text: text}, text: [text]},),
        (Line(1_800_000_000_000_000, clean(text, 40), 7, 3, shown),),
        Coredump(7, "", shown),
        record,
        Repeats(2, 3, 1, NOW.wall_ms, NOW.wall_ms),
        notes=(shown,),
    )._replace(**fields)


@settings(max_examples=times(15), deadline=None)
@given(st.text(max_size=60), st.integers(40, 200))
@example("\x1b[31mred\x1b]0;owned\x07\x9b1m\u202e\u2066\x7f\r\n\x00", 80)
def test_hostile_text_reaches_neither_terminal_nor_page(text: str, width: int) -> None:
    report = make(text=text)
    shown = render(report, "why.txt.j2", width=width, fold=True)
    assert not OBEYED.search(shown)
    page = render(report, PAGE)
    assert not OBEYED.search(page)
    json.loads(json.dumps(to_json(report)))


def test_a_page_has_no_markup_of_others() -> None:
    page = render(make(text='<script>alert(1)</script>"><img src=x onerror=y>{{ 7*7 }}'), PAGE)
    assert "<script" not in page
    assert "<img" not in page
    assert "{{ 7*7 }}" in page


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_has_words_and_advice(kind: str) -> None:
    for code in (0, 1, 70, 75, 78, 203, 217, -1, -2, -3, -6, -9, -11, -35):
        ended = recall(kind, code)
        assert (ended.kind, ended.failed) == (kind, True)
        assert ended.line
        advice = advise(make(kind, code, coredump=None, trace=None))
        assert all(each.text or each.command for each in advice)
    assert render(make(kind), "why.txt.j2").startswith("worker:tag:0 ")


@pytest.mark.parametrize("result", [word for word in RESULTS if word != "success"])
def test_recall_says_what_classify_said(result: str) -> None:
    code, status = ("dumped", "SEGV") if result == "core-dump" else ("killed", "KILL")
    ended = classify(result, code, status)
    if ended.kind in ("signal", "core-dump", "oom"):
        assert recall(ended.kind, ended.code).line in ended.line
    assert recall(ended.kind, ended.code).kind == ended.kind


def test_signals_are_spelled_as_systemd_spells_them() -> None:
    assert [name_signal(n) for n in (9, 11, 34, 37, 64, 99)] == [
        "KILL", "SEGV", "RTMIN", "RTMIN+3", "RTMAX", "99",
    ]  # fmt: skip


def test_the_trace_that_tells_most() -> None:
    logged = Trace("traceback", "ValueError", (), (), ())
    stacks = Trace("stacks", "Fatal Python error: Aborted", (), (), ())
    assert choose_trace("exit", (logged,)) == (logged, True)
    assert choose_trace("watchdog", (stacks, logged)) == (stacks, True)
    # It was killed: what it logged before is not what ended it.
    assert choose_trace("signal", (logged,)) == (logged, False)
    assert choose_trace("signal", ()) == (None, False)


@given(
    st.dictionaries(
        st.sampled_from(["topic", "type", "timestamp", "worker", "system", "frames", "text"]),
        st.recursive(
            st.none() | st.integers() | st.text() | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["status", "errors", "current_job"]), inner)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_event_is_one_clean_line(event: dict[str, Any]) -> None:
    line = re.sub(r"\x1b\[[0-9;]*m", "", describe(event))
    assert line.isprintable()
