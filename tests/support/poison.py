"""Text that a terminal, a journal or a page would obey, put into every field of documents and
answers, and a look at what comes out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HOSTILE_SUPERVISOR: Final = Path(__file__).with_name("hostile_supervisor.py")
FORGED: Final = "forged-line"
# A title, a cleared screen, a background that is never ours, backspaces, C1, ends of lines of all
# kinds, directions of writing, DEL, NUL, half of a pair, an emergency for journald, a script.
POISON: Final = (
    "\x1b]0;owned\x07\x1b[2J\x1b[41m\x9b31m\b\b\r\n"
    f"{FORGED}\n<0>{FORGED}\x0b\x0c\x85\u2028{FORGED}\u2029\u202e\u2066\u200f\x7f\x00\ud83d"
    "<script>alert(1)</script>|{{7*7}}"
)
# A store refuses half of a character: the text without it, and what it is in JSON.
WHOLE: Final = POISON.replace("\ud83d", "")
HALF: Final = "\\ud83d"
_OURS: Final = re.compile(rb"\x1b\[(?:0|1|2|3[0-7]|9[0-7])(?:;[0-9]+)?m")
_FORBIDDEN: Final = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)


def poison(value: Any, keep: Collection[str] = ()) -> Any:
    """The value with POISON in place of every text, but for attributes of these names."""
    match value:
        case str():
            return POISON
        case dict():
            return {
                name: each if name in keep else poison(each, keep) for name, each in value.items()
            } | {POISON: POISON}
        case list():
            return [poison(each, keep) for each in value]
    return value


def check(said: bytes, what: object, *, on_terminal: bool = False) -> None:
    """Raise unless it is text of lines that nobody forged, with no control in it."""
    if on_terminal:
        said = _OURS.sub(b"", said).replace(b"\r\n", b"\n")
    text = said.decode()  # no half of a pair either
    found = _FORBIDDEN.search(text)
    assert found is None, (
        f"{what}: {found and text[max(0, found.start() - 80) : found.end() + 40]!r}"
    )
    forged = [line for line in text.split("\n") if line.lstrip().startswith((FORGED, "<0>"))]
    assert not forged, f"{what}: {forged}"


def run(
    command: Sequence[str], environment: Mapping[str, str], *, on_terminal: bool = False
) -> tuple[int, bytes]:
    """The exit status and all that a program says, as bytes; on a terminal of its own or piped."""
    if not on_terminal:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65_536):
            said += piece
    except OSError:
        pass  # the last one has closed it
    finally:
        os.close(ours)
    return process.wait(60), said


def write_answers(file: Path, answers: Mapping[str, object]) -> None:
    """What the hostile supervisor answers from now on."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(answers))
    new.chmod(0o644)
    new.rename(file)


def say(*lines: object, **how: object) -> dict[str, object]:
    """An answer of these lines: texts as they are, all else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return {"lines": texts, **how}
