"""A request as routes see it: its sender, its session, the route that answers, and its body as bounded JSON.

The middleware (`nemo_gym.http.middleware`) records this in the request's scope, and routes read it from there. A
session cookie is a signed, unencrypted dict per client, decoded on first use. Its name is NeMo Gym's; its key is the
server's own, so no client can forge a session.

A byte limit alone does not bound a body's memory: an empty list takes 3 bytes in the body and 60 in memory. So a
body's values are counted before anything is parsed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.errors import InvalidBodyError, NemoGymError, not_json
from nemo_gym.http import telemetry


class TooManyValuesError(NemoGymError):
    """A JSON body has more values than the server accepts."""

    code = "body_too_many_values"
    status = 413


class TooManyMessagesError(NemoGymError):
    """A conversation has more messages than the server accepts."""

    code = "too_many_messages"
    status = 413


_VALUE_BYTES = 2
"""The shortest value and its separator."""
_HELD_AT_ONCE_BYTES = 256 << 10
"""Bytes scanned in one call, which holds the interpreter's lock for a millisecond or two."""
_INLINE_SCAN_BYTES = 2 << 20
_COUNTING = ThreadPoolExecutor(1, "body values")
"""One body at a time: every further thread that competes for the interpreter's lock delays the event loop."""
_STRUCTURE = b",[{"
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
_NOT_STRUCTURE_OR_QUOTE = bytes(byte for byte in range(256) if byte not in _STRUCTURE + b'"')


async def check_values(body: bytes, at_most: int) -> None:
    """Raise `TooManyValuesError` for JSON of more than ``at_most`` values. ``body`` need not be valid JSON."""
    if len(body) <= at_most * _VALUE_BYTES:
        return
    too_many = (
        has_more_values(body, at_most)
        if len(body) <= _INLINE_SCAN_BYTES
        else await asyncio.get_running_loop().run_in_executor(_COUNTING, has_more_values, body, at_most)
    )
    if too_many:
        raise TooManyValuesError(
            f"the body has more than {at_most} JSON values; raise the server's 'max_body_values' to allow more",
            limit=at_most,
        )


def has_more_values(body: bytes, at_most: int) -> bool:
    """Whether JSON has more than ``at_most`` values, counted as commas and opening brackets outside of strings."""
    pieces = range(0, len(body), _HELD_AT_ONCE_BYTES)
    anywhere = 0
    for at in pieces:
        anywhere += len(body[at : at + _HELD_AT_ONCE_BYTES].translate(None, _NOT_STRUCTURE))
        if anywhere > at_most:
            break
    else:
        return False  # strings included, there are not enough of these signs
    counter = ValueCounter()
    for at in pieces:
        counter.feed(body[at : at + _HELD_AT_ONCE_BYTES])
        # Each counted sign allows a key and a value, hence at most four quotes.
        if counter.found > at_most or counter.quotes > 4 * at_most + 4:
            return True
    return False


class ValueCounter:
    """Counts the values of JSON that arrives in pieces. A list or an object counts as ``of_containers`` values: it
    costs that much more to parse and to hold in memory than a number."""

    def __init__(self, of_containers: int = 1) -> None:
        self.found = self.quotes = 0
        self._extra_per_container = of_containers - 1
        self._in_string, self._backslash = False, b""

    def feed(self, piece: bytes) -> None:
        piece = (self._backslash + piece).replace(b"\\\\", b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""  # the character it escapes is in the next piece
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE_OR_QUOTE)
        self.quotes += piece.count(b'"')
        parts = piece.split(b'"')
        for part in parts[self._in_string :: 2]:
            self.found += len(part)
            if self._extra_per_container and part:
                self.found += self._extra_per_container * (part.count(b"[") + part.count(b"{"))
        self._in_string ^= len(parts) % 2 == 0


def check_messages(body: Mapping[str, Any], at_most: int) -> None:
    """Raise `TooManyMessagesError` if the body's ``messages`` or ``input`` has more than ``at_most`` elements."""
    for key in ("messages", "input"):
        history = body.get(key)
        if isinstance(history, list) and len(history) > at_most:
            raise TooManyMessagesError(
                f"'{key}' has {len(history)} elements, but the limit is {at_most}; raise the server's 'max_messages'"
                " to allow more",
                param=key,
                limit=at_most,
            )


# -- Body ----------------------------------------------------------------------------------------------------------

_LEVELS_AROUND = 50
"""Nesting levels reserved for whatever encloses the value, out of the 254 that can be encoded."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class JsonResponse(JSONResponse):
    """Plain data as JSON, encoded once."""

    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise not_json(error) from error


class EncodedBodyError(NemoGymError):
    """A body is compressed; this server inflates no request bodies."""

    code = "content_encoding"
    status = 415


def validated(model: type[ModelT], value: Any, what: str) -> ModelT:
    """Validate ``value`` as ``model``. Raises `InvalidBodyError`, which names ``what`` and each wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InvalidBodyError(f"{what}: {validation_problems(error, model.model_fields)}") from None


async def parse_json_object(
    request: Request,
    loads: Callable[[bytes], Any] = orjson.loads,
    *,
    max_values: int | None = None,
    checks_depth: bool = True,
) -> dict[str, Any]:
    """Read the request's body as a JSON object. Raises `InvalidBodyError`, `EncodedBodyError` for a compressed body,
    and `TooManyValuesError` for more than ``max_values``. ``loads`` must return and raise as orjson's does. Without
    ``checks_depth``, the caller checks the parts of the body by `require_shallow`."""
    refuse_encoded(request)
    body = await request.body()
    if max_values is not None:
        await check_values(body, max_values)
    return json_object(body, request.scope["path"], loads, checks_depth=checks_depth)


