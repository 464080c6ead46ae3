"""Unit files as text: places, quoting, sections; and which files are ours to write and remove."""

from __future__ import annotations

import itertools
import json
import re
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.config.file import parse
from nomarr_systemd.config.values import Config, Pool
from nomarr_systemd.core.errors import ConfigError
from nomarr_systemd.core.ids import Component
from nomarr_systemd.host.layout import LIBEXEC, Paths, system_paths
from nomarr_systemd.systemd.unit_files import (
    MARK,
    STORE_USERS,
    UnitError,
    adapt,
    dropin_of,
    find_data,
    install,
    plan,
    quote,
    read_base_units,
    render_files,
    render_target,
)
from nomarr_systemd.worker.environment import Settings

WORKER = Component("tag", 0)
POOL = '[pool.tag]\nworkers = 2\nentrypoint = "package.module:Class"\n'
ARGUMENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def render(config: Config) -> str:
    """The drop-in of the first worker."""
    return render_files(config, system_paths())[dropin_of(WORKER)]


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section of a unit file."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            found[list(found)[-1]].append(line)
    return found


def read_as_systemd(text: str) -> str:
    """One quoted argument without its quotes, escapes and specifiers."""
    assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', text)
    unescaped = re.sub(
        r"\\(?:x(..)|(.))", lambda m: chr(int(m[1], 16)) if m[1] else m[2], text[1:-1]
    )
    assert re.fullmatch(r"(?:[^%]|%%)*", unescaped, re.DOTALL), "a specifier"
    return unescaped.replace("%%", "%")


@given(ARGUMENT)
def test_an_argument_survives_quoting_on_one_line(argument: str) -> None:
    quoted = quote(argument)
    assert not re.search(r"[\x00-\x1f\x7f]", quoted)
    assert read_as_systemd(quoted) == argument


def test_a_python_worker() -> None:
    text = render(parse(POOL + "watchdog_s = 0.25\nstop_timeout_s = 1.0005\nclaim_batch = 4"))
    assert text.startswith(MARK)
    service = sections(text)["Service"]
    assert 'Environment="NOMARR_COMPONENT_ID=worker:tag:0"' in service
    start = service.index("ExecStart=")
    assert service[start + 1] == f'ExecStart=:"{LIBEXEC}/nomarr-worker" "package.module:Class"'
    assert service[start + 2 :] == [
        "WatchdogSec=250ms",
        "TimeoutStartSec=60s",
        "TimeoutStopSec=1000500us",
    ]
    [line] = [line for line in service if "NOMARR_SETTINGS=" in line]
    told = read_as_systemd(line.removeprefix("Environment="))
    settings = json.loads(told.removeprefix("NOMARR_SETTINGS="))
    assert (settings["stall_timeout_s"], settings["claim_batch"]) == (300, 4)
    assert "claim_batch" not in render(parse(POOL))  # else an upgrade would restart all workers
    assert settings.keys() == set(Settings._fields)  # what the worker reads, and no more


def test_a_command_may_be_notified_for_by_its_children() -> None:
    text = render(parse('[pool.tag]\ncommand = ["/bin/a b", "50%"]'))
    service = sections(text)["Service"]
    assert 'ExecStart=:"/bin/a b" "50%%"' in service
    assert "NotifyAccess=all" in service
    # For nomarrctl job; a change of the health's settings restarts no program that ignores them.
    [line] = [line for line in service if "NOMARR_SETTINGS=" in line]
    told = read_as_systemd(line.removeprefix("Environment="))
    assert list(json.loads(told.removeprefix("NOMARR_SETTINGS="))) == ["store"]


def test_64_workers_share_a_slice() -> None:
    large = render_files(parse(POOL.replace("2", "65")), system_paths())
    for number, part in ((0, 0), (63, 0), (64, 1)):
        worker = Component("tag", number)
        assert f"Slice=nomarr-tag-{part}.slice" in sections(large[dropin_of(worker)])["Service"]


def test_a_worker_that_runs_in_another_slice_is_not_restarted_for_that(tmp_path: Path) -> None:
    install(plan(parse(POOL), str(tmp_path), system_paths()))
    file = tmp_path / dropin_of(WORKER)
    text = file.read_text()
    file.write_text(text.replace("Slice=nomarr-tag-0.slice\n", ""))
    changes = plan(parse(POOL), str(tmp_path), system_paths())
    assert changes.change == {dropin_of(WORKER): text}
    assert not changes.is_old(WORKER)
    file.write_text(text.replace("Slice=nomarr-tag-0.slice\n", "Nice=1\n"))
    assert plan(parse(POOL), str(tmp_path), system_paths()).is_old(WORKER)


