"""A worker that checks the GPU and writes ``gpu:health``, for workers with ``needs_gpu``.

    [pool.gpu]
    entrypoint = "nomarr_systemd.worker.gpu_probe:GpuProbe"
    [pool.gpu.unit]
    Environment = ["GPU_CHECK=nvidia-smi -L"]

The check is a program of the pool's choice: the GPU is available if it exits with 0 in time. It
runs in a process of its own. One that hangs is killed; one that cannot be killed, because it waits
in the kernel, is left alone: the GPU is not available until it ends, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import IO, Final

from nomarr_systemd.core.errors import ConfigError, StoreError
from nomarr_systemd.core.text import one_line
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.stats import GpuHealth, report_gpu
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.worker.environment import read_environment
from nomarr_systemd.worker.errors import NotReady
from nomarr_systemd.worker.runtime import Waits, Worker

CHECK: Final = "nvidia-smi -L"
TIMEOUT_S: Final = 10.0
EVERY_S: Final = 20.0
_KILL_S: Final = 2.0
_TAIL: Final = 2000  # bytes of what the check printed


class Probe:
    """The check; ``check`` never takes longer than the time limit and _KILL_S."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[bytes] | None = None

    def check(self, on_wait: Callable[[], None]) -> GpuHealth:
        """Run the check; ``on_wait`` is called about every second."""
        name = os.path.basename(self._command[0])
        if self._stuck is not None:
            if self._stuck.poll() is None:
                return GpuHealth(False, f"{name} hangs, and cannot be killed")
            self._stuck = None
        with tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                return GpuHealth(False, f"{name} cannot be run: {error.strerror}")
            if _ends(child, self._timeout_s, on_wait):
                if child.returncode == 0:
                    return GpuHealth(True)
                return GpuHealth(False, f"{name}: {_describe(child.returncode)}{_last(output)}")
            # Its children too: a shell would leave what it waits for.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            if not _ends(child, _KILL_S, on_wait):
                self._stuck = child
            return GpuHealth(False, f"{name} did not end within {self._timeout_s:g} s")


class GpuProbe(Worker):
    """Checks every $GPU_CHECK_EVERY_S, for $GPU_CHECK_TIMEOUT_S at most."""

    idle_waits = Waits(0.5, 1.0, 0.5)

    def __init__(self) -> None:
        environment = read_environment(os.environ, os.getpid())
        if environment.settings.store is None:
            raise ConfigError(
                "there is no store to write gpu:health to", hint="nomarrctl apply names it"
            )
        self._store_settings = environment.settings.store
        self._every_s = _read_seconds(os.environ, "GPU_CHECK_EVERY_S", EVERY_S)
        timeout_s = _read_seconds(os.environ, "GPU_CHECK_TIMEOUT_S", TIMEOUT_S)
        self._probe = Probe(_read_command(os.environ), timeout_s)
        self._due = 0.0
        self._last: GpuHealth | None = None

    def next_job(self) -> str | None:
        return "gpu" if monotonic() >= self._due else None

    def process(self, job: str) -> object:  # noqa: ARG002  # there is only one
        health = self._probe.check(self.progress)
        if health != self._last:
            say = f"the GPU is not available: {health.reason}"
            print("the GPU is available" if health.available else say, flush=True)  # noqa: T201
        self._last = health
        try:
            with contextlib.closing(open_work_store(self._store_settings)) as store:
                report_gpu(store, health, host_of(self._store_settings))
        except StoreError as error:
            raise NotReady(f"the store is away: {error}") from error
        self._due = monotonic() + self._every_s
        return health.available


def _ends(child: subprocess.Popen[bytes], within_s: float, on_wait: Callable[[], None]) -> bool:
    until = monotonic() + within_s
    while True:
        left_s = until - monotonic()
        try:
            child.wait(max(0.0, min(left_s, 1.0)))
        except subprocess.TimeoutExpired:
            on_wait()
            if left_s <= 0:
                return False
        else:
            return True


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _last(output: IO[bytes]) -> str:
    """Return the last line that the check printed, after a colon."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    lines = output.read(_TAIL).decode(errors="replace").strip().splitlines()
    return f": {one_line(lines[-1], 200)}" if lines else ""


def _read_command(variables: Mapping[str, str]) -> list[str]:
    try:
        command = shlex.split(variables.get("GPU_CHECK", "") or CHECK)
    except ValueError as error:
        raise ConfigError(f"GPU_CHECK: {error}", hint="quote it as for a shell") from error
    if not command:
        raise ConfigError("GPU_CHECK is empty", hint=f"name a program, such as {CHECK}")
    return command


def _read_seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 3600:
        raise ConfigError(f"{name} is {text!r}", hint="a number of seconds, 3600 at most")
    return seconds
