"""Who may ask: users, passwords and rights.

DOCS develop/http-api/authentication/ and operations/administration/user-management/.
"""

from __future__ import annotations

import base64
from typing import Any

from tests.arango_standin.data import Refusal


class Accounts:
    """Passwords by user, and the databases each may use; None stands for all and `_system`.

    ``closed`` are collections that a user has no right to.
    """

    def __init__(self) -> None:
        self._by_user: dict[str, tuple[str, set[str] | None]] = {}
        self._closed: dict[str, frozenset[str]] = {}

    def add(
        self,
        user: str,
        password: str,
        databases: set[str] | None = None,
        closed: frozenset[str] = frozenset(),
    ) -> None:
        self._by_user[user] = password, databases
        self._closed[user] = closed

    def authenticate(self, header: str) -> str:
        """The user, or 401: DOCS develop/http-api/authentication/."""
        scheme, _, text = header.partition(" ")
        try:
            user, _, password = base64.b64decode(text).decode().partition(":")
        except ValueError:
            user = password = ""
        if scheme != "Basic" or self._by_user.get(user, (None, None))[0] != password:
            raise Refusal(401, 11, "not authorized to execute this request")
        return user

    def need(self, user: Any) -> None:
        """No user is made here: whoever is named must be known."""
        if user not in self._by_user:
            raise Refusal(501, 9, f"the stand-in creates no user {user!r}")

    def authorize(self, user: str, database: str, parts: tuple[str, ...]) -> None:
        databases = self._by_user[user][1]
        if databases is not None and database not in databases:
            raise Refusal(401, 11, "not authorized to execute this request")
        if parts[0] == "document" and parts[1] in self._closed[user]:
            raise Refusal(403, 11, "forbidden")
