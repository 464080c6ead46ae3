"""``nomarrctl job``: how a worker in any language takes jobs from the queue of its pool.

It runs inside the worker's unit, as the worker's user: what it needs is in the environment that the
unit sets. A claim belongs to the run of the worker ($INVOCATION_ID), so it is settled as a Python
worker's is if the worker dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, TypeVar

import click

from nomarr_systemd.cli.common import NOT_RUNNING, echo_json
from nomarr_systemd.core.death import EX_TEMPFAIL
from nomarr_systemd.core.errors import ConfigError, NomarrError, StoreError
from nomarr_systemd.core.ids import is_run, parse_component
from nomarr_systemd.core.job import Doc, Owner, path_of
from nomarr_systemd.host.clock import read_boot_id
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.jobs.claims import Claims, End, check_result
from nomarr_systemd.jobs.queue import NoSuchJob
from nomarr_systemd.store.open import open_work_store
from nomarr_systemd.worker.environment import read_environment

_FIRST_LOOK_S: Final = 0.2
_LAST_LOOK_S: Final = 2.0
_Result = TypeVar("_Result")


class StoreAway(NomarrError):
    """The store cannot be used now: nothing was changed, or it will be found changed."""

    code = "store-away"
    exit_status = EX_TEMPFAIL


@click.group()
def job() -> None:
    """Take jobs from the queue, for workers in any language.

    For programs that run as workers (command = … in nomarr.toml), not for people: those use
    nomarrctl jobs. A run of a worker has one job in hand at most. In sh:

    \b
        while path=$(nomarrctl job take --path --wait 5); do
            if tags=$(analyse "$path"); then nomarrctl job done --text "$tags"
            else nomarrctl job fail "analyse: exit status $?"; fi
        done

    Exit status: 0 done; 3 take: there is no job; 4 done, fail, release: no job is in hand; 75 the
    store is away, try again; 78 it does not run in a worker. nomarr-worker(7) has all of it.
    """


def _wait_option(what: str) -> Callable[[Any], Any]:
    return click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(0, 3600),
        default=0.0,
        metavar="SECONDS",
        help=f"{what} Shorter than half of watchdog_s.",
    )


@job.command()
@_wait_option("Wait up to SECONDS for a job.")
@click.option("--path", "path_only", is_flag=True, help="Print the job's path instead of JSON.")
def take(wait_s: float, path_only: bool) -> int | None:
    """Take the first job of the pool's queue and print it.

    JSON on one line: id, path, attempts (1: it was never begun before) and, if the path is not
    UTF-8, raw: its bytes in base64. If this run has a job in hand already, that one is printed
    again.
    """

    def look(claims: Claims) -> Doc | None:
        found = claims.in_hand()
        return found[0] if found else claims.take_next()

    doc = _ask(look, wait_s)
    if doc is None:
        return NOT_RUNNING
    if path_only:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(path_of(doc)) + b"\n")
        sys.stdout.buffer.flush()
    else:
        shown = {"id": doc["_key"], "path": doc["path"], "attempts": doc["attempts"]}
        echo_json(shown | ({"raw": doc["raw"]} if "raw" in doc else {}), indent=None)
    return None


@job.command()
@click.option("--result", metavar="JSON", help="The result, as JSON; - reads standard input.")
@click.option("--text", metavar="TEXT", help="The result, as text.")
@_wait_option("Retry for up to SECONDS if the store is away.")
def done(result: str | None, text: str | None, wait_s: float) -> None:
    """Record that the job in hand is done; the result is kept with it."""
    if result is not None and text is not None:
        raise click.UsageError("give --result or --text, not both")
    value: object = text
    if result is not None:
        value = _parse_result(sys.stdin.read() if result == "-" else result)
    _end(End("done", check_result(value)), wait_s)


@job.command()
@click.argument("message")
@click.option("--type", "kind", default="JobFailed", metavar="WORD", help="The kind of error.")
@_wait_option("Retry for up to SECONDS if the store is away.")
def fail(message: str, kind: str, wait_s: float) -> None:
    """Record that the job in hand failed; MESSAGE says why. It is not tried again by itself."""
    error = {"type": kind[:100], "message": message[:2000]}
    _end(End("error", error=error), wait_s)


@job.command()
@_wait_option("Retry for up to SECONDS if the store is away.")
def release(wait_s: float) -> None:
    """Put the job in hand back into the queue: it was not done, and that is not its fault."""
    _end(End("pending"), wait_s)


def _end(end: End, wait_s: float) -> None:
    def write(claims: Claims) -> bool:
        found = claims.in_hand()
        return bool(found) and claims.end(found[0]["_key"], end)

    if not _ask(write, wait_s):
        raise NoSuchJob(
            "this run has no job in hand",
            hint="take one first; if it had one, it was settled, or its pool has failed",
        )


def _ask(question: Callable[[Claims], _Result], wait_s: float) -> _Result:
    """Ask the store until the answer is true, or for ``wait_s``; return the last answer."""
    settings, pool, owner = _find_run()
    until = time.monotonic() + wait_s
    pause_s = _FIRST_LOOK_S
    while True:
        away: StoreError | None = None
        try:
            with closing(open_work_store(settings)) as store:
                claims = Claims(store, pool, owner)
                while True:
                    answer = question(claims)
                    if answer or answer is False or time.monotonic() + pause_s > until:
                        return answer
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, _LAST_LOOK_S)
        except StoreError as error:
            away = error
        if time.monotonic() + pause_s > until:
            raise StoreAway(str(away), hint=away.hint or "try again later") from away
        time.sleep(pause_s)


def _find_run() -> tuple[Any, str, Owner]:
    """Return the store's settings, the pool, and the run of the worker that this program belongs
    to."""
    environment = read_environment(os.environ, os.getpid())
    settings, invocation = environment.settings.store, environment.invocation
    if not environment.component_id or not is_run(invocation) or settings is None:
        raise ConfigError(
            "this is not a worker's environment: NOMARR_COMPONENT_ID, NOMARR_SETTINGS and"
            " INVOCATION_ID are needed",
            hint="call it from a worker; for people there is nomarrctl jobs",
        )
    owner = Owner(environment.component_id, invocation, host_of(settings), read_boot_id())
    return settings, parse_component(environment.component_id).pool, owner


def _parse_result(text: str) -> object:
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--result is not JSON: {error}; --text takes any text") from error
