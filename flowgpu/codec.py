"""JSON values to frozen dataclasses: no unknown, missing or double field or wrong type.

A field that is a class variable is none of the value's.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
MOST_SECONDS = 1e12


class UnknownField(Exception):
    """A field that this version does not know; the text is its name."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook): refuse an object that has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a field twice")
    return found


# Resolving annotations costs more than all else, and a manifest has thousands of blocks.
_hints: dict[object, dict[str, Any]] = {}


def decode(kind: type[T], value: Any, name: str = "manifest") -> T:
    """The dataclass that has the fields of `value`. Raises UnknownField, ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    hints = _hints.get(kind)
    if hints is None:
        found = get_type_hints(kind)
        hints = {key: found[key] for key in found if get_origin(found[key]) is not ClassVar}
        _hints[kind] = hints
    if value.keys() != hints.keys():
        if unknown := sorted(value.keys() - hints.keys()):
            raise UnknownField(f"{name}.{unknown[0]}")
        missing = sorted(hints.keys() - value.keys())
        raise ValueError(f"{name}.{missing[0]} is missing")
    fields = {}
    for key, hint in hints.items():
        item = value[key]
        # First what thousands of blocks have, for which no name is needed.
        plain = hint is int and type(item) is int and 0 <= item < 1 << 64
        fields[key] = item if plain else _typed(hint, item, f"{name}.{key}")
    return kind(**fields)


def _typed(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, name)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        if arguments[0] is int and _are_words(value):
            return tuple(value)
        return tuple(_typed(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        of = int if arguments[0] is int else str
        return {of(key): _typed(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if origin is types.UnionType:  # of a type and None
        return None if value is None else _typed(arguments[0], value, name)
    if hint is float and type(value) in (int, float) and 0 <= value <= MOST_SECONDS:
        return float(value)
    if hint is int and type(value) is int and 0 <= value < 1 << 64:
        return value
    if hint is bool and type(value) is bool:
        return value
    if hint is str and type(value) is str and "\0" not in value:
        return value
    wanted = hint.__name__ if not isinstance(hint, types.GenericAlias) else str(hint)
    raise ValueError(f"{name} is not {wanted}")


def _are_words(values: list[Any]) -> bool:
    """They are integers of 64 bits without a sign."""
    return (
        set(map(type, values)) <= {int}
        and min(values, default=0) >= 0
        and (max(values, default=0) < 1 << 64)
    )
