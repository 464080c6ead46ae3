"""How far tests by Hypothesis and the exploration of the plan go: ``make test`` goes the same short
ways in every run, ``make test-deep`` goes ``NOMARR_DEPTH`` times as many, drawn anew each time.
"""

from __future__ import annotations

import os
from typing import Final

DEPTH: Final = int(os.environ.get("NOMARR_DEPTH", "1"))
IS_DEEP: Final = DEPTH > 1


def times(examples: int) -> int:
    """So many examples, or as many times more as was asked for."""
    return examples * DEPTH
