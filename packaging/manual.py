#!/usr/bin/env python3
"""Writes the man pages: packaging/manual.py DIRECTORY.

A page is a file NAME.SECTION.md in docs/man, in a subset of Markdown. A line {{ NAME }} is replaced
by what the program knows: the commands and options of nomarrctl, the settings of nomarr.toml, the
directives that a pool cannot set. So a page always agrees with the program.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nomarr_systemd import __version__  # noqa: E402  # the tree that is packaged, not an installed one
from nomarr_systemd.cli.main import nomarrctl  # noqa: E402
from nomarr_systemd.config import settings  # noqa: E402
from nomarr_systemd.config.unit_directives import OWNED  # noqa: E402
from nomarr_systemd.config.values import Config, Pool  # noqa: E402

EVERYWHERE = {"--help", "--user"}  # described once, among the global options
UNSAID = ("[OPTIONS]", "[ARGS]...")
SIGNS = {"\\": r"\e", "…": "...", "–": r"\(en", "−": r"\-", "→": r"\(->", "×": r"\(mu"}
LITERAL = SIGNS | {"-": r"\-", "'": r"\(aq", "^": r"\(ha", "~": r"\(ti", "`": r"\(ga"}
INLINE = re.compile(r"\\(?P<plain>.)|`(?P<code>[^`]+)`|\*(?P<other>(?:\\.|[^*])+)\*")
ITEM = re.compile(r"(?P<term>.+)\n:   (?P<text>(?s:.+))")


def literal(text: str, signs: dict[str, str] = LITERAL) -> str:
    """Return text as roff that shows it unchanged, to be typed or copied."""
    spelled = "".join(signs.get(sign, sign) for sign in text)
    if not spelled.isascii():
        raise SystemExit(f"manual: add a spelling for roff to SIGNS: {spelled}")
    return spelled


def plain(text: str) -> str:
    """Return prose as roff. A hyphen between letters stays; any other becomes a minus."""
    return literal(re.sub(r"(?<![A-Za-z])-|-(?![A-Za-z])", "−", text), SIGNS)


def inline(text: str) -> str:
    """Return one line: `code` in bold, *placeholders* in italics; a backslash escapes."""
    parts, at = [], 0
    for match in INLINE.finditer(text := " ".join(text.split())):
        parts.append(plain(text[at : match.start()]))
        if match["plain"]:
            parts.append(plain(match["plain"]))
        elif match["code"]:
            parts.append(rf"\fB{literal(match['code'])}\fR")
        else:
            parts.append(rf"\fI{literal(match['other'].replace(chr(92), ''))}\fR")
        at = match.end()
    return guard("".join((*parts, plain(text[at:]))))


def guard(line: str) -> str:
    """Return a line that roff does not read as a command."""
    return rf"\&{line}" if line.startswith((".", "'")) else line


def render(block: str) -> Iterator[str]:
    """Yield one block of Markdown as lines of roff."""
    if block.startswith("### "):
        yield f'.SS "{inline(block[4:])}"'
    elif block.startswith("## "):
        yield f'.SH "{inline(block[3:].upper())}"'
    elif block.startswith("    "):
        yield from (".PP", ".nf", ".RS 4")
        yield from (guard(literal(line)) for line in textwrap.dedent(block).splitlines())
        yield from (".RE", ".fi")
    elif item := ITEM.fullmatch(block):
        yield from (".TP", inline(item["term"]), inline(item["text"]))
    else:
        yield from (".PP", inline(block))


def make_page(source: Path) -> str:
    """Return the whole page; the first line of its source is "# NAME(SECTION): summary"."""
    blocks = re.split(r"\n(?:[ ]*\n)+", source.read_text(encoding="utf-8").rstrip())
    name, section, summary = re.fullmatch(r"# (.+)\((\d)\): (.+)", blocks[0]).groups()  # type: ignore[union-attr]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = re.findall(r"^## [\d.]+ – ([\d-]+)$", changes, re.MULTILINE)[0]
    title = f'.TH "{literal(name.upper())}" {section} "{date}" "nomarr-systemd {__version__}"'
    lines = [title, ".SH NAME", rf"{literal(name)} \- {plain(summary)}"]
    for block in blocks[1:]:
        known = re.fullmatch(r"\{\{ (\w+) \}\}", block)
        for each in PARTS[known[1]]() if known else [block]:
            lines += render(each)
    # A heading begins a paragraph by itself.
    return re.sub(r"^(\.S[HS] .+)\n\.PP$", r"\1", "\n".join(lines), flags=re.MULTILINE) + "\n"


def escape(text: str) -> str:
    return re.sub(r"([\\`*])", r"\\\1", text)


def sentence(text: str) -> str:
    return (text if text.startswith("systemd") else text[0].upper() + text[1:]) + "."


def describe(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; click's \\b marks one to be kept as it is."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            title, _, rest = paragraph[2:].partition("\n")
            yield escape(title)
            yield textwrap.indent(textwrap.dedent(rest), "    ")
        else:
            yield paragraph if paragraph.startswith("    ") else escape(paragraph)


def describe_options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Argument) or (ctx.parent and EVERYWHERE & {*parameter.opts}):
            continue
        names, text = parameter.get_help_record(ctx) or ("", "")
        yield f"`{names}`\n:   {escape(text) or 'See above.'}"


def describe_command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yield the description of a verb, or of each verb of a group."""
    pieces = [each for each in command.collect_usage_pieces(ctx) if each not in UNSAID]
    names = ctx.command_path.partition(" ")[2]
    yield f"### `{' '.join((names, *pieces))}`"
    yield from describe(command.help or "")
    yield from describe_options(command, ctx)
    if command.epilog:
        yield from describe(command.epilog)
    if isinstance(command, click.Group):
        yield from describe_all(command, ctx)


