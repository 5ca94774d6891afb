"""Session cookies: a signed, unencrypted dict per client, read only when somebody looks at it.

The cookie's name is the one NeMo Gym uses; its key is the server's own, so no client can write a session. A session
that was opened for an attempt names it, and every request with it is refused once that attempt is fenced or closed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any
from uuid import uuid4

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.problems import send_problem

SESSION_ID_KEY = "session_id"
MAX_AGE_S = 14 * 24 * 3600
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"
SessionGuard = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Gets the path and the session; raises a `NemoGymError` for one that may not be used any more."""


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


class SessionMiddleware:
    """Gives every HTTP request a `LazySession`, and its reply the cookie of a session that is used."""

    def __init__(self, app: ASGIApp, cookie_name: str, codec: CookieCodec, guard: SessionGuard | None = None) -> None:
        self.app = app
        self._name = cookie_name
        self._needle = cookie_name.encode("latin-1", "replace") + b"="
        self._codec = codec
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or isinstance(scope.get("session"), LazySession):
            # The second case: an application within one that has sessions already.
            await self.app(scope, receive, send)
            return
        cookie = self._cookie(scope)
        session = LazySession(self._codec, cookie)
        scope["session"] = session
        if cookie is not None and self._guard is not None:
            try:
                await self._guard(scope["path"], session)
            except NemoGymError as error:
                await send_problem(scope, receive, send, error)
                return

        async def send_with_cookie(message: Message) -> None:
            # Also when nothing changed: callers keep the cookies of the last reply only.
            if message["type"] == "http.response.start" and (session.changed or cookie is not None):
                value = self._codec.encode(session) if session.changed else cookie
                header = f"{self._name}={value}; {_ATTRIBUTES}".encode("latin-1")
                message["headers"] = [*message.get("headers", ()), (b"set-cookie", header)]
            await send(message)

        await self.app(scope, receive, send_with_cookie)

    def _cookie(self, scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"cookie" and self._needle in value:
                for part in value.split(b";"):
                    part = part.strip()
                    if part.startswith(self._needle):
                        text: str = part[len(self._needle) :].decode("latin-1")
                        return text.strip('"')
        return None
