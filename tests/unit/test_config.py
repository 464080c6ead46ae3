"""The configuration file: a full example, every rule, and that all mistakes come at once."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.settings import (
    FLEET,
    HEALTH,
    HOMES,
    POLICY,
    POOL,
    STORE,
    WEB,
    Setting,
    check,
)
from nomarr_systemd.config.unit_directives import OWNED
from nomarr_systemd.config.values import (
    Config,
    FleetSettings,
    Pool,
    StoreSettings,
    WebSettings,
    WorkerRules,
)
from nomarr_systemd.core.errors import ConfigError, Mistake, NoSuchWorker
from nomarr_systemd.core.health import HealthRules
from nomarr_systemd.core.ids import Component
from nomarr_systemd.core.policy import Rules

FULL = """\
[store]
url = "arangodb+tls://nomarr@db1,db2:8530/nomarr"
password_file = "/etc/nomarr/password"
ca_file = "/etc/nomarr/ca.pem"
work_user = "worker"
work_password_file = "/etc/nomarr/work-password"

[policy]
max_restarts = 6
window_s = 600
max_lifetime_restarts = 0
backoff_base_s = 2
backoff_multiplier = 3
backoff_max_s = 30.5
backoff_jitter = 0
stable_after_s = 900
on_exhausted = "cooldown"
never_restart = [78, 2]
lifetime_days = 30
on_clean_exit = "stay"

[health]
frame_interval_s = 1
startup_timeout_s = 120
staleness_interval_s = 4
max_misses = 2
min_recovery_s = 1
max_recovery_s = 60
max_unhealthy_s = 600
stall_timeout_s = 0
snapshot_interval_s = 10
gpu_health_max_age_s = 30

[web]
listen = "[::1]:80"

[pool.tag]
workers = 3
entrypoint = "nomarr.tagging:Tagger"
watchdog_s = 10
stop_timeout_s = 0.5
idle_evict_s = 0
claim_timeout_s = 5
crash_policy = "restart-requeue-in-flight"
crash_max_retries = 3
job_max_crashes = 1

[pool.tag.policy]
max_restarts = 7

[pool.tag.health]
stall_timeout_s = 900

[pool.tag.unit]
MemoryMax = "4G"
Nice = 5
PrivateTmp = true
Environment = ["A=1", "B=2"]

[pool.scan]
command = ["/usr/bin/scan", "--all", ""]