def describe_all(group: click.Group, ctx: click.Context) -> Iterator[str]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command:
            yield from describe_command(command, click.Context(command, ctx, name))


def list_commands() -> Iterator[str]:
    return describe_all(nomarrctl, click.Context(nomarrctl, info_name="nomarrctl"))


def list_options() -> Iterator[str]:
    ctx = click.Context(nomarrctl, info_name="nomarrctl", **nomarrctl.context_settings)
    return describe_options(nomarrctl, ctx)


def list_settings() -> Iterator[str]:
    """Yield every section of nomarr.toml with its settings."""
    config = Config()
    values: dict[int, Any] = {
        id(settings.POLICY): config.policy,
        id(settings.HEALTH): config.health,
        id(settings.STORE): config.store,
        id(settings.FLEET): config.fleet,
        id(settings.WEB): config.web,
        id(settings.POOL): Pool(""),
    }
    for home, keys in settings.HOMES.items():
        yield f"### {home}"
        for setting in keys:
            default = show_default(getattr(values[id(keys)], setting.key))
            text = f"{sentence(setting.help)} {sentence(f'{setting.wants()}; {default}')}"
            yield f"`{setting.key}`\n:   {escape(text)}"


def show_default(value: object) -> str:
    """Return a default as it would be written in the file."""
    match value:
        case None | "" | ():
            return "not set by default"
        case str():
            return f'the default is "{value}"'
        case tuple():
            return f"the default is {[*value]}"
        case _:
            return f"the default is {value:g}"


def list_owned() -> Iterator[str]:
    for each in OWNED:
        instead = f": {each.instead}" if each.instead else ""
        yield f"`{each.name}`\n:   {escape(sentence(each.why + instead))}"


PARTS = {
    "commands": list_commands,
    "options": list_options,
    "settings": list_settings,
    "owned": list_owned,
}


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} DIRECTORY")
    for source in sorted((ROOT / "docs/man").glob("*.md")):
        Path(sys.argv[1], source.stem).write_text(make_page(source), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
