"""The message catalog explains every entry that is written, with fields that the entries have."""

from __future__ import annotations

import re
from pathlib import Path

from nomarr_systemd.systemd import journal

CHECKOUT = Path(__file__).parents[2]
CATALOG = (CHECKOUT / "packaging/nomarr.catalog").read_text()


def test_every_kind_of_entry_is_explained() -> None:
    # systemd reads an entry only after an empty line.
    explained = re.findall(r"^\n-- ([0-9a-f]{32})\nSubject: ", CATALOG, re.MULTILINE)
    assert explained == list(journal.MESSAGE_IDS.values())


def test_explanations_name_fields_that_entries_have() -> None:
    source = Path(journal.__file__).read_text()
    written = set(re.findall(r'"(NOMARR_[A-Z_]+)"', source))
    assert set(re.findall(r"@([A-Z_]+)@", CATALOG)) <= written
