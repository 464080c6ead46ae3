"""Identity: three spellings of one worker, and everything else refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import (
    Component,
    check_pool,
    next_start_job,
    parse_component,
    split_invocation,
)

pools = st.from_regex(r"[a-z][a-z0-9_]{0,30}", fullmatch=True)
components = st.builds(Component, pools, st.integers(0, 4095))


@given(components)
def test_every_spelling_leads_back(component: Component) -> None:
    for text in (component.component_id, component.instance, component.unit, str(component)):
        assert parse_component(text) == component
    assert parse_component(component.unit.removesuffix(".service")) == component


def test_the_spellings() -> None:
    component = Component("tag", 0)
    assert component.component_id == "worker:tag:0"
    assert component.instance == "tag-0"
    assert component.unit == "nomarr-worker@tag-0.service"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no pool and index"),
        ("tag", "no pool and index"),
        ("worker:tag", "no pool and index"),
        ("Tag-0", "small letter"),
        ("0tag-0", "small letter"),
        ("tag--0", "small letter"),
        ("worker:tag:0:status", "small letter"),
        ("worker::0", "small letter"),
        ("a" * 32 + "-0", "small letter"),
        ("tag-00", "leading zeros"),
        ("tag-", "not a number"),
        ("tag-x", "not a number"),
        ("tag-٣", "not a number"),
        ("tag-0\n", "not a number"),
        ("tag-4096", "above 4095"),
        ("tag-99999", "not a number"),
        ("nomarr-worker@tag-0.timer", "not a number"),
        ("nomarr-supervisor.service", "not a number"),
        ("/tag-0", "small letter"),
        ("../tag-0", "small letter"),
        ("tag 0", "no pool and index"),
    ],
)
def test_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadName) as caught:
        parse_component(text)
    assert why in str(caught.value)
    assert "worker:tag:0" in caught.value.hint


@given(st.text(max_size=200))
def test_any_text_is_a_component_or_a_bad_name(text: str) -> None:
    try:
        component = parse_component(text)
    except BadName as error:
        refusal = str(error)
    else:
        spellings = (component.component_id, component.instance, component.unit)
        assert text in (*spellings, component.unit.removesuffix(".service"))
        return
    assert refusal.isprintable()


def test_pools() -> None:
    check_pool("tag")
    with pytest.raises(BadName):
        check_pool("tag-2")


def test_start_jobs_are_numbered_after_their_invocation() -> None:
    run = "0123456789abcdef" * 2
    assert next_start_job(run) == f"{run}#1"
    assert next_start_job(f"{run}#1") == f"{run}#2"
    assert split_invocation(run) == (run, 0)
    assert split_invocation(f"{run}#12") == (run, 12)


@pytest.mark.parametrize("text", ["", "x" * 32, "A" * 32, "0" * 31, "0" * 32 + "#0", "0" * 33])
def test_bad_invocations(text: str) -> None:
    with pytest.raises(BadName):
        split_invocation(text)
