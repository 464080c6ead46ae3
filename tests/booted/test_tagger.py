"""The example application on a clean system with the package, as its README says to try it."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.machine import Machine
from tests.support.packages import CHECKOUT

EXAMPLE = "/usr/share/doc/nomarr-systemd/examples/tagger"


def commands() -> list[str]:
    """The first block of commands in the README."""
    text = (CHECKOUT / "examples/tagger/README.md").read_text()
    block = re.search(r"^## Try it\n(?:(?!    ).*\n)*((?:    .*\n)+)", text, re.MULTILINE)
    assert block
    return [line.strip() for line in block[1].splitlines()]


def test_what_the_readme_says(machine: Machine) -> None:
    assert len(commands()) == 7
    for command in commands():
        # Its own status says that not all is well yet.
        shell = f"cd {EXAMPLE} && {command}"
        machine.run("sh", "-c", shell, check=not command.startswith("nomarrctl status"))

    def jobs() -> dict[str, dict[str, Any]]:
        listed = machine.run("nomarrctl", "jobs", "list", "--json").stdout
        return {job["path"]: job for job in json.loads(listed)["jobs"]}

    def expected(path: str) -> str:
        return "done" if "/songs/" in path else "error" if "/broken/" in path else "quarantined"

    def are_ended() -> bool:
        """But for the one that hangs: that takes the watchdog of everyday half a minute."""
        found = {path: job["status"] for path, job in jobs().items() if "hang" not in path}
        return all(status == expected(path) for path, status in found.items())

    machine.wait_for(are_ended, "every job has its end")
    found = jobs()
    assert len(found) >= 17
    sidecar = machine.path("/srv/music/songs/sine-1000.wav.tags.json")
    assert json.loads(sidecar.read_text())["loudness_dbfs"] == -3.01
    owner = machine.run("stat", "-c", "%U", "/srv/music/songs/sine-1000.wav.tags.json").stdout
    assert owner == "nomarr\n"
    first, _ = found["/srv/music/deadly/crash.wav"]["crashes"]
    why = ("nomarrctl", "why", first["component_id"], "--invocation", first["invocation"])

    def ask() -> str:
        text = machine.run(*why).stdout
        return text if "_decode_natively" in text else ""

    assert "killed by SIGSEGV" in machine.wait_for(ask, "why names the place in the code")
