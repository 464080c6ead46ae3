"""The ledger in ArangoDB, as a fleet has it: decisions and published accounts, under systemd.

The server is the stand-in, or the one that NOMARR_TEST_ARANGO_URL names.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nomarr_systemd.config.values import StoreSettings
from nomarr_systemd.core.account import Account, from_doc
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.open import open_store
from tests.arango_standin.running import Server, open_server
from tests.support.capabilities import NOT_HERE
from tests.support.lab import Lab

WORKER = """\
#!/bin/sh
[ ! -e {broken} ] || exit 1
systemd-notify --ready --pid=$$
exec sleep 1000
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server() as server:
        yield server


@pytest.fixture
def url(lab: Lab, server: Server) -> Iterator[str]:
    """The store of a lab whose worker dies as long as ``broken`` is there."""
    database = f"nomarr_test_{uuid.uuid4().hex}"
    url = f"arangodb://root@{server.host}:{server.port}/{database}"
    secret = Path(lab.directory, "secret")
    secret.touch(0o600)
    secret.write_text(server.password)
    worker = lab.write_program("worker", WORKER.replace("{broken}", f"{lab.directory}/broken"))
    lab.install(
        f'[store]\nurl = "{url}"\npassword_file = "{secret}"\n'
        f'work_user = "worker"\nwork_password_file = "{secret}-of-jobs"\n'
        "[policy]\nbackoff_base_s = 0.1\nbackoff_max_s = 0.2\nbackoff_jitter = 0\n"
        f'max_restarts = 2\n[pool.tag]\ncommand = ["{worker}"]\nwatchdog_s = 3600\n'
    )
    lab.systemctl("start", "nomarr-controller.socket")
    lab.start("tag-0")
    yield url
    server.call("DELETE", f"/_api/database/{database}")


def read(lab: Lab, url: str) -> Account:
    store = open_store(url, "policy", password_file=f"{lab.directory}/secret")
    try:
        return Ledger(store, host=host_of(StoreSettings(url))).account("worker:tag:0")
    finally:
        store.close()


def test_a_crash_loop_is_on_record_there(lab: Lab, url: str) -> None:
    Path(lab.directory, "broken").touch()
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked", what="tag-0 is masked")
    lab.wait_for(lambda: read(lab, url).records[-1].effect == "done", what="it is done")
    account = read(lab, url)
    assert [record.action for record in account.records] == ["restart", "restart", "fail"]
    assert account.host == host_of(StoreSettings(url)) != ""
    shown = Path(lab.paths.public, "tag-0.json").read_text()
    assert from_doc(json.loads(shown)).rows == account.rows


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "body", "status": 200, "body": "\xff\xfe"},
        {"kind": "body", "status": 200, "body": '{"result":[5],"hasMore":true,"id":"1"}'},
        {"kind": "trickle-body", "status": 200},
        {"kind": "answer", "status": 500, "message": "boom\n<0>EMERGENCY \x1b[2J"},
    ],
    ids=["not-utf-8", "no-end", "slow", "an-emergency"],
)
def test_a_server_that_answers_badly_is_away(
    lab: Lab, server: Server, url: str, fault: dict[str, Any]
) -> None:
    """The worker is restarted meanwhile, and its death is booked when the server is sound again.
    Security findings 11 and 16."""
    if not server.standin:
        pytest.skip(NOT_HERE + "a real server answers well")
    died = lab.get("tag-0", "InvocationID")
    server.fault(**fault)
    try:
        os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
        lab.wait_for(
            lambda: Path(lab.paths.spool, f"{died}.json").exists(), what="the death is spooled"
        )
        lab.wait_for(
            lambda: (
                lab.get("tag-0", "ActiveState") == "active"
                and lab.get("tag-0", "InvocationID") != died
            ),
            what="tag-0 runs again",
        )
    finally:
        server.fault()
    lab.systemctl("start", "nomarr-reconcile.service")
    lab.wait_for(lambda: read(lab, url).find(died), what="the death is on record")
    assert lab.journal("--output=cat", "--priority=0") == ""
    said = lab.journal("--output=cat", "--unit=nomarr-controller.service")
    assert "Traceback" not in said
