"""A plugin of pytest: ``--processes=N`` runs modules of tests beside each other.

Tests are collected once; then processes are forked, each of which takes one module after another,
in the order in which they were named. Collecting takes 12 s of processor time in a fresh clone and
4 s later, which pytest-xdist would take in each of its processes.

A module's tests share a machine or a server, so they stay together, and so do a session's fixtures
in each process. Reports are pytest's own, told by the process that forked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

Module = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run modules in so many processes beside each other"
    parser.addoption("--processes", type=int, default=1, metavar="N", help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of pytest's own loop, if that is asked for."""
    options = session.config.option
    if options.processes < 2 or options.collectonly or session.testsfailed:
        return None
    modules = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    Parent(session, modules).run(min(options.processes, len(modules)))
    return True


class Child:
    """A process that was forked, as the one that forked it sees it."""

    def __init__(self, number: int, pid: int, link: Connection) -> None:
        self.pid = pid
        self.link = link
        self.end = os.pidfd_open(pid)  # a grandchild may keep the link open
        self.module: Module = []  # that it runs, or has run last
        self.item = 0  # in that
        self.is_done = False  # nothing is left for it
        # By this a report is one of many beside each other, as pytest-xdist has it.
        name = f"p{number}"
        self.node = SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]")


class Parent:
    """The process that forks: gives modules to its children, and tells what they report."""

    def __init__(self, session: pytest.Session, modules: list[Module]) -> None:
        self._session = session
        self._hook = session.config.hook
        self._modules = modules
        self._waiting = deque(range(len(modules)))
        self._children: list[Child] = []

    def run(self, processes: int) -> None:
        gc.collect()
        gc.freeze()  # a collection in a child would write to all that it shares
        try:
            for number in range(processes):
                self._fork(number)
            while self._children:
                for child, is_over in self._wait():
                    self._read(child, is_over=is_over)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:  # those that are left end with their test
            for child in self._children:
                child.link.close()
            for child in self._children:
                os.waitpid(child.pid, 0)

    def _fork(self, number: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for link in (ours, *(child.link for child in self._children)):
                link.close()
            _be_child(self._session, self._modules, theirs, number)
        theirs.close()
        self._children.append(Child(number, pid, ours))

    def _wait(self) -> Iterator[tuple[Child, bool]]:
        """Who has sent something, and who has ended."""
        ready = wait([source for child in self._children for source in (child.link, child.end)])
        for child in tuple(self._children):
            if child.link in ready or child.end in ready:
                yield child, child.end in ready

    def _read(self, child: Child, *, is_over: bool) -> None:
        try:
            while child.link.poll():
                self._take(child, child.link.recv())
        except (EOFError, OSError):
            is_over = True
        if is_over:
            self._children.remove(child)
            child.link.close()
            os.close(child.end)
            _, status = os.waitpid(child.pid, 0)
            if status or not child.is_done:
                self._tell_lost(child)

    def _take(self, child: Child, message: Any) -> None:
        match message:
            case dict():
                config = self._session.config
                report = self._hook.pytest_report_from_serializable(config=config, data=message)
                self._tell(child, report)
            case int():
                child.item = message
            case _:  # it has nothing left to do
                child.is_done = not self._waiting
                number = -1 if child.is_done else self._waiting.popleft()
                child.module = child.module if child.is_done else self._modules[number]
                child.link.send(number)

    def _tell_lost(self, child: Child) -> None:
        """The test that ended its process has failed; the rest of its module is not run. So has the
        last one, if what its process had for the session could not be ended."""
        item = child.module[child.item]
        left = len(child.module) - child.item - 1
        text = f"its process ended in it; {left} tests of {item.path} were not run"
        if child.is_done:
            text = "a fixture of the session failed at its end; what it said is on standard error"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._tell(child, report)

    def _tell(self, child: Child, report: Any) -> None:
        report.node = child.node
        self._hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:  # at once: others may have sent more failures
            raise self._session.Failed(self._session.shouldfail)


def _be_child(
    session: pytest.Session, modules: list[Module], link: Connection, number: int
) -> NoReturn:
    status = 1
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            _separate(session.config, number)
            session.config.pluginmanager.register(Reporter(session.config, link))
            _run_modules(session, modules, link)
        session._setupstate.teardown_exact(None)  # of a session's fixtures
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _separate(config: pytest.Config, number: int) -> None:
    """Have nothing in common with the other processes: what is told, captured, or written."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"p{number}-", numbered=False)


def _run_modules(session: pytest.Session, modules: list[Module], link: Connection) -> None:
    protocol = session.config.hook.pytest_runtest_protocol
    # Which module is next is not known at the end of one: only the session is left for that.
    end: Any = session
    while True:
        link.send(None)
        chosen = link.recv()
        if chosen < 0:
            return
        items = modules[chosen]
        for place, item in enumerate(items):
            link.send(place)
            protocol(item=item, nextitem=items[place + 1] if item is not items[-1] else end)


class Reporter:
    """Sends a child's reports to the process that tells them."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._link.send(hook.pytest_report_to_serializable(config=self._config, report=report))
