"""Text that others wrote, made safe to show: colours taken out, everything else that a terminal
would obey spelled out.
"""

from __future__ import annotations

import re
from typing import Final

from nomarr_systemd.core.quoting import escape

# CSI and OSC sequences, and the two-byte ones. What is cut short is left to ``escape``. OSC ends at
# BEL or ESC \; neither part can match the other's signs, so it takes linear time.
_ANSI: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]"
)


def clean(text: str, limit: int = 4096) -> str:
    """One line, without its colours, with nothing in it that is not printable, and cut."""
    if text.isprintable():
        return text if len(text) <= limit else text[: limit - 1] + "…"
    text = text[: 4 * limit].expandtabs(4)
    if "\x1b" in text or "\x9b" in text:
        text = _ANSI.sub("", text)
    shown = escape(text.rstrip("\r\n "))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def clean_lines(text: str, limit: int = 4096, most: int = 2000) -> list[str]:
    """The lines of a text, each of them clean."""
    return [clean(line, limit) for line in text.split("\n")[:most]]
