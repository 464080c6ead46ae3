"""docs/json.md against what nomarrctl prints: every field of a table is there, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.postmortem.run_log import Coredump
from tests.support.incidents import close_first, open_second
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation

POOL = """\
[policy]
backoff_base_s = 0.05
backoff_jitter = 0
[pool.tag]
entrypoint = "tests.support.job_workers:Tagger"
crash_policy = "restart-requeue-in-flight"
"""
# What is in these is not ours to say.
OPEN = ("jobs.result", "frames")


def documented(command: str) -> set[str]:
    """The fields in the tables of a command's section, without the signs for lists."""
    text = Path(CHECKOUT, "docs/json.md").read_text()
    section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name.replace("[]", "") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def printed(value: Any, path: str = "") -> set[str]:
    """Every field of a document that has no fields of its own."""
    if path in OPEN:
        return {path}
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = [(path, each) for each in value]
    if not inner:
        return {path}
    return {field for at, each in inner for field in printed(each, at)}


def compare(command: str, document: Any, *, unseen: frozenset[str] = frozenset()) -> None:
    said, shown = documented(command), printed(document)
    leaves = {field for field in said if not any(each.startswith(f"{field}.") for each in said)}
    assert shown - said == set(), f"not in docs/json.md: {command}"
    assert leaves - shown == unseen, f"in docs/json.md, but not printed: {command}"


@pytest.fixture
def site(lab: Lab) -> Installation:
    """A worker that has done a job, died twice of another one, and once by itself, which counts."""
    site = Installation(lab)
    site.config.write_text(POOL)
    site.good("apply")
    site.wait_until_healthy("tag-0")
    site.wait_until_reconciled()
    listed = Path(lab.directory, "listed")
    listed.write_bytes(b"/music/a.flac\0/music/poison.flac\0/music/\xff.flac\0")
    site.good("jobs", "add", "--null", "--from-file", str(listed))

    def are_ended() -> bool:
        counts = site.json("jobs", "list")["counts"]["tag"]
        return bool(counts["done"] == 2 and counts["quarantined"] == 1)

    lab.wait_for(are_ended, what="two jobs are done, one is in quarantine")
    lab.wait_for(
        lambda: [each for each in site.records() if each.action == "refund"],
        what="the restarts are refunded",
    )
    site.wait_until_healthy("tag-0")
    site.crash("tag-0")
    site.wait_until_healthy("tag-0")
    return site


def test_what_is_written_is_what_is_printed(site: Installation) -> None:
    compare("status", site.json("status"))
    close_first(str(site.state))
    open_second(str(site.state))
    compare("history", site.json("history"))
    compare("policy explain", site.json("policy", "explain", "tag-0"))
    listed = site.json("jobs", "list")
    compare("jobs list", {**listed, "counts": {"POOL": listed["counts"]["tag"]}})
    done = site.ctl("doctor", "--json")
    assert done.returncode in (0, 1)  # as this machine is
    compare("doctor", json.loads(done.stdout))
    # No core dumps are kept in the lab.
    dump = frozenset(f"coredump.{name}" for name in Coredump._fields)
    first = site.records()[0].invocation
    compare("why", site.json("why", "tag-0", "--invocation", first), unseen=dump)
