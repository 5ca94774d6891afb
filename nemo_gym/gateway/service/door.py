"""The way in for most calls: a harness that sends its body whole to an inference route, with its session's token.

Everything else (other credentials, prefixes, cookies, encodings, tokens that open nothing) goes the long way through
the server's layers, which answer it as they answer everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.contract.credentials import CREDENTIAL_HEADER
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.service.call import CallRequest
from nemo_gym.gateway.service.inference import Inference
from nemo_gym.gateway.service.limits import step_begins
from nemo_gym.gateway.service.live import LiveSession
from nemo_gym.gateway.service.sessions import DurableSessions
from nemo_gym.gateway.sessions import token_in
from nemo_gym.http.correlation import ROLLOUT_ID_HEADER
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError
from nemo_gym.http.problems import json_object, refused, unexpected

_SESSIONS = "/sessions/"
_ELSEWHERE = frozenset(
    {CREDENTIAL_HEADER.lower(), ROLLOUT_ID_HEADER.lower(), "cookie", "content-encoding", "transfer-encoding"}
)
"""Headers that some layer does something about."""
LENGTH_DIGITS = 15


class InferenceDoor:
    """An `nemo_gym.http.server.Shortcut` to a gateway's inference."""

    def __init__(self, sessions: DurableSessions[Any, Any], inference: Inference[Any, Any]) -> None:
        self._sessions = sessions
        self._inference = inference
        self._limits = inference.limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path: str = scope["path"]
        named: str | None = None
        if (dialect := PATHS.get(path)) is None and path.startswith(_SESSIONS):
            named, slash, route = path[len(_SESSIONS) :].partition("/")
            dialect = PATHS.get(slash + route)
        if dialect is None:
            return None
        # Of a header that comes twice, the first counts.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        length = headers.get("content-length", "")
        if not (length.isdecimal() and len(length) <= LENGTH_DIGITS and int(length) <= self._limits.max_body_bytes):
            return None
        if not _ELSEWHERE.isdisjoint(headers):
            return None
        live = self._session(headers, named)
        return None if live is None else self._claimed(dialect, live, headers, int(length), scope, receive, send)

    def _session(self, headers: Mapping[str, str], named: str | None) -> LiveSession[Any] | None:
        token = token_in(headers)
        if token is None:
            return None
        try:
            live = self._sessions.authorized(token)
        except NemoGymError:
            return None
        return live if named is None or named == live.session_id else None

    async def _claimed(
        self,
        dialect: Dialect,
        live: LiveSession[Any],
        headers: Mapping[str, str],
        length: int,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            live.share.claim(length, self._limits.max_session_in_flight_bytes)
        except NemoGymError as error:
            await refused(Request(scope), error)(scope, receive, send)
            return
        try:
            await self._answered(dialect, live, headers, scope, receive, send)
        finally:
            live.share.release(length)

    async def _answered(
        self,
        dialect: Dialect,
        live: LiveSession[Any],
        headers: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # gone before its whole body was here: nobody waits for an answer
            parts.append(message["body"])
            more = message["more_body"]
        try:
            raw = parts[0] if len(parts) == 1 else await self._joined(parts, live)
            await self._inference.admit(raw, live)
            working = step_begins(len(raw))
            body = json_object(raw, scope["path"], live.bodies.loads)
            live.share.worked(working)
            asked = CallRequest(headers, scope["client"], receive, len(raw))
            response = await self._inference.answer(dialect, body, asked, live)
        except CallerGoneError:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except NemoGymError as error:
            response = refused(Request(scope), error)
        except Exception as error:  # noqa: BLE001 - the boundary of this server, as in `UnknownErrorMiddleware`
            response = unexpected(scope, error)
        await response(scope, receive, send)

    async def _joined(self, parts: list[bytes], live: LiveSession[Any]) -> bytes:
        await self._inference.turns.wait(live.share)
        working = step_begins(sum(map(len, parts)))
        raw = b"".join(parts)
        live.share.worked(working)
        parts.clear()
        return raw
