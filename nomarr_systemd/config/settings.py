"""Every setting of the configuration file as data: its key, type, bounds and help; and the check of
one value against one setting. ``check`` knows the sections and how settings must fit each other;
the defaults are in ``values`` and in ``core``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

from nomarr_systemd.config.store_url import parse_address, parse_store_url
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.job import CrashPolicy
from nomarr_systemd.core.policy import OnCleanExit, OnExhausted
from nomarr_systemd.core.text import ask_for, quote, show

DAY_S = 86_400
YEAR_S = 31_536_000
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NOT_FOR_WORKERS = ("root", "nomarr-supervisor", "nomarr-web")
SHORTEST_S = 0.001  # systemd reads a time of 0 as "off" or "for ever", and rounds down to it

Kind = Literal["whole", "number", "word", "text", "path", "statuses", "command"]


class Fault(NamedTuple):
    """What is wrong with a value; ``at`` is the index of the item, if it is in a list."""

    problem: str
    suggestion: str = ""
    at: tuple[int, ...] = ()


class Setting(NamedTuple):
    """One key. With ``above`` the least value itself is refused. ``form`` raises BadName."""

    key: str
    kind: Kind
    least: float = 0
    most: float = 0
    above: bool = False
    words: tuple[str, ...] = ()
    form: Callable[[str], object] | None = None
    help: str = ""  # for the manual: what it sets, without capital and full stop

    def wants(self) -> str:
        """Return what is allowed, as the end of a message that says "is not"."""
        low = f"above {self.least}, up" if self.above else f"from {self.least}"
        match self.kind:
            case "whole":
                return f"a whole number {low} to {self.most}"
            case "number":
                return f"a number {low} to {self.most}"
            case "word":
                return "one of " + ", ".join(f'"{word}"' for word in self.words)
            case "path":
                return "an absolute path"
            case "statuses":
                return f"a list of exit statuses from {self.least} to {self.most}"
            case "command":
                return 'a list of texts, as ["/usr/bin/program", "--option"]'
            case "text":
                return "text"


def check_entrypoint(text: str) -> None:
    """Raise BadName unless ``text`` looks like ``package.module:Class``."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), name]
    if not (colon and text.isascii() and all(part.isidentifier() for part in parts)):
        raise BadName(f"{show(text)} names no class", hint='write it as "package.module:Class"')


def check_user(text: str) -> None:
    """Raise BadName unless ``text`` can be the name of a user for workers."""
    if not _USER.fullmatch(text):
        raise BadName(f"{show(text)} is no name of a user", hint='write it as "music"')
    if text in _NOT_FOR_WORKERS:
        raise BadName(f"workers cannot run as {text}", hint="make a user of their own for them")


def check_listen(text: str) -> None:
    """Raise BadName unless ``text`` is an address to listen on, or the path of a Unix socket."""
    if text.startswith("/") and text.isprintable() and len(text) <= 100:
        return
    try:
        parse_address(text)
    except BadName as error:
        hint = 'write "127.0.0.1:8765", "[::1]:8765", another HOST:PORT, or the path of a socket'
        raise BadName(f"{show(text)} is no address: {error}", hint=hint) from error


def check_host(text: str) -> None:
    """Raise BadName unless ``text`` can be a host's name in the keys of documents."""
    if not _HOST_NAME.fullmatch(text) or text == "unknown":
        raise BadName(
            f"{show(text)} cannot be a host's name",
            hint="a name is a letter or digit, then at most 62 letters, digits, dots, - or _",
        )


def check_hosts(text: str) -> None:
    """Raise BadName unless ``text`` is names of hosts, with spaces between."""
    for name in text.split():
        if not re.fullmatch(r"[A-Za-z0-9.\-]{1,253}", name):
            raise BadName(f"{show(name)} is no name of a host", hint="leave out port and scheme")


