"""What is written for people: links lead somewhere, and commands are ones that nomarrctl takes."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nomarr_systemd.cli.main import nomarrctl
from nomarr_systemd.config.file import parse
from nomarr_systemd.host.scope import make_scope

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "packaging/**/*.md")
    for page in CHECKOUT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def read_prose(page: Path) -> str:
    """Without code, in which brackets are something else."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`|^    .*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(read_prose(page)):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page}: {link}"
        assert target.is_relative_to(CHECKOUT), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def commands() -> Iterator[str]:
    """Every command of nomarrctl in a block or in a line of text."""
    for page in (CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")):
        text = page.read_text()
        found = re.findall(r"^    (nomarrctl [^#\n]+)", text, re.MULTILINE)
        found += re.findall(r"`(nomarrctl [^`]+)`", text)
        yield from (" ".join(each.split()) for each in found if not re.match(r"nomarrctl:", each))


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_nomarrctl_takes_what_is_written(line: str) -> None:
    """Parsed as it would be, and not run."""
    words = shlex.split(line)[1:]
    if "COMMAND" in words or "SHELL" in words:
        return
    ctx = click.Context(nomarrctl, obj=make_scope(None, user=False))
    ctx.params = {"config_file": None}
    command: click.Command = nomarrctl
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        if name == "--user":
            continue
        found = command.get_command(ctx, name)
        assert found, f"there is no command {name}"
        command = found
    if words:
        command.make_context(command.name, words, parent=ctx)


def test_toml_that_is_shown_is_accepted() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    for text in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL):
        tomllib.loads(text)
        assert parse(text).pools
