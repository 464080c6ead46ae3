"""Traces among other lines, and fingerprints that are the same for the same crash."""

from __future__ import annotations

import faulthandler
import tempfile
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.core.text import clean, clean_lines
from nomarr_systemd.postmortem.stack_traces import Trace, fingerprint, recognise

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=30)
NUMBERS = st.integers(1, 99_999)
LINES = st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=80)


def write_traceback(calls: list[tuple[str, str]], number: int, message: str, pid: int) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for file, function in calls:
        lines.append(f'  File "/srv/release-{pid}/{file}.py", line {number}, in {function}')
        lines.append("    some_code(here)")
    return [*lines, f"ValueError: {message}"]


def write_stacks(calls: list[tuple[str, str]], number: int, address: int) -> list[str]:
    lines = ["Fatal Python error: Aborted", f"Thread 0x{address:016x} (most recent call first):"]
    lines += [f'  File "/usr/lib/threading.py", line {number} in wait']
    lines += [f"Current thread 0x{address + 64:016x} (most recent call first):"]
    lines += [f'  File "/srv/{file}.py", line {number} in {function}' for file, function in calls]
    return [*lines, "Extension modules: numpy.core._multiarray_umath (total: 1)"]


def only(lines: list[str]) -> Trace:
    (trace,) = recognise(lines)
    return trace


@given(CALLS, NUMBERS, NUMBERS, LINES, LINES, NUMBERS, NUMBERS)
def test_numbers_messages_and_pids_make_no_difference(
    calls: list[tuple[str, str]], one: int, two: int, a: str, b: str, pid: int, other: int
) -> None:
    first = only(write_traceback(calls, one, a, pid))
    second = only(write_traceback(calls, two, b, other))
    assert fingerprint("exit", 1, first) == fingerprint("exit", 1, second)
    assert first.errors == ("ValueError",)


@given(CALLS, NUMBERS, NUMBERS, st.integers(0, 1 << 48), st.integers(0, 1 << 48))
def test_addresses_make_no_difference(
    calls: list[tuple[str, str]], one: int, two: int, here: int, there: int
) -> None:
    first = only(write_stacks(calls, one, here))
    again = only(write_stacks(calls, one, there))
    assert fingerprint("watchdog", -2, first) == fingerprint("stale", -2, again)
    assert first.frames[-1].function == calls[0][1]  # most recent call first
    # A function can hang in many places, but crashes in the place that its lines move away from.
    second = only(write_stacks(calls, two, there))
    is_alike = fingerprint("watchdog", -2, first) == fingerprint("watchdog", -2, second)
    assert is_alike == (one == two)
    crash, other = (
        only([line.replace("Aborted", "Segmentation fault") for line in lines])
        for lines in (write_stacks(calls, one, here), write_stacks(calls, two, there))
    )
    assert fingerprint("signal", -11, crash) == fingerprint("signal", -11, other)


def test_the_way_a_start_timed_out_makes_no_difference() -> None:
    """It left with 0 at the SIGTERM, or was killed: it was not ready in time."""
    codes = (0, -1, -2, -6, -9, 143)
    assert len({fingerprint("start-timeout", code, None) for code in codes}) == 1
    assert len({fingerprint("exit", code, None) for code in codes}) == len(codes)


@given(CALLS, st.integers(1, 500))
def test_the_depth_of_a_recursion_makes_no_difference(
    calls: list[tuple[str, str]], depth: int
) -> None:
    loop = [("a", "visit"), ("b", "descend")]
    first = only(write_traceback([*calls, *loop], 1, "", 1))
    deep = only(write_traceback([*calls, *loop * depth], 1, "", 1))
    assert fingerprint("exit", 1, first) == fingerprint("exit", 1, deep)


@given(CALLS, NAMES)
def test_another_place_is_another_crash(calls: list[tuple[str, str]], function: str) -> None:
    first = only(write_traceback([*calls, ("tail", f"x{function}")], 1, "", 1))
    second = only(write_traceback([*calls, ("tail", f"y{function}")], 1, "", 1))
    assert fingerprint("exit", 1, first) != fingerprint("exit", 1, second)