# fmt: off
POLICY = (
    Setting("max_restarts", "whole", 0, 100,
            help="restarts allowed within the window; on_exhausted applies to the next failure"),
    Setting("window_s", "number", 0, YEAR_S, above=True,
            help="length of the sliding window in seconds"),
    Setting("max_lifetime_restarts", "whole", 0, 1_000_000,
            help="restarts allowed since the last reset (0: no such limit)"),
    Setting("backoff_base_s", "number", 0, DAY_S,
            help="seconds before the first restart"),
    Setting("backoff_multiplier", "number", 1, 100,
            help="factor by which each further backoff is longer"),
    Setting("backoff_max_s", "number", 0, DAY_S,
            help="the longest backoff; also that of a restart decided while the store is away"),
    Setting("backoff_jitter", "number", 0, 1,
            help="fraction by which a backoff may be longer or shorter, at random"),
    Setting("stable_after_s", "number", 0, YEAR_S,
            help="seconds of running after which a worker's next backoff is backoff_base_s again"),
    Setting("on_exhausted", "word", words=get_args(OnExhausted),
            help="when the window is full: mask the unit, or restart when it has room again"),
    Setting("never_restart", "statuses", 0, 255,
            help="exit statuses that no restart mends: the unit is masked at once"),
    Setting("lifetime_days", "number", 0, 36_500,
            help="days after which a restart no longer counts for max_lifetime_restarts "
                 "(0: it always does); needs a limit of at most 100"),
    Setting("on_clean_exit", "word", words=get_args(OnCleanExit),
            help="a worker that ends with status 0 unasked: restart it (counted), or let it stay"
                 " finished"),
)
HEALTH = (
    Setting("frame_interval_s", "number", 0.05, 3600,
            help="seconds between two frames of a Python worker"),
    Setting("startup_timeout_s", "number", 0, DAY_S, above=True,
            help="seconds of silence allowed while a worker loads"),
    Setting("staleness_interval_s", "number", 0.05, 3600,
            help="seconds of silence that count as one miss"),
    Setting("max_misses", "whole", 1, 1000,
            help="misses in a row after which the worker is killed"),
    Setting("min_recovery_s", "number", 0, DAY_S,
            help="least seconds that a worker gets after it reports that it is recovering"),
    Setting("max_recovery_s", "number", 0, DAY_S, above=True,
            help="most seconds that a worker gets to recover, from its first such report"),
    Setting("max_unhealthy_s", "number", 0, DAY_S,
            help="seconds after which a worker that reports unhealthy is killed (0: never)"),
    Setting("stall_timeout_s", "number", 0, DAY_S,
            help="seconds without progress before a Python worker stops pinging the "
                 "watchdog (0: it never stops)"),
    Setting("snapshot_interval_s", "number", 0.1, DAY_S,
            help="seconds between two records of the workers' health in the store"),
    Setting("gpu_health_max_age_s", "number", 0, DAY_S,
            help="seconds after which the GPU's health in the store is ignored"),
)
# The supervisor takes the snapshots of all workers at once.
POOL_HEALTH = tuple(setting for setting in HEALTH if setting.key != "snapshot_interval_s")
STORE = (
    Setting("url", "text", form=parse_store_url,
            help="a directory on this host, or a server for several hosts: "
                 "postgresql+tls://USER@HOST:PORT,HOST:PORT/DATABASE, or arangodb+tls://…"),
    Setting("password_file", "path",
            help="a file with only the ledger's password for the server, readable by root alone"),
    Setting("ca_file", "path",
            help="the certificates to trust with +tls, instead of the system's"),
    Setting("work_user", "text",
            help="another user of the server, for jobs and history; required with a server"),
    Setting("work_password_file", "path",
            help="a file with the password of work_user, which workers may read"),
    Setting("replication_factor", "whole", 1, 10,
            help="with a cluster of ArangoDB: the copies of each document, 3 recommended; the "
                 "server's default is often 1, which is no copy"),
    Setting("write_concern", "whole", 1, 10,
            help="with a cluster of ArangoDB: the copies that must be written before an answer, "
                 "2 recommended; at most replication_factor"),
    Setting("sharding", "word", words=("flexible", "single"),
            help="with a cluster of ArangoDB: single keeps all collections on one server and its "
                 "copies, recommended; only for a database that is made from now on"),
)
FLEET = (
    Setting("host", "text", form=check_host,
            help="this host's name in the store; without it, an id made from the machine-id"),
    Setting("lease_s", "number", 10, 3600,
            help="seconds without a sign of this host's supervisor after which other hosts "
                 "settle its jobs"),
    Setting("max_restarts_at_once", "whole", 0, 10_000,
            help="workers of a pool that may be starting again at the same time, on all hosts "
                 "(0: no limit)"),
)
WEB = (
    Setting("listen", "text", form=check_listen,
            help="where nomarr-web serves the page: HOST:PORT, or the path of a Unix socket; "
                 "beyond this machine it needs a token"),
    Setting("hosts", "text", form=check_hosts,
            help="other names by which the page is reached, with spaces between; requests with "
                 "another Host are refused"),
    Setting("token_file", "path",
            help="a file with only the token that clients must send; or give the "
                 "credential nomarr-web.token to nomarr-web.service"),
)
POOL = (
    Setting("workers", "whole", 0, 4096,
            help="the number of workers; they are numbered from 0"),
    Setting("entrypoint", "text", form=check_entrypoint,
            help="a subclass of nomarr_systemd.worker.runtime.Worker, as package.module:Class"),
    Setting("command", "command",
            help="instead of entrypoint: any program that keeps the worker contract"),
    Setting("user", "text", form=check_user,
            help="the user that these workers run as, instead of nomarr; it must exist"),
    Setting("watchdog_s", "number", SHORTEST_S, DAY_S,
            help="seconds without WATCHDOG=1 after which systemd kills a worker"),
    Setting("stop_timeout_s", "number", SHORTEST_S, DAY_S,
            help="seconds that a worker may take to finish its job when it is asked to stop"),
    Setting("idle_evict_s", "number", 0, YEAR_S,
            help="seconds without a job after which a Python worker is to free its "
                 "models (0: never)"),
    Setting("claim_timeout_s", "number", 0, DAY_S, above=True,
            help="seconds after which the jobs of a dead worker are settled if no cause of its "
                 "death was reported"),
    Setting("claim_batch", "whole", 1, 1000,
            help="jobs that a Python worker takes at once from SQLite or PostgreSQL, for jobs of "
                 "milliseconds; if it dies, only the one in hand has crashed, and the others go "
                 "back into the queue uncounted"),
    Setting("crash_policy", "word", words=get_args(CrashPolicy),
            help="what becomes of a job when its worker dies"),
    Setting("crash_max_retries", "whole", 0, 1_000_000,
            help="crashes since the last clean stop after which the next one fails the whole pool"),
    Setting("job_max_crashes", "whole", 1, 1000,
            help="a job that has killed this many workers is quarantined"),
)
# fmt: on
HOMES = {
    "[policy], [pool.NAME.policy] or [worker.INSTANCE.policy]": POLICY,
    "[health] or [pool.NAME.health]": HEALTH,
    "[store]": STORE,
    "[fleet]": FLEET,
    "[web]": WEB,
    "[pool.NAME]": POOL,
}


