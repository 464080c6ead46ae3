"""Whether a worker is wanted, and whether a run was asked to stop: by what systemd
itself shows of ``nomarr-wanted@``, which is active from a start of the worker until a stop or a
restart of it is requested. No program has to run for that, and no journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Facts = Mapping[str, str]
# Asked of nomarr-wanted@, and of the worker's unit.
WANTED_FACTS: Final = (
    *("ActiveState", "Job", "InvocationID"),
    *("InactiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic"),
)
UNIT_FACTS: Final = (
    *("ActiveState", "LoadState", "Job", "InvocationID", "ConditionResult"),
    *("InactiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic"),
    "ConditionTimestampMonotonic",
)
_LONGEST_STOP_US: Final = 600 * 1_000_000
_RESTART_US: Final = 1_000_000  # a restart stops and starts the wanted unit at once


def is_wanted(wanted: Facts) -> bool:
    """Return True unless a stop was requested since the last start. A wanted unit that never was
    active, as after an upgrade, means no stop."""
    if wanted["ActiveState"] != "inactive" or wanted["Job"]:
        return True
    return _us(wanted, "InactiveEnterTimestampMonotonic") == 0


def was_asked_to_stop(unit: Facts, wanted: Facts) -> bool:
    """Return True if a stop or restart was requested while the unit's present or last run
    lasted."""
    stopped = _us(wanted, "InactiveEnterTimestampMonotonic")
    began = _us(unit, "InactiveExitTimestampMonotonic")
    ended = _us(unit, "InactiveEnterTimestampMonotonic")
    if not stopped or stopped < began:
        return False
    return ended < began or stopped <= ended


def was_asked_before(died_us: int, wanted: Facts) -> bool:
    """Return True if a stop or restart was requested shortly before the death of an older run of
    the unit, of which only the report has the time. If the worker was started between the stop and
    the death, the stop was another run's."""
    stopped = _us(wanted, "InactiveEnterTimestampMonotonic")
    if stopped + _RESTART_US < _us(wanted, "InactiveExitTimestampMonotonic") <= died_us:
        return False
    return 0 < stopped <= died_us < stopped + _LONGEST_STOP_US


def was_restarted(wanted: Facts) -> bool:
    """Return True if the worker is not wanted, or since its restart was requested: the run before
    may have ended for that, however long it took."""
    stopped = _us(wanted, "InactiveEnterTimestampMonotonic")
    began = _us(wanted, "InactiveExitTimestampMonotonic")
    return wanted["ActiveState"] != "active" or 0 < stopped <= began <= stopped + _RESTART_US


def is_down(unit: Facts, wanted: Facts) -> bool:
    """Return True if the unit does not run although it was started and no stop was requested since:
    it failed, ended by itself, or could not be started."""
    is_idle = unit["ActiveState"] in ("inactive", "failed") and not unit["Job"]
    return is_idle and wanted["ActiveState"] == "active" and not wanted["Job"]


def has_begun(unit: Facts, wanted: Facts) -> bool:
    """Return True if the unit has run since it was last wanted, or systemd has tried to run it:
    then its start conditions were checked after the last requested stop. If they were not met, its
    last run decides, which may be an older one."""
    if not unit["InvocationID"]:
        return False
    tried = _us(unit, "ConditionTimestampMonotonic")
    if unit["ConditionResult"] == "yes" and tried > _us(wanted, "InactiveEnterTimestampMonotonic"):
        return True
    if was_asked_to_stop(unit, wanted):
        return False
    ended = _us(unit, "InactiveEnterTimestampMonotonic")
    return ended >= _us(wanted, "InactiveExitTimestampMonotonic")


def find_run(unit: Facts, wanted: Facts) -> str:
    """Return the invocation of the unit's present or last run; if it could not be started since it
    is wanted, that of its wanted unit."""
    if is_down(unit, wanted) and not has_begun(unit, wanted):
        return wanted["InvocationID"]
    return unit["InvocationID"]


def _us(facts: Facts, name: str) -> int:
    return int(facts[name] or 0)
