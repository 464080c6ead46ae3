"""A user's own installation whose workers take jobs from the store, and what becomes of those."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.values import Config
from nomarr_systemd.core.job import key_of
from nomarr_systemd.jobs import queue
from nomarr_systemd.jobs.claims import CLAIMS
from nomarr_systemd.store.protocol import Doc
from nomarr_systemd.store.sqlite.store import SqliteStore
from nomarr_systemd.systemd.journal import MESSAGE_IDS
from tests.support.lab import Lab
from tests.support.operator_site import Installation

POOL = """
[pool.{name}]
workers = {workers}
entrypoint = "tests.support.crash_workers:Tagger"
watchdog_s = 3600
{settings}
[pool.{name}.unit]
Environment = ["PLACE={place}"]
"""


class JobSite(Installation):
    """Pools of crash_workers.Tagger: ``pools`` has the number of workers and settings of each."""

    def __init__(self, lab: Lab, policy: str, pools: dict[str, tuple[int, str]]) -> None:
        super().__init__(lab)
        self.place = Path(lab.directory, "place")
        self.place.mkdir()
        text = policy
        for name, (workers, settings) in pools.items():
            fields = {"workers": workers, "settings": settings, "place": self.place}
            text += POOL.format(name=name, **fields)
        self.config.write_text(text)
        self.good("apply")
        names = [each.instance for each in self.parsed.components()]
        self.wait_until_healthy(*names)
        self.store = SqliteStore(str(self.state), "work")

    @property
    def parsed(self) -> Config:
        return parse(self.config.read_text(), state_directory=str(self.state))

    def instances(self, pool: str) -> list[str]:
        return [each.instance for each in self.parsed.components() if each.pool == pool]

    def path(self, name: str) -> str:
        return str(self.place / name)

    def touch(self, name: str) -> None:
        (self.place / name).touch()

    def add(self, pool: str, *names: str) -> None:
        self.good("jobs", "add", "--pool", pool, *map(self.path, names))

    def job(self, pool: str, name: str) -> Doc:
        return queue.find(self.store, pool, self.path(name))

    def key(self, pool: str, name: str) -> str:
        return key_of(pool, self.path(name))

    def wait_for_job(self, pool: str, name: str, status: str) -> Doc:
        def look() -> Doc | None:
            doc = self.job(pool, name)
            return doc if doc["status"] == status else None

        found = self.lab.wait_for(look, what=f"{name} is {status}")
        assert found is not None
        return found

    def wait_for_worker(self, pool: str, name: str) -> str:
        """The instance that has the job in hand."""
        doc = self.wait_for_job(pool, name, "running")
        return str(doc["component_id"]).removeprefix("worker:").replace(":", "-")

    def wait_for_new_run(self, instance: str, old: str) -> None:
        def look() -> bool:
            shown = self.lab.show(instance, "InvocationID", "ActiveState")
            return shown["InvocationID"] != old and shown["ActiveState"] == "active"

        self.lab.wait_for(look, what=f"{instance} runs again")

    def wait_until_masked(self, pool: str) -> None:
        """All of its workers, with the reason on record, and none of them running."""
        for name in self.instances(pool):
            self.lab.wait_for(
                lambda: self.lab.get(name, "LoadState") == "masked",  # noqa: B023
                what=f"{name} is masked",
            )
            self.lab.wait_until(name, "inactive", "failed")
            self.lab.wait_for(
                lambda: self.account(name).failure_reason,  # noqa: B023
                what="the reason",
            )

    def kill_all_with(self, instance: str, number: int = signal.SIGKILL) -> str:
        """SIGKILL for supervisor and controller, a signal for the worker; the run that died."""
        died = self.lab.get(instance, "InvocationID")
        units = {
            "nomarr-supervisor.service": signal.SIGKILL,
            "nomarr-controller.service": signal.SIGKILL,
            instance: number,
        }
        pids = {self.lab.find_main_pid(unit): each for unit, each in units.items()}
        for pid, each in pids.items():
            if pid:
                os.kill(pid, each)
        return died

    def runs(self, *pools: str) -> dict[str, str]:
        names = [name for pool in pools for name in self.instances(pool)]
        return {name: self.lab.get(name, "InvocationID") for name in names}

    def told(self, kind: str, pool: str) -> list[str]:
        """What the journal has of one kind about a pool."""
        said = self.lab.journal(
            f"MESSAGE_ID={MESSAGE_IDS[kind]}", f"NOMARR_POOL={pool}", "--output=cat"
        )
        return said.splitlines()

    def claims(self, pool: str) -> list[Doc]:
        return self.store.find(CLAIMS, {"pool": pool})

    def why(self, instance: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = self.json("why", instance, *options)
        return found
