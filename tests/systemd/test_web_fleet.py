"""The page of a host that shares its store: all hosts, the worst first, in a real browser; and what
a worker with the jobs' password could write about a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from nomarr_systemd.store.protocol import HOSTS
from tests.support.fleet_site import Host, Servers, make_hosts, run_servers
from tests.support.web_site import Client, find_port

CHROMIUM = "/usr/bin/chromium"
EVIL = '<img src=x onerror="document.title=1">\x1b[2J; reboot'


class FleetPage:
    def __init__(self, host: Host, servers: Servers, port: int) -> None:
        self.host, self.servers, self.port = host, servers, port
        self.client = Client(port)
        host.lab.systemctl("start", "nomarr-web.service")
        host.lab.wait_for(self.client.is_ready, what="nomarr-web is ready")


@pytest.fixture
def fleet_page(tmp_path: Path) -> Iterator[FleetPage]:
    with run_servers() as servers, make_hosts(["alpha"]) as (lab,):
        port = find_port()
        web = f'[web]\nlisten = "127.0.0.1:{port}"\n'
        host = Host(lab, servers, tmp_path, {"tag": (2, "")}, web)
        host.wait_until_healthy("tag-0", "tag-1")
        yield FleetPage(host, servers, port)


def test_all_hosts_on_the_page(fleet_page: FleetPage) -> None:
    crash = {"worker": "tag-0; reboot", "wall_ms": 1, "invocation": EVIL, "cause": EVIL}
    with closing(fleet_page.servers.open()) as store:
        about = {"state": "held", "lease_ms": 10_000, "version": "1", "pools": {"tag": {EVIL: 1}}}
        old = {"name": EVIL, "renewed_ms": 1, "crashes": [crash], "system": EVIL}
        store.insert(HOSTS, {"_key": "evil", **about, **old})
        gone = {"name": "gone", "renewed_ms": 1, "system": "healthy", "state": "lost"}
        store.insert(HOSTS, {"_key": "gone", **about, **gone})
    host = fleet_page.host

    def is_up() -> bool:
        hosts = fleet_page.client.json("/api/fleet")["hosts"]
        return any(each["pools"] == {"tag": {"healthy": 2}} for each in hosts)

    host.lab.wait_for(is_up, what="the host tells how its workers are")
    told = fleet_page.client.json("/api/fleet")
    assert told["shared"]
    assert [each["state"] for each in told["hosts"]] == ["lost", "stale", "up"]
    assert told["hosts"][2]["host"] == told["host"]
    assert Path(CHROMIUM).exists(), "chromium is missing: run packaging/prepare test"
    expect.set_options(timeout=20_000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, theme in ((1280, "light"), (390, "dark")):
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                color_scheme=theme,  # type: ignore[arg-type]
            )
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{fleet_page.port}/")
            page.get_by_role("link", name="Fleet").click()
            cards = page.locator(".card")
            expect(cards).to_have_count(3)
            expect(cards.nth(0)).to_contain_text("the other hosts have settled its jobs")
            expect(cards.nth(1)).to_contain_text('<img src=x onerror="document.title=1">')
            expect(cards.nth(1).locator(".command")).to_have_count(0)  # it would have "; reboot"
            expect(cards.nth(2)).to_contain_text("(this host)")
            expect(cards.nth(2)).to_contain_text("2 healthy")
            assert page.title() == "nomarr"
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
            page.locator("#filter").fill("gone")
            expect(cards).to_have_count(1)
            context.close()
        browser.close()
