"""A client of systemd's manager, the system's or a user's.

Questions, starts and timers go over its bus; what changes files or is waited for goes through
``systemctl``. Callers decide when to do what; errors are in systemctl.py. Names of units come from
core.ids.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from nomarr_systemd.core.ids import UNIT_PREFIX, WANTED_PREFIX, Component
from nomarr_systemd.systemd.dbus.connection import (
    MANAGER,
    PROPERTIES,
    Bus,
    BusError,
    Call,
    unit_path,
)
from nomarr_systemd.systemd.systemctl import (
    TIMEOUT_S,
    AlreadyThere,
    ManagerError,
    Masked,
    NotAllowed,
    NotLoaded,
    Refused,
    run_systemctl,
)
from nomarr_systemd.systemd.timers import make_restart_timer, make_service_timer, timer_of
from nomarr_systemd.systemd.unit_properties import LISTED, as_text, interface_of, show_unloaded

SUPERVISOR: Final = "nomarr-supervisor.service"
RECONCILER: Final = "nomarr-reconcile.service"
SOON: Final = "nomarr-reconcile-soon.timer"  # active from a failure until the reconciler has run
WAKEUP: Final = "nomarr-wakeup.service"  # the hook: runs when a worker has ended
SERVING: Final = ("nomarr-controller.socket", "nomarr-reconcile.timer")  # wanted by the target
SHUTDOWN: Final = "shutdown.target"  # has a job while the system, or a user's manager, goes down
_NOT_LOADED: Final = 5  # systemctl's exit status for a unit to stop that is not there
_PORTION: Final = 1000  # names on one command line
_FEW: Final = 8  # patterns: systemd compares each with the name of each unit
_JOBS: Final = 128  # jobs that are queued in one trip
_PAUSE_S: Final = 0.01  # between trips: systemd begins what is queued when nobody asks
_GONE: Final = (
    *("org.freedesktop.DBus.Error.UnknownInterface", "org.freedesktop.DBus.Error.UnknownProperty"),
    "org.freedesktop.DBus.Error.UnknownObject",
)
_IDLE: Final = ("failed", "inactive")
_REPLACE_TRIES: Final = 100
_SHOW_TRIES: Final = 20  # of a unit that changes all the time
_STARTED: Final = "UserspaceTimestampMonotonic"
Verb = Literal["start", "stop", "restart", "try-restart"]
_METHODS: Final[Mapping[Verb, str]] = {
    "start": "StartUnit",
    "stop": "StopUnit",
    "restart": "RestartUnit",
    "try-restart": "TryRestartUnit",
}
_Key = TypeVar("_Key")


_ERRORS: Final[Mapping[str, type[Refused]]] = {
    "org.freedesktop.systemd1.NoSuchUnit": NotLoaded,
    "org.freedesktop.systemd1.UnitExists": AlreadyThere,
    "org.freedesktop.systemd1.UnitMasked": Masked,
    "org.freedesktop.DBus.Error.AccessDenied": NotAllowed,
    "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired": NotAllowed,
}


class Manager:
    """One service manager. Every method may raise ManagerError.

    With ``tell`` there is no time limit: it gets a line that says which answer is awaited.
    """

    def __init__(
        self,
        *,
        user: bool = False,
        bus: Bus | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._scope = ("--user",) if user else ()
        self._tell = tell
        on_wait = self._tell_of_wait if tell else None
        self._bus = bus or Bus(user=user, timeout_s=TIMEOUT_S, on_wait=on_wait)
        self._asked = ""  # what is waited for
        self._loaded: set[str] = set()  # workers' units that were, on this connection
        self._started_us: int | None = None

    def show(self, units: Sequence[str], properties: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the properties of each unit as texts, by the name it was asked by; one trip for
        all.

        What a unit of its kind does not have is empty.
        """
        return self.show_each(dict.fromkeys(units, properties))

    def show_each(self, questions: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
        """Return the properties that are asked for of each unit, as texts; one trip for all.

        Four properties come from one list of all units: single questions take most of the time.
        systemd continues between its answers, so the list is asked for before and after them. If a
        unit differs between the two, it is asked about again: all that is returned of a unit was
        true at one moment.

        What there is of a run is not asked of workers that are not loaded: systemd would load many
        workers for each question, and forget them before the next.
        """
        found, left = self._show_once(questions)
        for _ in range(_SHOW_TRIES):
            if not left:
                break
            # With those of the same instance, which are compared with each other.
            again, left = self._show_once(
                {unit: each for unit, each in questions.items() if _instance_of(unit) in left}
            )
            found |= again
        return {unit: found[unit] for unit in questions}

    def _show_once(
        self, questions: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, dict[str, str]], set[str]]:
        """Return the properties of each unit, and the instances that changed meanwhile."""
        listed = [unit for unit, names in questions.items() if not LISTED.keys().isdisjoint(names)]
        known = self._find_unloaded(questions)
        singles = [
            Call("Get", "ss", (interface_of(unit, name), name), path, PROPERTIES)
            for unit, properties in questions.items()
            for path, own in ((unit_path(unit), known.get(unit, {})),)
            for name in properties
            if name not in LISTED and name not in own
        ]
        # In parts: systemd loads those of one that are not loaded before it answers anybody.
        lists = [Call("ListUnitsByNames", "as", (some,)) for some in _portions(listed, _JOBS)]
        again = lists if singles else []
        calls = [*lists, *singles, *again]
        if self._started_us is None:  # a timer will need it
            calls.append(Call("Get", "ss", (MANAGER, _STARTED), interface=PROPERTIES))
        answers = self._ask_all(calls)
        if self._started_us is None:
            self._started_us = int(as_text(_STARTED, answers.pop()))
        before = [row for [rows] in answers[: len(lists)] for row in rows]
        after = [row for [rows] in answers[len(answers) - len(again) :] for row in rows]
        rows = dict(zip(listed, after or before, strict=True))
        single = iter(answers[len(lists) :])
        shown = {
            unit: {
                name: as_text(name, [LISTED[name](rows[unit])])
                if name in LISTED
                else own[name]
                if name in own
                else as_text(name, next(single))
                for name in properties
            }
            for unit, properties in questions.items()
            for own in (known.get(unit, {}),)
        }
        changed = {
            _instance_of(unit)
            for unit, row in zip(listed, before, strict=True)
            if row != rows[unit] or (unit in known and not _is_at_rest(row))
        }
        return shown, changed

    def _find_unloaded(
        self, questions: Mapping[str, Sequence[str]]
    ) -> Mapping[str, Mapping[str, str]]:
        """Return what need not be asked: of each worker that is not loaded, the facts of a run."""
        prefixes = (UNIT_PREFIX, WANTED_PREFIX)
        workers = [
            unit
            for unit, names in questions.items()
            if unit.startswith(prefixes)
            and unit not in self._loaded
            and not LISTED.keys() >= set(names)
        ]
        if not workers:
            return {}
        few = len(workers) <= _FEW
        patterns = workers if few else [f"{prefix}*" for prefix in prefixes]
        self._loaded.update(self.list_loaded(*patterns))
        workers = [unit for unit in workers if unit not in self._loaded]
        return {unit: show_unloaded(questions[unit]) for unit in workers}

    def show_manager(self, *properties: str) -> dict[str, str]:
        """Return properties of the manager itself."""
        calls = [Call("Get", "ss", (MANAGER, name), interface=PROPERTIES) for name in properties]
        return dict(zip(properties, map(as_text, properties, self._ask_all(calls)), strict=True))

    def list_failed(self, pattern: str) -> list[str]:
        """Return the loaded units of this pattern that are ``failed``."""
        found = self._ask(Call("ListUnitsByPatterns", "asas", (["failed"], [pattern])))
        return [row[0] for row in found[0] if row[3] == "failed"]

    def list_idle(self, pattern: str) -> tuple[dict[str, str], bool]:
        """Return the loaded units of this pattern that are failed or inactive, with their state;
        and True if the hook had ended before: then what ends later will start it again."""
        calls = (
            Call("ListUnitsByNames", "as", ([WAKEUP],)),
            Call("ListUnitsByPatterns", "asas", ([*_IDLE], [pattern])),
        )
        hook, found = self._ask_all(calls)
        facts = {name: as_text(name, [take(hook[0][0])]) for name, take in LISTED.items()}
        has_failed = facts["SubState"] == "auto-restart"  # it will run again
        is_over = has_failed or (facts["ActiveState"] in _IDLE and not facts["Job"])
        return {row[0]: row[3] for row in found[0] if row[3] in _IDLE}, is_over

    def list_loaded(self, *patterns: str) -> dict[str, dict[str, str]]:
        """Return LoadState, ActiveState, SubState and Job of the loaded units of these patterns.

        One trip. systemd loads no unit for this: loading takes it much longer than answering.
        """
        found = self._ask(Call("ListUnitsByPatterns", "asas", ([], patterns)))
        return {
            row[0]: {name: as_text(name, [take(row)]) for name, take in LISTED.items()}
            for row in found[0]
        }

    def start(self, unit: str) -> None:
        """Queue a start and do not wait for it."""
        self._ask(Call("StartUnit", "ss", (unit, "replace")))

    def start_alone(self, unit: str) -> None:
        """Queue a start of the unit without the units that it wants; do not wait for it."""
        self._ask(Call("StartUnit", "ss", (unit, "ignore-dependencies")))

    def restart(self, unit: str) -> None:
        """Queue a restart and do not wait for it."""
        self._ask(Call("RestartUnit", "ss", (unit, "replace")))

    def queue(self, verb: Verb, units: Iterable[str]) -> dict[str, ManagerError | None]:
        """Queue a job for each unit and wait for none; return systemd's error, or None, for each.
        One trip for all. A unit that is not loaded is stopped already."""
        return self._queue(dict.fromkeys(units, verb))

    def queue_all(
        self, *, start: Iterable[str] = (), stop: Iterable[str] = ()
    ) -> dict[str, ManagerError | None]:
        """Queue starts, then stops, as ``queue`` does; one trip for all."""
        verbs: dict[str, Verb] = dict.fromkeys(start, "start")
        return self._queue(verbs | dict.fromkeys(stop, "stop"))

    def _queue(self, verbs: Mapping[str, Verb]) -> dict[str, ManagerError | None]:
        """Queue jobs, few in a trip: systemd does all that are queued before it answers again, but
        not as long as there is something to answer."""
        found: dict[str, ManagerError | None] = {}
        for portion in _portions(verbs, _JOBS):
            if found:
                time.sleep(_PAUSE_S)
            calls = {unit: Call(_METHODS[verbs[unit]], "ss", (unit, "replace")) for unit in portion}
            found |= self._try_all(calls)
            if len(portion) == _JOBS:  # systemd sends every change of a unit to all that listen
                self.close()
        return {
            unit: None if verbs[unit] == "stop" and isinstance(answer, NotLoaded) else answer
            for unit, answer in found.items()
        }

    def begin_stop(self, unit: str) -> None:
        """Queue a stop and do not wait for it; a unit that is not loaded is stopped already."""
        with contextlib.suppress(NotLoaded):
            self._ask(Call("StopUnit", "ss", (unit, "replace")))

    def cancel_timer(self, component: Component) -> None:
        """Stop the timer of a restart."""
        self.begin_stop(timer_of(component))

    def stop(self, units: Iterable[str]) -> None:
        """Stop what is there; a unit that is not loaded is stopped already."""
        for portion in _portions(units):
            self._systemctl("stop", *portion, fine=(0, _NOT_LOADED))

    def mask(self, units: Iterable[str]) -> None:
        """Mask them all with one reload, and check that they are masked."""
        names = list(units)
        for portion in _portions(names):
            self._systemctl("mask", "--quiet", *portion)
        for name, shown in self.show(names, ["LoadState"]).items():
            if shown["LoadState"] != "masked":
                raise Refused(
                    f"{name} cannot be masked: a file of that name is in the way",
                    hint=f"systemctl cat {name} shows it; move it away",
                )

    def unmask(self, units: Iterable[str]) -> None:
        for portion in _portions(units):
            self._systemctl("unmask", "--quiet", *portion)

    def reset_failed(self, units: Iterable[str]) -> None:
        """Reset the failed state; a unit that is not loaded has none."""
        answers = self._try_all({unit: Call("ResetFailedUnit", "s", (unit,)) for unit in units})
        for error in answers.values():
            if error is not None and not isinstance(error, NotLoaded):
                raise error

    def reload(self) -> None:
        self._systemctl("daemon-reload")

    def restart_running(self, units: Iterable[str]) -> None:
        """Restart those of the units that run; waits until they are ready."""
        for portion in _portions(units):
            self._systemctl("try-restart", *portion)

    def start_and_wait(self, unit: str) -> None:
        """Start the unit; waits until it is ready."""
        self._systemctl("start", unit)

    def reload_unit(self, unit: str) -> None:
        """Have the unit reload; waits until it has. Ignores ordering: else it would wait until a
        unit that is ordered after this one has stopped, which may take for ever."""
        self._systemctl("--job-mode=ignore-dependencies", "reload", unit)

    def schedule_all(self, due_ms: Mapping[Component, int]) -> dict[Component, ManagerError | None]:
        """Make timers that start ``nomarr-restart@`` once, at these CLOCK_MONOTONIC times;
        return systemd's error, or None, for each. One trip, unless one has a timer already."""
        calls = {
            each: make_restart_timer(each, self._since_start_us(when))
            for each, when in due_ms.items()
        }
        answers = self._try_all(calls)
        for component, answer in answers.items():
            if isinstance(answer, AlreadyThere):
                answers[component] = self._replace_timer(component, calls[component])
        return answers

    def schedule_service(self, name: str, due_ms: int, wall_ms: int) -> None:
        """Make a timer that starts this service once, in place of one that is there. Both have
        the same name: a transient timer can start no other.

        It elapses at the CLOCK_MONOTONIC time, and at the wall-clock time: whichever comes first
        after the clock was set or the machine slept. The caller makes it again if it was early.
        """
        timer = f"{name}.timer"
        call = make_service_timer(name, self._since_start_us(due_ms), wall_ms)
        for _ in range(_REPLACE_TRIES):
            answer = self._try_all({timer: call})[timer]
            if not isinstance(answer, AlreadyThere):
                break
            self.begin_stop(timer)  # the manager unloads it a moment later
            time.sleep(0.002)
        if answer is not None:
            raise answer

    def _since_start_us(self, due_ms: int) -> int:
        if self._started_us is None:
            self._started_us = int(self.show_manager(_STARTED)[_STARTED])
        # Whole milliseconds, or a daemon-reload would round it.
        return max(0, due_ms - self._started_us // 1000) * 1000

    def _replace_timer(self, component: Component, call: Call) -> ManagerError | None:
        for _ in range(_REPLACE_TRIES):
            self.cancel_timer(component)  # the manager unloads it a moment later
            answer = self._try_all({component: call})[component]
            if not isinstance(answer, AlreadyThere):
                return answer
            time.sleep(0.002)
        return Refused(f"{timer_of(component)} is there and cannot be replaced")

    def close(self) -> None:
        self._bus.close()
        self._loaded.clear()

    def _ask(self, call: Call) -> list[Any]:
        return self._ask_all([call])[0]

    def _ask_all(self, calls: Sequence[Call]) -> list[list[Any]]:
        found = []
        for call, answer in zip(calls, self._exchange(calls), strict=True):
            if not isinstance(answer, BusError):
                found.append(answer)
            elif call.interface == PROPERTIES and answer.name in _GONE:
                found.append([""])
            else:
                raise _refusal(call, answer)
        return found

    def _try_all(self, calls: Mapping[_Key, Call]) -> dict[_Key, ManagerError | None]:
        """Send many calls in one trip; if one is refused, the others are still done."""
        answers = self._exchange(list(calls.values())) if calls else []
        return {
            key: _refusal(call, answer) if isinstance(answer, BusError) else None
            for (key, call), answer in zip(calls.items(), answers, strict=True)
        }

    def _exchange(self, calls: Sequence[Call]) -> list[list[Any] | BusError]:
        if self._tell and calls:
            self._asked = _name_calls(calls)
        try:
            return self._bus.call_all(calls)
        except BusError as error:
            raise ManagerError(str(error)) from error

    def _systemctl(self, *arguments: str, fine: Sequence[int] = (0,)) -> None:
        self._asked = f"systemctl {arguments[0]}"
        on_wait = self._tell_of_wait if self._tell else None
        run_systemctl([*self._scope, *arguments], fine=fine, on_wait=on_wait)

    def _tell_of_wait(self) -> None:
        if self._tell:
            self._tell(f"systemd is busy, waiting for it: {self._asked}")


def _portions(names: Iterable[str], most: int = _PORTION) -> Iterator[list[str]]:
    """Yield the names in parts of at most so many; as many as fit into a command line."""
    rest = list(names)
    for start in range(0, len(rest), most):
        yield rest[start : start + most]


def _name_calls(calls: Sequence[Call]) -> str:
    """Name calls for a person: the first, and how many more there are."""
    first = " ".join([calls[0].member, *(str(word) for word in calls[0].arguments[:1])])
    return f"{first[:80]} and {len(calls) - 1} more" if len(calls) > 1 else first[:80]


def _refusal(call: Call, answer: BusError) -> Refused:
    what = " ".join(str(word) for word in call.arguments[:1])
    return _ERRORS.get(answer.name, Refused)(f"{call.member} {what}: {answer}")


def monotonic_ms() -> int:
    """Return CLOCK_MONOTONIC, which systemd's timers use."""
    return time.monotonic_ns() // 1_000_000


def _is_at_rest(row: Sequence[Any]) -> bool:
    """True of a unit, by its row in a list, that systemd has only just loaded."""
    return LISTED["ActiveState"](row) == "inactive" and not LISTED["Job"](row)[0]


def _instance_of(unit: str) -> str:
    return unit.partition("@")[2].rpartition(".")[0]