[worker.tag-1.policy]
max_restarts = 8
"""


def mistakes_in(text: str) -> tuple[Mistake, ...]:
    try:
        parse(textwrap.dedent(text))
    except ConfigError as error:
        return error.mistakes
    return ()


def only_mistake_in(text: str) -> Mistake:
    (mistake,) = mistakes_in(text)
    return mistake


def pool_with(lines: str) -> str:
    """A file with one good pool and these lines after it."""
    return f'[pool.tag]\nentrypoint = "a:B"\nworkers = 2\n{textwrap.dedent(lines)}'


def arango_with(lines: str) -> str:
    """A file with a good server as its store and these lines after it."""
    return f"[store]\nurl = 'arangodb://a@h/d'\n{lines}\nwork_user = 'w'\n"


def test_a_full_file() -> None:
    policy = Rules(6, 600.0, 0, 2.0, 3.0, 30.5, 0.0, 900.0, "cooldown", (78, 2), 30.0, "stay")
    tag = policy._replace(max_restarts=7)
    health = HealthRules(1.0, 120.0, 4.0, 2, 1.0, 60.0, 600.0, 0.0, 10.0, 30.0)
    expected = Config(
        store=StoreSettings(
            "arangodb+tls://nomarr@db1,db2:8530/nomarr",
            "/etc/nomarr/password",
            "/etc/nomarr/ca.pem",
            "worker",
            "/etc/nomarr/work-password",
        ),
        policy=policy,
        own_policy=Rules._fields,
        health=health,
        web=WebSettings("[::1]:80"),
        pools=(
            Pool(
                name="tag",
                workers=3,
                entrypoint="nomarr.tagging:Tagger",
                watchdog_s=10.0,
                stop_timeout_s=0.5,
                idle_evict_s=0.0,
                claim_timeout_s=5.0,
                crash_policy="restart-requeue-in-flight",
                crash_max_retries=3,
                job_max_crashes=1,
                rules=tag,
                own_rules=("max_restarts",),
                health=health._replace(stall_timeout_s=900.0),
                own_health=("stall_timeout_s",),
                unit=(
                    ("MemoryMax", "4G"),
                    ("Nice", 5),
                    ("PrivateTmp", True),
                    ("Environment", ("A=1", "B=2")),
                ),
            ),
            Pool("scan", command=("/usr/bin/scan", "--all", ""), rules=policy, health=health),
        ),
        workers=(
            WorkerRules(Component("tag", 1), tag._replace(max_restarts=8), ("max_restarts",)),
        ),
    )
    config = parse(FULL)
    assert config == expected
    assert isinstance(config.policy.window_s, float)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_empty_file_has_the_defaults_and_runs_nothing() -> None:
    assert parse("") == Config()
    assert parse("").components() == ()
    assert parse("", state_directory="/home/me/state").store.url == "sqlite:///home/me/state"


def test_defaults_of_a_pool() -> None:
    (pool,) = parse('[pool.tag]\nentrypoint = "a:B"').pools
    assert pool == Pool("tag", 1, "a:B", (), "", 30, 90, 300, 30, "restart-fail-in-flight", None, 2)


def test_components_come_in_the_files_order() -> None:
    text = """
    [pool.z]
    workers = 2
    entrypoint = "a:B"
    [pool.none]
    workers = 0
    entrypoint = "a:B"
    [pool.a]
    entrypoint = "a:B"
    """
    assert [c.instance for c in parse(textwrap.dedent(text)).components()] == ["z-0", "z-1", "a-0"]


def test_a_workers_rules_are_over_its_pools_over_the_policy() -> None:
    config = parse(FULL)
    rules = [config.rules_for(component).max_restarts for component in config.components()]
    assert rules == [7, 8, 7, 6]
    worker = Component("tag", 1)
    assert config.origin_of(worker, "max_restarts") == "worker"
    assert config.origin_of(Component("tag", 0), "max_restarts") == "pool"
    assert config.origin_of(worker, "window_s") == "policy"
    assert parse(pool_with("")).origin_of(worker, "window_s") == "default"
    assert config.pool_of(worker).name == "tag"
    for nobody in (Component("tag", 3), Component("nope", 0)):
        with pytest.raises(NoSuchWorker, match="is not configured") as caught:
            config.rules_for(nobody)
        assert caught.value.exit_status == 4


WRONG = """\
max_restart = 5
[policy]
max_restart = 5
max_restarts = true
window_s = 0
backoff_base_s = 70
never_restart = [
  78,
  256, # too big
  78,
]
[helth]
[health]
frame_interval_s = 5
max_misses = "3"
[web]
listen = "8765"
[pool.tag]
workers = 2
enrtypoint = "a:B"
crash_policy = "restart_fail_in_flight"
policy = { backoff_max_s = nan, on_exhausted = "masq" }
[pool.tag.unit]
Restart = "always"
MemoryMax = "4G\\nExecStartPre=/bin/evil"
[pool.Scan]
command = ["scan", 5]
[worker.tag-2.policy]
max_restarts = 1
[worker."worker:tag:0"]
"""


def test_all_mistakes_at_once_with_their_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(WRONG, source="/etc/nomarr/nomarr.toml")
    found = [(mistake.line, mistake.key) for mistake in caught.value.mistakes]
    assert found == [
        (1, "max_restart"),
        (3, "policy.max_restart"),
        (4, "policy.max_restarts"),
        (5, "policy.window_s"),
        (6, "policy.backoff_base_s"),
        (9, "policy.never_restart[1]"),
        (10, "policy.never_restart[2]"),
        (12, "helth"),
        (14, "health.frame_interval_s"),
        (15, "health.max_misses"),
        (17, "web.listen"),
        (18, "pool.tag"),
        (20, "pool.tag.enrtypoint"),
        (21, "pool.tag.crash_policy"),
        (22, "pool.tag.policy.backoff_max_s"),
        (22, "pool.tag.policy.on_exhausted"),
        (24, "pool.tag.unit.Restart"),
        (25, "pool.tag.unit.MemoryMax"),
        (26, "pool.Scan"),
        (27, "pool.Scan.command[0]"),
        (27, "pool.Scan.command[1]"),
        (28, "worker.tag-2"),
        (30, 'worker."worker:tag:0"'),
    ]
    listing = str(caught.value).split("\n")
    assert len(listing) == len(found)
    assert all(line.startswith("/etc/nomarr/nomarr.toml:") for line in listing)
    for line in (
        "policy.max_restart: unknown key; did you mean max_restarts?",
        "policy.max_restarts: true is not a whole number from 0 to 100",
        "policy.window_s: 0 is not a number above 0, up to 31536000",
        "policy.backoff_base_s: backoff_base_s (70) must not be above backoff_max_s (60)",
        "policy.never_restart[1]: 256 is not an exit status from 0 to 255",
        "helth: unknown key; did you mean health?",
        'health.max_misses: "3" is not a whole number from 1 to 1000',
        "pool.tag: the pool has no program; set entrypoint or command",
        "pool.tag.enrtypoint: unknown key; did you mean entrypoint?",
    ):
        assert any(shown.endswith(line) for shown in listing), line
    assert caught.value.code == "config"
    assert caught.value.exit_status == 78


def test_the_message_is_as_documented() -> None:
    text = "\n" * 11 + "policy.max_restart = 1"
    with pytest.raises(ConfigError) as caught:
        parse(text)
    expected = "nomarr.toml:12: policy.max_restart: unknown key; did you mean max_restarts?"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a = 1\nb 2\n", 2, "Expected '='"),
        ("[policy]\nmax_restarts = 1\nmax_restarts = 2\n", 3, "overwrite"),
        ("[policy]\n\n[policy]\n", 3, "twice"),
        ("a = [1,\n2\n", 2, "Unclosed array"),
        ('a = "x\r\n', 1, "Illegal character"),
        ("\ufeffa = 1", 1, "Invalid statement"),
        ("a = \x1b[31m", 1, "Invalid value"),
        ("a = " + "9" * 5000, 1, "digits"),
        ("a = " + "[" * 5000, 1, "nested too deeply"),
    ],
)
def test_a_text_that_is_not_toml(text: str, line: int, problem: str) -> None:
    mistake = only_mistake_in(text)
    assert mistake.line == line
    assert problem in str(mistake)
    assert "not TOML" in mistake.problem
    assert str(mistake).isprintable()


NUMBERS = [
    (section, setting)
    for section in (POLICY, HEALTH, POOL)
    for setting in section
    if setting.kind in ("whole", "number")
]


@pytest.mark.parametrize("setting", [s for _, s in NUMBERS], ids=lambda s: s.key)
def test_numbers_keep_to_their_bounds(setting: Setting) -> None:
    inside = [setting.most, setting.least + 1, *([] if setting.above else [setting.least])]
    outside: list[object] = [setting.least - 1, setting.most + 1, 10**400, -(16**5000)]
    outside += [float("nan"), float("inf"), -float("inf"), True, "1", [1], {}, None]
    if setting.above:
        outside.append(setting.least)
    if setting.kind == "whole":
        outside.append(setting.least + 0.5)
    assert [value for value in inside if list(check(setting, value))] == []
    assert [value for value in outside if not list(check(setting, value))] == []


def test_a_number_too_long_to_spell_is_still_only_a_mistake() -> None:
    mistake = only_mistake_in("policy.max_restarts = 0x" + "f" * 5000)
    assert mistake.problem.startswith("a number of more than 40 digits is not")


def test_every_field_is_a_setting_and_has_a_default_within_bounds() -> None:
    for settings, values in (
        (POLICY, Rules()),
        (HEALTH, HealthRules()),
        (STORE, StoreSettings()),
        (FLEET, FleetSettings()),
        (WEB, WebSettings()),
    ):
        keys = tuple(setting.key for setting in settings)
        assert keys == values._fields[: len(keys)]
        assert values._fields[len(keys) :] == (("host",) if settings is STORE else ())
    assert {setting.key for setting in POOL} == (
        set(Pool._fields) - {"name", "rules", "own_rules", "health", "own_health", "unit"}
    )
    for setting in (*POLICY, *HEALTH):
        default = getattr(Rules() if setting in POLICY else HealthRules(), setting.key)
        given = list(default) if isinstance(default, tuple) else default
        assert list(check(setting, given)) == [], setting.key


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        # sections
        ("policy = 5", 1, "policy", "5 is not a table; write [policy]"),
        ("[[policy]]", 1, "policy", "a list is not a table"),
        ("[pool]\ntag = 3", 2, "pool.tag", "3 is not a table; write [pool.tag]"),
        ("worker = []", 1, "worker", "a list is not a table"),
        ("[nothing_like_it]", 1, "nothing_like_it", "known here: store, fleet, policy"),
        ("workers = 2", 1, "workers", "it belongs in [pool.NAME]"),
        (pool_with("max_restarts = 1"), 4, "pool.tag.max_restarts", "belongs in [policy], [pool."),
        (pool_with("[worker.tag-0]\nwindow_s = 1"), 5, "worker.tag-0.window_s", "belongs in"),
        (pool_with("[pool.tag.policy]\nx = 1"), 5, "pool.tag.policy.x", "unknown key"),
        (
            pool_with("[pool.tag.health]\nsnapshot_interval_s = 1"),
            *(5, "pool.tag.health.snapshot_interval_s", "unknown key"),
        ),
        (
            "health.frame_interval_s = 2\n" + pool_with("health.staleness_interval_s = 1"),
            *(5, "pool.tag.health.staleness_interval_s", "frame_interval_s (2) must be below"),
        ),
        # values
        ("[policy]\nwindow_s = 1979-05-27", 2, "policy.window_s", "a date or time is not"),
        ("[policy]\non_exhausted = 'masc'", 2, "policy.on_exhausted", "did you mean mask?"),
        ("[policy]\non_exhausted = 1", 2, "policy.on_exhausted", 'one of "mask", "cooldown"'),
        ("[policy]\nnever_restart = 78", 2, "policy.never_restart", "a list of exit statuses"),
        ("[policy]\nnever_restart = [1.5]", 2, "policy.never_restart[0]", "1.5 is not an exit"),
        ("[policy]\nnever_restart = [true]", 2, "policy.never_restart[0]", "true is not"),
        ("[policy]\nnever_restart = [[]]", 2, "policy.never_restart[0]", "a list is not"),
        ("[web]\nlisten = 'localhost'", 2, "web.listen", "there is no :PORT"),
        ("[web]\nlisten = ':80'", 2, "web.listen", "the host is not a name"),
        ("[web]\nlisten = 'h:0'", 2, "web.listen", "from 1 to 65535"),
        ("[web]\nlisten = '::1:80'", 2, "web.listen", "in brackets"),
        ("[web]\nlisten = ''", 2, "web.listen", "empty"),
        # the fleet
        ("[fleet]\nhost = 'a b'", 2, "fleet.host", "cannot be a host's name"),
        (
            "[store]\nurl = 'arangodb://a@h/d'\nwork_user = 'w'\n[fleet]\nhost = 'unknown'",
            *(5, "fleet.host", "cannot be a host's name"),
        ),
        ("[fleet]\nhost = 'a'", 2, "fleet.host", "SQLite is for one host"),
        ("[fleet]\nlease_s = 30", 2, "fleet.lease_s", "SQLite is for one host"),
        ("[fleet]\nlease_s = 1", 2, "fleet.lease_s", "from 10 to 3600"),
        # the store
        ("[store]\nurl = 5", 2, "store.url", "5 is not text"),
        ("[store]\nurl = 'postgres://x'", 2, "store.url", "names no store"),
        ("[store]\nurl = 'arangodb://a:s3cret@h/d'", 2, "store.url", "set password_file"),
        ("[store]\npassword_file = '/p'", 2, "store.password_file", "only for a postgresql"),
        (
            "[store]\nurl = 'sqlite:///x'\nwork_user = 'w'",
            3,
            "store.work_user",
            "only for a postgresql",
        ),
        (
            arango_with("work_password_file = '/w'\npassword_file = 'p'"),
            4,
            "store.password_file",
            "not an absolute path",
        ),
        (
            arango_with('work_password_file = "/w"\npassword_file = "/p\\nq"'),
            4,
            "store.password_file",
            "not an absolute path",
        ),
        (arango_with("ca_file = '/c'"), 3, "store.ca_file", "arangodb+tls"),
        (arango_with("replication_factor = 0"), 3, "store.replication_factor", "from 1 to 10"),
        (arango_with("sharding = 'none'"), 3, "store.sharding", 'one of "flexible", "single"'),
        (
            arango_with("write_concern = 2"),
            3,
            "store.write_concern",
            "more than replication_factor",
        ),
        (
            "[store]\nurl = 'postgresql://a@h/d'\nwork_user = 'w'\nreplication_factor = 3",
            4,
            "store.replication_factor",
            "only for an arangodb:// url",
        ),
        (
            "[store]\nurl = 'arangodb://a@h/d'\nwork_password_file = '/c'",
            3,
            "store.work_password_file",
            "there is no work_user",
        ),
        # workers never hold the ledger's password: security finding 12
        ("[store]\nurl = 'arangodb://a@h/d'", 2, "store.url", "workers must not hold"),
        (
            "[store]\nurl = 'arangodb+tls://a@h/d'\npassword_file = '/p'",
            2,
            "store.url",
            "set work_user and work_password_file",
        ),
        (
            "[store]\nurl = 'arangodb://a@h/d'\nwork_user = 'a'",
            3,
            "store.work_user",
            "the ledger's user",
        ),
        (arango_with("password_file = '/p'"), 3, "store.password_file", "work_password_file"),
        (
            arango_with("work_password_file = '/p'"),
            3,
            "store.work_password_file",
            "there is no password_file",
        ),
        (
            arango_with("password_file = '/p'\nwork_password_file = '/p'"),
            4,
            "store.work_password_file",
            "make another file",
        ),
        # pools
        ("[pool.tag]\nworkers = 0", 1, "pool.tag", "set entrypoint or command"),
        (pool_with("command = ['/bin/x']"), 4, "pool.tag.command", "remove one of the two"),
        ("[pool.'a b']\nentrypoint = 'a:B'", 1, 'pool."a b"', "cannot name a pool"),
        ("[pool.tag]\nentrypoint = 'a.b'", 2, "pool.tag.entrypoint", "package.module:Class"),
        ("[pool.tag]\nentrypoint = 'a..b:C'", 2, "pool.tag.entrypoint", "names no class"),
        ("[pool.tag]\nentrypoint = 'a:B.c'", 2, "pool.tag.entrypoint", "names no class"),
        ("[pool.tag]\nentrypoint = 'a:B --x'", 2, "pool.tag.entrypoint", "names no class"),
        ("[pool.tag]\nentrypoint = ['a:B']", 2, "pool.tag.entrypoint", "a list is not text"),
        ("[pool.tag]\ncommand = '/bin/x'", 2, "pool.tag.command", "is not a list of texts"),
        ("[pool.tag]\ncommand = []", 2, "pool.tag.command", "the list is empty"),
        ("[pool.tag]\ncommand = ['x']", 2, "pool.tag.command[0]", "absolute path of a program"),
        ("[pool.tag]\ncommand = ['/x',\n5]", 3, "pool.tag.command[1]", "put it into quotes"),
        ('[pool.tag]\ncommand = ["/x", "a\\u0000"]', 2, "pool.tag.command[1]", "NUL"),
        (pool_with("crash_policy = 'fail'"), 4, "pool.tag.crash_policy", '"fail-pool"'),
        (pool_with("watchdog_s = 0"), 4, "pool.tag.watchdog_s", "a number from 0.001 to 86400"),
        (
            pool_with("[pool.big]\nentrypoint = 'a:B'\nworkers = 4095"),
            6,
            "pool.big.workers",
            "4097 workers; 4096 is the most",
        ),
        # workers
        (pool_with("[worker.tag-2]"), 4, "worker.tag-2", "workers = 2, numbered from 0"),
        (pool_with("[worker.tga-0]"), 4, "worker.tga-0", "no [pool.tga]; did you mean tag?"),
        (pool_with("[worker.tag]"), 4, "worker.tag", "not the name of an instance"),
        (pool_with("[worker.tag-00]"), 4, "worker.tag-00", "not the name of an instance"),
        (
            pool_with("[worker.'worker:tag:0'.policy]"),
            4,
            'worker."worker:tag:0"',
            "by its instance only; write [worker.tag-0.policy]",
        ),
        (
            pool_with("[worker.'nomarr-worker@tag-0.service']"),
            4,
            'worker."nomarr-worker@tag-0.service"',
            "write [worker.tag-0.policy]",
        ),
        # what must fit together
        (
            "[health]\nmin_recovery_s = 9\nmax_recovery_s = 8",
            2,
            "health.min_recovery_s",
            "(9) must not be above max_recovery_s (8)",
        ),
        ("[health]\nmax_recovery_s = 1", 2, "health.max_recovery_s", "min_recovery_s (5)"),
        (
            "[health]\nstaleness_interval_s = 2.5",
            2,
            "health.staleness_interval_s",
            "frame_interval_s (2.5) must be below staleness_interval_s (2.5)",
        ),
        (
            "policy.backoff_max_s = 9\n" + pool_with("[pool.tag.policy]\nbackoff_base_s = 10"),
            6,
            "pool.tag.policy.backoff_base_s",
            "(10) must not be above backoff_max_s (9)",
        ),
        (
            pool_with("policy.backoff_base_s = 10\n[worker.tag-1.policy]\nbackoff_max_s = 9"),
            6,
            "worker.tag-1.policy.backoff_max_s",
            "(10) must not be above backoff_max_s (9)",
        ),
    ],
)
def test_one_mistake(text: str, line: int, key: str, words: str) -> None:
    mistake = only_mistake_in(text)
    assert (mistake.line, mistake.key) == (line, key)
    assert words in str(mistake)
    assert "s3cret" not in str(mistake)


@pytest.mark.parametrize(
    "text",
    [
        "[policy]\nbackoff_base_s = 60\nmax_restarts = 0\nnever_restart = []",
        pool_with("policy.backoff_base_s = 70\npolicy.backoff_max_s = 70"),
        pool_with("[pool.tag.unit]\nExecStartPre = ['/bin/a', '/bin/b']\nCPUWeight = 10"),
        pool_with("[worker.tag-1]"),
        pool_with("[pool.big]\nentrypoint = 'a:B'\nworkers = 4094"),
        arango_with(""),
        arango_with("password_file = '/p'\nwork_password_file = '/w'"),
        "[web]\n[health]\n[store]\n[policy]\n[pool]\n[worker]",
    ],
)
def test_what_is_no_mistake(text: str) -> None:
    assert mistakes_in(text) == ()


def test_one_mistake_does_not_cause_another() -> None:
    """What a refused value would have been is not guessed at."""
    for text in (
        "[policy]\nbackoff_max_s = 'x'\nbackoff_base_s = 70",
        "policy.backoff_max_s = 'x'\n" + pool_with("policy.backoff_base_s = 70"),
        "[health]\nstaleness_interval_s = -1\nframe_interval_s = 9",
        "[store]\nurl = 'x'\npassword_file = '/p'",
        "pool.tag = 5\nworker.tag-7.policy.max_restarts = 1",
        "[pool.tag]\nentrypoint = 'a:B'\nworkers = -1\n[worker.tag-7]",
        "[pool.tag]\nentrypoint = 5",
    ):
        assert len(mistakes_in(text)) == 1, text


@pytest.mark.parametrize("owned", OWNED, ids=lambda owned: owned.name)
def test_directives_that_the_design_owns(owned: Any) -> None:
    name = owned.name.replace("*", "")
    mistake = only_mistake_in(pool_with(f"[pool.tag.unit]\n{name} = 'x'"))
    assert mistake.line == 5
    assert mistake.problem == f"a pool cannot set {name}: {owned.why}"
    assert mistake.suggestion == owned.instead


@pytest.mark.parametrize(
    "name", ["RestartSec", "RestartMode", "StartLimitBurst", "TimeoutAbortSec"]
)
def test_families_of_directives_that_the_design_owns(name: str) -> None:
    assert "a pool cannot set" in str(only_mistake_in(pool_with(f"unit.{name} = 1")))


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("memory_max = '4G'", "memory_max", "not the name of a systemd directive"),
        ("'A\\nB' = '4G'", '"A\\\\nB"', "not the name of a systemd directive"),
        ("MemoryMax = 4.5", "MemoryMax", "4.5 is not text; put it into quotes"),
        ("MemoryMax = {}", "MemoryMax", "a table is not text"),
        ("Environment = ['A=1', 2]", "Environment[1]", "2 is not text"),
        ('Description = "a\\nRestart=always"', "Description", "more than one directive"),
        ('Description = "a\\rRestart=always"', "Description", "more than one directive"),
        ('Description = "a\\u0000"', "Description", "more than one directive"),
        ("Description = 'a\\'", "Description", "a backslash at the end"),
        ('Environment = ["A=1", "B\\nC"]', "Environment[1]", "more than one directive"),
        ("Environment = ''", "Environment", "would undo what the unit itself needs"),
        ("Nice = 0x1_0000_0000_0000_0000", "Nice", "more than systemd can count"),
    ],
)
def test_directives_with_bad_names_or_values(line: str, key: str, words: str) -> None:
    mistake = only_mistake_in(pool_with(f"[pool.tag.unit]\n{line}"))
    assert mistake.key == f"pool.tag.unit.{key}"
    assert words in str(mistake)
    assert str(mistake).isprintable()


TEXT = st.text(max_size=10)
KEYS = st.lists(st.sampled_from(Rules._fields), unique=True).map(tuple)


def seconds_of(defaults: Any) -> dict[str, st.SearchStrategy[float]]:
    """Any good number for each field that is one."""
    values = defaults._asdict().items()
    return {name: st.floats(0, 1e8) for name, value in values if isinstance(value, float)}


RULES = st.builds(
    Rules,
    **seconds_of(Rules()),
    max_restarts=st.integers(0, 100),
    max_lifetime_restarts=st.integers(0, 10**6),
    on_exhausted=st.sampled_from(["mask", "cooldown"]),
    never_restart=st.lists(st.integers(0, 255)).map(tuple),
)
COMPONENTS = st.builds(
    Component, st.from_regex(r"[a-z][a-z0-9_]{0,30}", fullmatch=True), st.integers(0, 4095)
)
HEALTHS = st.builds(HealthRules, **seconds_of(HealthRules()), max_misses=st.integers(1, 9))
POOLS = st.builds(
    Pool,
    name=TEXT,
    workers=st.integers(0, 4096),
    entrypoint=TEXT,
    command=st.lists(TEXT).map(tuple),
    **seconds_of(Pool("x")),
    crash_policy=st.sampled_from(["restart-fail-in-flight", "fail-pool"]),
    crash_max_retries=st.none() | st.integers(0, 9),
    job_max_crashes=st.integers(1, 9),
    rules=RULES,
    own_rules=KEYS,
    health=HEALTHS,
    own_health=KEYS,
    unit=st.lists(
        st.tuples(TEXT, TEXT | st.integers() | st.booleans() | st.lists(TEXT).map(tuple))
    ).map(tuple),
)
CONFIGS = st.builds(
    Config,
    store=st.builds(StoreSettings, TEXT, TEXT, TEXT, TEXT, TEXT),
    fleet=st.builds(FleetSettings, TEXT, **seconds_of(FleetSettings())),
    policy=RULES,
    own_policy=KEYS,
    health=HEALTHS,
    web=st.builds(WebSettings, TEXT),
    pools=st.lists(POOLS, max_size=3).map(tuple),
    workers=st.lists(st.builds(WorkerRules, COMPONENTS, RULES, KEYS), max_size=3).map(tuple),
)


@given(CONFIGS, st.booleans())
def test_a_configuration_survives_json(config: Config, sort_keys: bool) -> None:
    again = Config.from_dict(json.loads(json.dumps(config.to_dict(), sort_keys=sort_keys)))
    assert again == config
    assert repr(again) == repr(config)  # a bool is still a bool, a float a float
    assert {type(pool) for pool in again.pools} <= {Pool}


def test_json_of_another_version() -> None:
    stored = parse(FULL).to_dict()
    del stored["web"]
    del stored["pools"][0]["idle_evict_s"]
    stored["pools"][0]["of_the_future"] = 1
    stored["of_the_future"] = {}
    config = Config.from_dict(stored)
    assert config.web == WebSettings()
    assert config.pools[0].idle_evict_s == 300


@pytest.mark.parametrize(
    "stored",
    [
        {"pools": 3},
        {"pools": [{}]},
        {"store": 5},
        {"workers": [{"component": "nobody", "rules": {}}]},
        {"pools": [{"name": "x", "unit": [1]}]},
    ],
)
def test_damaged_json_is_a_config_error(stored: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="damaged") as caught:
        Config.from_dict(stored)
    assert "nomarrctl apply" in caught.value.hint


def to_toml(value: Any) -> str:
    """Any value in one line."""
    match value:
        case dict():
            return "{" + ", ".join(f"{to_toml(k)} = {to_toml(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() if value > 10**9:
            return hex(value)
    return str(value).lower()


def tables_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)


NAMES = [setting.key for settings in HOMES.values() for setting in settings]
NAMES += ["store", "policy", "health", "web", "pool", "worker", "unit", "tag", "tag-0", "Restart"]
ANYTHING = st.recursive(
    st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | tables_of(inner),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["store", "policy", "health", "web", "pool", "worker"]) | st.text(),
        tables_of(ANYTHING | tables_of(ANYTHING)) | ANYTHING,
    )
)
def test_any_toml_is_a_configuration_or_a_list_of_mistakes(document: dict[str, Any]) -> None:
    text = "\n".join(f"{to_toml(key)} = {to_toml(value)}" for key, value in document.items())
    spelled = list(document)
    for mistake in mistakes_in(text):
        assert str(mistake).isprintable()
        assert "not TOML" not in mistake.problem
        key = spelled[mistake.line - 1]
        assert mistake.key.startswith((key, '"')), "the line is that of the key's section"


def test_the_controllers_import_is_cheap() -> None:
    code = "import sys, nomarr_systemd.config.values; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: what site itself imports is not ours
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    dear = {"tomllib", "difflib", "dataclasses", "json", "urllib", "ipaddress", "datetime"}
    assert not dear & set(run.stdout.split())
