"""The pages for people: links and citations lead somewhere, commands are ones that nomarrctl takes,
and the tables of the contract, the policy and the map of modules agree with the code.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from nomarr_systemd.cli.main import nomarrctl
from nomarr_systemd.config.file import parse
from nomarr_systemd.core import start_table
from nomarr_systemd.core.death import LABELS
from nomarr_systemd.core.frames import DROPS, STATUS_OF_PHASE, STATUSES
from nomarr_systemd.core.health import (
    DECISION,
    REPORTED,
    TABLE,
    HealthRules,
    Signal,
    State,
    step,
)
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.host.scope import make_scope
from nomarr_systemd.store.protocol import DOMAINS
from nomarr_systemd.systemd import journal

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "packaging/**/*.md")
    for page in CHECKOUT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CITATION = re.compile(r"\b(docs/[a-z_-]+\.md)(?:#([\w-]+))?")
DESIGN = "DESIGN" + " §"  # the design that is not in the repository


def sources() -> Iterator[tuple[str, str]]:
    """Every text file of ours: its name in the repository, and its text."""
    places = ("docs", "examples", "nomarr_systemd", "packaging", "templates", "tests", "units")
    found = [path for place in places for path in sorted((CHECKOUT / place).rglob("*"))]
    found += [path for pattern in ("*.md", "*.toml", "Makefile") for path in CHECKOUT.glob(pattern)]
    for path in found:
        if path.is_file() and path.suffix != ".pyc":
            yield str(path.relative_to(CHECKOUT)), path.read_text(errors="replace")


def read_table(page: str, head: str) -> list[list[str]]:
    """The rows of the table of a page whose first row begins with ``head``; cells without marks."""
    text = (CHECKOUT / "docs" / page).read_text().replace(r"\|", "¦")
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    (table,) = (each for each in tables if each.startswith(f"| {head} |"))
    rows = [line[1:-1].split("|") for line in table.splitlines()]
    return [[_without_marks(cell) for cell in row] for row in rows[2:]]


def _without_marks(cell: str) -> str:
    cell = cell.strip()
    return cell[1:-1] if re.fullmatch(r"`[^`]+`", cell) else cell


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
        if name in ("--user", "--fleet"):
            ctx.params[name.removeprefix("--")] = True
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


def test_citations_in_code_lead_somewhere() -> None:
    for name, text in sources():
        if name.endswith(".md"):
            continue  # their links are followed
        for page, section in CITATION.findall(text):
            assert (CHECKOUT / page).is_file(), f"{name} cites {page}"
            assert not section or section in anchors(CHECKOUT / page), f"{name}: {page}#{section}"


def test_no_file_cites_the_design() -> None:
    """Everything that is to be read is in the repository."""
    citing = [name for name, text in sources() if DESIGN in text]
    assert citing == []


def test_the_map_has_every_module_and_no_other() -> None:
    page = (CHECKOUT / "docs/architecture.md").read_text()
    chart = page.partition("\n## Map of modules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z_.`, ]+`) \| \S", chart, re.MULTILINE)
    shown = sorted(name for row in rows for name in re.findall(r"`([a-z_.]+)`", row))
    package = CHECKOUT / "nomarr_systemd"
    there = sorted(
        ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
        if path.stem != "__init__"
    )
    assert shown == there


def test_the_walks_name_what_there_is() -> None:
    page = (CHECKOUT / "docs/architecture.md").read_text()
    walks = page.partition("\n## Two walks\n")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*(?:\._?[A-Z]\w+)?\.\w+)`", walks)
    assert len(names) > 30
    missing = [name for name in names if not _is_there(name) and "nomarr-" not in name]
    assert missing == []


def _is_there(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(["nomarr_systemd", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.parametrize(
    ("page", "head", "rules"),
    [
        ("policy.md", "setting", Rules()),
        ("contract.md", "`[health]`", HealthRules()),
    ],
)
def test_defaults_are_those_of_the_code(page: str, head: str, rules: Rules | HealthRules) -> None:
    shown = {row[0]: tomllib.loads(f"x = {row[1]}")["x"] for row in read_table(page, head)}
    there = {
        name: [*value] if isinstance(value, tuple) else value
        for name, value in rules._asdict().items()
    }
    assert shown == there
    assert [*shown] == [*there]


def test_when_a_worker_starts_is_the_plans_table() -> None:
    shown = read_table("policy.md", "if | what follows")
    assert shown == [[why, verdict] for why, _, verdict in start_table.TABLE]


def test_the_health_table_is_the_machine() -> None:
    rows = read_table("contract.md", "event")
    noise = {"noise"}  # described in words
    assert {row[0] for row in rows} == TABLE["pending"].keys() - noise
    for event, *cells in rows:
        for status, cell in zip(TABLE, cells, strict=True):
            before = State(status)
            after, _ = step(before, Signal(event), 0.0, HealthRules())
            expected = "–" if after is before else after.status
            assert cell == expected, f"{event} in {status}"


def test_the_words_for_others_are_those_of_the_code() -> None:
    rows = read_table("contract.md", "health | status for an owner")
    assert rows == [[status, REPORTED[status], DECISION[status]] for status in TABLE]


def test_the_tables_of_frames_are_complete() -> None:
    assert dict(read_table("contract.md", "phase")) == dict(STATUS_OF_PHASE)
    assert [row[0] for row in read_table("contract.md", "kind")] == [*DROPS]
    words = next(row[2] for row in read_table("contract.md", "field | type") if row[0] == "status")
    assert set(re.findall(r"`(\w+)`", words)) - {"phase"} == {*STATUSES}
    causes = {row[3] for row in read_table("contract.md", "in") if row[3]}
    assert causes == LABELS.keys() - {"invalid-heartbeat"}


def test_the_journals_ids_are_complete() -> None:
    shown = {row[0] for row in read_table("contract.md", "`MESSAGE_ID`")}
    assert shown == {*journal.MESSAGE_IDS.values(), journal.ACT_ID}
    text = (CHECKOUT / "docs/contract.md").read_text()
    written = re.findall(r'"(NOMARR_[A-Z_]+)"', Path(journal.__file__).read_text())
    assert [name for name in written if f"`{name}`" not in text] == []


def test_the_grants_of_arangodb_name_every_collection() -> None:
    text = (CHECKOUT / "docs/security.md").read_text()
    named = [
        json.loads(found) for found in re.findall(r"^    (\[.*\])\.forEach\($", text, re.MULTILINE)
    ]
    assert named == [[each.name for each in DOMAINS[domain]] for domain in ("policy", "work")]
