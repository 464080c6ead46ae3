"""Writes ``public/``, which ``ledger.public`` reads: the store calls it after each commit, the
controller after a change of an incident.

A reader without write permission can use no journal mode of SQLite, so each committed document
is renamed into place here. These files are copies: losing one loses nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import gmtime, strftime
from typing import Any, Final

from nomarr_systemd.core.errors import BadName, NomarrError, StoreError, StoreUnavailable
from nomarr_systemd.core.ids import parse_component
from nomarr_systemd.core.incident import Incident
from nomarr_systemd.core.json import as_object, decode, get_int, get_list, get_str
from nomarr_systemd.core.ledger_record import DECISIONS, Record, crash_word
from nomarr_systemd.core.text import count
from nomarr_systemd.host.files import locked, remove
from nomarr_systemd.host.log import ERROR, log
from nomarr_systemd.ledger import past_records
from nomarr_systemd.ledger.public import INCIDENTS, MAX_BYTES, RECORDS, SUFFIX, list_past, read_past
from nomarr_systemd.store.protocol import PAST_RECORDS, POLICY_LEDGER, Doc, encode

PATIENCE_S: Final = 2.0
# What needs no quoting in a unit's file.
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 -")
_PAST_BYTES: Final = 256  # of the file of each worker, always
_MAX_PAST: Final = 200
_PAGE: Final = 50  # accounts that are read at once
Read = Callable[[list[str]], Mapping[str, str]]
Write = Callable[[str, str | None], None]  # name and text of an account


class Publisher:
    """Writes one directory of published documents, 0640 and of the given group.

    ``host`` is this host where several share a store: workers of the others are not published.
    """

    def __init__(self, directory: str, *, gid: int = -1, host: str = "") -> None:
        self.directory = directory
        self._past = os.path.join(os.path.dirname(directory), "past")
        self._gid = gid
        self._host = host
        self.error: Exception | None = None  # why the last publication failed; the commit stands
        self._late: dict[str, Read] | None = None

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Publish once, at the end, what is written meanwhile: workers wait for their start, and no
        process waits for this. What their units read at a start is written at once. After a kill
        the reconciler publishes all."""
        late: dict[str, Read] = {}
        self._late = late
        try:
            yield
        finally:
            self._late = None
            for read in set(late.values()):
                keys = [key for key, each in late.items() if each == read]
                self._publish(keys, read, self._write)

    def publish(self, keys: Iterable[str], read: Read) -> None:
        """Write the texts that ``read(keys)`` reads from the store now; those of documents that it
        does not find are removed.

        It reads under the lock: of two writers the last one has also read last. A full disk does
        not undo a commit, so errors are kept and logged, not raised, and the store's
        ``publish_all`` makes up for them.
        """
        if self._late is None:
            self._publish(keys, read, self._write, self._write_past)
        else:
            keys = list(keys)
            self._late |= dict.fromkeys(keys, read)
            self._publish(keys, read, self._write_past)

    def _publish(self, keys: Iterable[str], read: Read, *writers: Write) -> None:
        names = {key: name for key in keys if (name := self.name(key)) is not None}
        if not names:
            return
        self.error = None
        try:
            self._make_directory()
            # The lock is beside the directory, for its owner only: a reader must not lock it.
            with locked(f"{self.directory}.lock", PATIENCE_S):
                for start in range(0, len(names), _PAGE):
                    page = list(names)[start : start + _PAGE]
                    texts = read(page)
                    for key in page:
                        self._show(names[key], texts.get(key), *writers)
        except (OSError, StoreError) as error:
            self._complain(", ".join(list(names.values())[:3]), error)

    def publish_all(self, find: Callable[..., list[Doc]]) -> None:
        """Publish every account of this host that ``find`` finds, and remove all other files: what
        a kill or a removal left. Raises what ``find`` raises."""
        kept: set[str] = set()
        after, page = "", [dict[str, Any]()]
        where = {"host": self._host}
        self.error = None
        try:
            self._make_directory()
            while page:
                with locked(f"{self.directory}.lock", PATIENCE_S):
                    page = find(POLICY_LEDGER, where, after=after, limit=_PAGE)
                    for doc in page:
                        after, name = doc["_key"], self.name(doc["_key"])
                        if name is not None:
                            kept.add(name)
                            self._show(name, encode(doc), self._write, self._write_past)
                            try:
                                self._catch_up(doc, find)
                            except (OSError, ValueError, TypeError, NomarrError) as error:
                                self._complain(f"{RECORDS} of {name}", error)
            self._remove_others(kept)
        except OSError as error:
            self._complain("the accounts", error)

    def publish_records(self, keys: Iterable[str], get: Callable[[str, str], Doc | None]) -> None:
        """Write the documents of records with these keys and those before them that are missing;
        remove the files of those that do not exist. Errors are kept and logged, as by
        ``publish``."""
        try:
            self._make_directory()
            with locked(f"{self.directory}.lock", PATIENCE_S):
                for key in keys:
                    self._write_records(key, get)
        except (OSError, StoreError) as error:
            self._complain(RECORDS, error)

    def _write_records(self, key: str, get: Callable[[str, str], Doc | None]) -> None:
        component, number, host = past_records.split_key(key)
        if component is None or host != self._host:
            return
        name = f"{RECORDS}/{component.instance}"
        doc = get(PAST_RECORDS, key)
        if doc is None:
            remove(os.path.join(self.directory, name, str(number)))
            return
        for each in (RECORDS, name):
            self._make_directory(each)
        there = set(list_past(self.directory, component)) - {number}
        while doc is not None and number:
            if number not in there:
                self._write(f"{name}/{number}", "\n".join(past_records.read_rows(doc)))
            number -= 1
            if number and number not in there:
                doc = get(PAST_RECORDS, past_records.make_key(component.component_id, number, host))

    def _catch_up(self, doc: Doc, find: Callable[..., list[Doc]]) -> None:
        """Publish the records before the ring of an account, if a kill has left them out."""
        rows = get_list(doc, "records", [])
        if not rows or str(rows[0]).startswith("1|"):
            return
        component = parse_component(get_str(doc, "component_id"))
        numbers = list_past(self.directory, component)
        past = read_past(self.directory, component, numbers[-1]) if numbers else []
        is_whole = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        last = Record.read(past[-1]).attempt if past else 0
        if is_whole and last == Record.read(rows[0]).attempt - 1:
            return
        where = {"host": self._host, "component_id": component.component_id}

        def get(collection: str, key: str) -> Doc | None:
            found = find(collection, {"_key": key}, limit=1)
            return found[0] if found else None

        for newest in find(PAST_RECORDS, where, descending=True, limit=1):
            self._write_records(newest["_key"], get)

    def publish_incidents(self, incidents: Sequence[Incident]) -> None:
        """Write incidents, oldest first; the oldest are left out if there would be too much. There
        is no file until there was an incident."""
        if not incidents and not os.path.lexists(os.path.join(self.directory, INCIDENTS)):
            return
        rows: list[str] = []
        left = MAX_BYTES - 100
        for incident in reversed(incidents):
            rows.insert(0, encode(incident.to_past_doc()))
            left -= len(rows[0].encode()) + 1
            if left < 0:
                del rows[0]
                break
        try:
            self._make_directory()
            with locked(f"{self.directory}.lock", PATIENCE_S):
                self._write(INCIDENTS, f'{{"incidents":[{",".join(rows)}]}}')
        except (OSError, StoreError) as error:
            self._complain(INCIDENTS, error)

    def _show(self, name: str, text: str | None, *writers: Write) -> None:
        try:
            for write in writers:
                write(name, text)
        except (OSError, StoreError, ValueError) as error:
            self._complain(name, error)

    def _complain(self, name: str, error: Exception) -> None:
        self.error = error
        log(ERROR, f"cannot publish {name}", error=error)

    def _remove_others(self, kept: set[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                is_other = name not in kept and name != INCIDENTS
                if is_other and name.endswith((SUFFIX, f"{SUFFIX}.new")):
                    remove(os.path.join(self.directory, name))
                    remove(os.path.join(self._past, name.partition(".")[0]))

    def name(self, key: str) -> str | None:
        """The file of the document ``key``, or None for one that is not published here."""
        component_id, _, host = key.partition("@")
        try:
            component = parse_component(component_id)
        except BadName:
            return None
        return component.instance + SUFFIX if host == self._host else None

    def _write_past(self, name: str, text: str | None) -> None:
        """Write what the unit of the worker reads as its environment at its next start."""
        line = "" if text is None else describe_past(text)
        path = os.path.join(self._past, name.removesuffix(SUFFIX))
        if not line:
            remove(path)
            return
        content = f'NOMARR_PAST="{line[:_MAX_PAST]}"'.ljust(_PAST_BYTES - 1).encode() + b"\n"
        if _overwrite(path, content):
            return
        os.makedirs(self._past, 0o700, exist_ok=True)
        with open(f"{path}.new", "wb", opener=_open_private) as file:
            file.write(content)
        os.rename(f"{path}.new", path)

    def _make_directory(self, name: str = "") -> None:
        path = os.path.join(self.directory, name)
        if not os.path.isdir(path):
            os.makedirs(path, 0o750, exist_ok=True)
            if self._gid != -1:
                os.chown(path, -1, self._gid)

    def _write(self, name: str, text: str | None) -> None:
        path = os.path.join(self.directory, name)
        if text is None:
            remove(path)
            return
        content = text.encode()
        if len(content) > MAX_BYTES:
            raise StoreUnavailable(f"{name} would have more than {MAX_BYTES} bytes")
        temporary = f"{path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o640)
        try:
            os.fchmod(fd, 0o640)
            if self._gid != -1:
                os.fchown(fd, -1, self._gid)
            while content:
                content = content[os.write(fd, content) :]
            os.rename(temporary, path)
        except OSError:
            remove(temporary)
            raise
        finally:
            os.close(fd)


def describe_past(text: str) -> str:
    """A worker's restarts and its last crash in a few words; empty if it has none."""
    account = as_object(decode(text))
    restarts = get_int(account, "restart_count", 0)
    last = ""
    for row in reversed(get_list(account, "records", [])):
        try:
            record = Record.read(str(row))
            when = strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(record.wall_ms / 1000))
        except (TypeError, ValueError, OverflowError, OSError):
            continue  # it is damaged, which is told elsewhere
        if record.action in DECISIONS and record.kind:
            word = "".join(sign for sign in crash_word(record) if sign in _PLAIN)
            last = f"last crash {word} at {when}"
            break
    return f"{count(restarts, 'restart')}, {last}" if last else ""


def _overwrite(path: str, content: bytes) -> bool:
    """Write to a file that has as many bytes; False if there is none. A file of one sector is old
    or new after a power cut, and no rename makes the next commit wait for its data."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        before = os.pread(fd, len(content) + 1, 0)
        if len(before) != len(content):
            return False
        return before == content or os.pwrite(fd, content, 0) == len(content)
    finally:
        os.close(fd)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
