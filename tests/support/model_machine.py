"""A machine in a few values: units, timers, reports and books of some workers, for exploring what
``core.plan`` does to it. It has no process and no file, and every state of it is a value.

``observe`` shows it as ``controller.observe`` would; ``carry_out`` changes it as ``controller.act``
would, in the same order, and may be cut off after any step, as a kill does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from nomarr_systemd.core import account as book
from nomarr_systemd.core import intents as do
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death, classify
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.intents import Intent
from nomarr_systemd.core.ledger_record import Record
from nomarr_systemd.core.plan import is_blamed, plan
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.core.time import Moment
from nomarr_systemd.core.world import Pool, Spooled, Turns, Unit, Worker, World

POOL = "tag"
WALL_MS = 1_700_000_000_000


class Simulated(NamedTuple):
    """One worker: its unit, and what is on record and reported about it."""

    state: str = "running"  # running, starting, failed, inactive
    run: int = 1  # the invocation
    runs: int = 1  # invocations so far
    masked: bool = False
    wanted: bool = True
    kept_down: bool = False
    due_ms: int = -1  # of its timer; -1: it has none
    hold: str = ""
    reports: tuple[tuple[int, int], ...] = ()  # runs that the hook reported, and when
    account: Account = Account("")
    # What the properties are held against.
    deaths: frozenset[int] = frozenset()  # runs that truly died, unasked
    unheard: frozenset[int] = frozenset()  # their hook was lost
    forgotten: frozenset[int] = frozenset()  # and systemd knows them no more
    stopped: bool = False  # a person stopped it, and nobody has started it since
    ended: frozenset[int] = frozenset()  # runs that ended well, and unasked
    unbegun: frozenset[int] = frozenset()  # runs that never began: their start job failed
    lacks: bool = False  # a unit that it needs is not active
    until_ms: int = -1  # of its pause; -1: it has no end

    @property
    def is_inactive(self) -> bool:
        """True if systemd calls its present state inactive, and not failed."""
        return self.state == "failed" and self.run in self.ended | self.unbegun


class Machine(NamedTuple):
    """The whole machine, hashable once ``freeze`` has made it so."""

    workers: tuple[Simulated, ...]
    now_ms: int = 0
    boot: int = 1
    incidents: tuple[Incident, ...] = ()
    spooled: tuple[Spooled, ...] = ()
    ledger: str = "sound"
    healthy: bool = False  # what the supervisor says of every active worker
    at_once: int = 0  # restarts that may be under way at the same time; 0: no limit
    turns: frozenset[int] = frozenset()  # workers that have a turn
    others: int = 0  # turns that other hosts have

    @property
    def free(self) -> int:
        return max(0, self.at_once - len(self.turns) - self.others)

    @property
    def now(self) -> Moment:
        return Moment(WALL_MS + self.now_ms, f"{self.boot:032x}", self.now_ms)


class Broken(AssertionError):
    """A property does not hold."""


def make_machine(workers: int, at_once: int = 0) -> Machine:
    simulated = tuple(Simulated(account=_frozen(Account(name_of(n)))) for n in range(workers))
    return Machine(simulated, at_once=at_once)


def name_of(number: int) -> str:
    return f"worker:{POOL}:{number}"


def invocation_of(number: int, run: int) -> str:
    return f"{number:016x}{run:016x}"


def _frozen(account: Account) -> Account:
    window = tuple((boot, tuple(row)) for boot, row in sorted(dict(account.window).items()))
    return account._replace(rows=tuple(account.rows), window=window)  # type: ignore[arg-type]


def _thawed(account: Account) -> Account:
    return account._replace(window=dict(account.window), rows=list(account.rows))


# As controller.observe sees it


def observe(machine: Machine, rules: Rules, asked: frozenset[str] = frozenset()) -> World:
    now = machine.now
    workers = []
    for number, each in enumerate(machine.workers):
        state = {"running": "active", "starting": "failed"}.get(each.state, each.state)
        if each.is_inactive and (not each.wanted or (each.kept_down and each.hold)):
            state = "inactive"
        timer = "none"
        if each.due_ms >= 0:
            timer = "waiting" if each.due_ms > machine.now_ms else "elapsed"
        reports = each.reports
        is_unknown = _thawed(each.account).find_last(invocation_of(number, each.run)) is None
        is_reported = any(run == each.run for run, _ in reports)
        if machine.ledger == "away":
            is_unknown = each.due_ms < 0
        if state == "failed" and each.state == "failed" and is_unknown and not is_reported:
            reports = (*reports, (each.run, machine.now_ms))  # the failed unit itself is found
        ordered = sorted(reports, key=lambda row: (row[0] == each.run, row[1]))
        deaths = tuple(_death(number, run, when, each, now) for run, when in ordered)
        unit = Unit(
            state,
            invocation_of(number, each.run),
            each.masked,
            each.state == "starting",
            each.wanted,
            each.kept_down,
            timer,  # type: ignore[arg-type]
            "db.service, which is failed" if each.lacks else "",
        )
        account = None if machine.ledger == "away" else _thawed(each.account)
        is_over = 0 <= each.until_ms <= machine.now_ms
        who = Component(POOL, number)
        seen = Worker(who, rules, unit, account, each.hold, deaths, resumes=is_over)
        workers.append(seen)
    recent = [
        record.death(each.account.component_id)
        for each in machine.workers
        for record in _thawed(each.account).records[-3:]
        if is_blamed(record) and machine.now_ms - record.boottime_ms < 10_000
    ]
    active = (n for n, each in enumerate(machine.workers) if each.state == "running")
    return World(
        tuple(workers),
        {POOL: Pool(len(machine.workers), rules.window_s)},
        {each.pool: each for each in machine.incidents},
        {POOL: tuple(recent)},
        spooled=machine.spooled,
        asked=asked,
        ledger=machine.ledger,  # type: ignore[arg-type]
        healthy=frozenset(map(name_of, active)) if machine.healthy else frozenset(),
        turns={POOL: Turns(machine.free, frozenset(map(name_of, machine.turns)))}
        if machine.at_once
        else {},
    )


def _death(number: int, run: int, when: int, each: Simulated, now: Moment) -> Death:
    asked = run not in each.deaths
    at = now.later(when - now.boottime_ms)
    name, invocation = name_of(number), invocation_of(number, run)
    if run in each.unbegun:
        lacks = "db.service, which is failed" if each.lacks else ""
        first = f"{invocation}#1"
        return classify("", start_job=True, lacks=lacks, component_id=name, invocation=first, at=at)
    if run in each.ended:
        return Death(name, invocation, "ended", 0, at=at, stop_asked=asked)
    return Death(name_of(number), invocation_of(number, run), code=1, at=at, stop_asked=asked)


# As controller.act changes it

# The order in which intents are carried out; controller.act says why. All bookings are one commit,
# and so are all notes.
ORDER: Final = (
    *(do.Schedule, do.OpenIncident, do.Join, do.Elect, do.Hold),
    (do.Book, do.BookSpooled, do.Refund, do.MarkFailed, do.Close),
    *(do.BlameJobs, do.Spool, do.Release, do.Stop, do.Mask, do.Resume, do.TakeTurn, do.Start),
    *(do.CancelTimer, do.Note, do.GiveTurn, do.Tell, do.Consult),
    do.Clear,
)


def steps_of(intents: Sequence[Intent]) -> Iterator[Sequence[Intent]]:
    """Yield what is done between two moments at which a kill can come, in order."""
    for kinds in ORDER:
        if isinstance(kinds, tuple) or kinds is do.Note:
            batch = [each for each in intents if isinstance(each, kinds)]
            if batch:
                yield batch
        else:
            yield from ([each] for each in intents if isinstance(each, kinds))


def carry_out(machine: Machine, step: Iterable[Intent], rules: Rules) -> Machine:
    for intent in step:
        machine = _do(machine, intent, rules)
    return machine


def _do(machine: Machine, intent: Intent, rules: Rules) -> Machine:
    match intent:
        case do.OpenIncident(incident):
            return machine._replace(incidents=(incident,))
        case do.Join(_, member):
            (incident,) = machine.incidents
            joined = incident._replace(members=(*incident.members, member))
            return machine._replace(incidents=(joined,))
        case do.Elect(_, canary):
            (incident,) = machine.incidents
            return machine._replace(incidents=(incident._replace(canary=canary),))
        case do.Close(_, why):
            (incident,) = machine.incidents
            return machine._replace(incidents=(incident._replace(closed=why),))
        case do.Spool(_, entry):
            kept = [each for each in machine.spooled if each.death != entry.death]
            return machine._replace(spooled=(*kept, entry))
        case do.TakeTurn(component):
            if not machine.free:
                raise Broken(f"{component} takes a turn, and none is free")
            return machine._replace(turns=machine.turns | {component.number})
        case do.GiveTurn(component):
            return machine._replace(turns=machine.turns - {component.number})
        case do.Tell() | do.Consult() | do.FailPool() | do.BlameJobs():
            return machine
    number = intent.component.number
    each = machine.workers[number]
    if isinstance(intent, do.BookSpooled):
        left = tuple(entry for entry in machine.spooled if entry != intent.entry)
        machine = machine._replace(spooled=left)
    return put(machine, number, _change(machine, each, intent, number, rules))


def _change(
    machine: Machine, each: Simulated, intent: Intent, number: int, rules: Rules
) -> Simulated:
    account, now = _thawed(each.account), machine.now
    match intent:
        case do.Schedule(_, due):
            return each._replace(due_ms=due.boottime_ms)
        case do.CancelTimer():
            return each._replace(due_ms=-1)
        case do.Hold(_, why):
            return each._replace(hold=why)
        case do.Release():
            return each._replace(hold="")
        case do.Book(_, death, _, current, _):
            account, _ = book.record_failure(account, death, rules, now, current=current)
        case do.BookSpooled(_, entry, _):
            account, _ = book.book(account, entry.death, entry.decision, rules, entry.at)
        case do.Refund(_, invocation, why):
            account, _ = book.refund(account, invocation, now, why)
        case do.MarkFailed(_, invocation, why):
            account = book.mark_failed(account, why, now, invocation=invocation)
        case do.Note(_, invocation, effect):
            account = book.set_effect(account, invocation, effect, now)
        case do.Resume(_, starts):
            if not 0 <= each.until_ms <= machine.now_ms:
                raise Broken(f"the pause of {number} is ended too early")
            each = each._replace(hold="", until_ms=-1)
            return _begin_run(each._replace(wanted=True, stopped=False)) if starts else each
        case do.Stop():
            return each._replace(state="inactive", wanted=False)
        case do.Mask():
            if account.failed_at_wall_ms is None or not account.failure_reason:
                raise Broken(f"{number} is masked without a reason")
            return each._replace(masked=True)
        case do.Start(_, run):
            return _start(machine, each, account, number, run)
        case do.Clear(_, invocation):
            kept = tuple(r for r in each.reports if invocation_of(number, r[0]) != invocation)
            return each._replace(reports=kept)
        case _:
            raise AssertionError(intent)
    return each._replace(account=_frozen(account))


def _start(machine: Machine, each: Simulated, account: Account, number: int, run: str) -> Simulated:
    """As act starts: only what is as it was seen, and is wanted."""
    if each.stopped or each.masked or each.hold:
        raise Broken(f"{number} is started although a person stopped, masked or held it")
    if machine.ledger == "sound" and not each.kept_down:
        last = account.find_last(run)
        if last is None or last.action not in ("restart", "hold"):
            raise Broken(f"{number} is started without a decision")
        is_retry = last.kind == "dependency"
        if machine.at_once and number not in machine.turns and not is_retry:
            raise Broken(f"{number} is started out of turn")
    lost = each.forgotten
    if machine.ledger == "away" and each.run in each.unheard:
        lost |= {each.run}  # no hook, no ledger, and the timer of another run
    return each._replace(state="starting", kept_down=False, forgotten=lost)


def put(machine: Machine, number: int, each: Simulated) -> Machine:
    workers = (*machine.workers[:number], each, *machine.workers[number + 1 :])
    return machine._replace(workers=workers)


# What happens to it


def die(machine: Machine, number: int, *, heard: bool = True) -> Machine:
    """A run dies by itself; its hook reports it, or is lost."""
    each = machine.workers[number]
    reports = (*each.reports, (each.run, machine.now_ms)) if heard else each.reports
    unheard = each.unheard if heard else each.unheard | {each.run}
    deaths = each.deaths | {each.run}
    changed = each._replace(state="failed", reports=reports, deaths=deaths, unheard=unheard)
    return put(machine, number, changed)


def end(machine: Machine, number: int) -> Machine:
    """A run ends well, and unasked."""
    each = machine.workers[number]
    machine = put(machine, number, each._replace(ended=each.ended | {each.run}))
    return die(machine, number)


def lack(machine: Machine, number: int) -> Machine:
    """A person starts the worker, and a unit that it needs fails: its start job fails."""
    each = machine.workers[number]._replace(wanted=True, stopped=False, lacks=True)
    if not machine.workers[number].wanted or each.state == "inactive":
        each = _never_begin(each)
        each = each._replace(deaths=each.deaths | {each.run})
    return fail_start(put(machine, number, each), number)


def _never_begin(each: Simulated) -> Simulated:
    """A start that leads to no run: systemd shows a newer wanted unit than the last run."""
    run = each.runs + 1
    lost = each.forgotten | ({each.run} & each.unheard if each.state == "failed" else set())
    unbegun = each.unbegun | {run}
    return each._replace(state="failed", run=run, runs=run, unbegun=unbegun, forgotten=lost)


def begin(machine: Machine, number: int) -> Machine:
    """A start job is done: the worker runs."""
    return put(machine, number, _begin_run(machine.workers[number]))


def _begin_run(each: Simulated) -> Simulated:
    lost = each.forgotten
    if each.state in ("failed", "starting") and each.run in each.unheard:
        lost |= {each.run}  # systemd shows the new run now
    return each._replace(
        state="running", run=each.runs + 1, runs=each.runs + 1, forgotten=lost, kept_down=False
    )


def fail_start(machine: Machine, number: int) -> Machine:
    """A start job fails: the hook reports the old run again."""
    each = machine.workers[number]
    report = (each.run, machine.now_ms)
    reports = (*(r for r in each.reports if r[0] != each.run), report)
    return put(machine, number, each._replace(state="failed", reports=reports))


def stop(machine: Machine, number: int) -> Machine:
    """A person stops the worker, in whatever state; a running one ends well."""
    each = machine.workers[number]
    state = "inactive" if each.state in ("running", "starting") else each.state
    if each.state == "starting":
        state = "failed"  # the job is cancelled
    changed = each._replace(state=state, wanted=False, stopped=True, due_ms=-1)
    return put(machine, number, changed)


def start(machine: Machine, number: int) -> Machine:
    """A person starts the worker."""
    each = machine.workers[number]._replace(wanted=True, stopped=False)
    if each.hold:
        return put(machine, number, _never_begin(each)._replace(kept_down=True))
    return put(machine, number, _begin_run(each))


def pause(machine: Machine, number: int) -> Machine:
    return stop(
        put(machine, number, machine.workers[number]._replace(hold="paused by uid 0")), number
    )


def pause_for(machine: Machine, number: int) -> Machine:
    """A pause that ends by itself."""
    machine = pause(machine, number)
    return put(machine, number, machine.workers[number]._replace(until_ms=machine.now_ms + 30_000))


def resume(machine: Machine, number: int) -> Machine:
    each = machine.workers[number]._replace(hold="", until_ms=-1)
    machine = put(machine, number, each)
    return machine if each.masked else start(machine, number)


def reset(machine: Machine, number: int) -> Machine:
    """nomarrctl reset: counts begin again, the mask goes, nothing is started."""
    each = machine.workers[number]
    account = _frozen(book.reset(_thawed(each.account), machine.now, "uid 0"))
    lost = each.forgotten | ({each.run} & each.unheard if each.state == "failed" else set())
    state = "inactive" if each.state == "failed" else each.state
    changed = each._replace(
        account=account, masked=False, state=state, due_ms=-1, stopped=True, wanted=False,
        forgotten=lost,
    )  # fmt: skip
    return put(machine, number, changed)


def reboot(machine: Machine) -> Machine:
    """Everything in memory is gone; the boot starts all that is neither masked nor held."""
    workers = []
    for each in machine.workers:
        unbooked = frozenset(run for run, _ in each.reports) | (
            {each.run} if each.state == "failed" else frozenset()
        )
        fresh = each._replace(
            reports=(), due_ms=-1, wanted=True, stopped=False, forgotten=each.forgotten | unbooked,
            unheard=each.unheard | unbooked, kept_down=False,
        )  # fmt: skip
        if fresh.masked:
            workers.append(fresh._replace(state="inactive", wanted=False))
        elif fresh.hold:
            workers.append(_never_begin(fresh)._replace(kept_down=True))
        else:
            workers.append(_begin_run(fresh._replace(state="inactive")))
    return machine._replace(workers=tuple(workers), boot=machine.boot + 1)


def wait(machine: Machine) -> Machine:
    """Time passes until the next timer rings, or for longer than a start job may take."""
    due = [
        when
        for each in machine.workers
        for when in (each.due_ms, each.until_ms)
        if when > machine.now_ms
    ]
    return machine._replace(now_ms=min(due, default=machine.now_ms + 11_000))


def happenings(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Yield all that can happen next, apart from the controller itself."""
    for number, each in enumerate(machine.workers):
        if each.state == "running":
            yield f"die {number}", die(machine, number)
            yield f"die unheard {number}", die(machine, number, heard=False)
            yield f"end {number}", end(machine, number)
        if each.lacks:
            yield f"mend {number}", put(machine, number, each._replace(lacks=False))
        if each.state == "starting":
            if not each.lacks:
                yield f"begin {number}", begin(machine, number)
            yield f"fail start {number}", fail_start(machine, number)
        if not each.stopped:
            yield f"stop {number}", stop(machine, number)
        if each.state in ("failed", "inactive") and not each.masked:
            if not each.lacks:
                yield f"start {number}", start(machine, number)
            if not each.hold:
                yield f"lack {number}", lack(machine, number)
        if each.hold.startswith("paused"):
            yield f"resume {number}", resume(machine, number)
        elif not each.stopped:
            yield f"pause {number}", pause(machine, number)
            yield f"pause {number} for a while", pause_for(machine, number)
        if each.account.rows:
            yield f"reset {number}", reset(machine, number)
    yield "wait", wait(machine)
    yield "reboot", reboot(machine)
    if machine.free:
        yield "others take a turn", machine._replace(others=machine.others + 1)
    if machine.others:
        yield "others give a turn back", machine._replace(others=machine.others - 1)
    if machine.turns:
        yield "turns expire", machine._replace(turns=frozenset())
    if machine.incidents and not machine.incidents[0].closed:
        yield "healthy", machine._replace(healthy=not machine.healthy)


