"""Traces found among other lines: Python tracebacks, the stacks of all threads by faulthandler, and
the native stacks of systemd-coredump.

Two crashes have the same fingerprint if they differ only in line numbers, addresses, process ids,
messages and the depth of a recursion. Of a hang the line where it hung counts, too: a long function
can hang in many places.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

Kind = Literal["traceback", "stacks", "native"]
MAX_FRAMES: Final = 20  # in a fingerprint: those nearest to the fault
_LOOK_AHEAD: Final = 40  # lines of a message before the next exception of a chain

_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINS: Final = frozenset(
    (
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    )
)
_FRAME: Final = re.compile(r'[\s|+-]*File "([^"]*)", line ([0-9]+)(?:,? in (.*))?')
_ERROR: Final = re.compile(r"([^\W\d][\w.<>]*)(?::.*)?\Z")
_GROUP_ERROR: Final = re.compile(r"\s*\| ([^\W\d][\w.]*)(?::.*)?\Z")
_FATAL: Final = re.compile(r"Fatal Python error: |Timeout \([0-9:.]+\)!\Z")
_THREAD: Final = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")
_BETWEEN: Final = re.compile(
    r"\s*\Z|\s+(?:\.\.\.|<.*>)|Extension modules: |Python runtime state: |Current thread's C stack"
    r"|\s+Binary file "
)
_NATIVE_HEAD: Final = re.compile(r"Stack trace of thread [0-9]+:")
_NATIVE: Final = re.compile(r"\s*#[0-9]+\s+0x[0-9a-f]+ (\S+) \(([^\s)]+)")
_HANGS: Final = ("Fatal Python error: Aborted", "Timeout ", "the stacks of all threads")
ANY_CODE: Final = ("start-timeout", "stop-timeout")  # the exit code after that means nothing
_DIGITS: Final = re.compile(r"[0-9]+")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")


class Frame(NamedTuple):
    """One call: the end of the file's path, and the function."""

    place: str
    function: str


class Trace(NamedTuple):
    """One trace. ``frames`` are the calls that led to the fault, the innermost last."""

    kind: Kind
    headline: str
    lines: tuple[str, ...]
    errors: tuple[str, ...]  # the exceptions of a chain, the last one raised last
    frames: tuple[Frame, ...]
    line: str = ""  # of stacks: the number of the line where the innermost call is


def recognise(lines: Sequence[str]) -> list[Trace]:
    """Return every trace in the lines of one process, in their order."""
    found: list[Trace] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        trace: Trace | None = None
        end = at + 1
        if line.endswith(_TRACEBACK):
            trace, end = _read_traceback(lines, at)
        elif _FATAL.match(line) or _THREAD.match(line):
            trace, end = _read_stacks(lines, at)
        elif _NATIVE_HEAD.match(line):
            trace, end = _read_native(lines, at)
        if trace is not None:
            found.append(trace)
        at = end
    return found


def fingerprint(kind: str, code: int, trace: Trace | None) -> str:
    """Return twelve hex digits that name a crash; without a trace, made of class and code."""
    if trace is None:
        parts = [kind] if kind in ANY_CODE else [kind, str(code)]
    elif trace.kind == "traceback":
        parts = ["traceback", *trace.errors]
    else:
        # Not the class: watchdog and supervisor both end a hung worker, in different classes.
        parts = [trace.kind, _ADDRESS.sub("0x", trace.headline)]
        if trace.headline.startswith(_HANGS):
            parts.append(trace.line)
    frames = trace.frames if trace else ()
    # Each call once: the depth of a recursion depends on the size of the stack.
    unique = tuple(dict.fromkeys(frames))[-MAX_FRAMES:]
    parts += [f"{frame.place}\x1f{frame.function}" for frame in unique]
    return hashlib.sha256("\x1e".join(parts).encode(errors="replace")).hexdigest()[:12]


