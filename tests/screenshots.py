"""``python -m tests.screenshots [DIRECTORY]``: pictures of the page, in docs/screenshots.

Everything in them happens: workers die, hang on and fail under the private systemd of the tests.
Only the past is written by hand, for the page has been up for seconds: the health of the day
before, and the incidents of the week.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from nomarr_systemd.core.health import Sample
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.host import clock
from nomarr_systemd.ledger import health_series
from nomarr_systemd.ledger.health_history import append
from nomarr_systemd.ledger.incidents import IncidentStore
from nomarr_systemd.store.sqlite.store import SqliteStore
from tests.support.lab import CHECKOUT, Lab
from tests.support.operator_site import Installation
from tests.support.web_site import Client, find_port

CHROMIUM = "/usr/bin/chromium"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
DAY_S = 86_400
SIZES = {390: 1300, 1280: 1000, 1920: 1080}
VIEWS = {
    "workers": "/",
    "worker": "/?worker=scan-1",
    "queues": "/?view=queues",
    "incidents": "/?view=incidents",
}
CONFIG = """\
[policy]
backoff_base_s = 240
backoff_jitter = 0
backoff_max_s = 240
max_restarts = 3
max_lifetime_restarts = 20
[health]
snapshot_interval_s = 1
[web]
listen = "127.0.0.1:{port}"
[pool.tag]
workers = 5
entrypoint = "tests.support.web_workers:Tagger"
job_max_crashes = 1
watchdog_s = 3600
[pool.scan]
workers = 4
command = ["{worker}"]
watchdog_s = 3600
[pool.embed]
workers = 3
command = ["{worker}"]
watchdog_s = 3600
[pool.ocr]
workers = 2
command = ["{worker}"]
watchdog_s = 3600
"""
WORKER = """\
#!/bin/sh
# It reads pages, until there is a file that tells it with which status to exit.
trap "exit 0" TERM
end="$0.${NOMARR_COMPONENT_ID##worker:}"
may_go_on() {
    [ ! -e "$end" ] || { echo "model.bin: no such file" >&2; exit "$(cat "$end")"; }
}
may_go_on
systemd-notify --ready
n=$$
while may_go_on; do
    printf 'HEALTH|{"component_id":"%s","status":"healthy","phase":"processing",%s,"seq":%s}\\n' \\
        "$NOMARR_COMPONENT_ID" "\\"job\\":\\"shelf/page-$((n / 120)).pdf\\"" "$n" >&3
    n=$((n + 1))
    sleep 0.5 & wait $!
