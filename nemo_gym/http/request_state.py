"""What the layers in front of a route learned about its request: who sent it, its session, and which route answers.

The layers (`nemo_gym.http.middleware`) write it, and routes read it. A session's cookie is a signed, unencrypted dict
per client, read only when somebody looks at it. Its name is the one NeMo Gym uses; its key is the server's own, so no
client can write a session.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import HTTPConnection
from starlette.types import Scope

from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.http import tracing

# -- Sender --------------------------------------------------------------------------------------------------------

CALLER = "nemo_gym.caller"


def caller_of(connection: HTTPConnection) -> Caller | None:
    """Who sent the request; ``None`` on an unsecured server (and on routes with another kind of token)."""
    caller: Any = connection.scope.get(CALLER)
    return caller if isinstance(caller, Caller) else None


def sent_by_agent(scope: Scope) -> bool:
    """Whether an agent server's credential came with the request."""
    caller = scope.get(CALLER)
    return isinstance(caller, Caller) and caller.role is Role.AGENT


def require_role(connection: HTTPConnection, *roles: Role) -> Caller | None:
    """The caller, who must have one of ``roles``; ``None`` on an unsecured server. Raises `RoleError`."""
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
        """The session in a cookie, or ``None`` when it is not one of this server's."""
        body, _, mac = cookie.encode("latin-1").rpartition(b".")
        if not body or not hmac.compare_digest(mac, self._mac(body)):
            return None
        data: dict[str, Any] = orjson.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
        return data


class LazySession(MutableMapping[str, Any]):
    """``request.session``: decoded on first use; a new one gets a random ``session_id``."""

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
        """Make this the session ``data``: a repeated seed gets the session of the first."""
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
"""Of paths that no route has, and of an application that a plugin built itself."""


class Seen:
    """What is learned of a request while it is answered."""

    __slots__ = ("attributes", "route", "title")

    def __init__(self) -> None:
        self.route = UNKNOWN_ROUTE
        self.title: str | None = None
        """Of its span, where that is more than a request."""
        self.attributes: Mapping[str, Any] = {}


def note_route(scope: Scope, route: str | None) -> None:
    """By which of its routes a server answers; what nobody notes counts as `UNKNOWN_ROUTE`."""
    seen = scope.get(SEEN)
    if seen is not None and route is not None:
        seen.route = route


def describe_request(scope: Scope, title: str, attributes: Mapping[str, Any]) -> None:
    """Have the span of the request be called ``title``, with these attributes."""
    seen = scope.get(SEEN)
    if isinstance(seen, Seen) and tracing.is_on():
        seen.title, seen.attributes = title, attributes
