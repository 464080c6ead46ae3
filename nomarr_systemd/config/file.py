"""Read ``nomarr.toml``: parse, find the line of every key, check, and report all mistakes.

``tomllib`` does not tell the line of a key. The scanner below does: it is right for every text that
``tomllib`` accepts, knows only where values end, and does not recurse.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping

from nomarr_systemd.config.check import ConfigChecker
from nomarr_systemd.config.values import Config, StoreSettings
from nomarr_systemd.core.errors import ConfigError, Mistake
from nomarr_systemd.core.text import escape, spell

Path = tuple[str | int, ...]

# No possessive quantifier after a group with branches: Python 3.11.2, which Debian 12 has, gets it
# wrong.
_SPACE = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]++|"(?:[^"\\]|\\.)*"|'[^']*+'""")
_BETWEEN_KEYS = re.compile(r"[ \t]*+(\.?)[ \t]*+")
_ASSIGN = re.compile(r"[ \t]*+=")
_SCALAR = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\]|\\.)*"'
    r"|'[^']*+'"
    # a number, true or false, a date; between date and time a blank is allowed
    r"|[^\s,\]}#]++(?:[ ][0-9]{2}:[^\s,\]}#]++)?+",
    re.DOTALL,
)


def map_lines(text: str) -> dict[Path, int]:
    """Return the line of every key, table and list item of ``text``, which ``tomllib`` accepted.

    A path is the keys from the top, with the index wherever it passes through a list.
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """Return the line of ``path``, or of the nearest table around it that has one."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return 1


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}  # how many [[tables]] an array has so far
        self._line = 1
        self._counted = 0

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        self._pass(_SPACE)
        while self.at < len(self.text):
            if self._sees("["):
                table = self._read_header()
            else:
                self._read_value(self._read_assignment(table))
            self._pass(_SPACE)
        return self.lines

    def _read_header(self) -> Path:
        line = self._here()
        array = self.text.startswith("[[", self.at)
        self.at += 2 if array else 1
        keys = self._read_key()
        self.at += 2 if array else 1
        path: Path = ()
        for key in keys[:-1]:
            path += (key,)
            self.lines.setdefault(path, line)
            if path in self._tables:
                path += (self._tables[path] - 1,)  # the key refers to the last of them
        path += (keys[-1],)
        if array:
            self.lines.setdefault(path, line)
            self._tables[path] = self._tables.get(path, 0) + 1
            path += (self._tables[path] - 1,)
        self.lines[path] = line  # a table's own header, also after [table.below.it]
        return path

    def _read_assignment(self, table: Path) -> Path:
        """Read a key and its equals sign; return the path that is assigned to."""
        line = self._here()
        path = table
        for key in self._read_key():
            path += (key,)
            self.lines.setdefault(path, line)
        self._pass(_ASSIGN)
        return path

    def _read_key(self) -> tuple[str, ...]:
        self._pass(_SPACE)
        keys = []
        while True:
            keys.append(_unquote(self._pass(_KEY)[0]))
            if not self._pass(_BETWEEN_KEYS)[1]:
                return tuple(keys)

    def _read_value(self, path: Path) -> None:
        """Skip the value of ``path``, noting the lines of what is inside it."""
        inside: list[tuple[Path, int | None]] = []  # open lists with the next index, and tables
        value: Path | None = path
        while value is not None or inside:
            self._pass(_SPACE)
            if value is not None:
                if self._sees("[{"):
                    inside.append((value, 0 if self._sees("[") else None))
                    self.at += 1
                else:
                    self._pass(_SCALAR)
                value = None
            elif self._sees("]}"):
                inside.pop()
                self.at += 1
            elif self._sees(","):
                self.at += 1
            else:
                owner, index = inside[-1]
                if index is None:
                    value = self._read_assignment(owner)
                else:
                    value = (*owner, index)
                    self.lines[value] = self._here()
                    inside[-1] = (owner, index + 1)

    def _sees(self, signs: str) -> bool:
        return self.text[self.at] in signs

    def _pass(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"not TOML at {self._here()}: tomllib refuses this text")
        self.at = match.end()
        return match

    def _here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line


def _unquote(key: str) -> str:
    if key[0] not in "\"'":
        return key
    unquoted: str = tomllib.loads(f"key = {key}")["key"]
    return unquoted


STATE_DIRECTORY = "/var/lib/nomarr"

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def parse(
    text: str, *, source: str = "nomarr.toml", state_directory: str = STATE_DIRECTORY
) -> Config:
    """Return the configuration in ``text``, or raise ConfigError with every mistake in it.

    ``source`` is the file's name in messages; the store is in ``state_directory`` unless the file
    says otherwise.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number too long, nesting too deep
        raise _refuse([_explain_syntax(text, error)], source) from error
    checker = ConfigChecker(StoreSettings(url=f"sqlite://{state_directory}"))
    config = checker.read(document)
    if checker.faults:
        lines = map_lines(text)
        mistakes = [
            Mistake(line_of(lines, path), spell(path), fault.problem, fault.suggestion)
            for path, fault in checker.faults
        ]
        raise _refuse(mistakes, source)
    return config


def _refuse(mistakes: Iterable[Mistake], source: str) -> ConfigError:
    ordered = tuple(sorted(mistakes, key=lambda mistake: mistake.line))
    return ConfigError(
        "\n".join(f"{escape(source)}:{mistake}" for mistake in ordered),
        hint="correct the file and try again; nothing was changed",
        mistakes=ordered,
    )


def _explain_syntax(text: str, error: ValueError | RecursionError) -> Mistake:
    if isinstance(error, RecursionError):
        return Mistake(1, "", "not TOML: lists or tables are nested too deeply")
    message = escape(str(error))
    place = _PLACE.search(message)
    if place is None:
        return Mistake(1, "", f"not TOML: {message}")
    what = message[: place.start()]
    last = text.rstrip().count("\n") + 1
    # tomllib says "Cannot …" of a key or a table that is given again
    again = "the same key or table may be defined twice" if what.startswith("Cannot") else ""
    column = f" (column {place['column']})" if place["column"] else ""
    return Mistake(int(place["line"] or last), "", f"not TOML: {what}{column}", again)