def test_directives_go_into_their_sections_before_our_own() -> None:
    unit = """[pool.tag.unit]
        MemoryMax = "4G"
        Nice = 5
        PrivateDevices = true
        ProtectHome = false
        After = ["a.service", "b.service"]
        RequiresMountsFor = "/srv"
        ConditionACPower = true
        Environment = ["A=1", "NOMARR_COMPONENT_ID=worker:other:1"]
        """
    found = sections(render(parse(POOL + unit)))
    assert found["Unit"] == [
        "After=a.service",
        "After=b.service",
        "RequiresMountsFor=/srv",
        "ConditionACPower=yes",
    ]
    assert found["Service"][:7] == [
        "MemoryMax=4G",
        "Nice=5",
        "PrivateDevices=yes",
        "ProtectHome=no",
        "Environment=A=1",
        "Environment=NOMARR_COMPONENT_ID=worker:other:1",
        'Environment="NOMARR_COMPONENT_ID=worker:tag:0"',
    ]


def test_a_program_that_systemd_cannot_run_is_named() -> None:
    config = Config(pools=(Pool("tag", command=('/bin/a"b',)),))
    with pytest.raises(ConfigError, match=r'\[pool\.tag\] command: .*/bin/a"b'):
        render(config)


def test_the_target_wants_every_worker_and_what_serves_them() -> None:
    [text] = render_target(parse(POOL)).values()
    wanted = sections(text)["Unit"]
    assert wanted == [
        "Wants=nomarr-supervisor.service nomarr-controller.socket nomarr-reconcile.timer",
        "Wants=nomarr-worker@tag-0.service",
        "Wants=nomarr-worker@tag-1.service",
    ]


def target_files(**counts: int) -> dict[str, dict[str, list[str]]]:
    """The drop-ins of the target and of portions, by unit, with so many workers in each pool."""
    pools = (Pool(name, command=("/bin/true",), workers=count) for name, count in counts.items())
    files = render_target(Config(pools=tuple(pools)))
    return {name.removesuffix(".d/20-nomarr.conf"): sections(text) for name, text in files.items()}


def test_the_target_of_many_workers_names_none_of_them() -> None:
    """systemd would load all in one go."""
    assert list(target_files(a=60, b=4)) == ["nomarr-workers.target"]
    files = target_files(a=1, b=130, c=64, d=10, e=54, f=1)
    assert files.pop("nomarr-workers.target")["Unit"] == [
        "Wants=nomarr-supervisor.service nomarr-controller.socket nomarr-reconcile.timer",
        "Wants=nomarr-portions.service",
    ]
    assert files.pop("nomarr-portions.service")["Service"] == [
        'Environment="NOMARR_PORTIONS=a-0 b-1 b-2 d-0 f-0"'
    ]
    found = {
        name: [line.removeprefix("Wants=nomarr-worker@") for line in files.pop(name)["Unit"]]
        for name in list(files)
        if name.startswith("nomarr-portion@")
    }
    assert {name: (len(workers), workers[0], workers[-1]) for name, workers in found.items()} == {
        "nomarr-portion@a-0.target": (65, "a-0.service", "b-63.service"),
        "nomarr-portion@b-1.target": (64, "b-64.service", "b-127.service"),
        "nomarr-portion@b-2.target": (66, "b-128.service", "c-63.service"),
        "nomarr-portion@d-0.target": (64, "d-0.service", "e-53.service"),
        "nomarr-portion@f-0.target": (1, "f-0.service", "f-0.service"),
    }
    assert {name: sections["Unit"] for name, sections in files.items()} == {
        f"nomarr-{name}.slice": [f"Before=nomarr-portion@{portion}.target"]
        for name, portion in {
            "a-0": "a-0",
            "b-0": "a-0",
            "b-1": "b-1",
            "b-2": "b-2",
            "c-0": "b-2",
            "d-0": "d-0",
            "e-0": "d-0",
            "f-0": "f-0",
        }.items()
    }


def test_another_worker_changes_only_its_own_portion() -> None:
    before, after = target_files(a=200, b=300), target_files(a=201, b=300)
    assert before.keys() == after.keys()
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["nomarr-portion@a-3.target"]


def test_in_user_scope_both_places_and_the_scope_are_written_out() -> None:
    paths = Paths("/run/user/7", "/home/50%/state", user=True)
    found = read_base_units(paths, libexec="/home/50%/lib")
    assert not any("/" in name for name in found), "the system's drop-ins are not for a user"
    everything = "\n".join(found.values())
    assert "/var/lib/nomarr" not in everything
    assert "/usr/lib/nomarr-systemd" not in everything
    assert "ConditionPathExists=!/home/50%%/state/hold/%i" in everything
    start = (
        "ExecStart=/home/50%%/lib/nomarr-supervisor --user --runtime=%t --state=/home/50%%/state"
    )
    assert start in found["nomarr-supervisor.service"].splitlines()


def test_in_system_scope_the_units_are_as_they_are() -> None:
    found = read_base_units(system_paths())
    for name, text in found.items():
        assert text == Path(find_data("units"), name).read_text()
    assert "nomarr-worker@.service.d/10-system.conf" in found


@pytest.mark.parametrize("place", ["relative", "/with space", '/with"quote', "/with$", "/a\\b"])
def test_a_place_that_cannot_stand_in_a_unit_is_refused(place: str) -> None:
    with pytest.raises(UnitError, match="cannot stand in a unit file"):
        adapt("", state=place, libexec="/lib")


