"""nomarrctl as a frame: help that teaches, completion, mistyped commands, exit statuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nomarr_systemd.cli.main import VERBS

CONFIG = '[pool.tag]\nworkers = 2\ncommand = ["/bin/true"]\n[pool.scan]\ncommand = ["/bin/true"]\n'
PROGRAM = [sys.executable, "-m", "nomarr_systemd.cli.main"]
OURS = (
    "apply",
    "completion",
    "doctor",
    "pause",
    "reconcile",
    "reset",
    "restart",
    "resume",
    "status",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a configuration, and nomarrctl on its PATH."""
    place = tmp_path / ".config/nomarr"
    place.mkdir(parents=True)
    (place / "nomarr.toml").write_text(CONFIG)
    program = tmp_path / "bin/nomarrctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(home: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=given | environment,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("verb", OURS)
def test_every_verb_teaches(home: Path, verb: str) -> None:
    done = run(home, "nomarrctl", verb, "--help")
    assert done.returncode == 0
    for part in ("Examples:", f"nomarrctl {verb}", "--user", "--json"):
        assert part in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_help_names_every_verb_and_the_exit_statuses(home: Path) -> None:
    said = run(home, "nomarrctl", "--help").stdout
    assert all(f"\n  {verb} " in said for verb in VERBS)
    assert "3 something is not running" in said


@pytest.mark.parametrize("arguments", [["staus"], ["--user", "staus"]])
def test_a_mistyped_command(home: Path, arguments: list[str]) -> None:
    done = run(home, "nomarrctl", *arguments)
    assert done.returncode == 2
    assert "did you mean status?" in done.stderr


@pytest.mark.parametrize(
    ("word", "answer"),
    [("stop", "nomarrctl pause"), ("logs", "journalctl -u"), ("scale", "workers = …")],
)
def test_words_of_other_programs(home: Path, word: str, answer: str) -> None:
    done = run(home, "nomarrctl", word)
    assert done.returncode == 2
    assert answer in done.stderr


def test_a_full_disk_is_told(home: Path) -> None:
    done = run(home, "sh", "-c", "nomarrctl policy show --user >/dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith("nomarrctl: [Errno 28] No space left on device\n")
    assert "Exception" not in done.stderr


def test_user_may_stand_before_or_behind_the_verb(home: Path) -> None:
    for arguments in (["--user", "policy", "show"], ["policy", "show", "--user"]):
        done = run(home, "nomarrctl", *arguments)
        assert done.returncode == 0, done.stderr
        assert "worker:tag:0 to worker:tag:1" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell(home: Path, shell: str) -> None:
    done = run(home, "nomarrctl", "completion", shell)
    assert done.returncode == 0, done.stderr
    assert f"_NOMARRCTL_COMPLETE={shell}_complete" in done.stdout
    assert "nomarrctl" in done.stdout
    if shutil.which(shell):  # it is at least a program of that language
        checked = subprocess.run([shell, "-n"], input=done.stdout, text=True, check=False)
        assert checked.returncode == 0


def ask(home: Path, words: str, current: str, shell: str) -> list[str]:
    """What a shell is told, by the way each of them asks."""
    place = str(len(words.split())) if shell != "fish" else current
    variables = {"COMP_WORDS": f"{words} {current}", "COMP_CWORD": place}
    variables["_NOMARRCTL_COMPLETE"] = f"{shell}_complete"
    done = run(home, "nomarrctl", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_live_names(home: Path, shell: str) -> None:
    said = "\n".join(ask(home, "nomarrctl --user status", "", shell))
    for name in ("tag-0", "tag-1", "scan-0", "tag", "scan"):
        assert name in said
    said = "\n".join(ask(home, "nomarrctl status --user", "t", shell))
    assert "tag-1" in said
    assert "scan" not in said
    assert "restart" in "\n".join(ask(home, "nomarrctl", "re", shell))
    explain = "\n".join(ask(home, "nomarrctl --user policy explain", "", shell))
    assert "scan-0" in explain
    assert "all 2 workers" not in explain


def test_completion_of_a_broken_configuration_says_nothing(home: Path) -> None:
    (home / ".config/nomarr/nomarr.toml").write_text("workers = [")
    assert "".join(ask(home, "nomarrctl --user status", "", "bash")) == ""


def test_bash_completes_for_real(home: Path) -> None:
    script = (
        "source <(nomarrctl completion bash);"
        ' COMP_WORDS=(nomarrctl --user pause "t"); COMP_CWORD=3;'
        ' _nomarrctl_completion nomarrctl; echo "${COMPREPLY[@]}"'
    )
    done = run(home, "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"tag-0", "tag-1", "tag"}


def test_what_the_system_refuses_is_an_error_not_a_traceback(home: Path) -> None:
    state = home / ".local/state/nomarr"
    state.mkdir(parents=True)
    (state / "config.json").mkdir()
    done = run(home, "nomarrctl", "--user", "status")
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    (state / "config.json").rmdir()
    (state / "config.json").write_text("[]")
    done = run(home, "nomarrctl", "--user", "pause")
    assert done.returncode == 78
    assert "hint: run nomarrctl apply" in done.stderr


@pytest.mark.parametrize("verb", ["reset", "pause", "resume", "restart", "status"])
def test_a_worker_or_pool_that_is_not_there(home: Path, verb: str) -> None:
    done = run(home, "nomarrctl", "--user", verb, "tga-0")
    assert done.returncode == 4
    assert 'there is no worker or pool "tga-0"' in done.stderr
    assert "did you mean tag-0?" in done.stderr
    done = run(home, "nomarrctl", "--user", verb, "\x1b[31m")
    assert done.returncode == 4
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["simulate", "--set", "max_restart=1"], "did you mean max_restarts?"),
        (["simulate", "--set", "max_restarts"], "write --set max_restarts=3"),
        (["simulate", "--set", "max_restarts=-1"], "from 0 to 100"),
        (["simulate", "--set", "on_exhausted=maks"], "did you mean mask?"),
        (["simulate", "--set", "backoff_base_s=90"], "must not be above backoff_max_s (60)"),
        (["simulate", "--since", "\x1b[2Jlately"], "yesterday"),
        (["explain", "tag"], "the pool tag has 2 workers"),
        (["explain"], "Missing argument"),
    ],
)
def test_bad_questions(home: Path, arguments: list[str], complaint: str) -> None:
    done = run(home, "nomarrctl", "--user", "policy", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "\x1b" not in done.stderr


def test_fish_completes_for_real(home: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("no fish; packaging/prepare test installs it")
    script = 'nomarrctl completion fish | source; complete -C "nomarrctl --user pause t"'
    done = run(home, "fish", "--no-config", "-c", script)
    assert done.returncode == 0, done.stderr
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == {"tag-0", "tag-1", "tag"}
