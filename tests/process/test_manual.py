"""The man pages, as the packages are built with them: complete, and in order for both readers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nomarr_systemd.cli.main import nomarrctl
from nomarr_systemd.config.settings import HOMES
from nomarr_systemd.config.unit_directives import OWNED

CHECKOUT = Path(__file__).parents[2]
PAGES = (
    *("nomarrctl.1", "nomarr.toml.5", "nomarr-systemd.7", "nomarr-worker.7"),
    "nomarr-worker@.service.8",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, "packaging/manual.py", made], cwd=CHECKOUT, check=True)
    return made


def need_program(*names: str) -> None:
    missing = [name for name in names if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {' or '.join(missing)}; packaging/prepare test installs them")


def read(page: Path) -> str:
    """The page as it is shown, on a terminal without end."""
    done = subprocess.run(
        ["man", "--warnings", "--encoding=UTF-8", "--local-file", page],
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "1000", "MANROFFOPT": "-rHY=0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return re.sub(".\b", "", done.stdout)


def walk(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))


def test_there_are_five(pages: Path) -> None:
    assert sorted(page.name for page in pages.iterdir()) == sorted(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_both_readers_accept_it(pages: Path, name: str) -> None:
    need_program("man", "mandoc")
    text = read(pages / name)
    assert "\\" not in text  # roff that was shown instead of obeyed
    assert "{{" not in text
    checked = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", pages / name], capture_output=True, text=True, check=False
    )
    assert (checked.stdout, checked.returncode) == ("", 0)


def test_every_command_and_option_is_there(pages: Path) -> None:
    need_program("man")
    text = read(pages / "nomarrctl.1")
    sections = dict(re.findall(r"^   (\S.*)\n((?:(?!   ?\S).*\n)*)", text, re.MULTILINE))
    for name, command in walk(nomarrctl):
        shown = next(
            (body for title, body in sections.items() if re.match(rf"{name}( [^a-z]|$)", title)), ""
        )
        assert shown, f"{name} is not in the page"
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help or option.show_default, f"{name} {option.opts} has no help"
                wanted = shown if option.name != "user" else text
                for spelled in option.opts:
                    assert re.search(rf"^ +.*{spelled}\b", wanted, re.MULTILINE), (name, spelled)
    for option in nomarrctl.params:
        assert option.opts[0] in text


def test_every_setting_is_there_and_explained(pages: Path) -> None:
    need_program("man")
    text = read(pages / "nomarr.toml.5")
    missing = [each.key for settings in HOMES.values() for each in settings if not each.help]
    assert missing == [], "each setting has its help"
    for home, settings in HOMES.items():
        assert f"\n   {home}\n" in text
        for setting in settings:
            assert re.search(rf"^ {{7}}{setting.key}\b", text, re.MULTILINE)
            assert setting.wants()[1:] in text
    for owned in OWNED:
        assert re.search(rf"^ {{7}}{re.escape(owned.name)}", text, re.MULTILINE)


def build(tree: Path, page: str) -> subprocess.CompletedProcess[str]:
    """The generator on one page of ours; its output is in the tree itself."""
    for directory in ("docs/man", "packaging"):
        (tree / directory).mkdir(parents=True)
    (tree / "nomarr_systemd").symlink_to(CHECKOUT / "nomarr_systemd")
    (tree / "CHANGELOG.md").write_text("## 1.0 – 2026-01-01\n")
    shutil.copy(CHECKOUT / "packaging/manual.py", tree / "packaging")
    (tree / "docs/man/x.1.md").write_text(f"# x(1): a trial\n\n{page}")
    command = [sys.executable, "packaging/manual.py", "."]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_no_text_can_become_a_command_of_roff(tmp_path: Path) -> None:
    """All that roff reads in its own way is shown as it is."""
    need_program("man")
    done = build(
        tmp_path,
        "## Texts\n\n.SH of mine\n\n'quoted' \\\\fB and -- \\*stars\\*\n\n"
        "    .so /etc/passwd\n    'x' ~ ^ ` a-b\n\n`--all` of *IT*\n:   .br is no break\n",
    )
    assert done.returncode == 0, done.stderr
    text = read(tmp_path / "x.1")
    for shown in (
        "\n       .SH of mine\n",
        "\n       'quoted' \\fB and -- *stars*\n",
        "\n           .so /etc/passwd\n           'x' ~ ^ ` a-b\n",
        "\n       --all of IT\n              .br is no break\n",
    ):
        assert shown in text, text


def test_a_sign_that_roff_may_not_have_is_refused(tmp_path: Path) -> None:
    """Better no package than a page with a hole in it."""
    done = build(tmp_path, "\u266b\n")
    assert done.returncode == 1
    assert "add a spelling" in done.stderr
