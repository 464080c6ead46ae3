"""Statements and transactions on one PostgreSQL database, with its errors as our own.

The connection is in ``postgresql.session``. The meaning of statements is not known here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from nomarr_systemd.core.errors import BadDocument, StaleRevision, StoreError, StoreUnavailable
from nomarr_systemd.store.postgresql import failures
from nomarr_systemd.store.postgresql.session import Answer, Failed, NotSent, Session, Unanswered

if TYPE_CHECKING:
    from nomarr_systemd.config.store_url import PostgresUrl

_TRIES: Final = 5  # of a write that meets another one


class Link:
    """One database on one or more hosts, as one user. Each call ends within ``timeout_s``."""

    def __init__(
        self, url: PostgresUrl, *, password: str, ca_file: str | None, timeout_s: float, most: int
    ) -> None:
        self.url = url
        self.where = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        self.timeout_s = timeout_s
        self.is_ready = False  # the tables are there
        self._session = Session(
            url, password=password, ca_file=ca_file, timeout_s=timeout_s, most=most
        )
        self._within = False  # a transaction
        self._begun = False  # its first statement was sent

    @property
    def in_transaction(self) -> bool:
        return self._within

    @property
    def received(self) -> int:
        """The bytes received on the present connection."""
        return self._session.received

    def close(self) -> None:
        self._session.close()

    def ask(
        self,
        sql: str,
        values: Sequence[object] = (),
        *,
        timeout_s: float = 0.0,
        repeatable: bool = False,
    ) -> Answer:
        """Return the answer, or Failed with the server's code, StoreUnavailable or StoreRefused. If
        the answer to a repeatable statement was lost, it is sent once more while there is time."""
        ends = time.monotonic() + (timeout_s or self.timeout_s)
        is_first = self._within and not self._begun
        try:
            answer = self._session.run(
                f"BEGIN; {sql}" if is_first else sql, values, timeout_s=ends - time.monotonic()
            )
        except NotSent as error:
            raise failures.refuse(self.url, self.where, error) from error
        except Unanswered as error:
            self._mark_begun()
            left_s = ends - time.monotonic()
            if repeatable and not self._within and left_s > 0:
                return self.ask(sql, values, timeout_s=left_s)
            raise StoreUnavailable(f"PostgreSQL at {self.where} did not answer: {error}") from error
        except Failed as error:
            self._mark_begun()
            if error.code == failures.READ_ONLY:
                self.close()  # another host may accept writes now
            raise
        except ValueError as error:  # a NUL in a text
            raise BadDocument(f"PostgreSQL cannot keep a value: {error}") from error
        self._mark_begun()
        return answer

    def run(
        self, what: str, sql: str, values: Sequence[object] = (), *, repeatable: bool = False
    ) -> Answer:
        """``ask``, with every error as a StoreError about ``what``."""
        try:
            return self.ask(sql, values, repeatable=repeatable)
        except Failed as error:
            self.is_ready = self.is_ready and error.code not in failures.MISSING
            raise failures.translate(self.url, self.where, what, error) from error

    def settle(self, what: str, sql: str, values: Sequence[object]) -> Answer:
        """``run``, with retries where two writers met and the server chose the other one."""
        for _ in range(0 if self._within else _TRIES):
            try:
                return self.run(what, sql, values)
            except StaleRevision:
                continue
        return self.run(what, sql, values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is asked inside becomes durable at its end, or, on an exception, nothing."""
        self._within, self._begun = True, False
        try:
            yield
            if self._begun:
                self._commit()
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._within = False
            self._session.keep(on=False)

    def _mark_begun(self) -> None:
        if self._within:
            self._begun = True
            self._session.keep(on=True)

    def _commit(self) -> None:
        status = self.run("a transaction", "COMMIT").status
        if status != "COMMIT":  # a statement had failed, and the server has rolled it back
            raise StoreUnavailable(f"PostgreSQL at {self.where} has undone a transaction")

    def _roll_back(self) -> None:
        if self._begun and self._session.is_connected:
            try:
                self.run("a transaction", "ROLLBACK")
            except StoreError:
                self.close()
