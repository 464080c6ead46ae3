"""The exploits against the store, on a booted system and as the users who would try them: nomarr, a
user without groups, and a hostile database server. Security findings 2, 11, 12, 16, 20, 21 and 23.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nomarr_systemd.store.protocol import DOMAINS
from tests.support import packages
from tests.support.exposure import read_exposure
from tests.support.installed import WORKERS
from tests.support.machine import CONFIG, STATE, Machine

POOL = f"""\
[policy]
max_restarts = 100
max_lifetime_restarts = 0
backoff_base_s = 0.2
backoff_max_s = 0.3
backoff_jitter = 0

[pool.tag]
command = ["{WORKERS}/steady", "0"]
"""
WORKER = "tag-0"
EXAMPLE = "/usr/lib/nomarr-systemd/examples/tagger"
OTHER = "4343"  # a user without a name, as any other
ARANGO = f"""\
[store]
url = "arangodb://ledger@127.0.0.1:8529/nomarr"
password_file = "/etc/nomarr/ledger-password"
work_user = "work"
work_password_file = "/etc/nomarr/work-password"

{POOL}"""
FOLDER = """\
from folder_jobs import FolderJobs
from nomarr_systemd.worker.runtime import Worker


class Folder(Worker):
    def source(self):
        return FolderJobs("/srv/music", quiet_s=0)

    def process(self, job):
        return "heard"
