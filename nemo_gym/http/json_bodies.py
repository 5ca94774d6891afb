"""JSON bodies: bounds on what one holds, reading it as an object or a model, and answering with one.

Bytes alone are no bound: an empty list takes three of them in a body and sixty in memory. So a body's values are
counted before anything is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import InvalidBodyError, NemoGymError, not_json


class TooManyValuesError(NemoGymError):
    """A JSON body of more values than the server takes."""

    code = "body_too_many_values"
    status = 413


class TooManyMessagesError(NemoGymError):
    """A conversation of more messages than the server takes."""

    code = "too_many_messages"
    status = 413


_VALUE_BYTES = 2
"""The shortest value with what separates it from the next."""
_HELD_AT_ONCE_BYTES = 256 << 10
"""Looked at in one call, which holds the interpreter for a millisecond or two."""
_IN_A_THREAD_BYTES = 2 << 20
_COUNTING = ThreadPoolExecutor(1, "body values")
"""One body at a time: the event loop waits behind each thread that wants the interpreter."""
_STRUCTURE = b",[{"
_OTHERS = bytes(one for one in range(256) if one not in _STRUCTURE)
_NO_QUOTES = bytes(one for one in range(256) if one not in _STRUCTURE + b'"')


async def check_values(body: bytes, at_most: int) -> None:
    """Raise `TooManyValuesError` for JSON of more than ``at_most`` values. It need not be JSON."""
    if len(body) <= at_most * _VALUE_BYTES:
        return
    too_many = (
        has_more_values(body, at_most)
        if len(body) <= _IN_A_THREAD_BYTES
        else await asyncio.get_running_loop().run_in_executor(_COUNTING, has_more_values, body, at_most)
    )
    if too_many:
        raise TooManyValuesError(
            f"the body has more than {at_most} JSON values; raise the server's 'max_body_values' if it may have",
            limit=at_most,
        )


def has_more_values(body: bytes, at_most: int) -> bool:
    """Whether JSON has more than ``at_most`` values, which is more commas and opening brackets outside of strings."""
    pieces = range(0, len(body), _HELD_AT_ONCE_BYTES)
    anywhere = 0
    for at in pieces:
        anywhere += len(body[at : at + _HELD_AT_ONCE_BYTES].translate(None, _OTHERS))
        if anywhere > at_most:
            break
    else:
        return False  # for fewer of them are anywhere
    counter = ValueCounter()
    for at in pieces:
        counter.feed(body[at : at + _HELD_AT_ONCE_BYTES])
        # A key and a value that are strings belong to one of those signs.
        if counter.found > at_most or counter.quotes > 4 * at_most + 4:
            return True
    return False


class ValueCounter:
    """Counts the values of JSON that comes in pieces. A list or an object counts as ``of_containers`` values: it takes
    that much more to parse, and to hold, than a number."""

    def __init__(self, of_containers: int = 1) -> None:
        self.found = self.quotes = 0
        self._more = of_containers - 1
        self._inside, self._backslash = False, b""

    def feed(self, piece: bytes) -> None:
        piece = (self._backslash + piece).replace(b"\\\\", b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""  # whatever it is before comes with the next piece
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"").translate(None, _NO_QUOTES)
        self.quotes += piece.count(b'"')
        parts = piece.split(b'"')
        for part in parts[self._inside :: 2]:
            self.found += len(part)
            if self._more and part:
                self.found += self._more * (part.count(b"[") + part.count(b"{"))
        self._inside ^= len(parts) % 2 == 0


def check_messages(body: Mapping[str, Any], at_most: int) -> None:
    """Raise `TooManyMessagesError` for a body with a history (``messages``, ``input``) of more than ``at_most``."""
    for key in ("messages", "input"):
        history = body.get(key)
        if isinstance(history, list) and len(history) > at_most:
            raise TooManyMessagesError(
                f"'{key}' has {len(history)} elements, and may have {at_most}; raise the server's 'max_messages' if"
                " it may have more",
                param=key,
                limit=at_most,
            )


# Reading a body as an object or a model, and answering with one.

_LEVELS_AROUND = 50
"""Of nesting, kept free of the 254 that can be written."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class JsonResponse(JSONResponse):
    """Plain data as JSON, encoded once."""

    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise not_json(error) from error


class EncodedBodyError(NemoGymError):
    """A body came compressed: nothing here inflates what somebody else has made small."""

    code = "content_encoding"
    status = 415


def validated(model: type[ModelT], value: Any, what: str) -> ModelT:
    """``value`` of a request as a model; raises `InvalidBodyError` that names ``what`` and each wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InvalidBodyError(f"{what}: {validation_problems(error, model.model_fields)}") from None


async def parse_json_object(
    request: Request, loads: Callable[[bytes], Any] = orjson.loads, *, max_values: int | None = None
) -> dict[str, Any]:
    """The request's body as a JSON object; raises `InvalidBodyError`, `EncodedBodyError` for one that is compressed,
    and `TooManyValuesError` where there is a bound. ``loads`` returns and raises as orjson's."""
    refuse_encoded(request)
    body = await request.body()
    if max_values is not None:
        await check_values(body, max_values)
    return json_object(body, request.scope["path"], loads)


def refuse_encoded(request: Request) -> None:
    """Raise `EncodedBodyError` for a compressed body."""
    for encoding in request.headers.getlist("content-encoding"):
        if encoding.strip().lower() not in ("identity", ""):
            raise EncodedBodyError(f"the body of {request.url.path} is encoded as {encoding[:40]!r}; send it as it is")


def json_object(body: bytes, path: str, loads: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    """See `parse_json_object`."""
    try:
        value = loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise InvalidBodyError(f"the body of {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(f"the body of {path} must be a JSON object, not {type(value).__name__}")
    if loads is orjson.loads:
        _require_shallow(value, path)
    return value


def _require_shallow(value: dict[str, Any], path: str) -> None:
    """Raise `InvalidBodyError` for a value that could be read but not be passed on: writing has a lower limit than
    reading, and what holds the value counts too. Writing it costs a third of reading it."""
    within: Any = value
    for _ in range(_LEVELS_AROUND):
        within = [within]
    try:
        orjson.dumps(within)
    except TypeError as error:
        raise InvalidBodyError(f"the body of {path}: {not_json(error)}") from None
