"""The private systemd of ``demo.lab`` with our units in it, and what tests want to know of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.values import Config
from nomarr_systemd.controller.main import IDLE_S, RESTING
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.demo import cgroup, lab
from nomarr_systemd.host.layout import Paths, make_directories, make_programs
from nomarr_systemd.systemd import unit_files
from tests.support import properties, waiting
from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).parents[2]
COMPILED = shutil.ignore_patterns("__pycache__")  # it may be of another user

# Instead of the controller: whatever the hook rings is kept for the test to read.
BELL = """\
[Service]
Type=simple
ExecStart=
ExecStart=/bin/sh -c 'exec cat <&3 >>%t/bell'
NonBlocking=no
"""

_accepted: set[str] = set()  # by systemd-analyze: texts of units, without the lab's directory
_Found = TypeVar("_Found")


class Lab(lab.Lab):
    """One per test. Everything below ``directory`` is seen from outside as from inside."""

    config = Config()

    @property
    def paths(self) -> Paths:
        return Paths(self.runtime, f"{self.home}/state", user=True)

    @property
    def socket(self) -> tuple[str, bool]:
        """The manager's private socket, as a place for Bus."""
        return f"{self.runtime}/systemd/private", False

    @property
    def namespaces(self) -> list[str]:
        """Files of /proc: what a program in the lab has entered."""
        names = ("mnt", "uts") if self.name else ("mnt",)
        return [f"/proc/{self.pid}/ns/{name}" for name in names]

    @property
    def libexec(self) -> str:
        return f"{self.directory}/libexec"

    def install(self, toml: str) -> Config:
        """What ``nomarrctl --user apply`` does, but for starting workers. May be done again."""
        self.config = parse(toml, state_directory=self.paths.state)
        make_directories(self.paths)
        make_programs(self.libexec, search=[str(CHECKOUT)])
        resolved = Path(self.paths.resolved)
        resolved.write_text(json.dumps(self.config.to_dict()))
        self._verify()
        unit_files.install(
            unit_files.plan(self.config, self.units, self.paths, libexec=self.libexec)
        )
        self.hand_over()
        self.reload()
        return self.config

    def _verify(self) -> None:
        """Have systemd look at the units, unless it has accepted the same ones in another lab."""
        files = unit_files.render_files(self.config, self.paths, libexec=self.libexec)
        text = json.dumps(files).replace(self.directory, "")
        if text not in _accepted:
            unit_files.verify(self.config, self.paths, libexec=self.libexec)
            _accepted.add(text)

    def hand_over(self) -> None:
        """Give everything in the lab to the user whose it is."""
        for directory, _, files in os.walk(self.directory):
            for path in (directory, *(os.path.join(directory, name) for name in files)):
                os.chown(path, self.uid, self.uid)

    def write_unit(self, name: str, text: str) -> None:
        """A unit or ``UNIT.d/NAME.conf`` of the test's own; takes effect with ``reload``."""
        path = Path(self.units, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_program(self, name: str, text: str) -> str:
        """An executable script; its path."""
        path = Path(self.directory, name)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def replace_controller(self) -> None:
        """Keep what the hook rings for ``read_bell``; before ``install``."""
        self.write_unit("nomarr-controller.service.d/99-test.conf", BELL)

    def read_bell(self) -> list[str]:
        """The lines that the hook has rung."""
        bell = Path(self.runtime, "bell")
        return bell.read_text().splitlines() if bell.exists() else []

    def reboot(self) -> None:
        """A power cut, and another manager: only what is outside the runtime directory is left.
        It starts nothing by itself, and the kernel's boot id stays."""
        assert self._manager
        self._manager.kill()
        self._manager.wait()
        for place in self.cgroups:
            cgroup.kill(f"{place}/manager")
        shutil.rmtree(self.runtime)
        os.mkdir(self.runtime, 0o700)
        self._start_manager()

    def reload(self) -> None:
        self.systemctl("daemon-reload")

    def start(self, *workers: str) -> None:
        """Start workers, named as a person would, and wait until they are ready."""
        self.systemctl("start", *map(unit_of, workers))

    def stop(self, *workers: str) -> None:
        self.systemctl("stop", *map(unit_of, workers))

    def show(self, name: str, *names: str) -> dict[str, str]:
        """The properties of a unit or of a worker."""
        unit = unit_of(name)
        if properties.ASKED.issuperset(names):
            return properties.ask(self.socket, [unit], names)[unit]
        text = self.systemctl("show", f"--property={','.join(names)}", unit)
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def get(self, name: str, wanted: str) -> str:
        """One property."""
        return self.show(name, wanted)[wanted]

    def main_pid(self, name: str) -> int:
        """The unit's main process; a unit without one fails the test. It never returns 0, which
        os.kill takes for this process and its whole group.
        """
        return self.main_pids(name)[0]

    def main_pids(self, *names: str) -> list[int]:
        """Of several units, by one question."""
        units = list(map(unit_of, names))
        shown = properties.ask(self.socket, units, ["MainPID"])
        pids = [int(shown[unit]["MainPID"]) for unit in units]
        without = [name for name, pid in zip(names, pids, strict=True) if not pid]
        assert not without, f"without a main process: {', '.join(without)}"
        return pids

    def find_main_pid(self, name: str) -> int:
        """The unit's main process, or 0."""
        return int(self.get(name, "MainPID"))

    def wait_for(
        self, look: Callable[[], _Found], *, timeout_s: float = PATIENCE_S, what: str = ""
    ) -> _Found:
        """What ``look`` finds, as soon as that is true."""
        return waiting.wait_for(look, timeout_s, what or look)

    def wait_until(self, name: str, *states: str, timeout_s: float = PATIENCE_S) -> None:
        """Until a unit's ActiveState is one of these."""
        self.wait_for(
            lambda: self.get(name, "ActiveState") in states,
            timeout_s=timeout_s,
            what=f"{name} is {' or '.join(states)}",
        )

    def wait_for_rest(self) -> int:
        """Until the controller rests; returns its process."""
        unit = "nomarr-controller.service"
        self.wait_for(
            lambda: self.get(unit, "StatusText") == RESTING,
            timeout_s=90,
            what="the controller rests",
        )
        return self.main_pid(unit)


def copy_package(place: Path, idle_s: float) -> Path:
    """Copy the package to ``place``, with a controller that rests so soon; returns the copy."""
    copy = place / "nomarr_systemd"
    shutil.copytree(CHECKOUT / "nomarr_systemd", copy, ignore=COMPILED)
    main = copy / "controller" / "main.py"
    before, text = f"IDLE_S: Final = {IDLE_S}", main.read_text()
    assert before in text
    main.write_text(text.replace(before, f"IDLE_S: Final = {idle_s}"))
    return copy


def unit_of(name: str) -> str:
    """A worker's unit by any of its names; other units are named in full."""
    if "." in name and not name.startswith("nomarr-worker@"):
        return name
    return parse_component(name).unit
