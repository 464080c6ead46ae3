"""The answers of the API: each a function of the site, the parameters and a name in the path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from nomarr_systemd.config.values import Config
from nomarr_systemd.core.errors import BadName, NoSuchWorker
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.web import readers
from nomarr_systemd.web.handlers import Handler
from nomarr_systemd.web.site import Site

Query = dict[str, str]
Answer = Callable[[Site, Query, str], Awaitable[object]]
ANY: Final = ("*",)  # the function itself checks the parameters
_MAX_PARAMETERS: Final = 20


def parse_worker(name: str) -> Component:
    """Return the worker that a path names; NoSuchWorker also if the name is not well formed."""
    try:
        return parse_component(name)
    except BadName as error:
        raise NoSuchWorker(str(error), hint="GET /api/workers lists them") from error


async def find_configured(site: Site, name: str) -> tuple[Config, Component]:
    config, worker = await site.config(), parse_worker(name)
    if worker not in config.components():
        raise NoSuchWorker(f"{worker} is not configured", hint="GET /api/workers lists them")
    return config, worker


async def list_workers(site: Site, _query: Query, _name: str) -> object:
    found = await site.run(readers.list_workers, await site.look())
    found["workers"] = [_time_job(site, each) for each in found["workers"]]
    return found


async def find_worker(site: Site, _query: Query, name: str) -> object:
    config = await site.config()
    return _time_job(site, await site.run(readers.find_worker, site.scope, config, name))


def _time_job(site: Site, worker: dict[str, Any]) -> dict[str, Any]:
    """Add when the job in hand began, or since when it is known to be in hand."""
    seen = site.upstream.find_job(worker["component"], worker["job"])
    return worker | {
        "job_seen_ms": seen.wall_ms if seen else None,
        "job_seen_from_start": bool(seen and seen.is_start),
    }


async def list_pools(site: Site, _query: Query, _name: str) -> object:
    return await site.run(readers.list_pools, await site.look(), site.queues())


async def list_policies(site: Site, query: Query, _name: str) -> object:
    wanted = [query["worker"]] if "worker" in query else []
    return await site.run(readers.list_policies, await site.look(), wanted)


async def list_jobs(site: Site, query: Query, _name: str) -> object:
    config = await site.config()
    return await site.run(readers.list_jobs, site.scope, config, query)


async def list_incidents(site: Site, _query: Query, _name: str) -> object:
    return await site.run(readers.list_incidents, site.scope, await site.look())


async def read_fleet(site: Site, _query: Query, _name: str) -> object:
    return await site.fleet()


async def read_history(site: Site, query: Query, name: str) -> object:
    return await site.run(readers.read_history, site.scope, parse_worker(name), query)


async def read_sparklines(site: Site, _query: Query, _name: str) -> object:
    return await site.sparklines()


async def read_frames(site: Site, _query: Query, name: str) -> object:
    _, worker = await find_configured(site, name)
    return await site.run(readers.read_frames, site.scope, worker)


async def try_policy(site: Site, query: Query, name: str) -> object:
    config, worker = await find_configured(site, name)
    changes = [f"{key}={value}" for key, value in query.items()]
    return await site.run(readers.try_policy, site.scope, config, worker, changes)


async def show_openapi(site: Site, _query: Query, _name: str) -> object:
    return site.openapi


class ApiHandler(Handler):
    """One path of the API, and the parameters that it allows."""

    def initialize(self, find: Answer, allowed: tuple[str, ...] = ()) -> None:
        self._find = find
        self._allowed = allowed

    async def get(self, name: str = "") -> None:
        allowed = self._allowed
        if allowed is ANY:
            allowed = tuple(self.request.query_arguments)[:_MAX_PARAMETERS]
        self.answer(await self._find(self.site, self.query(*allowed), name))

    head = get


class WhyHandler(Handler):
    """A post-mortem as JSON, text or a page."""

    async def get(self, name: str) -> None:
        query = self.query("invocation", "format")
        form = query.get("format") or self._preferred()
        if form not in ("json", "text", "html"):
            raise BadName("format is json, text or html")
        site = self.site
        worker, run = parse_worker(name), query.get("invocation", "")
        config = await site.config()
        report = await site.run(readers.make_postmortem, site.scope, config, worker, run)
        shown: Any = await site.run(readers.show_postmortem, report, form)
        if report.verdict == "unknown-run":
            self.set_status(404)
        if form == "json":
            self.answer(shown)
            return
        kind = "plain" if form == "text" else "html"
        self.set_header("Content-Type", f"text/{kind}; charset=utf-8")
        if form == "html":  # the page has a style of its own, and nothing else
            self.set_header(
                "Content-Security-Policy",
                "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
            )
        self.finish(shown)

    head = get

    def _preferred(self) -> str:
        accept = self.request.headers.get("Accept", "")
        if "text/html" in accept:
            return "html"
        return "text" if accept.startswith("text/plain") else "json"


class MetricsHandler(Handler):
    async def get(self) -> None:
        self.query()
        text = await self.site.render_metrics()
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(text)

    head = get


class HealthHandler(Handler):
    """``/healthz``: this process answers. ``/readyz``: the supervisor answers, too."""

    needs_token = False

    async def get(self) -> None:
        if self.request.path == "/readyz" and not self.site.upstream.is_connected:
            self.refuse(503, "the supervisor does not answer")
        else:
            self.answer({"status": "ok"})

    head = get
