"""``NamedTuple`` as in ``typing``, whose classes are created in a sixth of the time.

``typing`` compiles a constructor for each class, and each annotation. A controller has eighty such
classes, and while it starts a worker waits for its restart. Here classes with the same
number of fields share a constructor, except the names of its parameters; annotations stay text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from collections.abc import Iterable, Mapping
    from operator import itemgetter
    from types import CodeType, FunctionType

    try:
        from collections import _tuplegetter as make_getter  # quicker to read
    except ImportError:

        def make_getter(index: int, doc: str) -> property:
            return property(itemgetter(index), doc=doc)

    _GLOBALS = {"__builtins__": {}, "new": tuple.__new__}
    _codes: dict[int, CodeType] = {}  # of constructors, by number of fields

    def _make_new(name: str, fields: tuple[str, ...], defaults: tuple[Any, ...]) -> FunctionType:
        code = _codes.get(len(fields))
        if code is None:
            names = "".join(f"_{number}, " for number in range(len(fields)))
            made = eval(f"lambda cls, {names}: new(cls, ({names}))", {})  # noqa: S307 (our own text)
            code = _codes[len(fields)] = made.__code__
        code = code.replace(co_varnames=("cls", *fields), co_qualname=name)  # for its errors
        return FunctionType(code, _GLOBALS, "__new__", defaults)

    class _Maker(type):
        """Creates the classes that are derived from NamedTuple."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if bases == (tuple,) or NamedTuple not in bases:
                return super().__new__(cls, name, bases, body)
            fields = tuple(body.get("__annotations__", ()))
            defaults = {field: body[field] for field in fields if field in body}
            if tuple(defaults) != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name}: a field without a default follows one that has one")
            body |= {field: make_getter(at, "") for at, field in enumerate(fields)}
            body |= {
                "__match_args__": fields,
                "__new__": _make_new(name, fields, tuple(defaults.values())),
                "__slots__": (),
                "_field_defaults": defaults,
                "_fields": fields,
            }
            return super().__new__(cls, name, bases, body)

    class NamedTuple(tuple, metaclass=_Maker):
        """The base of a class whose annotated names are the fields of a tuple."""

        __slots__ = ()
        _fields: tuple[str, ...]

        @classmethod
        def _make(cls, values: Iterable[Any]) -> tuple[Any, ...]:
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"{cls.__name__} has {len(cls._fields)} fields, not {len(made)}")
            return made

        def _replace(self, /, **changes: object) -> tuple[Any, ...]:
            made = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"{type(self).__name__} has no fields {list(changes)}")
            return made

        def _asdict(self) -> Mapping[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            fields = zip(self._fields, self, strict=True)
            return f"{type(self).__name__}({', '.join(f'{name}={at!r}' for name, at in fields)})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)
