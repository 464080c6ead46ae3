"""The page in a real browser: real workers die under a real systemd, and the page shows it.

Debian's chromium, driven by Playwright. Without it these tests fail: packaging/prepare installs it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from nomarr_systemd.config.settings import POLICY
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.policy import Rules
from nomarr_systemd.demo.lab import LabUnavailable
from tests.support.lab import Lab
from tests.support.web_site import WebSite

CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 120_000  # only a hang takes longer, also on a busy machine


@pytest.fixture(scope="module")
def site() -> Iterator[WebSite]:
    lab = Lab()
    try:
        lab.begin()
    except LabUnavailable as error:
        pytest.skip(f"{error} ({error.hint})")
    try:
        site = WebSite(lab, backoff_s=8, ocr=3)  # long enough to be seen counted down
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
    # Without the pulse of the live sign, which is drawn sixty times a second.
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
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


def expect_state(page: Page, instance: str, state: str) -> None:
    pill = page.locator(f'nomarr-worker[data-worker="{instance}"] .pill')
    expect(pill).to_have_text(state)


def expect_link(page: Page, text: str) -> None:
    expect(page.locator("#link")).to_have_text(text)


def test_a_crash_is_seen_counted_down_and_explained(page: Page, site: WebSite) -> None:
    page.goto(site.url)
    expect_link(page, "live")
    expect_state(page, "ocr-0", "healthy")
    expect_row(page, "ocr-0", "never died")
    site.kill("ocr-0")
    expect_state(page, "ocr-0", "restarting")
    expect_row(page, "ocr-0", re.compile(r"restart in \d s"))
    expect(page.locator("nomarr-worker").first).to_have_attribute(
        "data-worker", re.compile("ocr-0|tag-.")
    )  # the worst first
    expect_row(page, "ocr-0", "SIGKILL")
    expect_state(page, "ocr-0", "healthy")  # after its backoff, without a reload
    gauge = page.locator('nomarr-worker[data-worker="ocr-0"] .budget')
    expect(gauge).to_have_attribute("aria-label", re.compile(r"1 of 3 restarts in 5 min"))
    page.get_by_role("link", name="ocr-0", exact=True).click()
    expect(page).to_have_url(f"{site.url}/?worker=ocr-0")
    expect(page.locator("details summary").first).to_contain_text("SIGKILL")
    page.locator("details summary").first.click()
    expect(page.locator(".why")).to_contain_text("worker:ocr:0 died: killed by SIGKILL")
    expect(page.locator(".why")).to_contain_text("Main process exited, code=killed, status=9/KILL")
    expect(page.locator(".timeline path.death")).to_have_count(1)
    expect(page.locator(".frames")).to_contain_text('"component_id":"worker:ocr:0"')
    fields = page.locator(".cards form [name]")
    names = fields.evaluate_all("all => all.map(each => each.name)")
    assert names == list(Rules._fields)  # all that nomarrctl policy simulate takes
    tried = Rules()._asdict() | {"max_restarts": 0, "never_restart": "1, 78"}
    given = {"max_restarts": 0, "never_restart": [1, 78]}
    for setting in POLICY:
        field = page.get_by_label(setting.key)
        if setting.kind == "word":  # the first says nothing but the value in force
            assert sorted(field.locator("option").all_text_contents()) == sorted(setting.words)
            field.select_option(setting.words[-1])
            given[setting.key] = setting.words[-1]
        else:
            field.fill(str(tried[setting.key]))
    with page.expect_response(re.compile("/simulate")) as answer:
        page.get_by_role("button", name="Try").click()
    assert answer.value.json()["set"] == tried | given
    expect(page.locator("table")).to_contain_text("masks")
    page.go_back()
    expect_state(page, "ocr-0", "healthy")


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
    expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()  # where one was


def test_a_filter_is_left_and_found_again(page: Page, site: WebSite) -> None:
    page.goto(f"{site.url}/?q=ocr")
    expect(page.locator("nomarr-worker")).to_have_count(3)
    page.get_by_role("link", name="ocr-1", exact=True).click()
    page.get_by_role("link", name="all workers", exact=False).last.click()
    expect(page).to_have_url(f"{site.url}/?q=ocr")
    expect(page.locator("nomarr-worker")).to_have_count(3)
    page.get_by_role("link", name="Workers", exact=True).click()
    expect(page.locator("nomarr-worker")).to_have_count(7)
    expect(page.locator("#filter")).to_have_value("")
    page.go_back()
    expect(page.locator("nomarr-worker")).to_have_count(3)


def test_dark_and_light_by_a_button(page: Page, site: WebSite) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(site.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Change between dark and light").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light  # it is remembered
    page.get_by_role("button", name="Change between dark and light").click()
    assert page.evaluate(ground) == light


def test_commands_are_copied(page: Page, site: WebSite) -> None:
    """Also from a row; the page itself cannot do it."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    site.good("pause", "ocr-2")
    try:
        page.goto(site.url)
        expect_state(page, "ocr-2", "paused")
        page.get_by_role("button", name="Copy: nomarrctl --user resume ocr-2").click()
        assert page.evaluate("navigator.clipboard.readText()") == "nomarrctl --user resume ocr-2"
    finally:
        site.good("resume", "ocr-2")
    site.wait_for_worker("ocr-2", state="healthy")


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
    expect_state(page, "ocr-1", "healthy")
    expect_loss(page)
    site.lab.systemctl("stop", "nomarr-web.service")
    expect_link(page, "offline")
    expect(page.locator("#alert")).to_contain_text("connection to nomarr-web is lost")
    expect_state(page, "ocr-1", "healthy")  # what was known stays
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
        lambda: site.lab.find_main_pid("nomarr-supervisor.service") not in (0, pid),
        what="a new one",
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