def passes(machine: Machine, rules: Rules) -> Iterator[tuple[str, Machine]]:
    """Yield the machine after a pass of the controller, and after one killed at each step."""
    done, count, asked = machine, 0, frozenset[str]()
    while True:
        intents = plan(observe(done, rules, asked), done.now)
        for step in steps_of(intents):
            if count:
                yield f"killed after {count}", done
            done = carry_out(done, step, rules)
            count += 1
        consulted = consulted_in(intents)
        if not consulted:
            break
        asked |= consulted
    yield "pass", done


def consulted_in(intents: Iterable[Intent]) -> frozenset[str]:
    """The runs that the supervisor is asked about; here it has nothing to say of them."""
    return frozenset(each.death.run for each in intents if isinstance(each, do.Consult))


# What must hold


def check(machine: Machine, rules: Rules) -> None:
    """Raise Broken if a property that holds at every moment does not."""
    for number, each in enumerate(machine.workers):
        records = _thawed(each.account).records
        booked = [
            r.invocation for r in records if r.action in ("restart", "fail", "hold", "ignore")
        ]
        if len(booked) != len(set(booked)):
            raise Broken(f"a death of {number} is booked twice")
        since = max((r.attempt for r in records if r.action == "reset"), default=0)
        refunded = {r.invocation for r in records if r.action == "refund"}
        counted = [
            r
            for r in records
            if r.action == "restart" and r.attempt > since and r.invocation not in refunded
        ]
        for record in counted:
            span_ms = rules.window_s * 1000
            young = [
                r
                for r in counted
                if r.boot_id == record.boot_id and 0 <= record.boottime_ms - r.boottime_ms < span_ms
            ]
            is_blind = any("the store is away" in r.text for r in young)
            if len(young) > rules.max_restarts and not is_blind:
                raise Broken(f"{number} has more restarts than the policy allows")


