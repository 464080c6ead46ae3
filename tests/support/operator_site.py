"""A user's own installation in the lab, configured and run by nomarrctl alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from nomarr_systemd.core import account as book
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.ledger_record import Record
from tests.support import forked_ctl
from tests.support.lab import CHECKOUT, COMPILED, Lab
from tests.support.steady import make_worker
from tests.support.supervision import Live

WORKER = make_worker(pause_s=0.2)
POLICY = """\
[policy]
backoff_base_s = {backoff_s}
backoff_jitter = 0
max_restarts = 2
"""
SYSTEM_PYTHON = "/usr/bin/python3"  # with the packages that packaging/prepare installs


class Installation:
    """One pool, ``tag``, of steady workers unless ``more`` says otherwise."""

    forks = True  # calls of nomarrctl are forked, by forked_ctl

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.worker = lab.write_program("worker", WORKER)
        self.state = Path(lab.home, ".local/state/nomarr")
        self.config = Path(lab.directory, "nomarr.toml")
        self.python, self.source = sys.executable, str(CHECKOUT)
        if lab.uid:  # who may read neither the checkout nor our Python has them installed
            self.forks = False
            self.python, self.source = SYSTEM_PYTHON, f"{lab.directory}/lib"
            for part in ("nomarr_systemd", "units", "templates"):
                shutil.copytree(CHECKOUT / part, f"{self.source}/{part}", ignore=COMPILED)
            lab.hand_over()

    def configure(self, workers: int, *, backoff_s: float = 0.1, more: str = "") -> None:
        self.config.write_text(
            POLICY.replace("{backoff_s}", str(backoff_s))
            + f'[pool.tag]\nworkers = {workers}\ncommand = ["{self.worker}"]\n'
            + f"watchdog_s = 3600\n{more}"
        )

    @property
    def _options(self) -> tuple[str, ...]:
        return "--user", "--config", str(self.config)

    def command(self, *arguments: str) -> list[str]:
        """nomarrctl as it runs in the lab."""
        code = (
            f"import sys; sys.path.insert(0, {self.source!r});"
            "from nomarr_systemd.cli.main import main; sys.exit(main())"
        )
        return [self.python, "-c", code, *self._options, *arguments]

    def ctl(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        if arguments[0] == "apply" and "--dry-run" not in arguments:
            arguments = (*arguments, "--yes")
        if self.forks and not environment:
            return forked_ctl.run(
                [*self._options, *arguments],
                self.lab.environment,
                self.lab.directory,
                self.lab.namespaces,
            )
        given = [f"{name}={value}" for name, value in environment.items()]
        return self.lab.run(["env", *given, *self.command(*arguments)], check=False)

    def good(self, *arguments: str, **environment: str) -> str:
        done = self.ctl(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str, status: int = 0) -> Any:
        done = self.ctl(*arguments, "--json")
        assert done.returncode == status, done.stderr + done.stdout
        return json.loads(done.stdout)

    def bring_up(self, workers: int, *, backoff_s: float = 0.1, more: str = "") -> None:
        """Configured, applied, and healthy."""
        self.configure(workers, backoff_s=backoff_s, more=more)
        self.good("apply")
        self.wait_until_healthy(*(f"tag-{number}" for number in range(workers)))

    def status(self) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.ctl("status", "--json").stdout)
        return {row["component"]: row for row in rows}

    def row(self, instance: str = "tag-0") -> dict[str, Any]:
        return self.status()[f"worker:{instance.replace('-', ':')}"]

    def account(self, instance: str = "tag-0") -> Account:
        try:
            text = (self.state / "public" / f"{instance}.json").read_text()
        except FileNotFoundError:
            return Account("worker:none:0")
        return book.from_doc(json.loads(text))

    def records(self, instance: str = "tag-0") -> list[Record]:
        return self.account(instance).records

    def wait_until_healthy(self, *instances: str) -> None:
        wanted = {f"worker:{name.replace('-', ':')}" for name in instances}

        def seen_by_supervisor() -> bool:
            try:
                with closing(Live(self.lab.paths.live)) as live:
                    answer = live.ask(op="snapshot")
            except OSError:  # it is being started
                return False
            seen = {row["component"]: row["status"] for row in answer["workers"]}
            return all(seen.get(name) == "healthy" for name in wanted)

        def shown() -> bool:
            rows = self.status()
            return all(rows[name]["state"] == "healthy" for name in wanted)

        # A process of nomarrctl for each look would keep the workers from what is waited for.
        for look in (seen_by_supervisor, shown):
            self.lab.wait_for(look, what=f"{wanted} are healthy")

    def wait_until_reconciled(self) -> None:
        """Until the first look of the reconciler is over; the next one comes in a minute.

        What it reads while the controller books the same failure may be late, and is then taken
        for a start job that failed: whoever counts restarts must not die just then.
        """

        def look() -> bool:
            triggered = self.lab.get("nomarr-reconcile.timer", "LastTriggerUSec")
            shown = self.lab.show("nomarr-reconcile.service", "ActiveState", "Job")
            idle = shown["ActiveState"] == "inactive" and not shown["Job"]
            return triggered not in ("", "0", "n/a") and idle

        self.lab.wait_for(look, what="the reconciler has looked")

    def kill(self, instance: str = "tag-0", number: int = signal.SIGKILL) -> str:
        """A signal for its main process; the run that died."""
        self.wait_until_reconciled()
        died = self.lab.get(instance, "InvocationID")
        os.kill(self.lab.main_pid(instance), number)
        return died

    def crash(self, instance: str = "tag-0") -> str:
        """Kill it, and wait until that is booked and it runs again or is masked."""
        self.lab.wait_until(instance, "active")
        died = self.kill(instance)

        def moved_on() -> bool:
            shown = self.lab.show(instance, "LoadState", "InvocationID")
            return shown["LoadState"] == "masked" or shown["InvocationID"] != died

        self.lab.wait_for(moved_on, what="it is restarted or masked")
        return died

    def mask(self, instance: str = "tag-0") -> None:
        """Crash it until the policy has had enough."""
        for _ in range(3):
            self.crash(instance)
        self.lab.wait_for(lambda: self.lab.get(instance, "LoadState") == "masked", what="the mask")
        self.lab.wait_for(lambda: self.account(instance).failure_reason, what="the reason")
