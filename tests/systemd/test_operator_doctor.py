"""``nomarrctl doctor``: an installation that is well, and one broken in every way it knows of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nomarr_systemd.host import machine
from tests.support.lab import Lab
from tests.support.operator_site import Installation
from tests.support.users import NOBODY


@pytest.fixture
def site(lab: Lab) -> Installation:
    return Installation(lab)


def examine(site: Installation) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and what is bad, but for what this machine is to blame for."""
    done = site.ctl("doctor", "--json")
    document = json.loads(done.stdout)
    bad = [each for each in document["findings"] if each["level"] == "bad"]
    assert document["healthy"] == (not bad)
    assert done.returncode == (1 if bad else 0)
    if machine.is_volatile(site.lab.directory):
        bad = [each for each in bad if "a reboot forgets" not in each["text"]]
    return done.returncode, bad


def test_all_is_well(site: Installation) -> None:
    site.bring_up(2)
    site.lab.systemctl("enable", "nomarr-workers.target")
    _, bad = examine(site)
    assert bad == []
    done = site.ctl("doctor")
    assert "✓ configuration: applied" in done.stdout
    assert "✓ supervisor: the supervisor answers" in done.stdout
    assert "✓ supervisor: systemd keeps the pipes of 2 workers" in done.stdout
    assert "✓ units: systemd accepts every unit" in done.stdout


@pytest.mark.parametrize("any_lab", [NOBODY], indirect=True, ids=["plain"])
def test_what_is_closed_is_not_called_missing(any_lab: Lab) -> None:
    """An unprivileged look at a sound installation said that nothing had been applied yet."""
    site = Installation(any_lab)
    site.bring_up(1)
    any_lab.systemctl("start", "nomarr-reconcile.service")  # it publishes
    (site.state / "config.json").chmod(0)
    (site.state / "public").chmod(0)
    found = site.json("doctor", status=77)["findings"]
    texts = [each["text"] for each in found]
    assert "nothing has been applied yet" not in texts
    closed = [each for each in found if "this user may not read" in each["text"]]
    assert [each["level"] for each in closed] == ["warn"]
    assert "this user may not read" in site.ctl("status").stderr


def test_before_anything_was_applied(site: Installation) -> None:
    status, bad = examine(site)
    assert status == 1
    assert [each["check"] for each in bad] == ["configuration"]
    site.configure(1)
    _, bad = examine(site)
    assert [each["mend"] for each in bad] == ["nomarrctl --user apply"]
    assert not site.state.exists()  # looking changes nothing


def test_a_file_that_was_applied_by_its_name_need_not_be_named_again(site: Installation) -> None:
    """``--config`` is for apply; what was applied is in force."""
    site.bring_up(1)
    site.config = site.config.with_name("none.toml")
    assert examine(site)[1] == []
    assert f"there is no {site.config} to compare with" in site.ctl("doctor").stdout
    for words in (["status"], ["jobs", "list"], ["jobs", "add", "/m/a"], ["policy", "show"]):
        done = site.ctl(*words)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_a_mistake_in_the_file_and_a_store_that_is_broken(site: Installation) -> None:
    site.bring_up(1)
    site.wait_until_reconciled()  # else that one makes the file again
    (site.state / "ledger.db").unlink(missing_ok=True)
    (site.state / "ledger.db").mkdir()
    site.configure(1, more="watchdog = 3\n")
    _, bad = examine(site)
    texts = {each["check"]: each["text"] for each in bad}
    assert "did you mean watchdog_s?" in texts["configuration"]
    assert "store" in texts


def test_doctor_names_what_reconcile_mends(site: Installation) -> None:
    site.bring_up(1)
    site.mask()
    site.lab.systemctl("unmask", "nomarr-worker@tag-0.service")
    _, bad = examine(site)
    assert [each["text"] for each in bad] == ["tag-0 has failed for good, but is not masked"]
    site.good("reset", "tag-0", "--start")
    site.wait_until_healthy("tag-0")
    assert examine(site)[1] == []


def test_a_disk_that_is_full_and_forgets(site: Installation) -> None:
    site.configure(1)
    place = site.state.parent
    place.mkdir(parents=True)
    # As root in the lab's own mount namespace, where its systemd and its programs see it.
    site.lab.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)])
    site.good("apply")
    found = site.json("doctor", status=1)["findings"]
    texts = [each["text"] for each in found if each["level"] == "bad"]
    assert any(f"{site.state} is on tmpfs: a reboot forgets every restart" in it for it in texts)
    assert any("MiB are free in" in text for text in texts)