def test_an_outage_is_shown_until_it_is_over(page: Page, site: WebSite) -> None:
    """Three workers die alike: an incident opens, with a canary, and closes by itself."""
    began_ms = time.time() * 1000

    def find(**wanted: object) -> dict[str, Any]:
        for each in site.client.json("/api/incidents")["incidents"]:
            is_mine = each["pool"] == "ocr" and (each["opened_ms"] or 0) >= began_ms
            if is_mine and wanted.items() <= {**each, "held": len(each["held"])}.items():
                return dict(each)
        return {}

    def is_told(number: int) -> bool:
        said = site.client.ask("/metrics")[2].decode().splitlines()
        return {
            f'nomarr_incident_open{{pool="ocr"}} {number:.1f}',
            'nomarr_incidents_total{pool="ocr"} 1.0',
        } <= set(said)

    page.goto(f"{site.url}/?view=incidents")
    expect_link(page, "live")
    card = page.locator("section.card", has=page.get_by_role("heading", name="ocr")).first
    with site.outage("ocr-0", "ocr-1", "ocr-2"):
        opened = site.lab.wait_for(lambda: find(open=True, held=2), what="an open incident")
        assert opened["canary"] not in opened["held"]
        assert opened["text"].endswith(f"{opened['canary']} is tried first")
        assert opened["closed_ms"] is opened["closed"] is None
        site.lab.wait_for(lambda: is_told(1), what="the metrics tell it")
        expect(card.locator(".pill")).to_have_text("open")  # without a reload
        canary = parse_component(opened["canary"]).instance
        expect(card.get_by_role("link", name=canary)).to_be_visible()
        expect(card).to_contain_text("3 workers died alike: killed by SIGKILL")
        expect(card).to_contain_text(f"nomarrctl --user why {canary}")
        expect(card).to_contain_text("nomarrctl --user resume ocr")
        page.goto(f"{site.url}/?pool=ocr")
        expect(page.get_by_role("link", name="incident", exact=True)).to_be_visible()
        expect(page.locator("nomarr-worker .pill", has_text="held")).to_have_count(2)
        page.goto(f"{site.url}/?view=incidents")
        expect(card.locator(".pill")).to_have_text("open")
    closed = site.lab.wait_for(
        lambda: now if (now := find(open=False)).get("closed_ms") else {},
        what="it is closed",
    )
    assert closed["opened_ms"] == opened["opened_ms"] <= closed["closed_ms"]
    assert closed["canary"] in (opened["canary"], *opened["held"])
    assert closed["closed"].endswith("is healthy")
    site.lab.wait_for(lambda: is_told(0), what="the metrics tell it")
    assert (closed["workers"], closed["members"], closed["cause"]) == (
        3,
        "0-2",
        "killed by SIGKILL",
    )
    assert closed["deaths"] >= 3
    # Without a reload it is among the past ones: who died, how often, how long, and how it ended.
    past = page.locator(".past li").first
    expect(past).to_contain_text("ocr")
    expect(past).to_contain_text(f"3 workers died alike, {closed['deaths']} deaths")
    expect(past.locator(".pill")).to_contain_text("over after")
    expect(
        past.get_by_role("link", name=parse_component(closed["canary"]).instance)
    ).to_be_visible()
    ended = f"{parse_component(closed['canary']).instance} is healthy"
    expect(past).to_contain_text(ended)
    expect(page.locator("section.card .pill", has_text="open")).to_have_count(0)
    # The same in a terminal, between the records.
    told = site.good("history", "ocr").splitlines()
    began = [n for n, line in enumerate(told) if "3 workers of ocr died alike" in line]
    over = [n for n, line in enumerate(told) if "the incident of ocr is over after" in line]
    assert began[-1] < over[-1], told
    moments = [line[:19] for line in told[1:]]
    assert moments == sorted(moments), told
    assert any("ocr-0" in line and "SIGKILL" in line for line in told[: over[-1]]), told
    assert f"{closed['deaths']} deaths: {closed['closed']}" in told[over[-1]]
    (same,) = [
        each
        for each in site.json("history", "ocr-0")["incidents"]
        if each["opened_ms"] == closed["opened_ms"]
    ]
    assert same.items() <= closed.items()
    assert site.json("history", "odd-0")["incidents"] == []
    for worker in ("ocr-0", "ocr-1", "ocr-2"):
        site.wait_for_worker(worker, state="healthy", held=None)


