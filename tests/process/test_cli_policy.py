"""nomarrctl as it is run: the policy that is in force, and what a bad configuration is told."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from nomarr_systemd import __version__
from nomarr_systemd.config.file import parse

CONFIG = """\
[policy]
max_restarts = 6
window_s = 300

[pool.tag]
workers = 4
entrypoint = "a.b:C"

[pool.tag.policy]
never_restart = [1, 2]

[worker.tag-2.policy]
max_restarts = 5

[pool.scan]
command = ["/usr/bin/scan"]
"""
PROGRAM = [sys.executable, "-m", "nomarr_systemd.cli.main"]


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "nomarr.toml"
    file.write_text(CONFIG)
    return file


def show_json(config: Path, *arguments: str) -> dict[str, dict[str, dict[str, object]]]:
    result = run("--config", config, "policy", "show", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return {worker["component"]: worker["policy"] for worker in json.loads(result.stdout)}


def test_the_policy_in_force_is_what_was_applied(config: Path, tmp_path: Path) -> None:
    state = tmp_path / ".local/state/nomarr"
    state.mkdir(parents=True)
    (state / "config.json").write_text(json.dumps(parse(CONFIG).to_dict()))
    shown = ("--user", "--config", config, "policy", "show", "tag-0")
    url = f"sqlite://{state}"
    config.write_text(f'[store]\nurl = "{url}"\n{CONFIG}')
    first = json.loads(run(*shown, "--json", HOME=str(tmp_path)).stdout)[0]
    assert first["applied"] is True
    assert first["file_differs"] is True  # in the store that is written down
    config.write_text(CONFIG.replace("max_restarts = 6", "max_restarts = 60"))
    after = run(*shown, HOME=str(tmp_path))
    assert "* max_restarts                      6  policy" in after.stdout
    assert "differs from what was applied" in after.stderr
    (state / "config.json").unlink()
    last = json.loads(run(*shown, "--json", HOME=str(tmp_path)).stdout)[0]
    assert (last["applied"], last["file_differs"]) == (False, None)
    assert last["policy"]["max_restarts"]["value"] == 60


def test_the_policy_of_every_worker(config: Path) -> None:
    result = run("--config", config, "policy", "show")
    assert result.returncode == 0
    assert "nothing has been applied yet; this is what" in result.stderr
    tables = [table.splitlines() for table in result.stdout.split("\n\n")]
    assert [table[0] for table in tables] == [
        "worker:tag:0 to worker:tag:1",
        "worker:tag:2",
        "worker:tag:3",
        "worker:scan:0",
    ]
    rows = {row[2:].split()[0]: row for row in tables[0][1:]}
    assert rows["max_restarts"].split() == ["*", "max_restarts", "6", "policy", "(default", "5)"]
    assert rows["window_s"].split() == ["window_s", "300", "policy"]
    assert rows["backoff_jitter"].split() == ["backoff_jitter", "0.1", "default"]
    assert rows["never_restart"].split()[:5] == ["*", "never_restart", "1", "2", "pool"]
    assert tables[1][1].split() == ["max_restarts", "5", "worker"]


def test_json_has_values_defaults_and_origins(config: Path) -> None:
    workers = show_json(config)
    assert list(workers) == [*(f"worker:tag:{n}" for n in range(4)), "worker:scan:0"]
    assert workers["worker:tag:2"]["max_restarts"] == {"value": 5, "default": 5, "from": "worker"}
    assert workers["worker:tag:0"]["never_restart"] == {
        "value": [1, 2],
        "default": [78],
        "from": "pool",
    }
    assert workers["worker:scan:0"]["max_restarts"]["from"] == "policy"
    assert workers["worker:scan:0"]["never_restart"]["from"] == "default"


@pytest.mark.parametrize("spelling", ["worker:tag:2", "tag-2", "nomarr-worker@tag-2.service"])
def test_one_worker_in_any_spelling(config: Path, spelling: str) -> None:
    assert list(show_json(config, spelling)) == ["worker:tag:2"]


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("tag-4", 4, 'there is no worker or pool "tag-4"'),
        ("worker:nope:0", 4, 'there is no worker or pool "worker:nope:0"'),
        ("nope", 4, 'there is no worker or pool "nope"'),
        ("", 4, 'there is no worker or pool ""'),
    ],
)
def test_a_worker_that_is_not_there(config: Path, name: str, status: int, message: str) -> None:
    result = run("--config", config, "policy", "show", name)
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr.startswith(f"nomarrctl: {message}")
    assert "\nhint: " in result.stderr


def test_every_mistake_in_the_file_is_told(config: Path) -> None:
    config.write_text('[policy]\nmax_restart = 5\n["evil\\u001b[31m"]\n[web]\nlisten = 1\n')
    result = run("--config", config, "policy", "show")
    assert (result.returncode, result.stdout) == (78, "")
    lines = result.stderr.splitlines()
    assert lines[0] == (
        f"nomarrctl: {config}:2: policy.max_restart: unknown key; did you mean max_restarts?"
    )
    assert lines[1].startswith(f'nomarrctl: {config}:3: "evil\\x1b[31m": unknown key')
    assert lines[2] == f"nomarrctl: {config}:5: web.listen: 1 is not text"
    assert lines[3].startswith("hint: ")
    assert len(lines) == 4
    assert "\x1b" not in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = run("--config", tmp_path / "none\x1b[31m.toml", "policy", "show")
    assert result.returncode == 78
    assert "there is no configuration file" in result.stderr
    assert "none\\x1b[31m.toml" in result.stderr
    assert "--config FILE" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    result = run("--config", tmp_path, "policy", "show")
    assert result.returncode == 78
    assert f"cannot read the configuration file {tmp_path}: Is a directory" in result.stderr
    broken = run("--config", "/proc/self/mem", "policy", "show")
    assert broken.returncode == 78
    assert "/proc/self/mem: Input/output error" in broken.stderr


def test_a_file_that_may_not_be_read(config: Path) -> None:
    config.chmod(0)
    # Root reads everything, unless it gives that right up.
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    result = subprocess.run(
        [*(without if os.geteuid() == 0 else ()), *PROGRAM, "--config", config, "policy", "show"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 77
    assert "this user may not read" in result.stderr


def test_a_file_that_is_not_text(config: Path) -> None:
    config.write_bytes(b"[policy]\n# caf\xe9\n")
    result = run("--config", config, "policy", "show")
    assert result.returncode == 78
    assert f"nomarrctl: {config}:2: the byte 0xe9 is not UTF-8\n" in result.stderr
    assert "hint: save the file in UTF-8" in result.stderr


def test_a_file_that_does_not_end() -> None:
    result = run("--config", "/dev/zero", "policy", "show")
    assert result.returncode == 78
    assert "larger than" in result.stderr


def test_the_file_of_the_user(tmp_path: Path) -> None:
    own = tmp_path / ".config" / "nomarr" / "nomarr.toml"
    missing = run("--user", "policy", "show", HOME=str(tmp_path))
    assert missing.returncode == 78
    assert str(own) in missing.stderr
    own.parent.mkdir(parents=True)
    own.write_text("")
    found = run("--user", "policy", "show", HOME=str(tmp_path))
    assert (found.returncode, found.stdout) == (0, f"No workers are configured in {own}.\n")
    assert run("--user", "policy", "show", "--json", HOME=str(tmp_path)).stdout == "[]\n"


def test_help_and_version() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert "policy" in shown.stdout
    assert "demo" in shown.stdout
    assert "/etc/nomarr/nomarr.toml" in shown.stdout
    assert run("--version").stdout == f"nomarrctl {__version__}\n"
    assert run("policy", "show", "--help").returncode == 0


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["policy", "show", "a-0", "b-0"]])
def test_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("Usage: ")


def test_help_imports_no_verb() -> None:
    code = "import sys; from nomarr_systemd.cli.main import main; s = main(['--help']);"
    code += "print(*sys.modules); sys.exit(s)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(result.stdout.splitlines()[-1].split())
    assert not {"nomarr_systemd.cli.policy", "nomarr_systemd.config.values", "tomllib"} & modules


def test_a_reader_that_leaves_early(config: Path) -> None:
    config.write_text(CONFIG.replace("workers = 4", "workers = 4000"))
    with subprocess.Popen(
        [*PROGRAM, "--config", str(config), "policy", "show", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.read(10)
        program.stdout.close()
        assert program.stderr.read() == b""


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_only_on_a_terminal_that_wants_them(
    config: Path, no_color: str, coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [*PROGRAM, "--config", str(config), "policy", "show", "tag-0"],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            env=os.environ | {"NO_COLOR": no_color, "TERM": "xterm"},
            timeout=60,
            check=True,
        )
        shown = os.read(ours, 65536)
    finally:
        os.close(theirs)
        os.close(ours)
    assert b"max_restarts" in shown
    assert (b"\x1b[" in shown) == coloured
