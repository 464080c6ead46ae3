"""Topics and the patterns that choose among them: ``worker:tag:0:status``, ``worker:*:status``.

A star stands for one part or more, so that ``worker:*:status`` means every worker.
"""

from __future__ import annotations

import re
from typing import Final

from nomarr_systemd.core.errors import BadName

MAX_TOPICS: Final = 64
_PATTERN = re.compile(r"[a-z0-9_*:]{1,100}")
_MAX_STARS: Final = 3  # each one more makes the matching of a hostile pattern dearer


class Patterns:
    """The topics of one subscriber."""

    def __init__(self, topics: object) -> None:
        """BadName unless ``topics`` is a list of topics or patterns."""
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
        """Whether the subscriber wants it. Remembered: there are few topics and many events."""
        known = self._known.get(topic)
        if known is None:
            known = self._known[topic] = self._match(topic) is not None
        return known
