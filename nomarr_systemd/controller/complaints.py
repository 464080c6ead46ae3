"""What goes wrong is said, and stays with the worker that it is about."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from nomarr_systemd.core.ids import Component
from nomarr_systemd.systemd.manager import Refused


@contextlib.contextmanager
def apart(component: Component) -> Iterator[None]:
    """What systemd refuses for one worker is no matter of the others. It is still owed then, and
    the reconciler tries again."""
    try:
        yield
    except Refused as error:
        complain(f"{component.instance}: {error}")


def complain(text: str) -> None:
    """To the journal by way of standard error, as an error."""
    sys.stderr.write(f"<3>nomarr-controller: {text}\n")
