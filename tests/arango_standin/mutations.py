"""Answers that are nearly right: a real one in which one thing is wrong, chosen by a seed."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, 5, -1, 0.5, 10**30, "", "x", "\ud800", "a\nb", "|" * 20, [], [1], {}, {"a": 1}),
    *([[1, 2], "x"], {"_key": 5}, "9" * 40, [None], {"result": 5}),
)
_BODIES: Final = (
    *(b"", b"5", b'"x"', b"[]", b"null", b"{{{", b"{}", b"\xff\xfe", b'{"a":NaN}', b"<html>"),
    *(b"[" * 100_000, b'{"a":' * 5000, b'{"_rev":"x"', b'{"error":false}', b'{"result":{}}'),
)


def mutate(answer: Any, random: Random) -> bytes:
    """The answer with a fault in it."""
    kind = random.randrange(8)
    text = json.dumps(answer).encode()
    if kind == 0:
        return random.choice(_BODIES)
    if kind == 1:
        return text[: random.randrange(len(text))]
    if kind == 2:
        place = random.randrange(len(text))
        return text[:place] + random.randbytes(1) + text[place + 1 :]
    whole = {"": json.loads(text)}
    holder, name = random.choice(list(_places(whole)))
    if kind == 3 and name != "":
        del holder[name]
    else:
        holder[name] = random.choice(_VALUES)
    return json.dumps(whole[""]).encode()


def _places(value: Any) -> Any:
    """Every place in a document where a value stands: what holds it, and its name there."""
    names = value if isinstance(value, dict) else range(len(value))
    for name in names:
        yield value, name
        if isinstance(value[name], dict | list):
            yield from _places(value[name])
