"""The live socket's operations, topics, events and topic patterns (docs/contract.md).

Requests, answers and events are lines of JSON. A request is an object with ``op``; the answer is
``{"ok": true, …}`` or ``{"ok": false, "error": text}``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from nomarr_systemd.core.errors import BadName
from nomarr_systemd.host.clock import wall_ms

SUBSCRIBE: Final = "subscribe"
SNAPSHOT: Final = "snapshot"
BLACKBOX: Final = "blackbox"
LABEL: Final = "label"
LABELS: Final = "labels"
HISTORY: Final = "history"
JOBS_OF: Final = "jobs"
FLEET: Final = "fleet"
ARCHIVE: Final = "archive"
CRASHED: Final = "crashed"
SET_FAILED: Final = "set_failed"
RESET: Final = "reset"
ROOT_ONLY: Final = frozenset((CRASHED, SET_FAILED, RESET))
MAX_LINE: Final = 8 << 20  # of an answer or event; a snapshot of 4,096 workers fits

SYSTEM: Final = "system:health"
QUEUES: Final = "queue:status"  # all queues as one
JOBS: Final = "queue:jobs"

# The public name of each status of the health machine.
PUBLIC_STATUS: Final = {
    "unregistered": "stopped",
    "pending": "starting",
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "recovering": "recovering",
    "dead": "crashed",
    "failed": "failed",
}

MAX_TOPICS: Final = 64
_PATTERN = re.compile(r"[a-z0-9_*:]{1,100}")
_MAX_TOPIC: Final = 200
_MAX_KNOWN: Final = 20_000  # there are two topics for each worker
_MAX_STARS: Final = 3  # each star makes it slower to match a hostile pattern


def status_topic(component_id: str) -> str:
    return f"{component_id}:status"


def frames_topic(component_id: str) -> str:
    return f"{component_id}:frames"


def queue_topic(pool: str) -> str:
    return f"queue:{pool}:status"


def make_event(topic: str, kind: str, **content: object) -> dict[str, Any]:
    return {"topic": topic, "type": kind, "timestamp": wall_ms(), **content}


class Patterns:
    """The topics of one subscriber. A star stands for one part or more: ``worker:*:status``."""

    def __init__(self, topics: object) -> None:
        """Raise BadName unless ``topics`` is a list of topics or patterns."""
        if not isinstance(topics, list) or not 0 < len(topics) <= MAX_TOPICS:
            raise BadName(f"topics must be a list of 1 to {MAX_TOPICS} topics")
        for topic in topics:
            if not isinstance(topic, str) or not _PATTERN.fullmatch(topic):
                raise BadName("a topic is up to 100 small letters, digits, _ and : with * for any")
            if topic.count("*") > _MAX_STARS:
                raise BadName(f"a topic may have {_MAX_STARS} stars at most")
        self.first: str = topics[0]
        parts = (re.escape(topic).replace(r"\*", "[a-z0-9_]+(?::[a-z0-9_]+)*") for topic in topics)
        self._match = re.compile("|".join(parts)).fullmatch
        self._known: dict[str, bool] = {}
        self.wants_queues = any(topic.startswith(("queue", "*")) for topic in topics)

    def match(self, topic: str) -> bool:
        """Return True if the subscriber wants the topic. Cached: there are few topics, many
        events."""
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            is_topic = len(topic) <= _MAX_TOPIC  # a longer one takes a pattern long to match
            known = self._known[topic] = is_topic and self._match(topic) is not None
        return known
