"""Checks of what is under the installation: systemd, the journal, the clock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.text import describe_ms
from nomarr_systemd.core.time import Moment
from nomarr_systemd.host import clock, machine
from nomarr_systemd.ledger.public import list_published, read_published
from nomarr_systemd.operate.doctor.installation import Found, Installation

LEAST_SYSTEMD: Final = 252
_LEAST_STEP_MS: Final = 60_000


def check_systemd(it: Installation) -> Found:
    version = machine.systemd_version()
    if version < LEAST_SYSTEMD:
        text = f"systemd {version or 'is missing'}; {LEAST_SYSTEMD} or newer is needed"
        yield "bad", text, "upgrade the system"
        return
    it.manager.show_manager("Version")
    kind = "cgroup v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "cgroup v1"
    yield "ok", f"systemd {version} answers, {kind}", ""


def check_journal(it: Installation) -> Found:  # noqa: ARG001  # as all checks
    if machine.is_journal_persistent():
        yield "ok", "the journal outlasts a reboot", ""
    else:
        mend = "mkdir -p /var/log/journal && systemctl restart systemd-journald"
        yield "warn", "the journal is lost at a reboot, and with it why workers died", mend


def check_clock(it: Installation) -> Found:
    synchronised = machine.is_clock_synchronised()
    if synchronised is False:
        text = "the clock is not synchronised: restarts before a reboot may be judged wrongly"
        yield "warn", text, "timedatectl set-ntp true"
    elif synchronised is None:
        yield "warn", "it is not known whether the clock is synchronised", "timedatectl"
    else:
        yield "ok", "the clock is synchronised", ""
    if not it.is_applied:
        return
    known, _ = list_published(it.paths.public)
    accounts = [
        read_published(it.paths.public, each).account for each in it.workers if each in known
    ]
    now = clock.now()
    step_ms = find_clock_step(accounts, now)
    if is_from_future(accounts, now):
        text = "the ledger has records of the future: the clock was set back"
        yield "bad", text, "timedatectl set-ntp true"
    elif step_ms:
        where = "forward" if step_ms > 0 else "back"
        text = f"since this boot the clock was set {where} by {describe_ms(abs(step_ms))}"
        yield "warn", f"{text}: times on record from before are off by that", "timedatectl"


def is_from_future(accounts: Iterable[Account], now: Moment) -> bool:
    """Return True if an account was updated later than now."""
    newest = max((account.updated_at_wall_ms or 0 for account in accounts), default=0)
    return newest > now.wall_ms + _LEAST_STEP_MS


def find_clock_step(accounts: Iterable[Account], now: Moment) -> int:
    """Return by how many milliseconds the wall clock was set since a record of this boot was
    written; 0 if by less than a minute. The time since boot cannot be set, so the difference of
    the two clocks shows it."""
    difference = now.wall_ms - now.boottime_ms
    steps = [
        difference - (record.wall_ms - record.boottime_ms)
        for account in accounts
        for record in account.records
        if record.boot_id == now.boot_id
    ]
    widest = max(steps, key=abs, default=0)
    return widest if abs(widest) >= _LEAST_STEP_MS else 0
