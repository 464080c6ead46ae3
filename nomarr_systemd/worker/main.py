"""``nomarr-worker ENTRYPOINT``: run one worker as the main process of its unit."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from nomarr_systemd.config.settings import check_entrypoint
from nomarr_systemd.core.errors import BadName, ConfigError
from nomarr_systemd.worker.environment import read_environment
from nomarr_systemd.worker.errors import SupervisorLost
from nomarr_systemd.worker.runtime import Runtime, Worker

log = logging.getLogger("nomarr-worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker that the one argument names, and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    # On stderr, which goes to the journal; stdout belongs to the worker.
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    faulthandler.enable()  # at SIGABRT, from the watchdog or the supervisor: all stacks
    try:
        if len(arguments) != 1:
            raise ConfigError("one argument is needed", hint="nomarr-worker package.module:Class")
        environment = read_environment(os.environ, os.getpid())
        # The pulse starts first: importing the worker may take longer than startup_timeout_s.
        return Runtime(environment).run(lambda: make_worker(arguments[0]))
    except ConfigError as error:
        log.error("%s%s", error, f" (hint: {error.hint})" if error.hint else "")
        return error.exit_status
    except SupervisorLost as error:
        log.error("%s; is nomarr-supervisor.service active?", error)
        return error.exit_status


def make_worker(entrypoint: str) -> Worker:
    """Return an instance of the class that ``package.module:Class`` names, or ConfigError."""
    try:
        check_entrypoint(entrypoint)
    except BadName as error:
        raise ConfigError(f"entrypoint: {error}", hint=error.hint) from error
    module_name, _, name = entrypoint.partition(":")
    try:
        module = import_module(module_name)
    except (OSError, MemoryError):  # these may be temporary: not an error of the configuration
        raise
    except Exception as error:
        log.error("%s cannot be imported", module_name, exc_info=error)
        raise ConfigError(
            f"entrypoint {entrypoint}: {type(error).__name__}: {error}",
            hint="correct entrypoint = … in nomarr.toml, or the module's installation",
        ) from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Worker)):
        what = "is not a subclass of Worker" if hasattr(module, name) else "does not exist"
        raise ConfigError(
            f"entrypoint {entrypoint}: {name} {what} in {module.__file__}",
            hint="subclass nomarr_systemd.worker.Worker, and correct entrypoint = …",
        )
    return found()


if __name__ == "__main__":
    sys.exit(main())
