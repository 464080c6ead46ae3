"""A plain user of a systemd machine, with the package installed: the demo needs no root."""

from __future__ import annotations

from tests.support.machine import Machine

USER = "singer"


def test_the_demo_runs_for_a_plain_user(machine: Machine) -> None:
    machine.run("useradd", "--create-home", "--uid=4242", USER)
    # What PAM does at a login; this minimal system has none of systemd's.
    place = machine.path("/etc/systemd/system/user@.service.d")
    place.mkdir(parents=True)
    (place / "10-no-pam.conf").write_text("[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n")
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "user@4242.service")
    as_user = ("setpriv", "--reuid=4242", "--regid=4242", "--init-groups", "--")
    home = ("env", f"HOME=/home/{USER}", "XDG_RUNTIME_DIR=/run/user/4242")
    done = machine.run(*as_user, *home, "nomarrctl", "demo", check=False, timeout_s=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All of it was checked" in done.stdout


def test_without_a_manager_it_says_what_is_missing(machine: Machine) -> None:
    as_user = ("setpriv", "--reuid=4343", "--regid=4343", "--clear-groups", "--")
    done = machine.run(*as_user, "nomarrctl", "demo", check=False)
    assert done.returncode != 0
    assert "this needs root, or a systemd user manager of your own" in done.stderr
