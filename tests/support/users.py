"""Users that tests run as."""

from __future__ import annotations

NOBODY = 65534