def _read_traceback(lines: Sequence[str], start: int) -> tuple[Trace, int]:
    """Read a traceback with the chain of its causes."""
    errors: list[str] = []
    frames: list[Frame] = []
    headline = ""
    at = start
    while True:
        is_group = lines[at].endswith(f"Exception Group {_TRACEBACK}")
        at += 1
        body = at
        while at < len(lines) and lines[at][:1] in (" ", "\t"):
            at += 1
        frames += _frames_of(lines[body:at])
        if is_group:
            named = [line for line in lines[body:at] if _GROUP_ERROR.match(line)]
            headline = named[0].lstrip(" |") if named else ""
            errors += [line.lstrip(" |").partition(":")[0] for line in named]
        elif at < len(lines) and (error := _ERROR.match(lines[at])):
            headline = lines[at]
            errors.append(error[1])
            at += 1
        next_one = _find_next_in_chain(lines, at)
        if next_one is None:
            break
        at = next_one
    headline = headline or "a traceback whose end is missing"
    trace = Trace("traceback", headline, tuple(lines[start:at]), tuple(errors), tuple(frames))
    return trace, at


def _find_next_in_chain(lines: Sequence[str], at: int) -> int | None:
    """Return the line where the next exception of the chain begins; None if there is none."""
    for here in range(at, min(len(lines), at + _LOOK_AHEAD)):
        if lines[here].strip() in _CHAINS:
            # journald leaves out empty lines, files do not.
            for after in range(here + 1, min(len(lines), here + 3)):
                if lines[after].endswith(_TRACEBACK):
                    return after
            return None
        if lines[here].endswith(_TRACEBACK):
            return None
    return None


def _read_stacks(lines: Sequence[str], start: int) -> tuple[Trace | None, int]:
    """Read the stacks of faulthandler: most recent call first, the faulting thread "current"."""
    has_head = _FATAL.match(lines[start]) is not None
    headline = lines[start] if has_head else "the stacks of all threads"
    stacks: list[list[tuple[Frame, str]]] = []
    current: list[tuple[Frame, str]] | None = None
    at = start + 1 if has_head else start
    while at < len(lines):
        thread = _THREAD.match(lines[at])
        if thread:
            stacks.append([])
            if thread[1] == "Current thread":
                current = stacks[-1]
        elif frame := _FRAME.match(lines[at]):
            if stacks:
                stacks[-1].append((_make_frame(frame[1], frame[3]), frame[2]))
        elif not _BETWEEN.match(lines[at]):
            break
        at += 1
    if not stacks and not has_head:
        return None, max(at, start + 1)
    # The main thread comes last; a signal from outside interrupts that one.
    fault = current or (stacks[-1] if stacks else [])
    frames = tuple(frame for frame, _ in reversed(fault))
    line = fault[0][1] if fault else ""
    end = at
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return Trace("stacks", headline, tuple(lines[start:end]), (), frames, line), at


def _read_native(lines: Sequence[str], start: int) -> tuple[Trace | None, int]:
    """Read the first thread of a core dump, which is the one that crashed."""
    at = start + 1
    frames = []
    while at < len(lines) and (match := _NATIVE.match(lines[at])):
        frames.append(Frame(_shorten(match[2]), match[1]))
        at += 1
    if not frames:
        return None, at
    top = frames[0].function if frames[0].function != "n/a" else frames[0].place
    headline = f"crashed in {top}"
    return Trace("native", headline, tuple(lines[start:at]), (), tuple(reversed(frames))), at


def _frames_of(lines: Iterable[str]) -> Iterable[Frame]:
    return [_make_frame(match[1], match[3]) for line in lines if (match := _FRAME.match(line))]


def _make_frame(path: str, function: str | None) -> Frame:
    return Frame(_shorten(path), _ADDRESS.sub("0x", (function or "").strip()))


def _shorten(path: str) -> str:
    """Return the file and its directory. Numbers in a directory's name are versions or process ids
    and are left out; those in a file's name stay, unless it is no file (``<input-12>``)."""
    parent, _, name = path.rpartition("/")
    if name.startswith("<"):
        name = _DIGITS.sub("#", name)
    return f"{_DIGITS.sub('#', parent.rpartition('/')[2])}/{name}"