def test_install_writes_the_difference_and_nothing_else(tmp_path: Path) -> None:
    directory = str(tmp_path)
    first = plan(parse(POOL), directory, system_paths())
    assert sorted(first.add) == [
        *(f"{unit}.d/20-nomarr.conf" for unit in STORE_USERS),
        "nomarr-worker@tag-0.service.d/20-nomarr.conf",
        "nomarr-worker@tag-1.service.d/20-nomarr.conf",
        "nomarr-workers.target.d/20-nomarr.conf",
    ]
    assert list(tmp_path.iterdir()) == [], "a plan touches nothing"
    install(first)
    assert not plan(parse(POOL), directory, system_paths())

    changed = plan(parse(POOL.replace("workers = 2", "workers = 1")), directory, system_paths())
    assert not changed.add
    assert list(changed.change) == ["nomarr-workers.target.d/20-nomarr.conf"]
    assert changed.remove == ("nomarr-worker@tag-1.service.d/20-nomarr.conf",)
    install(changed)
    assert not (tmp_path / "nomarr-worker@tag-1.service.d").exists()
    assert (tmp_path / "nomarr-worker@tag-0.service.d/20-nomarr.conf").stat().st_mode == 0o100644


def test_a_network_is_for_a_store_on_a_server(tmp_path: Path) -> None:
    url, files = "arangodb://root@db:8529/nomarr", "password_file = '/a'\nwork_password_file = '/b'"
    served = parse(f'[store]\nurl = "{url}"\nwork_user = "work"\n{files}\n{POOL}')
    user = Paths("/run/user/7", str(tmp_path), user=True)
    for unit in STORE_USERS:
        assert f"{unit}.d/20-nomarr.conf" not in render_files(parse(POOL), user)
    install(plan(parse(POOL), str(tmp_path), system_paths()))
    opened = plan(served, str(tmp_path), system_paths())
    assert all(map(opened.concern, STORE_USERS))
    install(opened)
    texts = [path.read_text() for path in tmp_path.glob("nomarr-[crs]*.service.d/*")]
    assert len(texts) == len(STORE_USERS)
    assert not any("AddressFamilies" in text for text in texts)
    assert not any(map(plan(served, str(tmp_path), system_paths()).concern, STORE_USERS))


def test_a_store_with_an_address_is_all_that_can_be_reached() -> None:
    files = "password_file = '/a'\nwork_password_file = '/b'"
    for hosts, allowed in (
        ("10.1.2.3:1,[fd00::1]", "IPAddressAllow=10.1.2.3 fd00::1"),
        ("localhost,[::1]:1", "IPAddressAllow=localhost"),
    ):
        url = f"postgresql://root@{hosts}/nomarr"
        config = parse(f'[store]\nurl = "{url}"\nwork_user = "work"\n{files}\n{POOL}')
        for unit in STORE_USERS:
            text = render_files(config, system_paths())[f"{unit}.d/20-nomarr.conf"]
            assert sections(text) == {"Service": ["IPAddressDeny=any", allowed]}


def test_a_store_with_a_name_can_be_at_any_address_of_one_host() -> None:
    files = "password_file = '/a'\nwork_password_file = '/b'"
    url = "postgresql://root@db.example/nomarr"
    config = parse(f'[store]\nurl = "{url}"\nwork_user = "work"\n{files}\n{POOL}')
    for unit in STORE_USERS:
        text = render_files(config, system_paths())[f"{unit}.d/20-nomarr.conf"]
        deny, *allow = sections(text)["Service"]
        assert deny == "IPAddressDeny=any"
        networks = [ip_network(each) for line in allow for each in line.partition("=")[2].split()]
        for last, version in (("223.255.255.255", 4), ("feff:" + ":".join(["ffff"] * 7), 6)):
            own = sorted(each for each in networks if each.version == version)
            (begin, end) = (own[0].network_address, own[-1].broadcast_address)
            assert (int(begin), end) == (0, ip_address(last))
            for one, next_one in itertools.pairwise(own):
                assert int(one.broadcast_address) + 1 == int(next_one.network_address)


def test_what_others_made_is_left_alone(tmp_path: Path) -> None:
    paths = Paths("/run/user/7", str(tmp_path / "state"), user=True)
    install(plan(parse(POOL), str(tmp_path), paths, libexec="/lib"))
    mask = tmp_path / "nomarr-worker@tag-1.service"
    mask.symlink_to("/dev/null")
    override = tmp_path / "nomarr-worker@tag-1.service.d/override.conf"
    override.write_text("[Service]\nNice=1\n")
    other = tmp_path / "nomarr-notes.service"
    other.write_text("[Service]\n")

    gone = plan(parse(""), str(tmp_path), paths, libexec="/lib")
    assert len(gone.remove) == 2
    install(gone)
    assert mask.is_symlink()
    assert override.exists()
    assert other.exists()
    assert not override.with_name("20-nomarr.conf").exists()


def test_a_file_of_others_in_our_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nomarr-worker@tag-0.service.d/20-nomarr.conf"
    path.parent.mkdir()
    path.write_text("[Service]\n")
    with pytest.raises(UnitError, match="was not made by nomarrctl"):
        plan(parse(POOL), str(tmp_path), system_paths())
