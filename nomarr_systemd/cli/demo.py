"""``nomarrctl demo``: real workers crash, hang and fail for good under a real, private systemd.

Only the timings are shortened. Every claim is checked; the exit status is 0 only if all of them
hold, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import click

import nomarr_systemd
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.host.lab import Lab, go_where_a_lab_can_be

WORKERS = '''\
"""The demo's workers: each tags the songs in a folder of its own."""

import os
import signal
import time
from pathlib import Path

from nomarr_systemd.worker.runtime import Waits, Worker

FOLDER = Path(os.environ["DEMO_MUSIC"], os.environ["NOMARR_COMPONENT_ID"].replace(":", "-"))


class Tagger(Worker):
    idle_waits = Waits(0.05, 1.0, 0.05)

    def next_job(self):
        songs = sorted(FOLDER.glob("*"))
        return str(songs[0]) if songs else None

    def process(self, job):
        song = Path(job)
        song.unlink()
        if song.name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if song.name.startswith("hang"):
            self.wait_for_the_gpu()
        time.sleep(0.1)

    def wait_for_the_gpu(self):
        while True:
            time.sleep(1)
'''
SCAN = """\
#!/bin/sh
# Broken until somebody mends it.
[ -e "$DEMO_MENDED" ] || exit 1
systemd-notify --ready
exec sleep 1000
"""
CONFIG = """\
[policy]
backoff_base_s = 0.5
backoff_jitter = 0

[health]
frame_interval_s = 0.2
staleness_interval_s = 2
stall_timeout_s = 1

[pool.tag]
workers = 2
entrypoint = "demo_workers:Tagger"
watchdog_s = 2

[pool.tag.unit]
Environment = ["PYTHONPATH={directory}", "DEMO_MUSIC={directory}/music"]
LimitCORE = 0

[pool.scan]
command = ["{directory}/scan"]

[pool.scan.policy]
backoff_base_s = 0.1

[pool.scan.unit]
Environment = ["DEMO_MENDED={directory}/mended"]
"""
PATIENCE_S = 30.0
_Found = TypeVar("_Found")


class DemoFailed(NomarrError):
    """Something the demo claims turned out not to be so."""

    code = "demo-failed"


@click.command()
def demo() -> None:
    """See it work: workers crash, hang and fail for good under a real systemd of their own."""
    go_where_a_lab_can_be([sys.executable, *sys.orig_argv[1:]])
    started = time.monotonic()
    _say("A private systemd is started, and three workers in it.")
    with Lab() as lab:
        directory = lab.directory
        story = Story(lab)
        story.begin()
        story.crash()
        story.hang()
        story.fail()
        story.stop()
    _check(not os.path.exists(directory), "everything was torn down, nothing is left")
    click.echo(f"\nAll of it was checked, in {time.monotonic() - started:.0f} s.")


class Story:
    """What happens, one chapter each."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._music = f"{lab.directory}/music"

    def begin(self) -> None:
        directory = self._lab.directory
        for name, text in (("demo_workers.py", WORKERS), ("scan", SCAN), ("nomarr.toml", CONFIG)):
            with open(f"{directory}/{name}", "w", encoding="utf-8") as file:
                file.write(text.replace("{directory}", directory))
        os.chmod(f"{directory}/scan", 0o755)  # noqa: S103 (a program is to be run)
        for worker in ("worker-tag-0", "worker-tag-1"):
            os.makedirs(f"{self._music}/{worker}")
        self._ctl("apply")
        self._wait(lambda: self._health("tag-0") == self._health("tag-1") == "healthy", "health")
        _check(True, "two taggers are running, and say on their pipes that they are healthy")
        status = self._lab.systemctl("show", "--property=StatusText", _unit("tag-0"))
        _tell("systemctl status says", status.partition("=")[2].strip())

    def crash(self) -> None:
        _say("A song crashes the tagger: a bad file, a bug in a library, SIGSEGV.")
        before = self._show("tag-0", "MainPID")
        self._drop("worker-tag-0", "crash.flac")
        self._wait(lambda: self._record("tag-0", "signal"), "the crash is on record")
        self._tell_decision("tag-0")
        self._wait(
            lambda: (
                self._show("tag-0", "ActiveState") == "active"
                and self._show("tag-0", "MainPID") != before
            ),
            "it runs again",
        )
        _check(True, "it runs again after its backoff")
        self._drop("worker-tag-0", "song.flac")
        self._wait(lambda: not os.listdir(f"{self._music}/worker-tag-0"), "the next song")
        _check(True, "and has tagged the next song")

    def hang(self) -> None:
        _say("Another one waits for a GPU that never answers. Its threads live; its job does not.")
        self._drop("worker-tag-1", "hang.flac")
        self._wait(lambda: self._record("tag-1", "watchdog"), "the hang is caught")
        self._tell_decision("tag-1")
        _check(True, "systemd's watchdog ended it: it attests progress, not a live thread")
        said = self._lab.journal("--output=cat", "--lines=400")
        _check("wait_for_the_gpu" in said, "the journal has its stack, down to wait_for_the_gpu")
        self._wait(lambda: self._show("tag-1", "ActiveState") == "active", "it runs again")
        _check(True, "it runs again")

    def fail(self) -> None:
        _say("A scanner that is broken dies at once, again and again.")
        masked = "masked"
        self._wait(lambda: self._show("scan-0", "LoadState") == masked, "scan-0 is masked")
        account = self._account("scan-0")
        rows = [row.split("|") for row in account["records"]]
        delays = [int(row[5]) for row in rows if row[2] == "restart"]
        _tell("its backoffs were", ", ".join(f"{delay} ms" for delay in delays))
        _check(delays == [100, 200, 400, 800, 1600], "each twice the one before, five of them")
        self._tell_decision("scan-0")
        _check(bool(account["failure_reason"]), f"the reason: {account['failure_reason']}")
        click.echo(self._ctl("status", check=False))
        with open(f"{self._lab.directory}/mended", "w", encoding="utf-8"):
            pass
        self._ctl("reset", "scan-0", "--start")
        self._wait(lambda: self._show("scan-0", "ActiveState") == "active", "scan-0 runs")
        _check(True, "mended and reset, it runs")

    def stop(self) -> None:
        _say("Everything is stopped.")
        self._lab.systemctl("stop", "nomarr-workers.target")
        for instance in ("tag-0", "tag-1", "scan-0"):
            self._wait(lambda: self._show(instance, "ActiveState") == "inactive", instance)  # noqa: B023
        _check(True, "all three have finished what they did and left")

    def _ctl(self, *arguments: str, check: bool = True) -> str:
        """nomarrctl as a user in the lab runs it."""
        source = os.path.dirname(os.path.dirname(os.path.abspath(nomarr_systemd.__file__)))
        code = (
            f"import sys; sys.path.insert(0, {source!r});"
            "from nomarr_systemd.cli.main import main; sys.exit(main())"
        )
        config = f"{self._lab.directory}/nomarr.toml"
        command = [sys.executable, "-c", code, "--user", "--config", config, *arguments]
        return self._lab.run(command, check=check).stdout

    def _show(self, instance: str, name: str) -> str:
        text = self._lab.systemctl("show", f"--property={name}", _unit(instance))
        return text.partition("=")[2].strip()

    def _health(self, instance: str) -> str:
        rows = json.loads(self._ctl("status", "--json", check=False) or "[]")
        component = "worker:" + instance.replace("-", ":")
        return next((row["health"] for row in rows if row["component"] == component), "")

    def _account(self, instance: str) -> dict[str, list[str]]:
        path = f"{self._lab.home}/.local/state/nomarr/public/{instance}.json"
        try:
            with open(path, encoding="utf-8") as file:
                account: dict[str, list[str]] = json.load(file)
        except FileNotFoundError:
            return {"records": []}
        return account

    def _record(self, instance: str, kind: str) -> bool:
        return any(f"|{kind}|" in row for row in self._account(instance)["records"])

    def _tell_decision(self, instance: str) -> None:
        """What the journal has about it, where systemctl status shows it."""
        entry = self._wait(
            lambda: self._lab.journal(
                f"NOMARR_INSTANCE={instance}", "SYSLOG_IDENTIFIER=nomarr-controller", "-o", "cat"
            ),
            "the journal entry",
        )
        _tell("the journal says", entry.strip().splitlines()[-1])

    def _drop(self, folder: str, name: str) -> None:
        with open(f"{self._music}/{folder}/{name}", "w", encoding="utf-8"):
            pass

    def _wait(self, look: Callable[[], _Found], what: str) -> _Found:
        ends = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > ends:
                raise DemoFailed(
                    f"not within {PATIENCE_S:g} s: {what}", hint=self._lab.journal("--lines=30")
                )
            time.sleep(0.05)
        return found


def _unit(instance: str) -> str:
    return f"nomarr-worker@{instance}.service"


def _say(text: str) -> None:
    click.echo("\n" + click.style(text, bold=True, fg="cyan"))


def _tell(what: str, then: str) -> None:
    click.echo(f"  {what}: " + click.style(then, fg="yellow"))


def _check(holds: bool, claim: str) -> None:
    if not holds:
        raise DemoFailed(f"not so: {claim}", hint="please report this with the output above")
    click.echo(click.style(f"  ✓ {claim}", fg="green"))
