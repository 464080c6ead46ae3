"""nomarr-web: from a frame to a client of the stream, many clients, metrics, and the page."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import selectors
import socket
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import cast

from nomarr_systemd.config.values import Config, Pool, StoreSettings, WebSettings
from nomarr_systemd.core import account as book_keeping
from nomarr_systemd.core.account import Account
from nomarr_systemd.core.death import Death
from nomarr_systemd.core.health import HealthRules, Sample
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.host import clock
from nomarr_systemd.ledger.health_history import append
from nomarr_systemd.ledger.health_series import COARSE, FINE, MIDDLE
from nomarr_systemd.store.protocol import POLICY_LEDGER
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.bench.timing import report
from tests.support.lab import Lab
from tests.support.supervision import Writer, make_lab
from tests.support.web_process import serve, wait_until_ready
from tests.support.web_site import Client, find_port

ROUNDS = 100
CLIENTS = 500
WORKERS = 200
YEAR_MS = 365 * 86_400_000
HZ = 4
SECONDS = 8
LONGEST_S = 60.0  # only a hang takes longer
LAST = b'"current_job":"last-'
LAST_JOB = re.compile(rb'"current_job":"(last-[0-9]+)"')
# Nothing but what is measured changes a worker.
CALM = HealthRules(staleness_interval_s=3600, startup_timeout_s=3600)
CHROMIUM = "/usr/bin/chromium"
# Active, and known to systemd by a run, after a process that ends at once.
IDLE = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=
ExecStart=/bin/true
WatchdogSec=0
"""
TICKS = os.sysconf("SC_CLK_TCK")


def measure() -> None:
    with make_lab() as lab:
        lab.configure(tag=WORKERS, health=CALM)
        fill_year(lab.paths.state)
        lab.start()
        writers = []
        for number in range(WORKERS):
            lab.begin_run(f"tag-{number}")
            writers.append(lab.writer(f"tag-{number}"))
            writers[-1].frame(job="first")
        port = find_port()
        with serve(lab, WebSettings(f"127.0.0.1:{port}"), client := Client(port)) as pid:
            measure_year(client)
            measure_latency(client, writers[0])
            measure_clients(client, pid, writers)
    for workers in (200, 2000):
        measure_page(workers)


