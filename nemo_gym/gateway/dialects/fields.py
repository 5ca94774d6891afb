"""Reading fields of bodies that anybody may send: the right type, or an `InvalidBodyError` that names the field.

``where`` is a path as SDKs print it: ``messages.3.content.0.text``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import orjson

from nemo_gym.contract.errors import InvalidBodyError

Body = Mapping[str, Any]
_WHOLE_BELOW = 1 << 63


def refuse(where: str, problem: str) -> NoReturn:
    """Raise the `InvalidBodyError` for a field; ``problem`` follows its name."""
    raise InvalidBodyError(f"'{where}' {problem}", param=where)


def text_at(body: Body, key: str, where: str, *, default: str | None = None) -> str:
    """A string that must be there, unless there is a ``default`` for where it is absent or null."""
    value = body.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        refuse(join(where, key), f"must be a string, not {kind_of(value)}")
    return value


def optional_text(body: Body, key: str, where: str) -> str | None:
    return None if body.get(key) is None else text_at(body, key, where)


def object_at(body: Body, key: str, where: str) -> Body:
    """An object; an empty one where it is absent or null."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(join(where, key), f"must be an object, not {kind_of(value)}")
    return value


def objects_in(value: Any, where: str, start: int = 0) -> Iterator[tuple[str, Body]]:
    """``(where, object)`` of each element of a list of objects from ``start`` on; nothing for null."""
    if value is None:
        return
    if not isinstance(value, list | tuple):
        refuse(where, f"must be a list, not {kind_of(value)}")
    for number in range(start, len(value)):
        item = value[number]
        at = f"{where}.{number}"
        if not isinstance(item, Mapping):
            refuse(at, f"must be an object, not {kind_of(item)}")
        yield at, item


def number_at(body: Body, key: str, *, low: float | None = None, whole: bool = False) -> int | float | None:
    """A number, or nothing where it is absent or null."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(key, f"must be a number, not {kind_of(value)}")
    if whole:
        if value != int(value):
            refuse(key, f"must be a whole number, not {value}")
        value = int(value)
        if not -_WHOLE_BELOW <= value < _WHOLE_BELOW:  # JSON has no limit there; engines and records have
            refuse(key, f"must be a whole number of 64 bits, not {value:.3g}")
    if low is not None and value < low:
        refuse(key, f"is {value}; it must be at least {low}")
    return value


def flag_at(body: Body, key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        refuse(key, f"must be true or false, not {kind_of(value)}")
    return bool(value)


def stop_at(body: Body, key: str) -> list[str] | None:
    """Stop strings: one, several, or nothing."""
    value = body.get(key)
    if value is None:
        return None
    pieces = [value] if isinstance(value, str) else value
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) and piece for piece in pieces):
        refuse(key, "must be a string that is not empty, or a list of such strings")
    return list(pieces) or None


def sampling_at(body: Body, *names: str) -> dict[str, Any]:
    """The sampling parameters among ``names`` that are set."""
    found = {name: number_at(body, name, whole=name in ("seed", "top_k")) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def json_at(value: Any, where: str) -> str:
    """JSON text of data that came as JSON."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # nested deeper than any tool's arguments, or not Unicode
        refuse(where, "cannot be written as JSON again: it is nested too deeply, or its text is no Unicode")


def repeatable(body: Body, *keys: str) -> None:
    """Refuse what a reply is to repeat and could not hold."""
    for key in keys:
        if isinstance(value := body.get(key), list | dict):
            json_at([[[[[[[[value]]]]]]]], key)


def refuse_set(body: Body, reasons: Mapping[str, str]) -> None:
    """Refuse the fields among ``reasons`` that ask for something: those not absent, null, false, 0 or empty."""
    for key, reason in reasons.items():
        if body.get(key):
            refuse(key, reason)


def rest_of(body: Body, known: Sequence[str] | frozenset[str]) -> dict[str, Any]:
    """The fields that are set and not ``known``."""
    return {key: value for key, value in body.items() if value is not None and key not in known}


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def kind_of(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
