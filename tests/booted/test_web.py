"""The page as its package installs it: its own user, its sandbox, its token."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.machine import Machine

UNIT = "nomarr-web.service"
CONFIG = """\
[pool.tag]
workers = 1
command = ["/usr/bin/sleep", "inf"]
"""
ASK = """\
import sys, urllib.request, urllib.error

request = urllib.request.Request("http://127.0.0.1:8765" + sys.argv[1])
if len(sys.argv) > 2:
    request.add_header("Authorization", "Bearer " + sys.argv[2])
try:
    with urllib.request.urlopen(request, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


MAPPED = """\
import socket

with socket.create_connection(("::ffff:127.0.0.1", 8765)) as link:
    link.sendall(b"GET /api/workers HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
    print(link.makefile().readline())
"""


def ask(machine: Machine, path: str, *token: str, user: str = "root") -> str:
    program = ("/usr/bin/python3", "/opt/ask.py", path, *token)
    return machine.run("setpriv", f"--reuid={user}", "--clear-groups", *program).stdout


@pytest.fixture(scope="module")
def page(machine: Machine, web_deb: Path) -> Machine:
    shutil.copy(web_deb, machine.path("/root/web.deb"))
    machine.path("/opt/ask.py").write_text(ASK)
    apt = ("apt-get", "install", "--yes", "--no-install-recommends")
    machine.run(*apt, "/root/web.deb", timeout_s=180)
    machine.path("/etc/nomarr/nomarr.toml").write_text(CONFIG)
    assert machine.run("systemctl", "is-enabled", UNIT, check=False).stdout == "disabled\n"
    assert machine.run("systemctl", "is-active", UNIT, check=False).stdout == "inactive\n"
    machine.run("nomarrctl", "apply", check=False)
    machine.run("systemctl", "enable", "--now", UNIT)  # the one command
    return machine


def test_it_runs_as_a_user_of_its_own_and_shows_the_workers(page: Machine) -> None:
    pid = page.run("systemctl", "show", "--value", "--property=MainPID", UNIT).stdout.strip()
    status = page.run("cat", f"/proc/{pid}/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = page.run("id", "--user", "nomarr-web").stdout.strip()
    assert fields["Uid"].split()[0] == uid != "0"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    said = page.run("systemd-analyze", "security", "--no-pager", UNIT).stdout
    overall = re.search(r"Overall exposure level for .*: ([0-9.]+) ", said)
    assert overall
    assert float(overall[1]) <= 2.0, said
    assert ask(page, "/healthz").startswith("200 ")
    assert '"instance":"tag-0"' in ask(page, "/api/workers")
    assert "nomarr_worker_healthy" in ask(page, "/metrics")
    assert ask(page, "/api/workers/tag-0/why").startswith("200 ")


def test_other_users_of_the_machine_see_nothing(page: Machine) -> None:
    for user in ("nobody", "nomarr"):  # workers see nothing of each other
        assert ask(page, "/api/workers", user=user).startswith("403 "), user
    page.run("useradd", "--system", "--groups=nomarr-view", "anna")
    assert ask(page, "/api/workers", user="anna").startswith("200 ")
    assert ask(page, "/healthz", user="nobody").startswith("200 ")
    # The same address, by a socket of IPv6.
    for user, status in (("root", "200 "), ("nobody", "403 ")):
        found = page.run(
            *("setpriv", f"--reuid={user}", "--clear-groups"),
            *("/usr/bin/python3", "-c", MAPPED),
        )
        assert found.stdout.split(" ", 1)[1].startswith(status), user


def test_a_token_is_taken_from_the_credential(page: Machine) -> None:
    store = page.path("/etc/credstore")
    store.mkdir(mode=0o700, exist_ok=True)
    (store / "nomarr-web.token").write_text("0123456789abcdef0123456789abcdef\n")
    page.run("systemctl", "restart", UNIT)
    assert ask(page, "/api/workers").startswith("401 ")
    token = "0123456789abcdef0123456789abcdef"
    assert ask(page, "/api/workers", token, user="nobody").startswith("200 ")
    (store / "nomarr-web.token").unlink()
    page.run("systemctl", "restart", UNIT)


def test_it_goes_without_a_trace(page: Machine) -> None:
    page.run("apt-get", "purge", "--yes", "nomarr-web", timeout_s=120)
    assert page.run("systemctl", "is-active", UNIT, check=False).returncode
    assert not page.path("/usr/lib/nomarr-systemd/nomarr_systemd/web").exists()
    assert page.run("nomarrctl", "status", "--json", check=False).stdout.startswith("[")
