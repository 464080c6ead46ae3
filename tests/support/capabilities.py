"""What this machine and user have, and how a test says that it lacks something."""

from __future__ import annotations

import os
from typing import Final

import pytest

from nomarr_systemd.demo.lab import is_mapped
from tests.support.users import NOBODY

# `make test` runs a plain user's tests as root of a user namespace, which has no other users.
IS_ROOT: Final = os.geteuid() == 0 and is_mapped(NOBODY)
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")
# Begins the reason of a test that is about another kind of machine: no lack of this one.
NOT_HERE: Final = "does not apply here: "