def fill_year(state: str) -> None:
    """A year of samples of every worker, in each layer as far back as it is kept."""
    store = SqliteStore(state, "work")
    now_ms = time.time_ns() // 1_000_000
    chunk = now_ms // FINE.chunk_ms
    workers = [f"worker:tag:{number}" for number in range(WORKERS)]
    index = {"workers": {each: {"chunk": chunk, "run": "a" * 32} for each in workers}}
    store.insert("stats", {"_key": "health:index", **index})
    for layer in (FINE, MIDDLE, COARSE):
        samples = layer.step_ms // FINE.step_ms
        rows: dict[int, list[object]] = {}
        since_ms = now_ms - (layer.keep_ms or YEAR_MS)
        first_ms = since_ms - since_ms % layer.step_ms
        for start_ms in range(first_ms, chunk * FINE.chunk_ms, layer.step_ms):
            bad = int(random.random() < 0.05)
            counts = {"h": samples} if not bad or samples == 1 else {"h": samples - 1, "u": 1}
            rows.setdefault(start_ms // layer.chunk_ms, []).append([start_ms, counts, bad, 0, 0])
        for worker in workers:
            with store.batch():
                for number, part in rows.items():
                    filled_ms = chunk * FINE.chunk_ms - FINE.step_ms
                    key = layer.key(worker, number, "")
                    store.insert("stats", {"_key": key, "filled_ms": filled_ms, "rows": part})
    # What is not condensed yet: as many as there can be at the default interval.
    for age in range(20, 0, -1):
        at_ms = now_ms - age * FINE.step_ms
        append(
            store, [Sample(each, at_ms, "healthy", "a" * 32, 0, 0, 0, "", b"") for each in workers]
        )
    size = sum(each.stat().st_size for each in Path(state).rglob("*") if each.is_file())
    report(f"a year of {WORKERS} workers", f"{size / 1e6:.0f} MB", "< 1000 MB")


def measure_year(client: Client) -> None:
    until_ms = time.time_ns() // 1_000_000
    path = f"history?since_ms={until_ms - YEAR_MS}&until_ms={until_ms}&points=400"
    taken = []
    for number in range(0, WORKERS, 10):
        began = time.perf_counter()
        found = client.json(f"/api/workers/tag-{number}/{path}")
        taken.append((time.perf_counter() - began) * 1000)
        assert len(found["health"]) > 390
    figure = f"{statistics.median(taken):.0f} ms, {max(taken):.0f} ms"
    report("  its time line (median, worst)", figure, "< 200 ms")
    began = time.perf_counter()
    lines = client.json("/api/sparklines")["workers"]
    took_ms = (time.perf_counter() - began) * 1000
    assert all(line.strip("-") for line in lines.values())
    report(f"  sparklines of {len(lines)} workers", f"{took_ms:.0f} ms")


def measure_latency(client: Client, writer: Writer) -> None:
    """One change at a time; the batches of a client are 0.25 s apart at least."""
    taken = []
    with closing(client.events("worker:tag:0:status")) as stream:
        events = iter(stream)
        next(events)
        for number in range(ROUNDS):
            time.sleep(random.uniform(0.26, 0.4))
            began = time.perf_counter()
            writer.frame(job=f"job-{number}")
            while next(events)["worker"]["current_job"] != f"job-{number}":
                pass
            taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    figure = f"{statistics.median(taken):.1f} ms, {taken[int(0.99 * len(taken))]:.1f} ms"
    report("frame → SSE client (median, p99)", figure)


class Reader:
    """A client of the stream that reads all there is. Texts are searched, not parsed: what is
    measured is the server, and 400,000 events arrive in a second."""

    def __init__(self, port: int) -> None:
        self.jobs: set[bytes] = set()  # of the last turn
        self.events = self.lost = 0
        self._rest = b""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(
            b"GET /events?topics=worker:*:status HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(1 << 20)
            if not data:
                raise SystemExit("nomarr-web has closed a stream")
            text = self._rest + data
            self.events += text.count(b"\nevent: ")
            self.lost += text.count(b"\nevent: lost\n")
            if LAST in text:
                self.jobs.update(LAST_JOB.findall(text))
            self._rest = text[text.rfind(b"\n") :]  # each line is found whole, and once

    def close(self) -> None:
        self._socket.close()


class Crowd:
    """Many readers in one thread."""

    def __init__(self, port: int, size: int) -> None:
        self.readers = [Reader(port) for _ in range(size)]
        self._selector = selectors.DefaultSelector()
        for each in self.readers:
            self._selector.register(each, selectors.EVENT_READ)

    def read(self, timeout_s: float) -> None:
        """Read what comes until the time is over."""
        ends = time.monotonic() + timeout_s
        while (left_s := ends - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                cast(Reader, key.fileobj).read()

    def close(self) -> None:
        self._selector.close()
        for each in self.readers:
            each.close()


def measure_clients(client: Client, pid: int, writers: list[Writer]) -> None:
    """In the end each client must know the last job of every worker, and have lost nothing."""
    with closing(Crowd(client.port, CLIENTS)) as crowd:
        crowd.read(2)  # snapshots
        before, began = read_cpu_s(pid), time.monotonic()
        for each in crowd.readers:
            each.events = 0
        for turn in range(SECONDS * HZ):
            for writer in writers:
                writer.frame(job=str(turn))
            crowd.read(began + (turn + 1) / HZ - time.monotonic())
        used, took = read_cpu_s(pid) - before, time.monotonic() - began
        rss_kb, events = read_rss_kb(pid), sum(each.events for each in crowd.readers)
        for number, writer in enumerate(writers):
            writer.frame(job=f"last-{number}")
        asked = time.monotonic()
        while any(len(each.jobs) < WORKERS for each in crowd.readers):
            crowd.read(0.05)
            if time.monotonic() - asked > LONGEST_S:
                break
        behind = sum(len(each.jobs) < WORKERS for each in crowd.readers)
        lost = sum(each.lost for each in crowd.readers)
    name = f"{CLIENTS} clients × {WORKERS} workers × {HZ} Hz"
    report(name, f"{100 * used / took:.0f} % CPU, {rss_kb / 1024:.0f} MiB")
    report("  events read by all of them", f"{events / took / 1000:.0f},000/s")
    took_s = time.monotonic() - asked
    report("  all up to date after the last frame", f"{took_s:.2f} s")
    report("  events lost, clients not up to date", f"{lost}, {behind}", "0, 0")


def read_rss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure_page(workers: int) -> None:
    """Real units, which are active, with half a ring of records each."""
    with Lab() as lab:
        lab.install('[pool.tag]\ncommand = ["/bin/true"]\n')
        port = find_port()
        config = Config(
            store=StoreSettings(f"sqlite://{lab.paths.state}"),
            web=WebSettings(f"127.0.0.1:{port}"),
            pools=(Pool("tag", workers=workers, command=("/bin/true",)),),
        )
        Path(lab.paths.resolved).write_text(json.dumps(config.to_dict()))
        Path(lab.units, "nomarr-worker@.service.d").mkdir()
        lab.write_unit("nomarr-worker@.service.d/zz-bench.conf", IDLE)
        names = " ".join(each.unit for each in config.components())
        lab.write_unit("many.target", f"[Unit]\nWants={names}\n")
        lab.reload()
        fill_accounts(lab.paths.state, config)
        programs = ("nomarr-supervisor.service", "nomarr-web.service")
        lab.systemctl("start", "many.target", *programs, timeout_s=300)
        lab.systemctl("start", "nomarr-reconcile.service", timeout_s=300)  # publishes the accounts
        client = Client(port)
        wait_until_ready(client)
        measure_answers(client, workers)
        measure_paint(port, workers)


def fill_accounts(state: str, config: Config) -> None:
    """The accounts of workers that died now and then over months."""
    account, now = Account("worker:tag:0"), clock.now()
    rules = Rules(max_lifetime_restarts=0)
    for number in range(50):
        then = now._replace(wall_ms=now.wall_ms - (50 - number) * 86_400_000, boot_id="a" * 32)
        death = Death("worker:tag:0", f"{number:032x}", "signal", -11)
        account = book_keeping.record_failure(account, death, rules, then)[0]
        account = book_keeping.set_effect(account, death.invocation, "done", then)
    document = book_keeping.to_doc(account)
    names = [each.component_id for each in config.components()]
    with closing(SqliteStore(state, "policy")) as store:
        store.add(
            POLICY_LEDGER, [{**document, "_key": name, "component_id": name} for name in names]
        )


def measure_answers(client: Client, workers: int) -> None:
    for path in ("/metrics", "/api/workers"):
        client.ask(path)
        taken, size = [], 0
        for _ in range(5):
            time.sleep(1.1)  # else the last look is used again
            began = time.perf_counter()
            size = len(client.ask(path)[2])
            taken.append((time.perf_counter() - began) * 1000)
        report(
            f"{path} at {workers} workers",
            f"{statistics.median(taken):.0f} ms, {size / 1024:.0f} KiB",
        )


def measure_paint(port: int, workers: int) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("nomarr-worker")).to_have_count(workers, timeout=60_000)
        paint, rows, size = page.evaluate("""() => [
            performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0,
            performance.now(),
            [...performance.getEntriesByType('resource'),
             ...performance.getEntriesByType('navigation')]
                .reduce((sum, each) => sum + each.transferSize, 0)]""")
        browser.close()
    figure = f"{paint:.0f} ms, {rows:.0f} ms, {size / 1024:.0f} KiB"
    report(f"page at {workers}: first paint, all rows, bytes", figure)
