"""The story of ``nomarrctl demo``: the tagger of examples/ meets good, broken and deadly files
under a real, private systemd. Only the timings are shortened, and every claim is checked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import Any, Final

from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.demo.lab import Lab
from nomarr_systemd.demo.stage import DemoFailed, Show, Stage
from nomarr_systemd.systemd.unit_files import find_data

SCAN = """\
#!/bin/sh
# It fails until the file $DEMO_MENDED is there.
[ -e "$DEMO_MENDED" ] || { echo "cannot find the music library" >&2; exit 1; }
exec 3>"$NOMARR_HEALTH_PIPE"
systemd-notify --ready
while printf 'HEALTH|{"component_id":"%s","status":"healthy"}\\n' "$NOMARR_COMPONENT_ID" >&3; do
    sleep 0.5 3>&-
    systemd-notify WATCHDOG=1
done
exit 75
"""
# A hang is caught after 2 to 4 seconds; a job that only waits for a slow disk is not.
CONFIG = """\
[policy]
backoff_base_s = 0.5
backoff_jitter = 0

[health]
frame_interval_s = 0.2
stall_timeout_s = 2

[pool.tag]
workers = 2
entrypoint = "tagger:Tagger"
watchdog_s = 2
crash_policy = "restart-requeue-in-flight"

[pool.tag.unit]
Environment = ["PYTHONPATH={directory}/tagger"]
LimitCORE = 0

[pool.scan]
command = ["{directory}/scan"]

[pool.scan.policy]
backoff_base_s = 0.1

