"""Every setting of the configuration file as data: its key, its type, its bounds; and how one
value is held against one setting. Which sections there are and how they hang together is
``configfile``'s, the defaults stand with the values in ``config`` and ``model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

from nomarr_systemd.config.store_url import parse_address, parse_store_url
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.job import CrashPolicy
from nomarr_systemd.core.policy import OnExhausted
from nomarr_systemd.core.text import ask_for, quote, show

DAY_S = 86_400
YEAR_S = 31_536_000
SHORTEST_S = 0.001  # systemd reads a time of 0 as "off" or "for ever", and rounds down to it

Kind = Literal["whole", "number", "word", "text", "path", "statuses", "command"]


class Fault(NamedTuple):
    """What is wrong with a value; ``at`` is the item, if it is one item of a list."""

    problem: str
    suggestion: str = ""
    at: tuple[int, ...] = ()


class Setting(NamedTuple):
    """One key. ``above``: the least value itself is refused. ``form`` raises BadName."""

    key: str
    kind: Kind
    least: float = 0
    most: float = 0
    above: bool = False
    words: tuple[str, ...] = ()
    form: Callable[[str], object] | None = None

    def wants(self) -> str:
        """What may stand there, to follow "is not"."""
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
    """BadName unless ``text`` looks like ``package.module:Class``."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), name]
    if not (colon and text.isascii() and all(part.isidentifier() for part in parts)):
        raise BadName(f"{show(text)} names no class", hint='write it as "package.module:Class"')


def check_listen(text: str) -> None:
    """BadName unless ``text`` is an address to listen on."""
    try:
        parse_address(text)
    except BadName as error:
        hint = 'write "127.0.0.1:8765", "[::1]:8765" or another HOST:PORT'
        raise BadName(f"{show(text)} is no address: {error}", hint=hint) from error


POLICY = (
    Setting("max_restarts", "whole", 0, 100),
    Setting("window_s", "number", 0, YEAR_S, above=True),
    Setting("max_lifetime_restarts", "whole", 0, 1_000_000),
    Setting("backoff_base_s", "number", 0, DAY_S),
    Setting("backoff_multiplier", "number", 1, 100),
    Setting("backoff_max_s", "number", 0, DAY_S),
    Setting("backoff_jitter", "number", 0, 1),
    Setting("stable_after_s", "number", 0, YEAR_S),
    Setting("on_exhausted", "word", words=get_args(OnExhausted)),
    Setting("never_restart", "statuses", 0, 255),
)
HEALTH = (
    Setting("frame_interval_s", "number", 0.05, 3600),
    Setting("startup_timeout_s", "number", 0, DAY_S, above=True),
    Setting("staleness_interval_s", "number", 0.05, 3600),
    Setting("max_misses", "whole", 1, 1000),
    Setting("min_recovery_s", "number", 0, DAY_S),
    Setting("max_recovery_s", "number", 0, DAY_S, above=True),
    Setting("max_unhealthy_s", "number", 0, DAY_S),
    Setting("stall_timeout_s", "number", 0, DAY_S),
    Setting("snapshot_interval_s", "number", 0.1, DAY_S),
    Setting("gpu_health_max_age_s", "number", 0, DAY_S),
)
STORE = (
    Setting("url", "text", form=parse_store_url),
    Setting("password_file", "path"),
    Setting("ca_file", "path"),
    Setting("work_user", "text"),
    Setting("work_password_file", "path"),
)
WEB = (Setting("listen", "text", form=check_listen),)
POOL = (
    Setting("workers", "whole", 0, 4096),
    Setting("entrypoint", "text", form=check_entrypoint),
    Setting("command", "command"),
    Setting("watchdog_s", "number", SHORTEST_S, DAY_S),
    Setting("stop_timeout_s", "number", SHORTEST_S, DAY_S),
    Setting("idle_evict_s", "number", 0, YEAR_S),
    Setting("claim_timeout_s", "number", 0, DAY_S, above=True),
    Setting("crash_policy", "word", words=get_args(CrashPolicy)),
    Setting("crash_max_retries", "whole", 0, 1_000_000),
    Setting("job_max_crashes", "whole", 1, 1000),
)
HOMES = {
    "[policy], [pool.NAME.policy] or [worker.INSTANCE.policy]": POLICY,
    "[health]": HEALTH,
    "[store]": STORE,
    "[web]": WEB,
    "[pool.NAME]": POOL,
}


def check(setting: Setting, value: object) -> Iterator[Fault]:
    """Everything that is wrong with ``value``; nothing when it is good."""
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
    """A good value as the configuration keeps it."""
    if setting.kind == "number":
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def explain_unknown(key: str, known: Iterable[str]) -> Fault:
    """Why ``key`` is not one of the ``known``, and which of them or where it may be meant."""
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
            yield Fault(f"{item} stands there twice", at=(n,))
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


MEANINGS: Final = {
    # [policy]
    "max_restarts": "restarts within the window; the failure after that is one too many",
    "window_s": "the length of the sliding window",
    "max_lifetime_restarts": "restarts in all since the last reset; 0: no such limit",
    "backoff_base_s": "the wait before the first restart",
    "backoff_multiplier": "each further wait is longer by this factor",
    "backoff_max_s": "the longest wait; also that of a restart decided while the store is away",
    "backoff_jitter": "a wait is longer or shorter by up to this share of itself",
    "stable_after_s": "a worker that ran for so long begins with the first wait again",
    "on_exhausted": "when the window is full: mask the unit, or restart when it has room again",
    "never_restart": "exit statuses that no restart mends: the unit is masked at once",
    # [health]
    "frame_interval_s": "a Python worker sends a frame this often",
    "startup_timeout_s": "silence that is allowed while a worker loads",
    "staleness_interval_s": "silence that counts as one miss",
    "max_misses": "so many misses in a row, and the worker is killed",
    "min_recovery_s": "what a worker that says it is recovering gets at least",
    "max_recovery_s": "what it gets at most, from its first word of it",
    "max_unhealthy_s": "a worker that calls itself unhealthy for so long is killed; 0: never",
    "stall_timeout_s": "a Python worker without progress for so long pings no more; 0: it does",
    "snapshot_interval_s": "the supervisor writes the workers' health to the store this often",
    "gpu_health_max_age_s": "what the store says of the GPU is ignored when it is older",
    # [store]
    "url": "a directory on this host, or arangodb+tls://USER@HOST:PORT,HOST:PORT/DATABASE",
    "password_file": "a file with the password for ArangoDB, and nothing else",
    "ca_file": "the certificates to trust for arangodb+tls, instead of the system's",
    "work_user": "another user of ArangoDB, for jobs and history",
    "work_password_file": "a file with the password of work_user",
    # [web]
    "listen": "where a web page is to be served; this version has none",
    # [pool.NAME]
    "workers": "how many there are; they are numbered from 0",
    "entrypoint": "a subclass of nomarr_systemd.worker.runtime.Worker, as package.module:Class",
    "command": "instead of entrypoint: any program that keeps the worker contract",
    "watchdog_s": "systemd kills a worker that sends no WATCHDOG=1 for so long",
    "stop_timeout_s": "how long a worker may take for its job when it is asked to stop",
    "idle_evict_s": "a Python worker idle for so long is to free its models; 0: never",
    "claim_timeout_s": "after so long a job is settled whose worker vanished and nobody saw it",
    "crash_policy": "what becomes of the job in hand when its worker dies",
    "crash_max_retries": "more crashes than this since the last clean stop fail the whole pool",
    "job_max_crashes": "a job that killed so many workers is quarantined",
}