done 3>"$NOMARR_HEALTH_PIPE"
"""
NAMES = [
    f"{pool}-{number}"
    for pool, many in (("tag", 5), ("scan", 4), ("embed", 3), ("ocr", 2))
    for number in range(many)
]


class Stage(Installation):
    """Four pools in every state that a worker can have."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.program = lab.write_program("reader", WORKER)
        self.port = find_port()
        self.client = Client(self.port)
        self.config.write_text(CONFIG.format(port=self.port, worker=self.program))

    def play(self) -> None:
        self.good("apply")
        self.fill_incidents()
        self.lab.systemctl("start", "nomarr-web.service")
        self.lab.wait_for(self.client.is_ready, what="nomarr-web is ready")
        self.wait_until_healthy(*NAMES)
        self.fill_history()
        self.wait_until_reconciled()
        music = [f"take-{n:02}.flac" for n in range(1, 25)]
        self.add_jobs(*music, "cover.broken.flac", "poison.flac", "slow-concert.flac")
        self.wait_for("tag", lambda w: w["last_crash"] is not None)
        self.add_jobs("slow-opera.flac")
        self.good("pause", "scan-3")
        self.fail("ocr-1", 78)
        self.wait_for("ocr-1", lambda w: w["state"] == "masked")
        for name in ("embed-0", "embed-1", "embed-2"):
            self.fail(name, 1)
        self.wait_for("embed", lambda w: w["state"] == "held")
        os.kill(self.look("scan-1")["pid"], signal.SIGSEGV)
        self.wait_for("scan-1", lambda w: w["state"] == "restarting")

    def fail(self, instance: str, status: int) -> None:
        """From now on the worker exits with ``status``, also when it is started again."""
        Path(f"{self.program}.{instance.replace('-', ':')}").write_text(str(status))

    def look(self, instance: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.json(f"/api/workers/{instance}")
        return found

    def wait_for(self, name: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        self.lab.wait_for(
            lambda: any(
                is_so(each)
                for each in self.client.json("/api/workers")["workers"]
                if name in (each["pool"], each["instance"])
            ),
            what=name,
            timeout_s=60,
        )

    def add_jobs(self, *names: str) -> None:
        music = Path(self.lab.directory, "music")
        music.mkdir(exist_ok=True)
        for name in names:
            (music / name).touch()
        self.good("jobs", "add", "--pool", "tag", *(f"{music}/{name}" for name in names))

    def fill_incidents(self) -> None:
        """Three outages, two of which ended by themselves."""
        hour_ms = 3_600_000
        now = clock.now()
        with closing(SqliteStore(str(self.state), "policy")) as store:
            for pool, members, hours, minutes, kind, code, why in (
                ("scan", 4, 120, 42, "exit", 1, "resumed by operator"),
                ("embed", 3, 51, 3, "signal", -9, "worker:embed:1 is healthy"),
                ("scan", 3, 7, 11, "exit", 1, "worker:scan:0 is healthy"),
            ):
                names = tuple(f"worker:{pool}:{number}" for number in range(members))
                opened = now._replace(wall_ms=now.wall_ms - hours * hour_ms, boot_id="a" * 32)
                incidents = IncidentStore(store)
                incidents.open(Incident(pool, kind, code, opened, names[0], names, ()))
                if why.startswith("worker:embed"):
                    incidents.elect(pool, names[1])
                closed = now._replace(wall_ms=opened.wall_ms + minutes * 60_000)
                incidents.close(pool, why, closed, members + minutes // 2)

    def fill_history(self) -> None:
        """A day of samples: healthy, with a few bad quarters of an hour."""
        store = SqliteStore(str(self.state), "work")
        chance = random.Random(7)  # the same picture each time
        now_ms = time.time_ns() // 1_000_000
        samples = []
        for name in NAMES:
            component = f"worker:{name.replace('-', ':')}"
            words = chance.choices(["unhealthy", "crashed", "starting"], k=5)
            bad = [(chance.randrange(DAY_S), word) for word in words]
            for second in range(0, DAY_S, 60):
                status = next((word for at, word in bad if at <= second < at + 600), "healthy")
                at_ms = now_ms - (DAY_S - second) * 1000
                samples.append(Sample(component, at_ms, status, "a" * 32, 0, 0, 0, "", b""))
        append(store, sorted(samples, key=lambda each: each.wall_ms))
        health_series.condense(store, now_ms)


def take(browser: Browser, url: str, directory: Path) -> None:
    for theme in THEMES:
        for width, height in SIZES.items():
            size: ViewportSize = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=theme)
            page = context.new_page()
            for name, path in VIEWS.items():
                page.goto(url + path)
                expect(page.locator("#link")).to_have_text("live")
                show(page, name)
                page.screenshot(path=directory / f"{name}-{theme}-{width}.png")
            context.close()


def show(page: Page, name: str) -> None:
    """Wait until a view has all that it reads."""
    if name == "workers":
        expect(page.locator(".spark rect").first).to_be_visible()
    elif name == "worker":
        page.locator("details summary").first.click()
        expect(page.locator(".why dl")).to_be_visible()
        page.evaluate("scrollTo(0, 0)")
    elif name == "queues":
        expect(page.locator(".jobs").first).to_be_visible()
    else:
        expect(page.locator(".card .pill").first).to_be_visible()
    page.evaluate("document.activeElement.blur()")


def main(argv: list[str]) -> int:
    directory = Path(argv[0]) if argv else CHECKOUT / "docs/screenshots"
    directory.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=30_000)
    with Lab() as lab, sync_playwright() as driver:
        stage = Stage(lab)
        stage.play()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, f"http://127.0.0.1:{stage.port}", directory)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