[pool.scan.unit]
Environment = ["DEMO_MENDED={directory}/mended"]
"""
TAGGERS: Final = ("tag-0", "tag-1")
LINES: Final = 5  # shown of each section of the report of ``why``


def tell(show: Show) -> None:
    """Run every chapter; DemoFailed if a claim does not hold. Nothing is left behind."""
    with Lab() as lab:
        show("chapter", "A private systemd is running; that of this machine is left alone.")
        directory = lab.directory
        story = Story(lab, show)
        story.begin()
        story.tag()
        story.crash()
        story.hang()
        story.fail()
        story.mend()
        story.look_back()
        story.stop()
    if os.path.exists(directory):
        raise DemoFailed(f"this does not hold: nothing is left; there is {directory}")
    show("tick", "everything was torn down, nothing is left")


class Story(Stage):
    """One method for each chapter."""

    def __init__(self, lab: Lab, show: Show) -> None:
        super().__init__(lab, f"{lab.directory}/nomarr.toml", show)
        self._directory = lab.directory
        self._music = f"{lab.directory}/music"

    def begin(self) -> None:
        directory = self._directory
        shutil.copytree(
            os.path.join(find_data("examples"), "tagger"),
            f"{directory}/tagger",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for name, text in (("scan", SCAN), ("nomarr.toml", CONFIG)):
            with open(f"{directory}/{name}", "w", encoding="utf-8") as file:
                file.write(text.replace("{directory}", directory))
        os.chmod(f"{directory}/scan", 0o755)  # noqa: S103 (a program is to be run)
        self.lab.run([sys.executable, "-B", f"{directory}/tagger/make_music.py", self._music])
        self.explain("nomarr.toml asks for two music taggers and a library scanner.")
        self.command("nomarrctl --user apply")
        self.ctl("apply")
        self._wait_until_healthy(*TAGGERS)
        self.check(True, "two taggers are running, and say on their pipes that they are healthy")

    def tag(self) -> None:
        self.say("A folder of music is to be tagged: loudness and brightness of each file.")
        songs, broken = (self._list(kind) for kind in ("songs", "broken"))
        self.command("nomarrctl --user jobs add --pool tag music/songs/* music/broken/*")
        self._add(*songs, *broken)
        jobs = self._wait_for_jobs([*songs, *broken], "done", "error")
        tags = {os.path.basename(path): _read_tags(path) for path in songs}
        for name in ("sine-1000.wav", "chirp-200-4000.wav", "noise.wav"):
            found = tags[name]
            self.explain(
                f"{name:<19} {found['loudness_dbfs']:>6} dBFS {found['centroid_hz']:>7} Hz"
            )
        self.check(
            all(jobs[name]["status"] == "done" for name in tags),
            f"{len(tags)} files are tagged, each in a file beside it",
        )
        sine = tags["sine-1000.wav"]
        self.check(
            sine["loudness_dbfs"] == -3.01 and abs(sine["centroid_hz"] - 1000) < 10,
            "a sine of 1 kHz has its centre at 1 kHz and 3 dB less than the loudest sound",
        )
        for path in broken:
            name = os.path.basename(path)
            self.explain(f"{name:<19} {jobs[name]['error']['message']}")
        self.check(
            all(jobs[os.path.basename(path)]["error"]["type"] == "NonFatal" for path in broken),
            f"{len(broken)} broken files failed their own jobs, and nothing else",
        )

    def crash(self) -> None:
        self.say("One file crashes any worker that decodes it: a bug in a library, SIGSEGV.")
        [path] = self._list("deadly", "crash")
        self.command("nomarrctl --user jobs add --pool tag music/deadly/crash.wav")
        self._add(path)
        job = self._wait_for_jobs([path], "quarantined")["crash.wav"]
        codes = [self._tell_decision(*_run_of(death)).code for death in job["crashes"]]
        self.check(
            codes == [-signal.SIGSEGV] * 2,
            "it killed a worker, was tried once more, killed again, and is set aside",
        )
        for name, run in map(_run_of, job["crashes"]):
            self.wait(
                lambda: self.account(name).find(run, ["refund"]),  # noqa: B023
                f"the restart of {name} is refunded",
                name,
            )
        self.check(True, "the file is to blame: the restarts of the workers are refunded")
        self._wait_until_healthy(*TAGGERS)
        self.check(True, "after their backoffs both taggers run again")
        self.command("nomarrctl --user jobs show music/deadly/crash.wav")
        self.quote(self._shorten(self.ctl("jobs", "show", path)))
        name, run = _run_of(job["crashes"][0])
        self.command(f"nomarrctl --user why {name} --invocation {run[:8]}")
        said = self._ask_why("in _decode_natively", name, "--invocation", run)
        self.quote(self._shorten(_sections(said, "The stacks", "Decision")))
        place = "" if self.lab.uid else ", and the place in the code"
        self.check("killed by SIGSEGV" in said, f"it names the signal{place}")

    def hang(self) -> None:
        self.say("Another file makes a worker wait for ever. Its process and its threads live on.")
        [path] = self._list("deadly", "hang")
        self.command("nomarrctl --user jobs add --pool tag music/deadly/hang.wav")
        self._add(path)
        death = self.wait(
            lambda: next(iter(self.jobs("tag").get("hang.wav", {}).get("crashes") or ()), None),
            "the worker with hang.wav is caught",
            *TAGGERS,
        )
        name, run = _run_of(death)
        self.check(
            self._tell_decision(name, run).kind == "watchdog",
            "systemd's watchdog ended it: a ping means progress, not just a live thread",
        )
        self.wait(
            lambda: any("_wait_for_ever" in line for line in self.said_by(name)),
            f"the journal has the stack of {name}",
            name,
        )
        self.check(True, "the journal has its stack, down to the line that waits")
        self.explain("The file goes back into the queue; the next worker to try it is caught, too.")

    def fail(self) -> None:
        self.say("The scanner is broken and dies at once, again and again, since the beginning.")
        self.wait(
            lambda: self.show("scan-0", "LoadState") == "masked",
            "scan-0 is masked",
            "scan-0",
        )
        self.wait(lambda: self.account("scan-0").failure_reason, "its reason", "scan-0")
        account = self.account("scan-0")
        delays = [each.delay_ms for each in account.records if each.action == "restart"]
        self.explain("its backoffs were " + ", ".join(f"{delay} ms" for delay in delays))
        self.check(delays == [100, 200, 400, 800, 1600], "each twice the one before, five of them")
        self.check(bool(account.failure_reason), f"then it was masked: {account.failure_reason}")
        self._tell_decision("scan-0", account.records[-1].invocation)
        self.command("nomarrctl --user why scan-0")
        said = self._ask_why("reset --start scan-0", "scan-0")
        self.quote(self._shorten(_sections(said, "Decision", "What to do")))
        self.check(
            "exited with status 1" in said, "it says how it died, why it stays down, what to do"
        )

    def mend(self) -> None:
        self.say("The scanner is mended.")
        with open(f"{self._directory}/mended", "w", encoding="utf-8"):
            pass
        self.command("nomarrctl --user reset --start scan-0")
        self.ctl("reset", "--start", "scan-0")
        self._wait_until_healthy("scan-0")
        self.check(True, "it is unmasked, its counts begin again, it runs and is healthy")

    def look_back(self) -> None:
        self.say("What became of all files and workers.")
        self._wait_for_jobs(self._list("deadly"), "quarantined")
        self._wait_until_healthy(*TAGGERS, "scan-0")
        self.command("nomarrctl --user jobs list --pool tag")
        self.quote(self.ctl("jobs", "list", "--pool", "tag").splitlines()[-1])
        self.command("nomarrctl --user status")
        self.quote(self.ctl("status", check=False))
        statuses = [job["status"] for job in self.jobs("tag").values()]
        counts = [len(self._list(kind)) for kind in ("songs", "broken", "deadly")]
        self.check(
            [statuses.count(word) for word in ("done", "error", "quarantined")] == counts
            and len(statuses) == sum(counts),
            "every file has a final status, none is lost or stuck, and all workers are healthy",
        )

    def stop(self) -> None:
        self.say("Everything is stopped.")
        self.lab.systemctl("stop", "nomarr-workers.target", timeout_s=120)
        for name in (*TAGGERS, "scan-0"):
            self.wait(
                lambda: self.show(name, "ActiveState") == "inactive",  # noqa: B023
                f"{name} is inactive",
                name,
            )
        self.check(True, "all three have finished their work and exited")

    def _list(self, kind: str, begins: str = "") -> list[str]:
        folder = f"{self._music}/{kind}"
        names = (name for name in os.listdir(folder) if not name.endswith(".json"))
        return sorted(f"{folder}/{name}" for name in names if name.startswith(begins))

    def _add(self, *paths: str) -> None:
        self.ctl("jobs", "add", "--pool", "tag", *paths)

    def _wait_for_jobs(self, paths: list[str], *statuses: str) -> dict[str, dict[str, Any]]:
        """Return the pool's jobs by name, once the named ones are in one of these states."""
        names = [os.path.basename(path) for path in paths]

        def look() -> dict[str, dict[str, Any]] | None:
            jobs = self.jobs("tag")
            # A job that changes its status while the list is read may be missing in it.
            ended = all(name in jobs and jobs[name]["status"] in statuses for name in names)
            return jobs if ended else None

        what = f"{', '.join(names[:3])}{' …' * (len(names) > 3)}: {' or '.join(statuses)}"
        return self.wait(look, what, *TAGGERS) or {}

    def _wait_until_healthy(self, *names: str) -> None:
        wanted = [parse_component(name).component_id for name in names]

        def look() -> bool:
            health = self.health()
            return all(health.get(name) == "healthy" for name in wanted)

        self.wait(look, f"{', '.join(names)}: healthy", *names)

    def _tell_decision(self, name: str, run: str) -> Record:
        """Show the decision about a death as the journal has it; return the record of the
        ledger."""
        said = self.wait(
            lambda: self.decision(name, run),
            f"the decision about {name} is in the journal",
            name,
        )
        self.quote(said)
        return self.wait(
            lambda: self.account(name).find(run), f"the death of {name} is on record", name
        )

    def _ask_why(self, names: str, *arguments: str) -> str:
        """Return what ``why`` prints, once it contains ``names``. A plain user cannot read the
        lab's journal: then the first output is returned."""

        def ask() -> str:
            said = self.ctl("why", *arguments)
            return said if names in said or self.lab.uid else ""

        return self.wait(ask, f"why names {names}", arguments[0])

    def _shorten(self, text: str) -> str:
        return text.replace(f"{self._directory}/", "")


def _run_of(death: dict[str, str]) -> tuple[str, str]:
    """Return the worker's instance and its invocation."""
    return parse_component(death["component_id"]).instance, death["invocation"]


def _read_tags(path: str) -> dict[str, Any]:
    with open(f"{path}.tags.json", encoding="utf-8") as file:
        tags: dict[str, Any] = json.load(file)
    return tags


def _sections(report: str, *wanted: str) -> str:
    """Return the head and the facts of a report of ``why``, and the wanted ones of its sections."""
    head, facts, *rest = report.strip().split("\n\n")
    kept = [head, facts]
    for section in rest:
        title, *lines = section.split("\n")
        if title.startswith(wanted):
            # Of several threads, show the one that crashed.
            at = next((n for n, line in enumerate(lines) if "Current thread" in line), 0)
            kept += [title, *lines[at : at + LINES], *["  …"] * (at + LINES < len(lines))]
    return "\n".join(kept)
