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

import pytest

from nomarr_systemd.core.account import Account, from_doc
from nomarr_systemd.host.machine import host_of
from nomarr_systemd.ledger.ledger import Ledger
from nomarr_systemd.store.open import open_store
from tests.arango_standin.running import Server, open_server
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


def test_a_crash_loop_is_on_record_there(lab: Lab, server: Server) -> None:
    database = f"nomarr_test_{uuid.uuid4().hex}"
    secret = Path(lab.directory, "secret")
    secret.touch(0o600)
    secret.write_text(server.password)
    broken = Path(lab.directory, "broken")
    worker = lab.write_program("worker", WORKER.replace("{broken}", str(broken)))
    url = f"arangodb://root@{server.host}:{server.port}/{database}"
    lab.install(
        f'[store]\nurl = "{url}"\npassword_file = "{secret}"\n'
        f'work_user = "worker"\nwork_password_file = "{secret}-of-jobs"\n'
        "[policy]\nbackoff_base_s = 0.1\nbackoff_jitter = 0\nmax_restarts = 2\n"
        f'[pool.tag]\ncommand = ["{worker}"]\nwatchdog_s = 3600\n'
    )
    lab.systemctl("start", "nomarr-controller.socket")
    lab.start("tag-0")
    broken.touch()
    os.kill(lab.main_pid("tag-0"), signal.SIGKILL)
    lab.wait_for(lambda: lab.get("tag-0", "LoadState") == "masked", what="tag-0 is masked")
    host = host_of(url)
    assert host

    def read() -> Account:
        store = open_store(url, "policy", password_file=str(secret))
        try:
            return Ledger(store, host=host).account("worker:tag:0")
        finally:
            store.close()

    lab.wait_for(lambda: read().records[-1].effect == "done", what="it is done")
    account = read()
    assert [record.action for record in account.records] == ["restart", "restart", "fail"]
    assert account.host == host
    shown = Path(lab.paths.public, "tag-0.json").read_text()
    assert from_doc(json.loads(shown)).rows == account.rows
    server.call("DELETE", f"/_api/database/{database}")
