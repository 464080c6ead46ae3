"""core.named_tuple.NamedTuple behaves as typing.NamedTuple does, for whatever fields and calls."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core import named_tuple
from nomarr_systemd.core.health import Transition

NAMES = [f"field_{number}" for number in range(12)] + ["cls", "new", "count_"]


def make_class(base: Any, fields: list[str], defaults: list[int]) -> Any:
    """A class with these fields, the last of which have defaults, and with a method."""
    optional = fields[len(fields) - len(defaults) :]
    body = [f"    {name}: int | None" for name in fields if name not in optional]
    body += [f"    {name}: int = {at}" for name, at in zip(optional, defaults, strict=True)]
    body += [
        "    def total(self): return sum(self)",
        "    @property",
        "    def own(self): return 1",
    ]
    code = "from __future__ import annotations\nclass Made(base):\n" + "\n".join(body)
    names = {"base": base, "__name__": __name__}
    exec(code, names)
    return names["Made"]


def outcome(call: Any, *args: Any, **named: Any) -> object:
    """The tuple that a call returns, or that it is refused."""
    try:
        made = call(*args, **named)
    except (TypeError, ValueError):  # of _replace another one since Python 3.13
        return "refused"
    return tuple(made), repr(made), made._asdict()


@st.composite
def calls(draw: Any) -> tuple[list[str], list[int], list[int], dict[str, int]]:
    fields = draw(st.lists(st.sampled_from(NAMES[:12]), max_size=12, unique=True))
    defaults = draw(st.lists(st.integers(), max_size=len(fields)))
    given_ = draw(st.lists(st.integers(), max_size=len(fields) + 1))
    named = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(), max_size=6))
    return fields, defaults, given_, named


@given(calls())
def test_every_call_has_the_outcome_of_typings(
    call: tuple[list[str], list[int], list[int], dict[str, int]],
) -> None:
    fields, defaults, values, named = call
    ours = make_class(named_tuple.NamedTuple, fields, defaults)
    theirs = make_class(typing.NamedTuple, fields, defaults)
    for name in ("_fields", "_field_defaults", "__match_args__", "__name__", "__qualname__"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.__annotations__.keys() == theirs.__annotations__.keys()
    if "cls" not in named:  # theirs has another name for it
        assert outcome(ours, *values, **named) == outcome(theirs, *values, **named)
    assert outcome(ours._make, values) == outcome(theirs._make, values)
    whole = [ours(*range(len(fields))), theirs(*range(len(fields)))]
    changed = [outcome(each._replace, **named) for each in whole]
    assert changed[0] == changed[1]
    assert whole[0] == whole[1] == tuple(range(len(fields)))
    assert hash(whole[0]) == hash(whole[1])
    assert (whole[0].total(), whole[0].own) == (whole[1].total(), whole[1].own)
    assert [getattr(whole[0], name) for name in fields] == list(whole[1])


def test_values_are_copied_pickled_and_matched() -> None:
    change = Transition("healthy", "dead", context="stale")
    for other in (pickle.loads(pickle.dumps(change)), copy.copy(change), copy.deepcopy(change)):
        assert other == change
        assert type(other) is Transition
    match change:
        case Transition(old, new):
            assert (old, new) == ("healthy", "dead")
    assert not hasattr(change, "__dict__")


def test_a_derived_class_keeps_the_fields() -> None:
    class Mine(Transition):
        """Has a method of its own."""

        def is_death(self) -> bool:
            return self.new == "dead"

    assert Mine("healthy", "dead", "stale").is_death()
    with pytest.raises(TypeError, match=r"Transition\(\) missing 1 required .*'context'"):
        Mine("healthy", "dead")  # type: ignore[call-arg]


def test_a_field_without_a_default_may_not_follow_one_that_has_one() -> None:
    for base in (named_tuple.NamedTuple, typing.NamedTuple):
        with pytest.raises(TypeError, match="default"):
            exec("class Made(base):\n    a: int = 1\n    b: int", {"base": base, "__name__": "x"})
