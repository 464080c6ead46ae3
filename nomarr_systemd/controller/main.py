"""The controller's programs: the one that the failures FIFO wakes, and the reconciler.

systemd starts the first when a hook writes to the FIFO, keeps what is written while it does not
run, and starts it again if it dies. After IDLE_S without work it rests: it has closed the store and
the bus and waits for the FIFO alone, so that the next failure waits for no interpreter. Both do the
same: observe, plan, act, until nothing is left to do. A report only narrows which workers are
observed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from nomarr_systemd.controller.act import Done, LedgerUnwritable, act
from nomarr_systemd.controller.canaries import Canaries, is_watching, observe_canaries
from nomarr_systemd.controller.ended_units import find_failed, find_idle, find_overtaken
from nomarr_systemd.controller.lapses import find_down
from nomarr_systemd.controller.observe import observe
from nomarr_systemd.controller.reports import (
    Report,
    clear_bell,
    clear_report,
    make_directory,
    read_reports,
)
from nomarr_systemd.controller.site import Site
from nomarr_systemd.core.errors import ConfigError, NomarrError, StoreError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.plan import plan
from nomarr_systemd.core.world import Outcome, World
from nomarr_systemd.host import clock
from nomarr_systemd.host.configuration import read_applied
from nomarr_systemd.host.layout import Paths
from nomarr_systemd.host.log import ERROR, keep_in, log, log_error
from nomarr_systemd.host.program_options import PLACES, parse_options
from nomarr_systemd.systemd.journal_socket import JournalSocket
from nomarr_systemd.systemd.manager import SOON, SUPERVISOR, Manager, monotonic_ms
from nomarr_systemd.systemd.notify import feed_watchdog, listen_fds, notify, watchdog_s
from nomarr_systemd.systemd.systemctl import ManagerError

USAGE: Final = f"usage: nomarr-controller {PLACES} [--reconcile]"
IDLE_S: Final = 30.0  # until it rests
RESTING: Final = "resting"  # its status in systemctl status
REST_S: Final = 3600.0  # between two signs of life while it rests
LOOK_AGAIN_S: Final = 0.5  # between two observations of a canary, and after a start
HOOK_S: Final = 0.01  # before the second look while the hook runs; then twice as long each time
FLUSH_MS: Final = 1000  # between two tries to send what journald could not take
LOOK_AT_ALL_MS: Final = 10_000  # between two observations of its pool, if no report comes
PAUSE_END: Final = "nomarr-pause-end"  # its timer is transient
TRY_AGAIN_MS: Final = 60_000  # a pause that could not be ended
_PASSES: Final = 5  # an incident that opens concerns more workers, and so do jobs that are settled
_NOT_OF_ONE: Final = (ManagerError, StoreError, LedgerUnwritable)  # no worker can be handled
Stamp = tuple[int, int]
T = TypeVar("T")


def run(
    site: Site,
    *,
    everybody: bool,
    with_untold: bool = False,
    resumed: Mapping[str, str] | None = None,
    also: Iterable[Component] = (),
) -> bool:
    """Do all there is to do now; True if something is left that no report will trigger. ``also``:
    workers to observe without a report.

    Call it in ``site.alone()``.
    """
    make_directory(site.paths)
    site.ask_anew()
    reports = read_reports(site.paths, with_untold=everybody or with_untold)
    fresh = [each for each in reports.deaths if not each.is_untold]
    if everybody:  # again at each: the ledger may have been lost, and records with it
        site.looked_at.clear()
    idle = find_idle(site)
    unheard, others = find_failed(site, idle, fresh)
    if everybody:
        with contextlib.suppress(StoreError):  # of a ledger that is away: they are found later
            unheard += find_overtaken(site, idle, [*fresh, *unheard])
    # One that was booked is on record, unless the ledger was lost.
    lost = {each.invocation for each in unheard}
    deaths = [each for each in reports.deaths if each.invocation not in lost] + unheard
    down = find_down(site, idle)
    reported = [each.component for each in deaths]
    who = None if everybody else [*reported, *others, *reports.due, *down, *also]
    configured = set(site.config.components())
    for each in deaths:
        if each.component not in configured:  # a person started it, and its mask would stay
            clear_report(site.paths, each.invocation)
    due = [*reports.due]
    try:
        owes = _handle(site, deaths, who, down, due, resumed)
    except _NOT_OF_ONE:
        raise
    except Exception as error:  # about one worker, as a rule: the others are handled without it
        log(ERROR, "after a fault each worker is handled alone", fault=_describe(error))
        _handle_each(site, deaths, configured if who is None else who, due)
        owes = True
    for component, written_ns in reports.due.items():
        clear_bell(site.paths, component, written_ns)
    return owes


def _handle(
    site: Site,
    deaths: list[Report],
    who: Sequence[Component] | None,
    down: Sequence[Component],
    due: Sequence[Component],
    resumed: Mapping[str, str] | None,
) -> bool:
    """Observe, plan and act until nothing is left to do; True as in ``run``."""
    owes, outcomes, asked = False, tuple[Outcome, ...](), frozenset[str]()
    for _ in range(_PASSES):
        feed_watchdog()
        world = observe(
            site,
            deaths,
            who,
            down=down,
            due=due,
            outcomes=outcomes,
            asked=asked,
            resumed=resumed,
        )
        done, world = _carry_out(site, world)
        _clear_seen(site, deaths, world)
        owes |= done.owes or (done.untold and world.supervisor_active) or _waits(world)
        outcomes, asked, resumed = done.outcomes, asked | done.asked, None
        if not outcomes and not done.asked and not done.changed_incidents:
            return owes
        deaths = read_reports(site.paths).deaths
    return True


def _handle_each(
    site: Site, deaths: Iterable[Report], who: Iterable[Component], due: Sequence[Component]
) -> None:
    """Handle workers one by one, in one pass each. A fault about one is logged, and what is owed
    to that worker is retried later; so is the question to the supervisor."""
    reports: dict[Component, list[Report]] = {each: [] for each in sorted(who)}
    for death in deaths:
        reports.setdefault(death.component, []).append(death)
    for component, own in reports.items():
        feed_watchdog()
        try:
            rang = [each for each in due if each == component]
            asked = frozenset(each.invocation for each in own)  # it is not asked about them
            _, world = _carry_out(site, observe(site, own, [component], due=rang, asked=asked))
            _clear_seen(site, own, world)
        except _NOT_OF_ONE:
            raise
        except Exception as error:
            name, fault = component.component_id, _describe(error)
            log(ERROR, "a fault: this worker is left as it is", component=name, fault=fault)


def _describe(error: Exception) -> str:
    """Return the error and where it happened, in one line."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        places.append(f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]} ({' > '.join(places[-5:])})"


