"""``nomarrctl policy explain`` and ``simulate`` on failures that really happened."""

from __future__ import annotations

import pytest

from tests.support.lab import Lab
from tests.support.operator_site import Installation


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def test_where_a_worker_stands_and_what_another_policy_would_have_done(site: Installation) -> None:
    site.bring_up(2)
    assert site.good("policy", "simulate") == "No failures are on record.\n"
    fresh = site.json("policy", "explain", "tag-0")
    assert [each["action"] for each in fresh["ahead"]] == ["restart", "restart", "fail"]
    assert [each["delay_s"] for each in fresh["ahead"]] == [0.1, 0.2, 0.0]
    assert "The next failure: restarted after 100 ms." in site.good("policy", "explain", "tag-0")

    runs = [site.crash() for _ in range(2)]
    site.lab.wait_until("tag-0", "active")
    stands = site.json("policy", "explain", "worker:tag:0")
    assert stands["window"]["used"] == 2
    assert [each["invocation"] for each in stands["window"]["restarts"]] == runs
    assert all(0 < each["frees_in_s"] <= 300 for each in stands["window"]["restarts"])
    assert stands["ahead"][0]["action"] == "fail"
    said = site.good("policy", "explain", "tag-0", COLUMNS="60")
    assert "The next failure: masked; 2 restarts within 5 min, the limit is 2." in said
    assert said.count("SIGKILL; leaves the window in 4 min") == 2
    assert "├" in said
    assert max(map(len, said.splitlines()[:6])) <= 60

    strict = site.json("policy", "simulate", "--set", "max_restarts=1", "tag")
    assert strict["set"] == {"max_restarts": 1}
    assert strict["recorded"]["restarts"] == 2
    assert strict["simulated"]["masks"] == 1
    assert strict["saved_s"] < 0
    worker = strict["workers"][0]
    assert worker["component"] == "worker:tag:0"
    assert worker["whole"] is True
    actions = [each["simulated"]["action"] for each in worker["failures"]]
    assert actions == ["restart", "fail"]
    same = site.json("policy", "simulate")
    assert same["recorded"] == same["simulated"]
    said = site.good("policy", "simulate", "--set", "max_restarts=1", "--since", "1h", "tag-0")
    assert "restart after 200 ms  masked" in said
    assert "more downtime" in said
    later = site.good("policy", "simulate", "--since", "2099-01-01")
    assert later == "No failures are on record since then.\n"

    site.crash()
    site.lab.wait_for(lambda: site.account().failure_reason, what="it is masked")
    assert "nomarrctl --user reset --start tag-0" in site.good("policy", "explain", "tag-0")
