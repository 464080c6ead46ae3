"""Names of a worker: pool and index, component id, instance and unit, and how to convert them.

A worker has one identity in three spellings: ``worker:tag:0`` (frames, store, command line),
``tag-0`` (what systemd calls the instance) and ``nomarr-worker@tag-0.service`` (the unit).
"""

from __future__ import annotations

import re
from functools import lru_cache

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import quote

MAX_INDEX = 4095  # so many workers on one host were tried
UNIT_PREFIX = "nomarr-worker@"
UNIT_SUFFIX = ".service"
TARGET = "nomarr-workers.target"  # of all workers
WANTED_PREFIX = "nomarr-wanted@"
WANTED_SUFFIX = ".target"
PER_SLICE = 64  # systemd goes through all units of its slice at every start of a worker

_POOL = re.compile(r"[a-z][a-z0-9_]{0,30}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_INVOCATION = re.compile(r"([0-9a-f]{32})(?:#([1-9][0-9]{0,5}))?")


class Component(NamedTuple):
    """One configured worker."""

    pool: str
    number: int

    @property
    def component_id(self) -> str:
        return f"worker:{self.pool}:{self.number}"

    @property
    def instance(self) -> str:
        return f"{self.pool}-{self.number}"

    @property
    def unit(self) -> str:
        return f"{UNIT_PREFIX}{self.pool}-{self.number}{UNIT_SUFFIX}"

    @property
    def wanted_unit(self) -> str:
        """The unit that is active from a start of the worker until a person stops the worker."""
        return f"{WANTED_PREFIX}{self.pool}-{self.number}{WANTED_SUFFIX}"

    @property
    def slice(self) -> str:
        """The part of its pool's slice, and of nomarr.slice, that the worker runs in."""
        return f"nomarr-{self.pool}-{self.number // PER_SLICE}.slice"

    def __str__(self) -> str:
        return self.component_id


@lru_cache(2 * (MAX_INDEX + 1))  # each worker in two spellings
def parse_component(text: str) -> Component:
    """Return the component that ``text`` names in any of the three spellings; BadName if none."""
    if text.startswith("worker:"):
        pool, separator, index = text[len("worker:") :].rpartition(":")
    elif text.startswith(UNIT_PREFIX):
        instance = text[len(UNIT_PREFIX) :].removesuffix(UNIT_SUFFIX)
        pool, separator, index = instance.rpartition("-")
    else:
        pool, separator, index = text.rpartition("-")
    if not separator:
        raise _bad(text, "it has no pool and index")
    check_pool(pool, of=text)
    if not _INDEX.fullmatch(index):
        raise _bad(text, f"the index {quote(index)} is not a number without leading zeros")
    if int(index) > MAX_INDEX:
        raise _bad(text, f"the index {index} is above {MAX_INDEX}")
    return Component(pool, int(index))


def check_pool(pool: str, *, of: str = "") -> None:
    """Raise BadName unless ``pool`` can name a pool."""
    if not _POOL.fullmatch(pool):
        raise _bad(
            of or pool,
            f"the pool {quote(pool)} is not a small letter followed by at most 30"
            " small letters, digits or underscores",
        )


def next_start_job(invocation: str) -> str:
    """Return the identity of the start job that failed after ``invocation``: ``<id>#1``, ``#2``, …

    A start job that fails leaves the unit in its old invocation. Two observers of one failed job
    know the same last identity, so they arrive at the same next one and it is booked once.
    """
    base, number = split_invocation(invocation)
    return f"{base}#{number + 1}"


def split_invocation(text: str) -> tuple[str, int]:
    """Return systemd's 32 hex digits and the number of the start job (0: the run itself)."""
    match = _INVOCATION.fullmatch(text)
    if not match:
        raise BadName(
            f"{quote(text)} is not an invocation id",
            hint="systemd's ids are 32 hex digits: systemctl show -p InvocationID UNIT",
        )
    return match[1], int(match[2] or 0)


def is_run(text: str) -> bool:
    """Return True if it names a run; a start job that failed never ran, and had no job."""
    try:
        return split_invocation(text)[1] == 0
    except BadName:
        return False


def find_instance(name: str) -> Component | None:
    """Return the component with exactly this instance name; None if there is none."""
    try:
        component = parse_component(name)
    except BadName:
        return None
    return component if component.instance == name else None


def _bad(text: str, why: str) -> BadName:
    return BadName(
        f"{quote(text)} is not a worker: {why}",
        hint="write worker:tag:0, tag-0 or nomarr-worker@tag-0.service",
    )