def _carry_out(site: Site, world: World) -> tuple[Done, World]:
    """Plan and act; if the ledger takes no bookings, plan again without it."""
    try:
        return act(site, plan(world, clock.now())), world
    except LedgerUnwritable as error:
        log(ERROR, "the ledger cannot be written", error=error, hint=error.hint)
        site.forget_store()
        world = world._replace(ledger="read-only", outcomes=())
        return act(site, plan(world, clock.now())), world


def _clear_seen(site: Site, deaths: Iterable[Report], world: World) -> None:
    """Clear reports that turned out to be of no death."""
    real = {death.run for worker in world.workers for death in worker.deaths}
    for each in deaths:
        if each.invocation not in real:
            clear_report(site.paths, each.invocation)


def _waits(world: World) -> bool:
    """True if something is left to do that no report will trigger."""
    is_open = any(not each.closed for each in world.incidents.values())
    # A start job that ends well runs no hook: the decision is noted as done by the next run.
    is_starting = any(
        worker.unit.has_job and (worker.deaths or (worker.account and worker.account.unfinished()))
        for worker in world.workers
    )
    return is_open or is_starting or world.ledger != "sound" or bool(world.spooled)


def serve(
    site: Site, fifo: int, applied: Stamp, *, has_rested: bool = False, idle_s: float = IDLE_S
) -> bool:
    """Handle pending reports, and new ones when the FIFO is written, until none comes for a while.
    One that has rested has looked at untold reports: those left since wait until it looks at all.

    False if another configuration has been applied since ``applied``.
    """
    os.set_blocking(fifo, False)
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    everybody, rang = False, True
    seen: Canaries = ()
    looked_ms, hook_s = 0, HOOK_S
    while True:
        # Lines only wake this process: systemd shows what has ended.
        with contextlib.suppress(BlockingIOError):
            while os.read(fifo, 65536):
                pass
        if find_stamp(site.paths.resolved) != applied:
            return False
        feed_watchdog()
        with site.alone():
            # While an incident is open, only its canary is watched: a pool takes many questions. So
            # is a worker that starts in its turn: when it runs, the turn is for others.
            is_old = monotonic_ms() - looked_ms > LOOK_AT_ALL_MS
            canaries = () if rang else observe_canaries(site)
            again = _find_failed_again(site)
            if rang or everybody or is_old or canaries != seen or again or site.hook_runs:
                # A controller that was killed may have left a pool that failed half stopped.
                is_first = not looked_ms and not has_rested
                owes = run(site, everybody=everybody, with_untold=is_first, also=again)
                looked_ms, seen = monotonic_ms(), canaries  # as they were before the run
            is_busy = is_watching(site) or bool(site.started)
        if everybody and not is_busy and not site.hook_runs:
            _arm(site, owes=owes)
            return True
        # While this process does not read, systemd would queue all its signals for it.
        site.manager.close()
        wait_s = LOOK_AGAIN_S if is_busy else idle_s
        hook_s = min(2 * hook_s, LOOK_AGAIN_S) if site.hook_runs else HOOK_S
        rang = _wait(site, poll, hook_s if site.hook_runs else wait_s)
        # Before it rests, it observes every worker.
        everybody = not rang and not is_busy and not site.hook_runs


