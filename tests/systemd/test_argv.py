"""What a worker gets from systemd is what the configuration says, whatever stands in it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.layout import system_paths
from nomarr_systemd.systemd.unit_files import dropin_of, render_files
from tests.support.depth import times
from tests.support.lab import Lab

WORKER = Component("tag", 0)
# The program is part of what must arrive: its text has quotes, a % and a $.
DUMP = r"""printf '%s\0' "$@" > "$HOME/argv"; exit 78"""
HOSTILE = [
    "", " ", "\t", "\n", "\r\n", "a\nExecStart=/bin/false", "%i", "%%", "%", "$HOME", "${HOME}",
    "$$", "$", '"', "'", "\\", "\\n", "a\\", ";", "\\;", "; rm", "#", "-", "@", "+!", "\x01",
    "\x1b[31m", "\x7f", "\x80", "\u2028", "ä", "\U0001f3b5", "\ufeff", "x" * 100_000, "=", "[Unit]",
    "\\x41", "\\u0041", "\\101", "'a b'", '"a b"', "a b", "\v\f\a\b",
]  # fmt: skip
ARGUMENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
PIECES = st.lists(st.sampled_from([*"%$\\\"'; \n\rxni{}#", "%i", "${HOME}", "\\x"])).map("".join)


def receive(lab: Lab, arguments: list[str]) -> list[str]:
    """What a program gets that systemd starts with these."""
    pool = Pool("tag", command=("/bin/sh", "-c", DUMP, "sh", *arguments))
    argv = Path(lab.home, "argv")
    argv.unlink(missing_ok=True)
    files = render_files(Config(pools=(pool,)), system_paths())
    lab.write_unit(dropin_of(WORKER), files[dropin_of(WORKER)])
    lab.reload()
    lab.systemctl("start", WORKER.unit, check=False)  # it is never ready
    return argv.read_bytes().decode().split("\0")[:-1]


def install(lab: Lab) -> None:
    lab.replace_controller()
    lab.install('[pool.tag]\ncommand = ["/bin/true"]')


def test_hostile_arguments_arrive_as_they_are(lab: Lab) -> None:
    install(lab)
    assert receive(lab, HOSTILE) == HOSTILE


def test_any_arguments_arrive_as_they_are(lab: Lab) -> None:
    install(lab)

    @settings(max_examples=times(40), suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(ARGUMENT | PIECES, min_size=1, max_size=20))
    def check(arguments: list[str]) -> None:
        assert receive(lab, arguments) == arguments

    check()


def test_a_worker_is_told_who_it_is(lab: Lab) -> None:
    lab.replace_controller()
    program = lab.write_program(
        "worker", '#!/bin/sh\nsystemd-notify --ready\nenv > "$HOME/environment"\nexec sleep 1000\n'
    )
    text = "[health]\nframe_interval_s = 0.5\n[pool.tag]\n"
    lab.install(text + 'entrypoint = "package.module:Class"\nidle_evict_s = 7')
    # The real program of Python workers has its own tests.
    Path(lab.libexec, "nomarr-worker").write_text(Path(program).read_text())
    lab.write_unit("nomarr-worker@.service.d/99-test.conf", "[Service]\nNotifyAccess=all\n")
    lab.reload()
    lab.start("tag-0")
    environment = Path(lab.home, "environment")
    text = lab.wait_for(lambda: environment.exists() and environment.read_text()) or ""
    told = dict(line.partition("=")[::2] for line in text.splitlines())
    assert told["NOMARR_COMPONENT_ID"] == "worker:tag:0"
    assert told["NOMARR_HEALTH_PIPE"] == f"{lab.paths.health}/tag-0"
    assert told["INVOCATION_ID"] == lab.get("tag-0", "InvocationID")
    assert told["WATCHDOG_USEC"] == "30000000"
    assert "NOTIFY_SOCKET" in told
    told_settings = json.loads(told["NOMARR_SETTINGS"])
    assert (told_settings["frame_interval_s"], told_settings["idle_evict_s"]) == (0.5, 7)