def check(setting: Setting, value: object) -> Iterator[Fault]:
    """Yield everything that is wrong with ``value``."""
    match setting.kind, value:
        case ("whole", int()) | ("number", int() | float()) if _within(setting, value):
            return
        case "word", str() if value in setting.words:
            return
        case "word", str():
            yield Fault(_is_not(value, setting), ask_for(value, setting.words))
        case "text", str():
            yield from _check_text(setting, value)
        case "path", str() if value.startswith("/") and value.isprintable():
            return
        case "statuses", list():
            yield from _check_statuses(setting, value)
        case "command", list():
            yield from _check_command(value)
        case _:
            yield Fault(_is_not(value, setting))


def convert(setting: Setting, value: Any) -> Any:
    """Convert a good value to the type that the configuration has."""
    if setting.kind == "number":
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def explain_unknown(key: str, known: Iterable[str]) -> Fault:
    """Return the fault of an unknown key: where it belongs, or the nearest ``known`` one."""
    known = tuple(known)
    for home, settings in HOMES.items():
        if any(setting.key == key for setting in settings):
            return Fault("unknown key", f"it belongs in {home}")
    return Fault("unknown key", ask_for(key, known) or f"known here: {', '.join(known)}")


def _within(setting: Setting, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    reaches = value > setting.least if setting.above else value >= setting.least
    return reaches and value <= setting.most  # nothing of this holds for NaN


def _is_not(value: object, setting: Setting) -> str:
    return f"{show(value)} is not {setting.wants()}"


def _check_text(setting: Setting, value: str) -> Iterator[Fault]:
    if not value or not value.isprintable():
        # not shown: it may be a URL with a password in it
        yield Fault("the text is empty or has characters that cannot be printed")
    elif setting.form:
        try:
            setting.form(value)
        except BadName as error:
            yield Fault(str(error), error.hint)


def _check_statuses(setting: Setting, items: list[object]) -> Iterator[Fault]:
    seen: set[object] = set()
    for n, item in enumerate(items):
        if not isinstance(item, int) or not _within(setting, item):
            least, most = setting.least, setting.most
            yield Fault(f"{show(item)} is not an exit status from {least} to {most}", at=(n,))
        elif item in seen:
            yield Fault(f"{item} is listed twice", at=(n,))
        else:
            seen.add(item)


def _check_command(items: list[object]) -> Iterator[Fault]:
    if not items:
        yield Fault("the list is empty", "its first text is the program's absolute path")
    for n, item in enumerate(items):
        if not isinstance(item, str):
            yield Fault(f"{show(item)} is not text", "put it into quotes", at=(n,))
        elif "\0" in item:
            yield Fault(f"{quote(item)} has a NUL, which no argument can have", at=(n,))
        elif n == 0 and not (item.startswith("/") and item.isprintable()):
            yield Fault(f"{quote(item)} is not the absolute path of a program", at=(n,))