def rest(fifo: int) -> None:
    """Wait until the FIFO is written. systemd's watchdog, which is meant for work, is set so that
    this process wakes up once in REST_S only."""
    gc.collect()
    gc.freeze()  # what is left is modules: a collection while a worker waits need not look at them
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    work_us = round(watchdog_s() * 1e6)
    rest_us = round(2 * REST_S * 1e6) if work_us else 0
    _tell(f"STATUS={RESTING}", f"WATCHDOG_USEC={rest_us}" if work_us else "")
    while not poll.poll(REST_S * 1000):
        feed_watchdog()
    _tell("STATUS=", f"WATCHDOG_USEC={work_us}" if work_us else "")


def _tell(*lines: str) -> None:
    with contextlib.suppress(OSError):
        notify(*(line for line in lines if line))


def _find_failed_again(site: Site) -> list[Component]:
    """Return the workers that were started a moment ago and are failed. systemd runs no hook for a
    unit that was failed before and could not even be executed: to it, nothing changed."""
    old_ms = monotonic_ms() - round(LOOK_AGAIN_S * 1000)
    old = [each for each, since_ms in site.started.items() if since_ms <= old_ms]
    shown = site.manager.show([each.unit for each in old], ("ActiveState", "Job")) if old else {}
    found = []
    for each in old:
        facts = shown[each.unit]
        if not facts["Job"]:
            del site.started[each]
            if facts["ActiveState"] == "failed":
                found.append(each)
    return found


def _wait(site: Site, poll: select.poll, wait_s: float) -> bool:
    """Wait for a report; True if one came. Journal entries that wait for journald are sent."""
    ends_ms = monotonic_ms() + round(wait_s * 1000)
    feed_ms = round((watchdog_s() or wait_s) * 500)
    while True:
        feed_watchdog()
        left_ms = min(max(0, ends_ms - monotonic_ms()), feed_ms)
        is_late = not site.journal.socket.flush()
        if poll.poll(min(left_ms, FLUSH_MS) if is_late else left_ms):
            return True
        if monotonic_ms() >= ends_ms:
            return False