def refuse_encoded(request: Request) -> None:
    """Raise `EncodedBodyError` for a compressed body."""
    for encoding in request.headers.getlist("content-encoding"):
        if encoding.strip().lower() not in ("identity", ""):
            raise EncodedBodyError(f"the body of {request.url.path} is encoded as {encoding[:40]!r}; send it as it is")


def json_object(
    body: bytes, path: str, loads: Callable[[bytes], Any] = orjson.loads, *, checks_depth: bool = True
) -> dict[str, Any]:
    """Parse ``body`` as `parse_json_object` does; an empty body is an empty object."""
    try:
        value = loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise InvalidBodyError(f"the body of {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(f"the body of {path} must be a JSON object, not {type(value).__name__}")
    if checks_depth:
        require_shallow(value, f"the body of {path}")
    return value


def require_shallow(value: dict[str, Any], what: str) -> None:
    """Raise `InvalidBodyError` for a value nested too deeply to be passed on: encoding allows fewer levels than
    parsing, and the enclosing levels count too. The trial encoding costs a third of the parsing."""
    nested: Any = value
    for _ in range(_LEVELS_AROUND):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except TypeError as error:
        raise InvalidBodyError(f"{what}: {not_json(error)}") from None


# -- Sender --------------------------------------------------------------------------------------------------------

CALLER = "nemo_gym.caller"


def caller_of(connection: HTTPConnection) -> Caller | None:
    """The sender of the request; ``None`` on an unsecured server and on routes with another kind of token."""
    caller: Any = connection.scope.get(CALLER)
    return caller if isinstance(caller, Caller) else None


def sent_by_agent(scope: Scope) -> bool:
    """Whether the request carried an agent server's credential."""
    caller = scope.get(CALLER)
    return isinstance(caller, Caller) and caller.role is Role.AGENT


def require_role(connection: HTTPConnection, *roles: Role) -> Caller | None:
    """Return the caller; ``None`` on an unsecured server. Raises `RoleError` unless it has one of ``roles``."""
    caller = caller_of(connection)
    if caller is not None:
        caller.require(*roles, route=connection.scope["path"])
    return caller


# -- Session -------------------------------------------------------------------------------------------------------

SESSION_ID_KEY = "session_id"


class CookieCodec:
    """Signs and reads session cookies with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _mac(self, body: bytes) -> bytes:
        return base64.urlsafe_b64encode(hmac.digest(self._key, body, hashlib.sha256)).rstrip(b"=")

    def encode(self, session: Mapping[str, Any]) -> str:
        body = base64.urlsafe_b64encode(orjson.dumps(dict(session))).rstrip(b"=")
        return (body + b"." + self._mac(body)).decode()

    def decode(self, cookie: str) -> dict[str, Any] | None:
        """The session in a cookie, or ``None`` if this server did not sign it."""
        body, _, mac = cookie.encode("latin-1").rpartition(b".")
        if not body or not hmac.compare_digest(mac, self._mac(body)):
            return None
        data: dict[str, Any] = orjson.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
        return data


class LazySession(MutableMapping[str, Any]):
    """``request.session``, decoded on first use. A new session gets a random ``session_id``."""

    __slots__ = ("_codec", "_cookie", "_data", "changed")

    def __init__(self, codec: CookieCodec, cookie: str | None) -> None:
        self._codec = codec
        self._cookie = cookie
        self._data: dict[str, Any] | None = None
        self.changed = False

    @property
    def _loaded(self) -> dict[str, Any]:
        if self._data is None:
            data = self._codec.decode(self._cookie) if self._cookie else None
            if data is None:
                data = {SESSION_ID_KEY: str(uuid4())}
                self.changed = True
            self._data = data
        return self._data

    def replace(self, data: Mapping[str, Any]) -> None:
        """Replace the session's contents by ``data``, so that a repeated seed gets the first seed's session."""
        self._data = dict(data)
        self.changed = True

    def __getitem__(self, key: str) -> Any:
        return self._loaded[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._loaded[key] = value
        self.changed = True

    def __delitem__(self, key: str) -> None:
        del self._loaded[key]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def copy(self) -> dict[str, Any]:
        return dict(self._loaded)


# -- Route and span ------------------------------------------------------------------------------------------------

SEEN = "nemo_gym.seen"
UNKNOWN_ROUTE = "other"
"""The label for paths without a route, and for applications that a plugin built itself."""


class Seen:
    """The layers' record of a request while it is answered, for its metrics and span."""

    __slots__ = ("attributes", "route", "title")

    def __init__(self) -> None:
        self.route = UNKNOWN_ROUTE
        self.title: str | None = None
        """The span's name, if it should be more specific than the route."""
        self.attributes: Mapping[str, Any] = {}


def note_route(scope: Scope, route: str | None) -> None:
    """Record the route that answers; requests without such a record count as `UNKNOWN_ROUTE`."""
    seen = scope.get(SEEN)
    if seen is not None and route is not None:
        seen.route = route


def describe_request(scope: Scope, title: str, attributes: Mapping[str, Any]) -> None:
    """Name the request's span ``title``, and give it these attributes."""
    seen = scope.get(SEEN)
    if isinstance(seen, Seen) and telemetry.is_on():
        seen.title, seen.attributes = title, attributes