@given(st.lists(st.one_of(LINES, st.sampled_from(write_stacks([("a", "b")], 1, 1)))), CALLS)
def test_a_traceback_is_found_among_anything(
    lines: list[str], calls: list[tuple[str, str]]
) -> None:
    """And nothing that a program prints raises, or is read twice."""
    found = recognise([*lines, "a line", *write_traceback(calls, 1, "end", 1)])
    assert found[-1].kind == "traceback"
    assert found[-1].headline == "ValueError: end"
    assert sum(len(trace.lines) for trace in found) <= len(lines) + 1 + 2 + 2 * len(calls)


def _raise_chain() -> None:
    try:
        raise KeyError("a")
    except KeyError as error:
        raise RuntimeError("two\nlines") from error


def _raise_group() -> None:
    raise ExceptionGroup("many", [ValueError("a"), OSError("b")])


def _raise_syntax() -> None:
    compile("a b", "<input-7>", "exec")


@pytest.mark.parametrize(
    ("act", "errors", "headline"),
    [
        (_raise_chain, ("KeyError", "RuntimeError"), "RuntimeError: two"),
        (
            _raise_group,
            ("ExceptionGroup", "ValueError", "OSError"),
            "ExceptionGroup: many (2 sub-exceptions)",
        ),
        (_raise_syntax, ("SyntaxError",), "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("keeps_empty", [True, False], ids=["file", "journal"])
def test_pythons_own_tracebacks(
    act: Callable[[], None], errors: tuple[str, ...], headline: str, keeps_empty: bool
) -> None:
    """journald leaves out empty lines."""
    try:
        act()
    except Exception as error:  # whatever the case raises
        lines = "".join(traceback.format_exception(error)).splitlines()
    lines = ["before", *(line for line in lines if line or keeps_empty), "after"]
    trace = only(lines)
    assert trace.errors == errors
    assert trace.headline == headline
    assert "before" not in trace.lines
    assert trace.frames[-1].function in ("_raise_chain", "_raise_group", "")


def test_faulthandlers_own_stacks() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    trace = only(["something", *lines, "something else"])
    assert trace.kind == "stacks"
    assert trace.frames[-1].function == "test_faulthandlers_own_stacks"


def test_a_core_dumps_stack() -> None:
    dump = """\
Process 812 (tagger) of user 989 dumped core.

Module libav.so.59 without build-id.
Stack trace of thread 812:
#0  0x00007f2b1c0a1e3c avcodec_decode (libav.so.59 + 0xa1e3c)
#1  0x0000561f0b1c7a10 n/a (tagger + 0x7a10)
ELF object binary architecture: AMD x86-64"""
    trace = only(clean_lines(dump))
    assert (trace.kind, trace.headline) == ("native", "crashed in avcodec_decode")
    moved = only(clean_lines(dump.replace("0x00007f2b1c0a1e3c", "0x00007fffffffff3c")))
    assert fingerprint("core-dump", -11, trace) == fingerprint("core-dump", -11, moved)


def test_without_a_trace_class_and_code_are_all_there_is() -> None:
    assert fingerprint("exit", 1, None) == fingerprint("exit", 1, None)
    assert fingerprint("exit", 1, None) != fingerprint("exit", 2, None)
    assert fingerprint("signal", -9, None) != fingerprint("oom", -9, None)


@given(st.text())
def test_clean_text_has_nothing_a_terminal_obeys(text: str) -> None:
    for line in clean_lines(text):
        assert line.isprintable()
    assert clean(text, 20).isprintable()
    assert len(clean(text, 20)) <= 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07after", "after"),
        ("a\tb", "a   b"),
        ("bell\x07", "bell\\x07"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("half \x1b[3", "half \\x1b[3"),
        ("  indented", "  indented"),
    ],
)
def test_colours_go_and_the_rest_is_spelled_out(text: str, shown: str) -> None:
    assert clean(text) == shown
