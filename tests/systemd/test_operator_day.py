"""One operator's day, as root and as a plain user: everything that user scope claims to do."""

from __future__ import annotations

from tests.support.lab import Lab
from tests.support.operator_site import Installation


def test_a_day(any_lab: Lab) -> None:
    site = Installation(any_lab)
    who = "root (uid 0)" if not any_lab.uid else "nobody (uid 65534)"
    site.bring_up(2)
    assert site.json("doctor")["healthy"] is True
    assert site.json("pause", "tag-1")["by"] == who
    assert site.row("tag-1")["held"] == f"paused by {who}"
    assert "tag-1   inactive  paused" in site.ctl("status").stdout
    site.good("resume")
    site.wait_until_healthy("tag-1")
    site.good("restart", "tag")
    site.mask()
    assert "failed for good" in site.good("policy", "explain", "tag-0")
    assert site.json("policy", "simulate", "tag-0")["recorded"]["masks"] == 1
    site.good("reset", "--pool", "tag", "--start")
    site.wait_until_healthy("tag-0", "tag-1")
    assert [each.by for each in site.records("tag-1")] == [who] * 4
    site.configure(1)
    site.good("apply")
    assert [row["instance"] for row in site.json("status")] == ["tag-0"]
