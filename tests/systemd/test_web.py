"""nomarr-web under a real systemd: API, stream, metrics, and clients that mean harm.

One installation for all: nothing here is changed for the tests that follow.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.specs.openapi.checks import positive_data_acceptance

from nomarr_systemd.demo.lab import LabUnavailable
from nomarr_systemd.web import server
from tests.support.capabilities import needs_root
from tests.support.lab import CHECKOUT, Lab
from tests.support.web_site import Client, WebSite

DOCUMENT = json.loads((CHECKOUT / "nomarr_systemd/web/openapi.json").read_text())
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def site() -> Iterator[WebSite]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = WebSite(lab)
        site.add_jobs("a.flac", "broken.flac", "poison.flac")
        ended = {"completed": 1, "errors": 1, "quarantined": 1, "running": 0}
        lab.wait_for(
            lambda: ended.items() <= site.client.json("/api/pools")["pools"][0]["queue"].items(),
            what="all jobs have ended",
        )
        for worker in ("tag-0", "tag-1", "tag-2"):
            site.wait_for_worker(worker, state="healthy")
        yield site
    finally:
        lab.end()


@pytest.fixture
def client(site: WebSite) -> Client:
    return site.client


def test_workers_pools_policies_and_jobs(client: Client) -> None:
    workers = client.json("/api/workers")
    assert {each["instance"] for each in workers["workers"]} >= {"tag-0", "ocr-1", "odd-0"}
    assert workers["supervisor"]["answers"] is True
    assert client.json("/api/workers/worker%3Atag%3A0")["instance"] == "tag-0"
    assert client.json("/api/workers/tag-0")["policy"]["max_restarts"]["value"] == 3
    pools = {each["pool"]: each for each in client.json("/api/pools")["pools"]}
    assert pools["tag"]["queue"]["quarantined"] == 1
    found = client.json("/api/jobs?pool=tag&status=error")
    assert [Path(job["path"]).name for job in found["jobs"]] == ["broken.flac"]
    assert found["counts"]["done"] == 1
    rules = client.json("/api/policy?worker=ocr-0")["policies"]
    assert [each["component"] for each in rules] == ["worker:ocr:0"]


def test_a_death_is_told_streamed_and_explained(site: WebSite, client: Client) -> None:
    with closing(client.events("worker:*:status,system:health")) as stream:
        first = stream.until(type="snapshot", topic="worker:ocr:0:status")
        assert first["worker"]["status"] == "healthy"
        run = site.crash("ocr-0")
        crash = stream.until(type="worker:crash", topic="worker:ocr:0:status", invocation=run)
        assert crash["worker"]["component"] == "worker:ocr:0"
        last_id = stream.last_id
    worker = site.wait_for_worker("ocr-0", state="healthy")
    assert worker["last_crash"]["invocation"] == run
    assert worker["window"]["used"] == 1
    why = client.json(f"/api/workers/ocr-0/why?invocation={run}")
    assert (why["verdict"], why["death"]["code"]) == ("died", -9)
    status, headers, page = client.ask("/api/workers/ocr-0/why", Accept="text/html")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"SIGKILL" in page
    status, headers, _ = client.ask("/api/workers/ocr-0/why?format=text")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    tried = client.json("/api/workers/ocr-0/simulate?max_restarts=0")
    assert tried["simulated"]["masks"] == 1
    # What came after the crash is sent to a client that was away, and no snapshot.
    with closing(client.events("worker:ocr:*:status", Last_Event_ID=last_id)) as stream:
        assert next(iter(stream))["type"] != "snapshot"


def test_what_is_remembered_of_a_run_ends_with_it(site: WebSite, client: Client) -> None:
    """The list asks systemd and reads accounts only for what has changed; a single worker is always
    asked about in full."""

    def find() -> dict[str, Any]:
        workers = client.json("/api/workers")["workers"]
        (found,) = [each for each in workers if each["instance"] == "ocr-0"]
        return {
            name: found[name] for name in ("active", "pid", "invocation", "last_crash", "window")
        }

    before = find()
    assert find()["pid"] == before["pid"]
    run = site.crash("ocr-0")
    now = site.wait_for_worker("ocr-0", state="healthy")
    assert now["last_crash"]["invocation"] == run
    assert now["pid"] != before["pid"]
    site.lab.wait_for(lambda: find() == {name: now[name] for name in before}, what="the list")


def test_history_has_health_and_records(site: WebSite, client: Client) -> None:
    site.crash("ocr-1")
    found = site.lab.wait_for(
        lambda: [h for h in [client.json("/api/workers/ocr-1/history")] if h["health"]],
        what="samples",
    )[0]
    assert found["records"][-1]["kind"] == "signal"
    assert sum(found["health"][-1]["states"].values()) > 0
    lines = client.json("/api/sparklines")["workers"]
    assert set(lines["worker:ocr:1"][-3:]) - {"-"}
    drawn = site.good("history", "--health", "ocr-1", "--since", "1h")
    assert "healthy" in drawn
    assert "▼" in drawn


def test_frames_are_streamed_of_the_worker_that_is_asked_for(client: Client) -> None:
    with closing(client.events("worker:ocr:1:frames")) as stream:
        assert stream.until(type="snapshot")["topic"] == "worker:ocr:1:frames"
        assert stream.until(type="frames")["frames"][0].startswith("HEALTH|")
    assert client.json("/api/workers/ocr-1/frames")["frames"]
    assert client.ask("/events?topics=worker:*:frames")[0] == 400


def test_metrics_are_well_formed_and_few(site: WebSite, client: Client) -> None:
    status, _, body = client.ask("/metrics")
    assert status == 200
    families = {each.name: each for each in text_string_to_metric_families(body.decode())}
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["nomarr_up",] == 1
    assert values["nomarr_supervisor_notification_failures_total",] == 0
    assert values["nomarr_worker_healthy", "tag", "tag-0"] == 1
    assert values["nomarr_queue_jobs", "quarantined", "tag"] == 1
    assert values["nomarr_decisions_total", "restart", "signal", "tag"] >= 1
    assert sum(v for k, v in values.items() if k[0] == "nomarr_job_duration_seconds_count") >= 1
    told = {f.name + ("_total" if f.type == "counter" else "") for f in families.values()}
    table = (CHECKOUT / "docs/web.md").read_text().partition("## Metrics")[2]
    told -= {"nomarr_job_duration_seconds_created"}  # the library's
    assert told == set(re.findall(r"`(nomarr_[a-z_]+)`", table))
    for family in families.values():
        assert family.documentation, family.name
        for sample in family.samples:
            assert not set(sample.labels) - {"pool", "worker", "state", "action", "class", "le"}
            assert not any(re.search(r"[0-9a-f]{32}|/", text) for text in sample.labels.values())
    promtool = ["promtool", "check", "metrics"]
    done = subprocess.run(promtool, input=body, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


# Requests that are refused


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "127.0.0.1:x"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Host": "localhost:1"}, 200),
    ],
)
def test_other_sites_get_nothing(client: Client, headers: dict[str, str], status: int) -> None:
    for path in ("/api/workers", "/metrics", "/api/workers/tag-0/why"):
        assert client.ask(path, **headers)[0] == status, path
    if status != 200:
        assert client.ask("/events?topics=system:health", **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_questions_is_answered(client: Client, method: str) -> None:
    for path in ("/api/workers", "/", "/static/app.js", "/nothing"):
        assert client.ask(path, method=method)[0] == 405, path


def test_each_answer_has_the_headers_of_a_careful_page(client: Client) -> None:
    for path in ("/", "/static/app.js", "/api/workers", "/api/nothing", "/metrics"):
        _, headers, _ = client.ask(path)
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff", path
        assert "set-cookie" not in headers, path
        assert "server" not in headers, path
        assert "access-control-allow-origin" not in headers, path


@pytest.mark.parametrize(
    "path",
    [
        "/static/../main.py",
        "/static/..%2fmain.py",
        "/static/%2e%2e/main.py",
        "//etc/passwd",
        "/etc/passwd",
        "/static/",
        "/api/workers/../../etc/passwd",
    ],
)
def test_no_other_file_is_served(client: Client, path: str) -> None:
    assert client.ask(path)[0] == 404


@needs_root
def test_another_users_client_is_refused(client: Client) -> None:
    """The page of a user is theirs, though every user of the machine can reach the port."""
    asked = ["curl", "--silent", "--max-time", "10", "--write-out", "%{http_code}"]
    url = f"http://127.0.0.1:{client.port}/api/workers"
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", *asked, url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("403"), done.stdout
    assert "may not see" in done.stdout


# Clients that mean harm


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_a_thousand_idle_connections_and_half_sent_headers(client: Client) -> None:
    with ExitStack() as stack:
        for number in range(1000):
            link = stack.enter_context(connect(client.port))
            if number % 2:
                link.sendall(b"GET /api/workers HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        began = time.monotonic()
        assert client.ask("/healthz")[0] == 200
        assert client.ask("/api/workers")[0] == 200
        assert time.monotonic() - began < 20  # not the time: that it is answered at all


def test_huge_headers_and_bodies_are_dropped(client: Client) -> None:
    with connect(client.port) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        with suppress(ConnectionError):  # it hangs up before it has read ten megabytes
            for _ in range(1000):
                link.sendall(b"X-Big: " + b"a" * 10_000 + b"\r\n")
            assert not link.recv(65_536).startswith(b"HTTP/1.1 200")
    with connect(client.port) as link:
        link.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        assert b"200" not in link.recv(4096)[:15]
    assert client.ask("/healthz")[0] == 200


def test_a_client_that_never_reads_slows_nobody(site: WebSite, client: Client) -> None:
    """It has a small buffer and a stream of all there is; others see every change."""
    with ExitStack() as stack:
        for _ in range(20):
            link = stack.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.connect(("127.0.0.1", client.port))
            link.sendall(
                b"GET /events?topics=*:*,worker:*:status HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
        stream = stack.enter_context(closing(client.events("worker:odd:*:status")))
        stream.until(type="snapshot", topic="worker:odd:0:status")
        run = site.crash("odd-0")
        assert stream.until(type="worker:crash", invocation=run)
        # Gone without a word: its place is free again.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    site.wait_for_worker("odd-0", state="healthy")


def test_it_ends_at_once_with_clients_connected(site: WebSite, client: Client) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(closing(client.events("worker:*:status")))
        site.lab.systemctl("stop", "nomarr-web.service")
        assert site.lab.get("nomarr-web.service", "Result") == "success"
    site.start_web()


# The document


@schema.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_document_is_kept(case: Any, site: WebSite) -> None:
    if case.path == "/events":  # without an end; test_every_path_is_in_the_document has it
        return
    # Settings of [policy] may each be allowed and not fit each other.
    not_checked = [positive_data_acceptance] if case.path.endswith("/simulate") else []
    case.call_and_validate(base_url=site.url, excluded_checks=not_checked, timeout=20)


def test_every_path_is_in_the_document() -> None:
    routes = [each[0] for each in (*server.ROUTES, *server.ANSWERS)]
    documented = [path.replace("{worker}", "tag-0") for path in DOCUMENT["paths"]]
    pages = ("/", "/static/app.js")
    for path in documented:
        assert any(re.fullmatch(route, path) for route in routes), path
    for route in routes:
        assert any(re.fullmatch(route, path) for path in (*documented, *pages)), route


def test_its_memory_is_bounded(site: WebSite) -> None:
    pid = site.lab.main_pid("nomarr-web.service")
    status: dict[str, Any] = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert int(status["VmRSS"].split()[0]) < 150_000
    assert os.path.exists(f"/proc/{pid}")