def check_settled(machine: Machine, rules: Rules) -> None:
    """Raise Broken if, after a whole pass, something owed is forgotten or would be done again."""
    again = plan(observe(machine, rules), machine.now)
    if again:
        raise Broken(f"planned again on its own result: {again}")
    for number, each in enumerate(machine.workers):
        if number in machine.turns and each.state != "starting" and machine.ledger == "sound":
            raise Broken(f"{number} keeps its turn")
        records = _thawed(each.account).records
        known = {r.invocation.partition("#")[0] for r in records}
        spooled = {entry.death.run for entry in machine.spooled}
        if 0 <= each.until_ms <= machine.now_ms:
            raise Broken(f"the pause of {number} outlasts its time")
        for run in each.deaths - each.forgotten:
            invocation = invocation_of(number, run)
            if machine.ledger == "sound" and invocation not in known:
                raise Broken(f"the death {run} of {number} is on no record")
            is_kept = invocation in known or invocation in spooled
            is_reported = any(r[0] == run for r in each.reports)
            if machine.ledger != "sound" and is_reported and not is_kept:
                raise Broken(f"the death {run} of {number} is neither booked nor spooled")
        is_owed = each.state == "failed" and each.wanted and not each.masked and not each.hold
        if rules.on_clean_exit == "stay" and each.run in each.ended:
            is_owed = False
            if any(r.action == "restart" and _run_of(r) in each.ended for r in records):
                raise Broken(f"{number} has finished, and is restarted")
        if is_owed and each.due_ms <= machine.now_ms:
            raise Broken(f"{number} is forgotten")


def _run_of(record: Record) -> int:
    return int(record.invocation.partition("#")[0][16:] or "0", 16)


def freeze(machine: Machine) -> int:
    """A key of the machine: two of the same key are the same world."""
    return hash((machine.workers, machine.now_ms, *machine[2:]))


def run_pass(machine: Machine, rules: Rules) -> Machine:
    """One whole pass, checked."""
    *_, (_, done) = passes(machine, rules)
    # A closed or opened incident concerns more workers: the controller looks again at once.
    asked = frozenset[str]()
    for _ in range(4):
        intents = plan(observe(done, rules, asked), done.now)
        if not intents:
            break
        done = carry_out(done, chain.from_iterable(steps_of(intents)), rules)
        asked |= consulted_in(intents)
    return done
