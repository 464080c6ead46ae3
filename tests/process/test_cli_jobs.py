"""nomarrctl jobs, as a program: many paths at once, strange ones, and what is said about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.values import Pool
from nomarr_systemd.core.job import Owner, RunEnd
from nomarr_systemd.jobs.claims import Claims, End
from nomarr_systemd.jobs.settlement import settle
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.capabilities import needs_root
from tests.support.users import open_to_all

STRANGE = [b"/music/\xff\xfe.flac", b"/music/new\nline", b"/music/" + b"x" * 4000, "/ä €".encode()]


class Program:
    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "work").mkdir()
        self.config = place / "nomarr.toml"
        self.config.write_text(
            f'[store]\nurl = "sqlite://{place}"\n[pool.tag]\nentrypoint = "a.b:C"\n'
        )
        # As nomarrctl apply leaves it, for a user whose home this is.
        self.applied = place / ".local/state/nomarr/config.json"
        self.applied.parent.mkdir(parents=True)
        self.applied.write_text(json.dumps(parse(self.config.read_text()).to_dict()))

    def run(self, *arguments: str | bytes, given: bytes = b"", status: int = 0) -> str:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "nomarr_systemd.cli.main"),
                *("--user", "--config", self.config, "jobs", *arguments),
            ],
            env=os.environ | {"HOME": str(self.place)},
            input=given,
            capture_output=True,
            check=False,
        )
        assert done.returncode == status, done
        self.said = done.stderr.decode()
        return self.said if status else done.stdout.decode()

    def complete(self, *words: str) -> list[str]:
        """What bash is told about the last of these words, which come after ``jobs``."""
        line = ["nomarrctl", "--user", "jobs", *words]
        variables = {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
        variables |= {"_NOMARRCTL_COMPLETE": "bash_complete", "HOME": str(self.place)}
        done = subprocess.run(
            [sys.executable, "-m", "nomarr_systemd.cli.main"],
            env=os.environ | variables,
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [line.partition(",")[2] for line in done.stdout.splitlines() if line]

    def ask(self, *arguments: str | bytes, given: bytes = b"") -> Any:
        return json.loads(self.run(*arguments, "--json", given=given))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def test_ten_thousand_at_once_and_again(program: Program) -> None:
    paths = b"".join(b"/music/%05d.flac\n" % n for n in range(10_000))
    assert program.ask("add", "-", given=paths)["added"] == 10_000
    assert program.ask("add", "-", given=paths + b"/one more\n") == {
        "pool": "tag",
        "paths": 10_001,
        "added": 1,
        "file_differs": False,
    }
    listed = program.ask("list", "--status", "pending", "--limit", "3")
    assert listed["counts"]["tag"]["pending"] == 10_001
    assert [job["path"] for job in listed["jobs"]] == [f"/music/{n:05d}.flac" for n in range(3)]
    assert "9998 more" in program.run("list", "--limit", "3")


def test_a_shell_completes_jobs(program: Program) -> None:
    program.run("add", "/m/a.flac", "/m/b.flac", "/other/c.flac", "/m/with space", "/m/$(reboot)")
    assert program.complete("show", "/m/") == ["/m/a.flac", "/m/b.flac"]
    assert program.complete("show", "--pool", "nope", "/m/") == []
    assert program.complete("retry", "/m/") == [], "none has failed"
    assert program.complete("quarantine", "release", "/m/") == []
    store = SqliteStore(str(program.place), "work")
    [doc] = [each for each in store.find("jobs") if each["path"] == "/m/a.flac"]
    store.replace("jobs", doc | {"status": "quarantined"})
    store.close()
    assert program.complete("quarantine", "release", "/m/") == ["/m/a.flac"]
    program.applied.unlink()
    program.config.unlink()
    assert program.complete("show", "/m/") == []


def test_paths_of_any_kind(program: Program) -> None:
    program.run("add", "-0", "--from-file", "-", given=b"\0".join(STRANGE))
    assert program.ask("add", *STRANGE)["added"] == 0
    assert program.ask("list")["counts"]["tag"]["pending"] == len(STRANGE)
    shown = program.run("list")
    assert "\\udcff" in shown
    assert "new\\nline" in shown
    assert all(line.isprintable() for line in shown.splitlines())
    for path in STRANGE:
        assert program.ask("show", path)["status"] == "pending"


def test_from_a_job_to_its_end(program: Program) -> None:
    program.run("add", "/a", "/b", "/c")
    store = SqliteStore(str(program.place), "work")
    claims = Claims(store, "tag", Owner("worker:tag:0", "a" * 32))
    for end in (End("done", {"bpm": 120}), End("error", error={"type": "E", "message": "\x1b[1m"})):
        doc = claims.take_next()
        assert doc
        claims.end(doc["_key"], end)
    assert program.ask("show", "/a")["result"] == {"bpm": 120}
    assert "\x1b" not in program.run("show", "/b")
    assert "cannot be retried" in program.run("retry", "/c", status=1)
    assert len(program.ask("retry", "--all")["pending"]) == 1
    # One that kills its workers.
    pool = Pool("tag", job_max_crashes=1)
    doc = claims.take_next()
    assert doc
    assert doc["path"] == "/b"
    settle(store, pool, RunEnd("worker:tag:0", "a" * 32, "killed by signal 11", 1))
    assert [job["path"] for job in program.ask("quarantine", "list")["jobs"]] == ["/b"]
    assert "killed by signal 11" in program.run("show", doc["_key"])
    assert "cannot be retried" in program.run("retry", "/b", status=1)
    assert program.ask("quarantine", "release", "/b") == {
        "pending": [doc["_key"]],
        "file_differs": False,
    }
    assert program.ask("prune")["pruned"] == 0
    assert program.ask("prune", "--days", "0")["pruned"] == 1
    assert "there is no job" in program.run("show", "/a", status=4)
    store.close()


def test_jobs_go_where_the_workers_look(program: Program, tmp_path: Path) -> None:
    """An edited url that was not applied sent jobs where nobody looked for them."""
    program.run("add", "/a")
    assert not program.said
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "work").mkdir(parents=True)
    text = program.config.read_text()
    program.config.write_text(text.replace(str(tmp_path), str(elsewhere)))
    assert program.ask("add", "/b")["file_differs"] is True
    listed = program.ask("list")
    assert [job["path"] for job in listed["jobs"]] == ["/a", "/b"]
    assert listed["file_differs"] is True
    program.run("list")
    assert "nomarr.toml differs from what was applied" in program.said
    assert "apply --dry-run" in program.said
    assert list((elsewhere / "work").iterdir()) == []
    program.config.write_text("[pool")  # a mistake is a difference, and nothing else
    assert program.ask("list")["file_differs"] is True
    program.applied.unlink()
    assert "run nomarrctl apply first" in program.run("list", status=78)


def test_several_states_at_once(program: Program) -> None:
    program.run("add", "/a")
    both = program.ask("list", "--status", "pending", "--status", "done")
    assert [job["path"] for job in both["jobs"]] == ["/a"]
    assert program.ask("list", "--status", "done", "--status", "error")["jobs"] == []


def test_mistakes_are_explained(program: Program) -> None:
    assert "name paths" in program.run("add", status=2)
    assert "did you mean tag?" in program.run("add", "--pool", "tga", "/a", status=4)
    assert "cannot read" in program.run("add", "--from-file", "/nowhere", status=1)
    assert "say --all" in program.run("retry", status=2)
    os.rmdir(program.place / "work")
    said = program.run("list", status=1 if os.geteuid() == 0 else 0)
    assert os.geteuid() or "nomarrctl apply" in said


@needs_root
def test_what_root_adds_the_workers_can_use(program: Program) -> None:
    open_to_all(program.place)
    os.chown(program.place / "work", 12345, 12345)
    secret = program.place / "list"
    secret.write_text("/a\n")
    secret.chmod(0o600)
    program.run("add", "--from-file", str(secret))
    owners = {path.stat().st_uid for path in (program.place / "work").iterdir()}
    assert owners == {12345}
