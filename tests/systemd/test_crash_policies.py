"""Crash policies, quarantine and their ends under a real systemd, with workers that take jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.jobs.settlement import STATS
from tests.support.job_site import JobSite
from tests.support.lab import Lab
from tests.support.watch import Watch

POLICY = """\
[policy]
backoff_base_s = 0.1
backoff_multiplier = 1
backoff_jitter = 0
"""
POOLS = {
    "keep": (2, ""),
    "again": (2, 'crash_policy = "restart-requeue-in-flight"\njob_max_crashes = 2'),
    "whole": (2, 'crash_policy = "fail-pool"'),
    "strict": (3, "crash_max_retries = 1"),
    "life": (1, "idle_evict_s = 0.5"),
    # One restart and no more: each second death by a job would mask it.
    "plain": (1, "[pool.plain.policy]\nmax_restarts = 1\nmax_lifetime_restarts = 1"),
    "bad": (
        1,
        """crash_policy = "restart-requeue-in-flight"
[pool.bad.policy]
max_restarts = 1
max_lifetime_restarts = 1""",
    ),
}


@pytest.fixture(scope="module")
def site() -> Iterator[JobSite]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = JobSite(lab, POLICY, POOLS)
        with closing(site.store):
            yield site
    finally:
        lab.end()


def test_the_job_in_hand_fails_and_all_else_goes_on(site: JobSite) -> None:
    site.add("keep", "wait-1", "wait-2")
    first, second = site.wait_for_worker("keep", "wait-1"), site.wait_for_worker("keep", "wait-2")
    assert {first, second} == {"keep-0", "keep-1"}
    runs = site.runs("keep")
    died = site.kill(first)
    site.wait_for_job("keep", "wait-1", "error")
    site.wait_for_new_run(first, died)
    cause = "killed by SIGKILL"
    site.lab.wait_for(
        lambda: cause in site.job("keep", "wait-1")["error"]["cause"], what="the better word"
    )
    error = site.job("keep", "wait-1")["error"]
    assert (error["type"], error["pool"]) == ("WorkerCrashedError", "keep")
    assert (error["worker_index"], error["invocation"]) == (int(first[-1]), died)
    assert cause in error["message"]
    assert site.job("keep", "wait-2")["status"] == "running"
    site.add("keep", "next")
    site.wait_for_job("keep", "next", "done")
    site.touch("wait-2.go")
    site.wait_for_job("keep", "wait-2", "done")
    assert site.lab.get(second, "InvocationID") == runs[second]
    key = site.key("keep", "wait-1")
    [told] = site.lab.wait_for(lambda: site.told("job-failed", "keep"), what="the entry about it")
    assert told.startswith(f"{first}: job {key} failed for it; 1 restart was refunded")
    assert told.endswith(f"nomarrctl --user jobs retry {key}")
    account = site.account(first)
    assert (account.restart_count, account.total_restarts) == (0, 1)
    advice = site.why(first, "--invocation", died)["advice"]
    assert f"nomarrctl --user jobs retry {key}" in [each["command"] for each in advice]


def test_the_job_in_hand_is_done_again(site: JobSite) -> None:
    site.add("again", "wait-1")
    died = site.kill(first := site.wait_for_worker("again", "wait-1"))
    site.lab.wait_for(lambda: site.job("again", "wait-1")["attempts"] == 2, what="a second try")
    site.touch("wait-1.go")
    job = site.wait_for_job("again", "wait-1", "done")
    assert job["attempts"] == 2
    assert [each["invocation"] for each in job["crashes"]] == [died]
    site.wait_for_new_run(first, died)


def test_a_poisonous_job_is_set_aside_and_restarts_are_given_back(site: JobSite) -> None:
    watch = Watch(site.lab.paths.live, "queue:again:status")
    before = {name: site.account(name).window for name in site.instances("again")}
    healthy = [f"{number}" for number in range(6)]
    site.add("again", "poison", *healthy)
    job = site.wait_for_job("again", "poison", "quarantined")
    for name in healthy:
        site.wait_for_job("again", name, "done")
    key = site.key("again", "poison")
    killed = {each["component_id"] for each in job["crashes"]}
    told = site.lab.wait_for(
        lambda: len(found := site.told("quarantine", "again")) == len(killed) and found,
        what="an entry for each worker that it killed",
    )
    assert told
    for entry in told:
        # What is said to be refunded is what is on record.
        instance = entry.partition(":")[0]
        refunds = [each for each in site.records(instance) if each.action == "refund"]
        many = "1 restart was" if len(refunds) == 1 else f"{len(refunds)} restarts were"
        assert f"{instance}: job {key} was quarantined; {many} refunded" in entry
        assert entry.endswith(f"nomarrctl --user jobs quarantine release {key}")
    for name in site.instances("again"):
        assert site.account(name).window == before[name]

    def announced() -> list[list[str]]:
        settled = [event for event in tuple(watch.events) if event["type"] == "settled"]
        return [found for event in settled if (found := event["outcome"]["quarantined"])]

    assert site.lab.wait_for(announced, what="the event") == [[key]]
    watch.close()
    # Each run that it killed can be asked about.
    assert len(job["crashes"]) == 2
    shown = site.good("jobs", "show", "--pool", "again", site.path("poison"))
    for each in job["crashes"]:
        assert each["invocation"] in shown
        report = site.why(each["component_id"], "--invocation", each["invocation"])
        assert report["verdict"] == "died"
        assert report["death"]["job"] == site.path("poison")
        commands = [each["command"] for each in report["advice"]]
        assert f"nomarrctl --user jobs quarantine release {key}" in commands
    assert [each["id"] for each in site.json("jobs", "quarantine", "list")["jobs"]] == [key]
    site.touch("poison.cured")
    assert "1 job is pending again" in site.good("jobs", "quarantine", "release", key)
    site.wait_for_job("again", "poison", "done")
    site.good("reconcile")
    assert len(site.told("quarantine", "again")) == len(killed)


def test_a_stream_of_bad_files_slows_a_worker_down_and_never_masks_it(site: JobSite) -> None:
    files = [f"poison-{number}" for number in range(5)]
    site.add("bad", *files, "zz-good")
    for name in files:
        site.wait_for_job("bad", name, "quarantined")
    site.wait_for_job("bad", "zz-good", "done")
    site.wait_until_healthy("bad-0")
    site.lab.wait_for(
        lambda: len(site.told("quarantine", "bad")) == len(files), what="an entry for each file"
    )
    account = site.account("bad-0")
    assert (account.restart_count, account.total_restarts) == (0, 2 * len(files))
    assert (account.k, account.failure_reason) == (2 * len(files), None)
    assert all("2 restarts were refunded" in each for each in site.told("quarantine", "bad"))


def test_so_does_a_stream_of_bad_files_that_are_tried_once(site: JobSite) -> None:
    """By the default crash_policy: a job fails for the death of its worker, which costs nothing."""
    files = [f"poison-{number}" for number in range(6)]
    site.add("plain", *files, "zz-good")
    for name in files:
        site.wait_for_job("plain", name, "error")
    site.wait_for_job("plain", "zz-good", "done")
    site.wait_until_healthy("plain-0")
    site.lab.wait_for(
        lambda: len(site.told("job-failed", "plain")) == len(files), what="an entry for each file"
    )
    assert all("1 restart was refunded" in each for each in site.told("job-failed", "plain"))
    account = site.account("plain-0")
    assert (account.restart_count, account.total_restarts) == (0, len(files))
    assert (account.k, account.failure_reason) == (len(files), None)
    # Who looks can see that, although nothing was counted.
    assert site.row("plain-0")["trouble"] == f"jobs killed it {len(files)} times within an hour"
    findings = json.loads(site.ctl("doctor", "--json").stdout)["findings"]
    [found] = [each for each in findings if each["text"].startswith("plain-0: jobs killed it")]
    assert found["mend"].endswith("jobs list --pool plain --status error --status quarantined")
    # What it does without a job in hand is its own fault, as ever.
    first = site.kill("plain-0")
    site.wait_for_new_run("plain-0", first)
    site.wait_until_healthy("plain-0")
    site.kill("plain-0")
    site.lab.wait_for(lambda: site.lab.get("plain-0", "LoadState") == "masked", what="it is masked")


def test_a_whole_pool_fails_and_is_brought_back(site: JobSite) -> None:
    others = site.runs("keep", "again")
    site.add("whole", "wait-a", "wait-b")
    first, second = site.wait_for_worker("whole", "wait-a"), site.wait_for_worker("whole", "wait-b")
    site.add("whole", "wait-c")
    died = site.kill(first)
    for name in ("wait-a", "wait-b", "wait-c"):
        error = site.wait_for_job("whole", name, "error")["error"]
        assert (error["type"], error["pool"]) == ("WorkerCrashedError", "whole")
        assert error["invocation"] == died
    site.lab.wait_until(second, "deactivating", "inactive")
    site.touch("wait-b.go")
    site.wait_until_masked("whole")
    assert site.lab.get(second, "Result") == "success"
    assert site.job("whole", "wait-b")["status"] == "error"  # its result came too late
    site.good("reconcile")
    told, *own = site.told("pool-failed", "whole")
    assert told.startswith(f"pool whole has failed: worker:whole:{first[-1]} died (killed by")
    # The journal of each worker says so, with the true cause.
    assert sorted(each.partition(":")[0] for each in own) == sorted((first, second))
    assert all(f"failed for good, because {told}" in each for each in own)
    for name in (first, second):
        row = site.row(name)
        assert row["state"] == "masked"
        assert row["failure_reason"] == site.account(name).failure_reason
        assert row["failure_reason"].startswith("its pool failed: worker:whole:")
        report = site.why(name)
        assert "its pool failed" in report["state"]["line"]
        assert report["advice"][-1]["command"].endswith("reset --pool whole --start")
    assert "its pool failed" in site.ctl("status").stdout
    assert "has failed" in site.good("events", "-n", "100", "--topic", "queue:whole:status")
    assert site.runs("keep", "again") == others
    assert site.claims("whole") == []
    assert "reset --start --pool whole\n" in site.ctl("status", first).stdout
    # One alone is a person's word, too; the others stay as they are.
    site.good("reset", second, "--start")
    site.wait_until_healthy(second)
    site.good("reconcile")
    assert [site.row(name)["state"] for name in (first, second)] == ["masked", "healthy"]
    site.good("reset", "--pool", "whole", "--start")
    site.wait_until_healthy(first, second)
    runs = site.runs("whole")
    site.good("reconcile")
    site.add("whole", "new-1", "new-2")
    for name in ("new-1", "new-2"):
        site.wait_for_job("whole", name, "done")
    site.good("reconcile")
    assert site.runs("whole") == runs
    assert len(site.told("pool-failed", "whole")) == 3


def test_too_many_crashes_fail_the_pool(site: JobSite) -> None:
    names = site.instances("strict")
    site.wait_for_new_run("strict-0", site.kill("strict-0"))
    site.wait_until_healthy("strict-0")
    site.add("strict", "wait-p", "wait-q", "wait-r")
    for job in ("wait-p", "wait-q", "wait-r"):
        site.wait_for_job("strict", job, "running")
    for pid in [site.lab.main_pid(name) for name in names]:  # all at once: an incident, too
        os.kill(pid, signal.SIGKILL)
    for job in ("wait-p", "wait-q", "wait-r"):
        site.wait_for_job("strict", job, "error")
    site.wait_until_masked("strict")
    site.good("reconcile")
    told = site.told("pool-failed", "strict")
    assert all("crash_max_retries is 1" in each for each in told)
    for name in names:
        assert "crash_max_retries is 1" in str(site.account(name).failure_reason)
        assert site.lab.get(name, "ActiveState") == "failed"


def test_all_die_together_and_the_job_is_settled_once(site: JobSite) -> None:
    site.add("keep", "wait-3")
    first = site.wait_for_worker("keep", "wait-3")
    before = site.account(first)
    died = site.kill_all_with(first)
    job = site.wait_for_job("keep", "wait-3", "error")
    site.wait_for_new_run(first, died)
    assert (job["attempts"], len(job["crashes"])) == (1, 1)
    assert site.claims("keep") == []
    site.lab.wait_for(
        lambda: site.account(first).find(died, ("refund",)), what="the restart is refunded"
    )
    site.good("reconcile")
    after = site.account(first)
    assert after.total_restarts == before.total_restarts + 1
    assert after.restart_count == before.restart_count
    assert site.job("keep", "wait-3")["status"] == "error"


def test_all_die_together_and_restarts_are_given_back(site: JobSite) -> None:
    site.add("again", "wait-4")
    for _ in range(2):
        first = site.wait_for_worker("again", "wait-4")
        died = site.kill_all_with(first)
        site.wait_for_new_run(first, died)
    job = site.wait_for_job("again", "wait-4", "quarantined")
    assert len(job["crashes"]) == 2
    dead = {each["invocation"] for each in job["crashes"]}

    def counted() -> set[str]:
        rows = [
            row for name in site.instances("again") for row in site.account(name).window.values()
        ]
        return {run for row in rows for run in row[::3]} & dead

    site.lab.wait_for(lambda: not counted(), what="restarts are refunded")
    key = site.key("again", "wait-4")
    site.lab.wait_for(
        lambda: [each for each in site.told("quarantine", "again") if key in each], what="the entry"
    )


def test_all_die_together_and_the_pool_fails(site: JobSite) -> None:
    """By another signal than above: three workers that die alike within ten seconds are an
    incident, and an incident does not fail the pool."""
    site.good("reset", "--pool", "strict", "--start")
    site.wait_until_healthy(*site.instances("strict"))
    site.wait_for_new_run("strict-0", site.kill("strict-0", signal.SIGSEGV))
    site.add("strict", "wait-s", "wait-t", "wait-u")
    for job in ("wait-t", "wait-u"):
        site.wait_for_job("strict", job, "running")
    site.add("strict", "wait-v")
    site.kill_all_with(site.wait_for_worker("strict", "wait-s"), signal.SIGSEGV)
    for job in ("wait-s", "wait-t", "wait-u", "wait-v"):
        attempts = site.wait_for_job("strict", job, "error")["attempts"]
        assert attempts == (job != "wait-v")
    site.touch("wait-t.go")
    site.touch("wait-u.go")
    site.wait_until_masked("strict")
    assert site.claims("strict") == []


def test_preflight_fails_and_recovers(site: JobSite) -> None:
    site.touch("unready-life")
    site.add("life", "p-1")
    row = site.lab.wait_for(
        lambda: (each := site.row("life-0"))["phase"] == "backing_off" and each, what="a back-off"
    )
    assert isinstance(row, dict)
    assert row["health"] == "unhealthy"
    assert row["active"] == "active"
    why = "what it needs is away; retrying in "
    assert row["note"].startswith(why)
    assert row["trouble"].startswith(f"unhealthy, backing_off: {why}")
    assert f"life-0: {why}" in site.ctl("status").stdout
    (site.place / "unready-life").unlink()
    site.wait_for_job("life", "p-1", "done")
    site.wait_until_healthy("life-0")
    assert site.account("life-0").restart_count == 0


def test_idle_workers_give_back_and_load_again(site: JobSite) -> None:
    loads = site.place / "loads-life"
    site.lab.wait_for(lambda: loads.read_text().endswith("evicted\n"), what="an eviction")
    site.add("life", "e-1")
    site.wait_for_job("life", "e-1", "done")
    assert loads.read_text().removesuffix("evicted\n").endswith("evicted\nloaded\n")


def test_a_pause_in_a_job_lets_it_finish_and_stay_down(site: JobSite) -> None:
    site.add("life", "wait-7", "x-8")
    assert site.wait_for_worker("life", "wait-7") == "life-0"
    enter = ["nsenter", f"--target={site.lab.pid}", "--mount", "--"]
    with subprocess.Popen(
        [*enter, *site.command("pause", "life")],
        env=site.lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as pause:
        # Not before it was told, or it would take the next job.
        site.lab.wait_for(lambda: site.lab.get("life-0", "SubState") == "stop-sigterm")
        site.touch("wait-7.go")
        said, _ = pause.communicate(timeout=60)
    assert said == "worker:life:0: paused\n"
    job = site.job("life", "wait-7")
    assert (job["status"], job.get("error"), job["attempts"]) == ("done", None, 1)
    site.good("reconcile")
    assert site.lab.get("life-0", "ActiveState") == "inactive"
    assert site.job("life", "x-8")["status"] == "pending"
    assert site.claims("life") == []
    site.good("resume", "life")
    site.wait_for_job("life", "x-8", "done")
    assert site.account("life-0").restart_count == 0


OUTAGE_POOLS = {
    "tag": (3, 'crash_policy = "restart-requeue-in-flight"'),
    "hand": (
        3,
        'crash_policy = "restart-requeue-in-flight"\n[pool.hand.policy]\nbackoff_base_s = 60',
    ),
}


def test_an_outage_holds_the_pool_until_it_is_over_or_a_person_says_so(lab: Lab) -> None:
    unlimited = "max_restarts = 100\nmax_lifetime_restarts = 0\n"  # the canary pays
    site = JobSite(lab, POLICY + unlimited, OUTAGE_POOLS)
    site.wait_until_reconciled()
    site.add("tag", "wait-1", "wait-2", "wait-3")
    site.add("hand", "wait-4", "wait-5", "wait-6")
    for job in ("wait-1", "wait-2", "wait-3"):
        site.wait_for_job("tag", job, "running")
    for job in ("wait-4", "wait-5", "wait-6"):
        site.wait_for_job("hand", job, "running")
    site.touch("gone-tag")
    canary, others = wait_until_held(site, "tag")
    for name in others:
        row = site.row(name)
        assert row["state"] == "held"
        assert row["held"].endswith(f"died alike (exit); worker:tag:{canary[-1]} is tried first")
        assert row["window"]["used"] == 0
        report = site.why(name)
        assert report["state"]["line"].startswith("held: incident: ")
        assert report["advice"][-1]["command"].endswith("resume tag")
    status = site.ctl("status").stdout
    assert f"{', '.join(others)}: held: incident: 3 workers of tag died alike" in status
    assert "nomarrctl resume tag" in status
    told = site.good("events", "-n", "100", "--topic", "queue:tag:status")
    assert "incident-opened" in told
    assert "died alike" in told
    tries = len(site.records(canary))
    lab.wait_for(lambda: len(site.records(canary)) >= tries + 2, what="two tries")
    (site.place / "gone-tag").unlink()
    site.wait_until_healthy("tag-0", "tag-1", "tag-2")
    for job in ("wait-1", "wait-2", "wait-3"):
        site.touch(f"{job}.go")
        assert site.wait_for_job("tag", job, "done")["attempts"] == 2
    assert len(site.told("incident-opened", "tag")) == 1
    assert len(site.told("incident-closed", "tag")) == 1
    for name in others:
        assert not any(site.account(name).window.values())
    assert [site.account(name).failure_reason for name in site.instances("tag")] == [None] * 3
    # The other pool's workers wait for a minute, its canary too: it is closed by hand.
    site.touch("gone-hand")
    wait_until_held(site, "hand")
    (site.place / "gone-hand").unlink()
    said = site.good("resume", "hand")
    assert said.endswith("no longer held\n")
    site.wait_until_healthy("hand-0", "hand-1", "hand-2")
    [told] = site.told("incident-closed", "hand")
    assert "resumed by root" in told
    assert os.listdir(site.state / "hold") == []
    for job in ("wait-4", "wait-5", "wait-6"):
        site.touch(f"{job}.go")
        site.wait_for_job("hand", job, "done")
    site.store.close()


def wait_until_held(site: JobSite, pool: str) -> tuple[str, list[str]]:
    """Until all but one of a pool's workers are held; that one, and the others."""
    names = site.instances(pool)

    def look() -> set[str]:
        rows = site.status()
        held = {row["instance"] for row in rows.values() if row["state"] == "held"}
        texts = {rows[f"worker:{name.replace('-', ':')}"]["held"] for name in held & set(names)}
        settled = len(texts) == 1 and "incident: 3 workers" in texts.pop()
        return held & set(names) if len(held & set(names)) == 2 and settled else set()

    held = site.lab.wait_for(look, what="two are held")
    [canary] = set(names) - held
    return canary, sorted(held)


def test_a_pool_forgets_its_crashes_when_all_of_it_has_stopped(site: JobSite) -> None:
    def crashes() -> int:
        books = site.store.get(STATS, "pool:keep")
        return int(books["crashes"]) if books else -1

    site.wait_for_new_run("keep-1", site.kill("keep-1"))
    site.wait_until_healthy("keep-1")
    site.lab.wait_for(lambda: crashes() > 0, what="the crash is counted")
    before = crashes()
    site.lab.stop("keep-0")
    site.lab.wait_until("keep-0", "inactive")
    site.lab.start("keep-0")
    site.wait_until_healthy("keep-0", "keep-1")
    assert crashes() == before
    site.lab.stop("keep-0", "keep-1")
    site.lab.wait_for(lambda: crashes() == 0, what="the crashes are forgotten")
