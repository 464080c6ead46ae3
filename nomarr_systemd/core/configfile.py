"""nomarr.toml: TOML text in, the configuration as values out, or every mistake in it at once,
each with its line. What is wrong is found in ``configreader``; where it stands is found here.
No file is opened: the text is an argument.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

from nomarr_systemd.core.config import Config, StoreSettings
from nomarr_systemd.core.configreader import Reader
from nomarr_systemd.core.errors import ConfigError, Mistake
from nomarr_systemd.core.quoting import escape, spell
from nomarr_systemd.core.tomllines import line_of, map_lines

STATE_DIRECTORY = "/var/lib/nomarr"

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def parse(
    text: str, *, source: str = "nomarr.toml", state_directory: str = STATE_DIRECTORY
) -> Config:
    """The configuration that ``text`` says, or ConfigError with every mistake in it.

    ``source`` is what messages call the file; in ``state_directory`` is the store unless the
    file says otherwise.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number too long, nesting too deep
        raise _refuse([_explain_syntax(text, error)], source) from error
    reader = Reader(StoreSettings(url=f"sqlite://{state_directory}"))
    config = reader.read(document)
    if reader.faults:
        lines = map_lines(text)
        mistakes = [
            Mistake(line_of(lines, path), spell(path), fault.problem, fault.suggestion)
            for path, fault in reader.faults
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
    again = "the same key or table may stand there twice" if what.startswith("Cannot") else ""
    column = f" (column {place['column']})" if place["column"] else ""
    return Mistake(int(place["line"] or last), "", f"not TOML: {what}{column}", again)