def test_the_age_of_a_job(page: Page, site: WebSite) -> None:
    """The store knows when a job began, or the first frame; of a job that was in hand before
    nomarr-web came, the page says since when it is known."""
    age = page.locator('nomarr-worker[data-worker="odd-0"] .age')
    site.lab.systemctl("restart", "nomarr-web.service")
    site.wait_until_ready()
    page.goto(site.url)
    expect(age).to_have_text(re.compile(r"^≥ ([2-9]|\d\d+) s$"))  # it grows
    expect(age).to_have_attribute("title", re.compile("began before nomarr-web"))
    page.reload()
    expect(age).to_have_text(re.compile(r"^≥ ([2-9]|\d\d+) s$"))  # and does not begin again
    page.goto(f"{site.url}/?worker=odd-0")
    expect(page.locator(".worker-head .job")).to_contain_text(re.compile(r"≥ \d+ s"))
    page.goto(site.url)
    site.kill("odd-0")
    expect(age).to_have_text(re.compile(r"^\d+ s$"))  # the next run begins it
    page.reload()
    expect(age).to_have_text(re.compile(r"^\d+ s$"))
    site.add_jobs("slow.flac")
    busy = page.locator("nomarr-worker", has_text="slow.flac").locator(".age")
    expect(busy).to_have_text(re.compile(r"^\d+ s$"))
    page.reload()
    expect(busy).to_have_text(re.compile(r"^\d+ (s|min.*)$"))  # still that of the store
    Path(site.lab.directory, "slow.flac").unlink()  # it ends


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_everybody_can_use_it(browser: Browser, site: WebSite, theme: str) -> None:
    """By axe-core: contrast, names, roles, landmarks, in every view and on a phone."""
    for width in (1280, 390):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        for path in ("/", "/?worker=ocr-0", "/?view=queues", "/?view=incidents"):
            page.goto(site.url + path)
            expect_link(page, "live")
            if "worker" in path:
                page.locator("details summary").first.click()
                expect(page.locator(".why dl")).to_be_visible()
            elif path == "/":
                expect(page.locator("nomarr-worker")).to_have_count(7)
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"{path} is wider than {width}"
        context.close()


def test_it_is_of_use_when_everything_is_down(page: Page, site: WebSite) -> None:
    """The last test of this module: it ends the supervisor and every worker."""
    units = [each["unit"] for each in site.client.json("/api/workers")["workers"]]
    # With its socket: else nomarr-web, which connects again, has systemd start it.
    supervisor = ("nomarr-supervisor.socket", "nomarr-supervisor.service")
    site.lab.systemctl("stop", *supervisor, *units)
    expect_loss(page)  # what only the supervisor knows is answered with 503
    page.goto(site.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("0 of 7 workers run")
    expect(page.locator("#alert")).to_contain_text("The supervisor was stopped")
    expect(page.locator("#alert")).to_contain_text(
        "systemctl --user start nomarr-supervisor.service"
    )
    expect_state(page, "ocr-0", "stopped")
    expect_row(page, "ocr-0", re.compile(r"(SIGKILL|exit 1) \d+ (s|min) ago"))
    page.get_by_role("link", name="ocr-0", exact=True).click()
    expect(page.locator(".card .command").first).to_contain_text("nomarrctl --user why ocr-0")
    page.locator("details summary").last.click()  # the first of its deaths
    expect(page.locator(".why").last).to_contain_text("worker:ocr:0 died: killed by SIGKILL")
    page.goto(f"{site.url}/?view=queues")
    expect(page.locator("main")).to_contain_text("supervisor does not answer")
