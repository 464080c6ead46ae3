"""Processes of Python that begin at once: a server that has imported what they need forks them. The
server has never opened a store, so they share no lock and no connection with the test.
"""

from __future__ import annotations

from multiprocessing import forkserver, get_context
from typing import Final

CONTEXT: Final = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.jobbers", "tests.support.racers"])


def start_server() -> None:
    """Start it, unless it runs; it ends with this process."""
    forkserver.ensure_running()