"""
LEDGER = [each.name for each in DOMAINS["policy"]]
SHAPELESS = ("5", '{"result":[5]}', "{}", "{{{", '{"result":' + "[" * 990 + "]" * 990 + "}")
STANDIN = (
    "sleep infinity | PYTHONPATH=/opt /usr/bin/python3 -m tests.arango_standin --port 8529"
    f" --account ledger:secret --account work:other:nomarr:{','.join(LEDGER)}"
    " --account careless:other:nomarr"
)
TELL = """\
import json, sys
sys.path.insert(0, "/opt")
from tests.arango_standin.running import Server
Server("127.0.0.1", 8529, "ledger", "secret").fault(**json.loads(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def running(machine: Machine) -> Iterator[None]:
    """Each test begins and ends with a sound installation."""
    machine.apply(POOL)
    machine.wait_until_running(WORKER)
    yield
    machine.apply(POOL)


def run_as(machine: Machine, user: str, script: str) -> subprocess.CompletedProcess[str]:
    groups = "--init-groups" if user == "nomarr" else "--clear-groups"
    command = ("setpriv", f"--reuid={user}", f"--regid={user}", groups, "sh", "-c", script)
    return machine.run(*command, check=False)


def configure(machine: Machine, toml: str) -> None:
    machine.path(CONFIG).write_text(toml)


def force(machine: Machine, **store: str) -> None:
    """Put a store into force that apply refuses: what an older version had applied."""
    path = machine.path(f"{STATE}/config.json")
    document = json.loads(path.read_text())
    document["store"] |= store
    path.write_text(json.dumps(document))


def die_while_the_store_is_away(machine: Machine) -> str:
    """Kill the worker: it is restarted, and its death is kept. Returns the invocation."""
    starts = machine.get("nomarr-controller.service", "NRestarts")
    died = machine.kill(WORKER)
    spooled = machine.path(f"{STATE}/spool/{died}.json")
    machine.wait_for(spooled.exists, "the death is spooled")
    machine.wait_until_running(WORKER, after=died)
    assert machine.get("nomarr-controller.service", "NRestarts") == starts  # no crash loop
    return died


def see_it_booked(machine: Machine, died: str) -> None:
    machine.run("nomarrctl", "reconcile")
    machine.wait_for(lambda: machine.account(WORKER).find(died), "the death is on record")


# Finding 2


def test_a_store_of_nomarrs_is_refused_and_nothing_is_renamed(machine: Machine) -> None:
    """The note says where root shall rename nomarr's file to."""
    target = "/etc/ld.so.preload"
    machine.run("install", "-d", "-o", "nomarr", "-g", "nomarr", "/srv/nomarr", "/srv/nomarr/work")
    planted = run_as(
        machine,
        "nomarr",
        f"cd /srv/nomarr && echo /srv/nomarr/p.so > ledger.db"
        f" && printf '{target}\\nwhy\\n' > ledger.db.setting-aside",
    )
    assert planted.returncode == 0
    configure(machine, f'[store]\nurl = "sqlite:///srv/nomarr"\n{POOL}')
    done = machine.run("nomarrctl", "apply", check=False)
    assert done.returncode != 0
    assert "/srv/nomarr belongs to nomarr" in done.stderr
    force(machine, url="sqlite:///srv/nomarr")
    said = machine.run("nomarrctl", "doctor", check=False)
    assert said.returncode == 1
    assert "/srv/nomarr belongs to nomarr" in said.stdout
    for act in (("reset", WORKER), ("reconcile",), ("jobs", "list")):
        machine.run("nomarrctl", *act, check=False)
    died = die_while_the_store_is_away(machine)
    assert not machine.path(target).exists()
    assert machine.path("/srv/nomarr/ledger.db").read_text() == "/srv/nomarr/p.so\n"
    # What doctor says mends it; the database of before is none, and is set aside in its place.
    for path in ("/srv/nomarr", "/srv/nomarr/ledger.db", "/srv/nomarr/ledger.db.setting-aside"):
        machine.run("chown", "-h", "root", path)
    machine.run("nomarrctl", "doctor", check=False)  # changes nothing
    see_it_booked(machine, died)
    assert not machine.path(target).exists()
    aside = [path.name for path in machine.path("/srv/nomarr").glob("*.corrupt-*Z")]
    assert len(aside) == 1
    machine.apply(POOL)


# Finding 20


def test_pipes_of_another_user_hang_no_worker(machine: Machine) -> None:
    machine.path(f"{WORKERS}/folder.py").write_text(FOLDER)
    machine.run("install", "-d", "-m", "1777", "/srv/music")
    digest = hashlib.blake2b(b"/srv/music/song", digest_size=16).hexdigest()
    planted = run_as(
        machine,
        OTHER,
        "cd /srv/music && echo la > song && mkfifo pipe && mkdir -m 777 .nomarr"
        f" && mkfifo -m 666 .nomarr/{digest}.json",
    )
    assert planted.returncode == 0, planted.stderr
    folder = '[pool.folder]\nentrypoint = "folder:Folder"\n[pool.folder.unit]\n'
    machine.apply(f'{POOL}\n{folder}Environment = ["PYTHONPATH={WORKERS}:{EXAMPLE}"]\n')
    machine.wait_until_running("folder-0")

    def notes() -> list[str]:
        found = machine.path("/var/lib/nomarr-workers/nomarr/folders").glob("*/*.json")
        return [path.read_text() for path in found]

    machine.wait_for(lambda: any('"heard"' in note for note in notes()), "the song is heard")
    machine.wait_until_healthy("folder-0")
    assert "/srv/music/song" in notes()[0]


# Findings 23, 12, 16 and 21: ArangoDB


def keep_password(machine: Machine, name: str, text: str, group: str, mode: int) -> None:
    path = f"/etc/nomarr/{name}"
    machine.path(path).write_text(text)
    machine.path(path).chmod(mode)
    machine.run("chown", f"root:{group}", path)


@pytest.fixture
def passwords(machine: Machine) -> None:
    keep_password(machine, "ledger-password", "secret", "root", 0o600)
    keep_password(machine, "work-password", "other", "nomarr", 0o640)


@pytest.mark.usefixtures("passwords")
def test_a_missing_driver_is_found_by_apply(machine: Machine) -> None:
    configure(machine, ARANGO)
    before = machine.path(f"{STATE}/config.json").read_text()
    done = machine.run("nomarrctl", "apply", check=False)
    assert done.returncode != 0
    assert "driver is missing" in done.stderr
    assert "python3-arango" in done.stderr
    assert machine.path(f"{STATE}/config.json").read_text() == before
    # And where it went missing later, nothing crashes of it.
    force(machine, url="arangodb://ledger@127.0.0.1:8529/nomarr", work_user="work")
    died = die_while_the_store_is_away(machine)
    assert "driver is missing" in machine.run("nomarrctl", "doctor", check=False).stdout
    machine.apply(POOL)
    see_it_booked(machine, died)


@pytest.fixture(scope="module")
def server(machine: Machine, arango: Path) -> str:
    """ArangoDB's driver, and a stand-in for the server, in the machine; returns its unit."""
    shutil.copy(arango, machine.path("/root/arango.deb"))
    apt = ("apt-get", "install", "--yes", "--no-install-recommends")
    machine.run(*apt, "/root/arango.deb", timeout_s=120)
    for part in ("tests/__init__.py", "tests/arango_standin"):
        source, place = packages.CHECKOUT / part, machine.path(f"/opt/{part}")
        place.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    machine.run("systemd-run", "--quiet", "--unit=standin", "sh", "-c", STANDIN)
    machine.wait_for(lambda: tell(machine).returncode == 0, "the stand-in answers")
    return "standin.service"


def tell(machine: Machine, **fault: object) -> subprocess.CompletedProcess[str]:
    command = ("/usr/bin/python3", "-c", TELL, json.dumps(fault))
    return machine.run(*command, check=False)


@pytest.mark.usefixtures("passwords", "server")
def test_workers_never_hold_the_ledgers_password(machine: Machine) -> None:
    path = "/etc/nomarr/ledger-password"
    keep_password(machine, "ledger-password", "secret", "nomarr", 0o640)
    assert run_as(machine, "nomarr", f"cat {path}").stdout == "secret"
    configure(machine, ARANGO)
    done = machine.run("nomarrctl", "apply", check=False)
    assert done.returncode != 0
    assert f"nomarr may read the ledger's password in {path}" in done.stderr
    keep_password(machine, "ledger-password", "secret", "root", 0o600)
    assert run_as(machine, "nomarr", f"cat {path}").returncode != 0
    assert "warning" not in machine.run("nomarrctl", "apply").stdout
    machine.path(path).chmod(0o604)
    said = machine.run("nomarrctl", "doctor", check=False).stdout
    assert f"nomarr may read the ledger's password in {path}" in said
    machine.path(path).chmod(0o600)
    configure(machine, ARANGO.replace('"work"', '"careless"'))
    said = machine.run("nomarrctl", "apply").stdout
    named = ", ".join(LEDGER)
    assert f"'careless' has a right to the ledger's documents ({named})" in said
    # One user for both is refused by the file's own check.
    configure(machine, ARANGO.replace('work_user = "work"\n', ""))
    done = machine.run("nomarrctl", "apply", check=False)
    assert "workers must not hold the ledger's password" in done.stderr


@pytest.mark.usefixtures("passwords", "server")
def test_what_the_server_says_is_no_emergency(machine: Machine) -> None:
    configure(machine, ARANGO)
    machine.run("nomarrctl", "apply")
    message = "boom\n<0>EMERGENCY: pay up \x1b[2J"
    tell(machine, kind="answer", status=500, number=4, message=message)
    died = die_while_the_store_is_away(machine)
    tell(machine)
    assert machine.journal("--priority=0", "--output=cat", "-t", "nomarr-controller") == ""
    unit = ("--unit=nomarr-controller.service", "--output=json")
    entries = [json.loads(line) for line in machine.journal(*unit).splitlines()]
    told = [entry for entry in entries if "EMERGENCY" in str(entry["MESSAGE"])]
    assert told
    for entry in told:
        assert isinstance(entry["MESSAGE"], str)  # bytes that cannot be printed come as a list
        assert "boom" in entry["MESSAGE"]
        assert entry["PRIORITY"] == "3"
    see_it_booked(machine, died)


@pytest.mark.usefixtures("passwords", "server")
def test_answers_of_no_shape_stop_no_decision(machine: Machine) -> None:
    """Each ended or blocked the controller, and the worker stayed down (finding 11)."""
    configure(machine, ARANGO)
    machine.run("nomarrctl", "apply")
    shapeless = ({"kind": "body", "body": body} for body in SHAPELESS)
    for fault in (*shapeless, {"kind": "trickle-body"}, {"kind": "endless"}):
        tell(machine, status=200, **fault)
        died = die_while_the_store_is_away(machine)
        tell(machine)
        see_it_booked(machine, died)


@pytest.mark.usefixtures("passwords", "server")
def test_a_network_is_for_a_store_on_a_server(machine: Machine) -> None:
    """Tried in the sandbox of the reconciler; the supervisor gets its own by a restart."""
    place = "/run/systemd/system/nomarr-reconcile.service.d"
    program = "/usr/bin/python3 -c 'import socket; socket.socket(socket.AF_INET)'"
    machine.run("mkdir", "-p", place)
    machine.path(f"{place}/99-try.conf").write_text(
        f"[Service]\nType=oneshot\nExecStart=\nExecStart={program}\n"
    )

    def tries() -> bool:
        done = machine.run("systemctl", "start", "nomarr-reconcile.service", check=False)
        return done.returncode == 0

    def families(unit: str) -> set[str]:
        return set(machine.get(unit, "RestrictAddressFamilies").split())

    supervisor = "nomarr-supervisor.service"
    try:
        machine.systemctl("daemon-reload")
        assert families(supervisor) == families("nomarr-controller.service") == {"AF_UNIX"}
        assert not tries()
        before = machine.get(supervisor, "MainPID")
        configure(machine, ARANGO)
        machine.run("nomarrctl", "apply")
        assert "AF_INET" in families(supervisor) & families("nomarr-controller.service")
        assert machine.get(supervisor, "MainPID") != before
        assert tries()
        # The url has an address: it is the only one that they can reach.
        for unit, most in ((supervisor, 1.3), ("nomarr-controller.service", 1.6)):
            assert "127.0.0.0/8" in machine.get(unit, "IPAddressAllow")
            assert "0.0.0.0/0" in machine.get(unit, "IPAddressDeny")
            assert read_exposure(machine, unit) <= most
        # A name may have any address tomorrow.
        machine.path("/etc/hosts").write_text("127.0.0.1 localhost store.example\n")
        configure(machine, ARANGO.replace("127.0.0.1", "store.example"))
        machine.run("nomarrctl", "apply")
        for unit, most in ((supervisor, 1.3), ("nomarr-controller.service", 1.6)):
            assert "192.0.0.0/3" in machine.get(unit, "IPAddressAllow")
            assert read_exposure(machine, unit) <= most
    finally:
        machine.run("rm", "-r", place)
        machine.systemctl("daemon-reload")
        machine.systemctl("reset-failed", "nomarr-reconcile.service")


@pytest.mark.usefixtures("passwords", "server")
def test_the_machine_id_stays_on_the_machine(machine: Machine) -> None:
    configure(machine, ARANGO)
    machine.run("nomarrctl", "apply")
    died = machine.kill(WORKER)
    machine.wait_until_running(WORKER, after=died)
    ask = (
        "import sys; sys.path.insert(0, '/opt')\n"
        "from tests.arango_standin.running import Server\n"
        "server = Server('127.0.0.1', 8529, 'ledger', 'secret')\n"
        "query = {'query': 'FOR d IN @@documents SORT d._key ASC RETURN d',"
        " 'bindVars': {'@documents': 'worker_restart_policy'}}\n"
        "print(server.call('POST', '/_db/nomarr/_api/cursor', query).body['result'])\n"
    )
    kept = machine.run("/usr/bin/python3", "-c", ask).stdout
    assert died in kept
    assert machine.path("/etc/machine-id").read_text().strip() not in kept