def _arm(site: Site, *, owes: bool) -> None:
    """Have the reconciler run in a minute if something is owed, or journald takes no entries; else
    it runs every hour.

    systemd itself arms the timer at every failure of a worker.
    """
    with contextlib.suppress(ManagerError):
        if owes or not site.journal.socket.flush():
            site.manager.restart(SOON)  # a start would do nothing while it runs this very program
        else:
            site.manager.queue_all(stop=[SOON])


def arm_next_end(site: Site) -> None:
    """Have the reconciler run when the next pause ends, by the wall clock. The timer is lost with a
    boot, and made again by the reconciler, which runs at every boot."""
    until_ms = site.holds.next_end_ms(site.config.components())
    if until_ms is not None:
        left_ms = until_ms - clock.now().wall_ms
        due_ms = monotonic_ms() + (left_ms if left_ms > 0 else TRY_AGAIN_MS)
        site.manager.schedule_service(PAUSE_END, due_ms, until_ms)


def reconcile(site: Site) -> None:
    """Observe every worker, plan and act.

    A supervisor that was started meanwhile has requested this run, which may have handled its
    workers already: then repeat it.
    """
    begun_ms = -1
    while _came_back(site, begun_ms):
        begun_ms = monotonic_ms()
        with site.alone():
            with contextlib.suppress(StoreError):
                site.store.publish_all()
                site.publish_incidents()
            owes = run(site, everybody=True)
            site.keep_room()
    with contextlib.suppress(ManagerError):
        arm_next_end(site)
    _arm(site, owes=owes)


def end_incident(site: Site, pool: str, why: str) -> bool:
    """End a pool's incident for a person: start all that it holds. False if none is open."""
    with site.alone():
        incident = site.incidents.get(pool)
        if incident is None or incident.closed:
            return False
        run(site, everybody=True, resumed={pool: why})
        incident = site.incidents.get(pool)
    return incident is None or bool(incident.closed)


def _came_back(site: Site, since_ms: int) -> bool:
    if since_ms < 0:
        return True
    shown = site.manager.show([SUPERVISOR], ["ActiveEnterTimestampMonotonic"])[SUPERVISOR]
    return int(shown["ActiveEnterTimestampMonotonic"] or 0) // 1000 > since_ms


def find_stamp(path: str) -> Stamp:
    """Return inode and time of a file: of the applied configuration, which each apply changes, or
    of this module, which each upgrade and downgrade replaces."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv, ["--reconcile"])
    if options is None:
        log(ERROR, USAGE)
        return 2
    paths, flags = options
    keep_in(JournalSocket(paths.kept_entries), "nomarr-controller")
    try:
        if "--reconcile" in flags:
            _with_site(paths, lambda site, _applied: reconcile(site))
        else:
            _stay(paths)
        return 0
    except NomarrError as error:
        log_error(error)
        return error.exit_status
    except Exception as error:  # what is owed is in files and the ledger: systemd starts it again
        log(ERROR, "unexpected error", fault=_describe(error))
        return 1


def _with_site(paths: Paths, work: Callable[[Site, Stamp], T]) -> T:
    applied = find_stamp(paths.resolved)  # before it is read: then nothing new is missed
    with contextlib.closing(Site(paths, read_applied(paths), Manager(user=paths.user))) as site:
        return work(site, applied)


def _stay(paths: Paths) -> None:
    """Serve and rest, until another version of this program is installed. Then systemd starts that
    one, as the line that ended the rest is still in the FIFO."""
    fds = listen_fds()
    if len(fds) != 1:
        raise ConfigError(
            "systemd passed no FIFO", hint="nomarr-controller.socket starts this program"
        )

    has_rested = False

    def work(site: Site, applied: Stamp) -> bool:
        if not has_rested:
            notify("READY=1")
        # After an error systemd starts the service again; files and FIFO are as they were.
        return serve(site, fds[0], applied, has_rested=has_rested)

    version = find_stamp(__file__)
    while True:
        has_rested = _with_site(paths, work)
        if has_rested:
            rest(fds[0])
            if find_stamp(__file__) != version:
                return


if __name__ == "__main__":
    sys.exit(main())
