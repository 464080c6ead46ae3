"""The page in a real browser: real workers die under a real systemd, and the page shows it.

Debian's chromium, driven by Playwright. Without it these tests fail: packaging/prepare installs it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from nomarr_systemd.demo.lab import LabUnavailable
from tests.support.lab import Lab
from tests.support.web_site import WebSite

CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def site() -> Iterator[WebSite]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = WebSite(lab, backoff_s=3, ocr=3)
        site.add_jobs("a.flac", "broken.flac", "poison.flac")
        yield site
    finally:
        lab.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert Path(CHROMIUM).exists(), "chromium is missing: run packaging/prepare test"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """What a page did that it should not: errors, requests to others."""

    def __init__(self, page: Page, url: str) -> None:
        self.troubles: list[str] = []
        self.expects_loss = False
        self._url = url
        page.on("console", self._take_line)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("request", self._take_request)

    def _take_line(self, line: ConsoleMessage) -> None:
        if line.type in ("error", "warning") and not self.expects_loss:
            self.troubles.append(f"{line.type}: {line.text}")

    def _take_request(self, request: Request) -> None:
        if not request.url.startswith((self._url, "data:")):
            self.troubles.append(f"a request to others: {request.url}")


@pytest.fixture
def page(browser: Browser, site: WebSite) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    watched = Watched(page, site.url)
    page.nomarr = watched  # type: ignore[attr-defined]
    yield page
    context.close()
    assert not watched.troubles


def expect_loss(page: Page) -> None:
    """From here on the browser may complain about a server that is away."""
    page.nomarr.expects_loss = True  # type: ignore[attr-defined]


def row(page: Page, instance: str) -> object:
    return page.locator(f'nomarr-worker[data-worker="{instance}"]')


def expect_row(page: Page, instance: str, text: str | re.Pattern[str]) -> None:
    expect(page.locator(f'nomarr-worker[data-worker="{instance}"]')).to_contain_text(text)


def expect_link(page: Page, text: str) -> None:
    expect(page.locator("#link")).to_have_text(text)


def test_a_crash_is_seen_counted_down_and_explained(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect_link(page, "live")
    expect_row(page, "ocr-0", "healthy")
    expect_row(page, "ocr-0", "never died")
    site.kill("ocr-0")
    expect_row(page, "ocr-0", "restarting")
    expect_row(page, "ocr-0", re.compile(r"restart in \d s"))
    expect(page.locator("nomarr-worker").first).to_have_attribute(
        "data-worker", re.compile("ocr-0|tag-.")
    )  # the worst first
    expect_row(page, "ocr-0", "SIGKILL")
    expect_row(page, "ocr-0", "healthy")  # after its backoff, without a reload
    gauge = page.locator('nomarr-worker[data-worker="ocr-0"] .budget')
    expect(gauge).to_have_attribute("aria-label", re.compile(r"1 of 3 restarts in 5 min"))
    page.get_by_role("link", name="ocr-0", exact=True).click()
    expect(page).to_have_url(f"{site.url}/?worker=ocr-0")
    page.locator("details summary").first.click()
    expect(page.locator(".why")).to_contain_text("worker:ocr:0 died: killed by SIGKILL")
    expect(page.locator(".why")).to_contain_text("Main process exited, code=killed, status=9/KILL")
    expect(page.locator(".timeline path.death")).to_have_count(1)
    expect(page.locator(".frames")).to_contain_text('"component_id":"worker:ocr:0"')
    page.get_by_label("max_restarts").fill("0")
    page.get_by_role("button", name="Try").click()
    expect(page.locator("table")).to_contain_text("masks")
    page.go_back()
    expect_row(page, "ocr-0", "healthy")


def test_filter_and_deep_links(page: Page, site: WebSite) -> None:
    page.goto(f"{site.url}/?pool=ocr")
    expect(page.locator("nomarr-worker")).to_have_count(3)
    page.goto(site.url)
    expect(page.locator("nomarr-worker")).to_have_count(7)
    page.keyboard.press("/")
    page.keyboard.type("tag-1")
    expect(page.locator("nomarr-worker")).to_have_count(1)
    expect(page).to_have_url(f"{site.url}/?q=tag-1")
    page.reload()
    expect(page.locator("nomarr-worker")).to_have_count(1)
    page.get_by_role("link", name="show all").click()
    expect(page.locator("nomarr-worker")).to_have_count(7)
    values = page.locator("#suggestions option").evaluate_all("all => all.map(o => o.value)")
    assert {"ocr", "ocr-1", "state:healthy"} <= set(values)
    page.goto(f"{site.url}/?worker=worker:tag:1")
    expect(page.get_by_role("heading", level=1)).to_have_text("tag-1")


def test_the_whole_way_by_keyboard(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect(page.locator("nomarr-worker")).to_have_count(7)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    name = page.locator(":focus").inner_text()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    page.keyboard.press("Escape")
    expect(page.locator("nomarr-worker")).to_have_count(7)


def test_queues_show_evidence(page: Page, site: WebSite) -> None:
    page.goto(f"{site.url}/?view=queues")
    card = page.locator("section.card", has=page.get_by_role("heading", name="tag", exact=True))
    expect(card).to_contain_text("Quarantined (1)")
    expect(card).to_contain_text("poison.flac")
    expect(card).to_contain_text("killed by SIGSEGV")
    expect(card).to_contain_text("cannot read")
    expect(card).to_contain_text("nomarrctl --user jobs quarantine release")


def test_what_workers_say_stays_text(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect_row(page, "odd-0", "<img src=x")
    expect_row(page, "odd-0", "\\u001b[2J\\u202e")
    page.goto(f"{site.url}/?worker=odd-0")
    expect(page.locator(".frames")).to_contain_text("<i>processing</i>")
    dead = next(
        each["instance"]
        for each in site.client.json("/api/workers")["workers"]
        if each["pool"] == "tag" and each["last_crash"]
    )
    page.goto(f"{site.url}/?worker={dead}")
    page.locator("details summary").first.click()
    expect(page.locator(".why")).to_contain_text("<script>document.title='owned'</script>")
    assert page.locator(".why script, main img, main i").count() == 0
    expect(page).to_have_title(f"{dead} – nomarr")


def test_loss_of_the_web_process_and_of_the_supervisor(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect_link(page, "live")
    expect_loss(page)
    site.lab.systemctl("stop", "nomarr-web.service")
    expect_link(page, "offline")
    expect(page.locator("#alert")).to_contain_text("connection to nomarr-web is lost")
    expect_row(page, "ocr-1", "healthy")  # what was known stays
    site.kill("ocr-1")  # nobody sees it now
    site.start_web()
    expect_link(page, "live")
    expect_row(page, "ocr-1", "SIGKILL")  # caught up
    expect(page.locator("#alert")).not_to_contain_text("lost")
    site.lab.systemctl("stop", "nomarr-supervisor.service")
    expect_link(page, "no supervisor")
    expect(page.locator("#alert")).to_contain_text("supervisor does not answer")
    site.lab.systemctl("start", "nomarr-supervisor.service")
    expect_link(page, "live")
    pid = site.lab.main_pid("nomarr-supervisor.service")
    site.lab.systemctl("kill", f"--signal={int(signal.SIGKILL)}", "nomarr-supervisor.service")
    site.lab.wait_for(
        lambda: site.lab.main_pid("nomarr-supervisor.service") not in (0, pid), what="a new one"
    )
    site.kill("ocr-2")
    expect_row(page, "ocr-2", "SIGKILL")  # the stream goes on, by the new supervisor
    expect_link(page, "live")


def test_a_hidden_page_does_not_stream(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect_link(page, "live")
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    expect_link(page, "paused")
    site.lab.wait_for(
        lambda: b"nomarr_web_stream_clients 0.0" in site.client.ask("/metrics")[2],
        what="the stream is closed",
    )
    page.evaluate(hide, False)
    expect_link(page, "live")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_everybody_can_use_it(browser: Browser, site: WebSite, theme: str) -> None:
    """By axe-core: contrast, names, roles, landmarks, in every view and on a phone."""
    for width in (1280, 390):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        page = context.new_page()
        for path in ("/", "/?worker=ocr-0", "/?view=queues", "/?view=incidents"):
            page.goto(site.url + path)
            expect_link(page, "live")
            if "worker" in path:
                page.locator("details summary").first.click()
                expect(page.locator(".why dl")).to_be_visible()
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"{path} is wider than {width}"
        context.close()
