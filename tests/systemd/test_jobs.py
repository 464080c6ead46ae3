"""Jobs under a real systemd: a pool survives a job that kills its workers."""

from __future__ import annotations

from contextlib import closing

from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.lab import Lab

CONFIG = """
[policy]
backoff_base_s = 0.05
backoff_max_s = 0.2
[pool.tag]
workers = 2
entrypoint = "tests.support.job_workers:Tagger"
crash_policy = "restart-requeue-in-flight"
"""


def test_a_pool_survives_a_poisonous_job(lab: Lab) -> None:
    lab.install(CONFIG)
    paths = [f"/music/{n:02d}.flac" for n in range(20)]
    with closing(SqliteStore(lab.paths.state, "work")) as store:
        queue.add(store, "tag", [*paths, "/music/05-poison.flac"], on_page=lambda *_: None)
        lab.hand_over()
        lab.systemctl("start", "nomarr-controller.socket", "nomarr-supervisor.service")
        lab.start("tag-0", "tag-1")
        ended = {"pending": 0, "running": 0, "done": 20, "error": 0, "quarantined": 1}
        lab.wait_for(lambda: queue.count(store, "tag") == ended)
        poison = queue.find(store, "tag", "/music/05-poison.flac")
        lab.wait_for(lambda: store.find(CLAIMS) == [])
    assert poison["attempts"] == 2
    assert poison["error"]["type"] == "WorkerCrashedError"
    lab.wait_until("tag-0", "active")
    lab.wait_until("tag-1", "active")
