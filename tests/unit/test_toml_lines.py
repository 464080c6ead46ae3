"""Lines of keys in TOML: cases that are easy to get wrong, and generated texts whose lines the
generator knows because it wrote them.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.config.file import Path, line_of, map_lines


def lines_of(text: str) -> dict[Path, int]:
    """The lines of a text that tomllib does accept."""
    text = textwrap.dedent(text)
    tomllib.loads(text)
    return map_lines(text)


def test_plain_keys_and_tables() -> None:
    text = """\
    top = 1

    # [not.a.table]
    [policy]   # [neither]
    window_s = 300 # x = 1
    [ pool . tag ]
    workers = 2
    """
    assert lines_of(text) == {
        ("top",): 1,
        ("policy",): 4,
        ("policy", "window_s"): 5,
        ("pool",): 6,
        ("pool", "tag"): 6,
        ("pool", "tag", "workers"): 7,
    }


def test_quoted_and_dotted_keys() -> None:
    text = r"""
    "a.b" = 1
    'c"d' = 2
    "e\"\u00e9\\" = 3
    x . "y z".'w' = 4
    x.v = 5
    "" = 6
    1.5 = 7
    """
    lines = lines_of(text)
    assert lines[("a.b",)] == 2
    assert lines[('c"d',)] == 3
    assert lines[('e"é\\',)] == 4
    assert lines[("x",)] == 5
    assert lines[("x", "y z")] == 5
    assert lines[("x", "y z", "w")] == 5
    assert lines[("x", "v")] == 6
    assert lines[("",)] == 7
    assert lines[("1", "5")] == 8


def test_arrays_of_tables() -> None:
    text = """\
    [[fruit]]
    name = "a"
    [fruit.physical]
    colour = "red"
    [[fruit.variety]]
    name = "b"
    [[fruit.variety]]
    name = "c"
    [[fruit]]
    name = "d"
    [[fruit.variety]]
    name = "e"
    """
    lines = lines_of(text)
    assert lines[("fruit",)] == 1
    assert lines[("fruit", 0, "name")] == 2
    assert lines[("fruit", 0, "physical", "colour")] == 4
    assert lines[("fruit", 0, "variety")] == 5
    assert lines[("fruit", 0, "variety", 1)] == 7
    assert lines[("fruit", 0, "variety", 1, "name")] == 8
    assert lines[("fruit", 1)] == 9
    assert lines[("fruit", 1, "variety", 0, "name")] == 12


def test_inline_tables_and_lists_over_lines() -> None:
    text = """\
    a = { b = 1, c.d = [2, { e = 3 }], f = {} }
    g = [ # ]
      1, "]", # , 7
      [ '#', [] ],
      { h = 1 },
      1979-05-27 07:32:00, 1979-05-27,

    ] # done
    i = 1
    """
    lines = lines_of(text)
    assert lines[("a", "c", "d", 1, "e")] == 1
    assert lines[("a", "f")] == 1
    assert [lines[("g", n)] for n in range(6)] == [3, 3, 4, 5, 6, 6]
    assert lines[("g", 3, "h")] == 5
    assert ("g", 6) not in lines
    assert lines[("i",)] == 9


def test_strings_over_lines() -> None:
    text = '''\
    a = """
    x = 1 \\
      "quoted" ""twice"" \\""" # no comment
    [no.table]"""""
    b = \'\'\'
    y = 2 'one' \'\'two\'\' \\
    \'\'\'\'
    c = """"""
    d = ""
    e = \'\'\'\'\'\'
    f = """"one at the start"""
    g = 1
    '''
    lines = lines_of(text)
    assert lines == {
        ("a",): 1,
        ("b",): 5,
        ("c",): 8,
        ("d",): 9,
        ("e",): 10,
        ("f",): 11,
        ("g",): 12,
    }


def test_a_table_has_the_line_of_its_own_header() -> None:
    assert lines_of("[a.b]\nx = 1\n[a]\ny = 1\n")[("a",)] == 3


@pytest.mark.parametrize("text", ["", "\n", "# only this", "\r\n# this\r\n", "   \t"])
def test_texts_without_keys(text: str) -> None:
    assert map_lines(text) == {}


def test_no_line_break_at_the_end() -> None:
    assert map_lines("a = 1\nb = 2") == {("a",): 1, ("b",): 2}
    assert map_lines("a = 1\n[b]") == {("a",): 1, ("b",): 2}


def test_deep_nesting_does_not_recurse() -> None:
    depth = 3000  # deeper than tomllib itself accepts
    assert line_of(map_lines("a = " + "[" * depth + "]" * depth), ("a",)) == 1


def test_a_path_without_a_line_has_that_of_what_is_around_it() -> None:
    lines = map_lines("\n[pool.tag]\nworkers = 1\n")
    assert line_of(lines, ("pool", "tag", "entrypoint")) == 2
    assert line_of(lines, ("pool", "tag", "workers", 3)) == 3
    assert line_of(lines, ("nothing", "like", "it")) == 1


TRICKY = "ab#[]{}=,. \té"
BARE = st.text("abcXYZ019_-", max_size=4)
BASIC = st.lists(st.sampled_from([*TRICKY, "'", '\\"', "\\\\", "\\n", "\\u00e9"]), max_size=6)
LITERAL = st.lists(st.sampled_from([*TRICKY, '"', "\\"]), max_size=6)
LONG_BASIC = st.lists(
    st.sampled_from(["\n", '"', '""', "'''", '\\"""', "\\\\", "\\\n ", "# a = 1", "[b]"]),
    max_size=6,
)
LONG_LITERAL = st.lists(
    st.sampled_from(["\n", "'", "''", '"""', "\\", "# a = 1", "[b]"]), max_size=6
)
NUMBERS = ("1", "+2", "0xff", "1_000", "1.5e-3", "-inf", "nan", "true", "false")
DATES = ("07:32:00.5", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00.1", "1979-05-27")


class Writer:
    """Writes TOML and notes at which line it wrote what."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.text = ""
        self.expected: dict[Path, int] = {}
        self.names = 0

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def pick(self, *choices: str) -> str:
        return str(self.draw(st.sampled_from(choices)))

    def write(self, text: str) -> None:
        self.text += text

    def blank(self) -> None:
        self.write(self.pick("", " ", "\t "))

    def end_line(self) -> None:
        self.write(self.pick("\n", "  \n", " # x = [ \" '''\n", "\n\n# [t]\n"))

    def key(self) -> str:
        """Write one key that no other is the same as."""
        self.names += 1
        style = self.pick("bare", "basic", "literal")
        if style == "bare":
            key = f"{self.draw(BARE)}{self.names}"
            self.write(key)
            return key
        content = "".join(self.draw(BASIC if style == "basic" else LITERAL)) + str(self.names)
        quoted = f'"{content}"' if style == "basic" else f"'{content}'"
        self.write(quoted)
        return str(tomllib.loads(f"k = {quoted}")["k"])

    def assign(self, table: Path, depth: int) -> None:
        line, path = self.line, table
        for n in range(self.draw(st.integers(1, 3))):
            if n:
                self.blank()
                self.write(".")
                self.blank()
            path += (self.key(),)
            self.expected[path] = line
        self.write(self.pick("=", " = ", "\t="))
        self.blank()
        self.value(path, depth)

    def value(self, path: Path, depth: int) -> None:
        kinds = ["bare", "basic", "literal", "long basic", "long literal"]
        match self.pick(*kinds, *(["list", "table"] if depth else [])):
            case "bare":
                self.write(self.pick(*NUMBERS, *DATES))
            case "basic":
                self.write('"' + "".join(self.draw(BASIC)) + '"')
            case "literal":
                self.write("'" + "".join(self.draw(LITERAL)) + "'")
            case "long basic":
                content = "x".join(self.draw(LONG_BASIC))
                self.write('"""' + content + "x" + self.pick("", '"', '""') + '"""')
            case "long literal":
                content = "x".join(self.draw(LONG_LITERAL))
                self.write("'''" + content + "x" + self.pick("", "'", "''") + "'''")
            case "list":
                self.write("[")
                for n in range(self.draw(st.integers(0, 3))):
                    if n:
                        self.write(",")
                    self.break_inside()
                    self.expected[(*path, n)] = self.line
                    self.value((*path, n), depth - 1)
                    self.break_inside()
                self.break_inside()
                self.write("]")
            case "table":
                self.write("{")
                for n in range(self.draw(st.integers(0, 3))):
                    if n:
                        self.write(",")
                    self.blank()
                    self.assign(path, depth - 1)
                    self.blank()
                self.write("}")

    def break_inside(self) -> None:
        self.write(self.pick("", " ", "\n", " # , ] }\n  "))

    def header(self, base: Path) -> Path:
        """Write [base.key] or [[base.key]]; returns the path that keys below it have."""
        opening, closing = self.pick("[ ]", "[[ ]]").split()
        line = self.line
        self.write(opening)
        for part in base:
            if isinstance(part, str):
                self.write("'" + part + "'." if "'" not in part else f'"{part}".')
        path: Path = (*base, self.key())
        self.blank()
        self.write(closing)
        self.expected[path] = line
        if opening == "[[":
            path += (0,)
            self.expected[path] = line
        return path


@st.composite
def documents(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[str, dict[Path, int]]:
    writer = Writer(draw)
    below: list[Path] = [()]
    for _ in range(draw(st.integers(0, 3))):
        writer.assign((), depth=2)
        writer.end_line()
    for _ in range(draw(st.integers(0, 3))):
        simple = [path for path in below if all(is_simple(part) for part in path)]
        table = writer.header(draw(st.sampled_from(simple)))
        below.append(table)
        writer.end_line()
        for _ in range(draw(st.integers(0, 3))):
            writer.blank()
            writer.assign(table, depth=2)
            writer.end_line()
    return writer.text, writer.expected


def is_simple(part: str | int) -> bool:
    """Whether the writer can write the key again as it stands."""
    return isinstance(part, int) or ("'" not in part and "\n" not in part)


def paths_in(value: object, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_in(item, (*path, key))
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from paths_in(item, (*path, n))


@given(documents(), st.booleans())
def test_generated_texts(document: tuple[str, dict[Path, int]], crlf: bool) -> None:
    text, expected = document
    if crlf:
        text = text.replace("\n", "\r\n")
    assert set(paths_in(tomllib.loads(text))) == set(expected)
    assert map_lines(text) == expected
