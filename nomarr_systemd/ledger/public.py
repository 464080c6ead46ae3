"""``public/<instance>.json``: the accounts of the ledger for users who may only read; their one
reader. ``public/records/<instance>/<number>``: records that have left an account.
``public/incidents.json``: the newest incidents. ``ledger.publisher`` writes them.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from nomarr_systemd.core.account import Account
from nomarr_systemd.core.errors import BadName
from nomarr_systemd.core.ids import Component, parse_component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.json import JsonError, as_object, decode, get_objects
from nomarr_systemd.core.named_tuple import NamedTuple
from nomarr_systemd.core.text import clean_all, count, one_line
from nomarr_systemd.host.layout import JOIN
from nomarr_systemd.ledger.documents import MAX_ROW, is_row, read_account, read_past_incident

SUFFIX: Final = ".json"
INCIDENTS: Final = "incidents.json"
RECORDS: Final = "records"
MAX_BYTES: Final = 512 << 10  # a full ring has 30 kB, and 460 kB with the longest texts


class Published(NamedTuple):
    """A worker's account as it is published; ``problem`` says why it could not be read, and then
    the account is empty and means nothing."""

    account: Account
    problem: str = ""


def read_published(directory: str, component: Component) -> Published:
    """One worker's account; a worker without a file has an empty one. Never raises."""
    path = f"{directory}/{component.instance}{SUFFIX}"
    empty = Account(component.component_id)
    try:
        with open(path, "rb") as file:
            return Published(_decode(file.read(MAX_BYTES), component))
    except FileNotFoundError:
        return Published(empty)
    except PermissionError:
        return Published(empty, _say_closed(path))
    except OSError as error:
        why = error.strerror or str(error)
        return Published(empty, f"The ledger's records in {path} cannot be read: {why}")
    except (ValueError, TypeError) as error:
        return Published(
            empty, one_line(f"The ledger's records in {path} are damaged: {error}", 400)
        )


def list_past(directory: str, component: Component) -> list[int]:
    """Return the numbers of the files with records that have left a worker's account, oldest first.
    Never raises."""
    with contextlib.suppress(OSError):
        names = os.listdir(os.path.join(directory, RECORDS, component.instance))
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 10)
    return []


def read_past(directory: str, component: Component, number: int) -> list[str]:
    """Return the rows of one of these files; none if it is gone. Never raises."""
    with contextlib.suppress(OSError):
        path = os.path.join(directory, RECORDS, component.instance, str(number))
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = (one_line(row, MAX_ROW) for row in file.read(MAX_BYTES).split("\n"))
            return [row for row in rows if is_row(row)]
    return []


def read_whole(directory: str, component: Component) -> Published:
    """Return the account with all records that are published, which are more than a ring. Never
    raises."""
    from nomarr_systemd.ledger.past_records import identify

    # The account first: what leaves it meanwhile is in the files already.
    published = read_published(directory, component)
    account = published.account
    rows: dict[tuple[str, ...], str] = {}
    for number in list_past(directory, component):
        rows |= {identify(row): row for row in read_past(directory, component, number)}
    rows |= {identify(row): row for row in account.rows}
    return published._replace(account=account._replace(rows=tuple(rows.values())))


class KnownAccounts:
    """Published accounts for a program that reads them again and again: a file that is the same is
    read once."""

    def __init__(self) -> None:
        self._known: dict[Component, tuple[tuple[int, int], Published]] = {}

    def read(self, directory: str, component: Component) -> Published:
        try:
            found = os.stat(f"{directory}/{component.instance}{SUFFIX}")
            stamp = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            return Published(Account(component.component_id))
        except OSError:
            return read_published(directory, component)
        known = self._known.get(component)
        if known is None or known[0] != stamp or known[1].problem:
            known = self._known[component] = (stamp, read_published(directory, component))
        return known[1]


def read_incidents(directory: str) -> tuple[list[Incident], str]:
    """The published incidents, oldest first, and what could not be read. Never raises."""
    path = os.path.join(directory, INCIDENTS)
    found, damaged = [], 0
    try:
        with open(path, "rb") as file:
            document = as_object(clean_all(decode(file.read(MAX_BYTES))))
    except FileNotFoundError:
        return [], ""
    except PermissionError:
        return [], _say_closed(path)
    except (OSError, ValueError, TypeError) as error:
        return [], one_line(f"Incidents in {path} cannot be read: {error}", 400)
    for each in get_objects(document, "incidents"):
        try:
            found.append(read_past_incident(each))
        except JsonError:
            damaged += 1
    return found, f"{count(damaged, 'incident')} in {path} cannot be read" if damaged else ""


def list_published(directory: str) -> tuple[set[Component], str]:
    """The workers that have a published account, and why they could not be listed, if so."""
    found = set()
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return set(), ""
    except PermissionError:
        return set(), _say_closed(directory)
    except OSError as error:
        return set(), f"The ledger's records in {directory} cannot be listed: {error.strerror}"
    for name in names:
        with contextlib.suppress(BadName):
            found.add(parse_component(name.removesuffix(SUFFIX)))
    return found, ""


def _decode(content: bytes, component: Component) -> Account:
    """The account, every text of it printable; or ValueError or TypeError, also where it is another
    worker's."""
    return read_account(as_object(clean_all(decode(content))), component.component_id)


def _say_closed(path: str) -> str:
    return f"This user may not read the ledger's records ({path}): {JOIN}"
