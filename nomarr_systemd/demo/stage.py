"""What the story of the demo uses: nomarrctl in a private systemd, waits, checks of claims, and
lines for the reader, which the caller's function shows.

A wait that fails names what was waited for, and shows the journal of the workers in question.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import nomarr_systemd
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.errors import NomarrError
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.demo.lab import Lab
from nomarr_systemd.ledger.public import read_published

PATIENCE_S: Final = 60.0  # for each wait: a slow disk or a busy machine is no failure
LOOK_AGAIN_S: Final = 0.05
LINES: Final = 40

_Found = TypeVar("_Found")
Kind = Literal["chapter", "text", "command", "answer", "tick"]
Show = Callable[[Kind, str], None]  # shows one line, or a program's whole answer


class DemoFailed(NomarrError):
    """A claim of the demo does not hold."""

    code = "demo-failed"


class Stage:
    """A lab with an installation of nomarr-systemd."""

    def __init__(self, lab: Lab, config: str, show: Show) -> None:
        self.lab = lab
        self._config = config
        self._show = show

    def say(self, text: str) -> None:
        """Begin a chapter."""
        self._show("chapter", text)

    def explain(self, text: str) -> None:
        self._show("text", text)

    def command(self, text: str) -> None:
        """Show what a person would type."""
        self._show("command", text)

    def quote(self, text: str) -> None:
        """Show what a program answered."""
        self._show("answer", text)

    def check(self, holds: bool, claim: str) -> None:
        """Show the claim as checked, or raise DemoFailed."""
        if not holds:
            raise DemoFailed(
                f"this does not hold: {claim}", hint="please report this with the output above"
            )
        self._show("tick", claim)

    def ctl(self, *arguments: str, check: bool = True) -> str:
        """Run nomarrctl --user in the lab and return what it prints."""
        source = os.path.dirname(os.path.dirname(os.path.abspath(nomarr_systemd.__file__)))
        code = (
            f"import sys; sys.path.insert(0, {source!r});"
            "from nomarr_systemd.cli.main import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", code, "--user", "--config", self._config, *arguments]
        ends = time.monotonic() + PATIENCE_S
        while True:
            done = self.lab.run(command, check=False, timeout_s=2 * PATIENCE_S)
            if not check or not done.returncode:
                return done.stdout
            # On a slow disk another process may lock the store for seconds: retry.
            if "stayed locked" not in done.stderr or time.monotonic() > ends:
                said = f"nomarrctl {arguments[0]}: exit status {done.returncode}"
                raise DemoFailed(said, hint=done.stderr.strip())

    def show(self, instance: str, name: str) -> str:
        """Return a property of the worker's unit."""
        unit = parse_component(instance).unit
        text = self.lab.systemctl(
            "show", f"--property={name}", unit, check=False, timeout_s=PATIENCE_S
        )
        return text.partition("=")[2].strip()

    def health(self) -> dict[str, str]:
        """Return the health of every worker, by component id."""
        rows = json.loads(self.ctl("status", "--json", check=False) or "[]")
        return {row["component"]: row["health"] for row in rows}

    def jobs(self, pool: str) -> dict[str, dict[str, Any]]:
        """Return the pool's jobs by the names of their files."""
        found = json.loads(self.ctl("jobs", "list", "--json", "--limit", "0", "--pool", pool))
        return {os.path.basename(job["path"]): job for job in found["jobs"]}

    def account(self, instance: str) -> Account:
        public = f"{self.lab.home}/.local/state/nomarr/public"
        return read_published(public, parse_component(instance)).account

    def decision(self, instance: str, invocation: str = "") -> str:
        """Return the controller's last line in the journal about the worker, or one run of it."""
        matches = [f"NOMARR_INSTANCE={instance}", "SYSLOG_IDENTIFIER=nomarr-controller"]
        if invocation:
            matches.append(f"NOMARR_INVOCATION_ID={invocation}")
        said = self.lab.journal(*matches, "--output=cat", "--quiet").strip()
        return said.splitlines()[-1] if said else ""

    def said_by(self, instance: str) -> list[str]:
        """Return the journal of a worker: its own lines, systemd's and the controller's about it.

        A journald of root does not know the units of a private manager by name, only its cgroups.
        """
        unit = parse_component(instance).unit
        lines = []
        for text in self.lab.journal("--quiet", "--output=json").splitlines():
            entry = json.loads(text)
            if (
                str(entry.get("_SYSTEMD_CGROUP")).endswith(f"/{unit}")
                or entry.get("USER_UNIT") == unit
                or entry.get("NOMARR_INSTANCE") == instance
            ):
                who = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or "?"
                lines.append(f"{who}[{entry.get('_PID')}]: {entry.get('MESSAGE')}")
        return lines

    def wait(self, look: Callable[[], _Found | None], what: str, *instances: str) -> _Found:
        """Call ``look`` until it finds something; ``instances`` are the workers in question."""
        ends = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > ends:
                raise DemoFailed(
                    f"not within {PATIENCE_S:g} s: {what}", hint=self._explain(instances)
                )
            time.sleep(LOOK_AGAIN_S)
        return found

    def _explain(self, instances: tuple[str, ...]) -> str:
        parts = ["the journal has these lines; please report them with all of the output"]
        for instance in instances:
            state = self.show(instance, "ActiveState") or "unknown"
            parts.append(f"--- {instance}, which is {state}:")
            parts += self.said_by(instance)[-LINES:] or ["nothing"]
        for name in ("nomarr-supervisor", "nomarr-controller"):
            parts.append(f"--- {name}:")
            said = self.lab.journal(f"SYSLOG_IDENTIFIER={name}", "--quiet", "--lines=10")
            parts.append(said.rstrip() or "nothing")
        return "\n".join(parts)
