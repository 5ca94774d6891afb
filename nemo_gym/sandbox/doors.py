"""Doors: the host's end of a listener on a box's loopback, which forwards an allow-list of routes to one target.

A provider opens the listening socket (in the box's network namespace, or on a mounted unix socket) and hands it to
`DoorServer`. Requests from the box are untrusted: a request whose path servers could interpret differently is refused,
credentials from the box are dropped, and the door's own headers override the rest. Bodies stream unchanged in both
directions, compressed ones too; if the box closes its connection, the request to the target is cancelled. The number
of connections and each request's size and arrival time are limited, so that a box cannot exhaust the door's process.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from nemo_gym._util.lazy import lazily
from nemo_gym._util.tasks import finish
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Door
from nemo_gym.http.client import new_session
from nemo_gym.sandbox.door_statistics import AnswerLimit, DoorStatistics, Exchange
from nemo_gym.sandbox.egress import EgressProxy, problem_body

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web
else:
    aiohttp = lazily("aiohttp")

GENERATION_ROUTES: tuple[str, ...] = ("POST /v1/responses", "POST /v1/chat/completions", "POST /v1/messages")
"""The routes that generate model responses, one per API dialect. One response is one turn."""

INFERENCE_ROUTES: tuple[str, ...] = (
    *GENERATION_ROUTES,
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/*",
)
"""The routes of a model endpoint that a harness needs, as the box requests them; the target's base path is prepended.
"""

MCP_ROUTES: tuple[str, ...] = ("GET /mcp", "POST /mcp", "DELETE /mcp")
"""The streamable HTTP transport of one MCP server."""

_CONNECT_TIMEOUT_S = 10.0
PATIENCE_S = 75.0
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS = 512
# A client refused in mid-body may still be sending. If the connection closed at once, it might never read the reason.
_LINGER_S = 1.0
# Below the 5 s after which common servers drop an idle connection, so that a request rarely meets one being closed.
_KEEPALIVE_S = 3.0
_HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
_CREDENTIALS = frozenset(["authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key", "x-auth-token"])
_FORWARDING = re.compile(r"forwarded|x-forwarded-.*|x-real-ip|via|host|expect", re.IGNORECASE)
_AMBIGUOUS = re.compile(rb"[\x00-\x20\x7f\\]|%(?:2f|5c|25|[01][0-9a-f]|7f)", re.IGNORECASE)


def normalize_path(raw: str) -> str | None:
    """Return the normal form of a request path, or ``None`` if servers could interpret the path differently.

    Dot segments are resolved and repeated slashes joined. Encoded slashes, backslashes, percent signs and control
    characters are refused, because the target may decode them after the door has checked the path.
    """
    if not raw.startswith("/") or _AMBIGUOUS.search(raw.encode("utf-8", "surrogateescape")):
        return None
    parts: list[str] = []
    for part in raw.split("/"):
        plain = unquote_to_bytes(part)
        if plain == b"..":
            if not parts:
                return None
            parts.pop()
        elif plain not in (b"", b"."):
            parts.append(part)
    return "/" + "/".join(parts)


class RouteMatcher:
    """Matches requests against ``METHOD /path`` patterns; see `Door.allow`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._routes: list[tuple[str, list[str]]] = []
        for pattern in patterns:
            method, _, path = pattern.partition(" ")
            segments = path.split("/")[1:]
            if not method.isalpha() or not path.startswith("/") or "**" in segments[:-1]:
                raise ConfigError(
                    f"door: allow pattern '{pattern}' is not 'METHOD /path' with '*' for a segment or a final '/**'"
                )
            self._routes.append((method.upper(), segments))

    def allows(self, method: str, path: str) -> bool:
        """Return whether a pattern matches; ``path`` must come from `normalize_path`."""
        segments = path.split("/")[1:]
        return any(method == route_method and self._match(route, segments) for route_method, route in self._routes)

    @staticmethod
    def _match(route: list[str], segments: list[str]) -> bool:
        if route[-1] == "**":
            route, segments = route[:-1], segments[: len(route) - 1]
        # A '*' needs a non-empty segment: '/a/*' does not match '/a/'.
        return len(route) == len(segments) and all(
            bool(segment) if pattern == "*" else pattern == segment
            for pattern, segment in zip(route, segments, strict=True)
        )


class DoorServer:
    """Serves one door on a bound socket, on the event loop that starts it.

    Args:
        door: the routes to forward, their target, and the headers to set.
        sock: bound TCP or unix stream socket; it need not listen yet. The server owns and closes it.
        patience_s: seconds that a connection may be idle or in the middle of a request's head; also the total time
            that the door waits for the pieces of one request body.
        max_body_bytes: maximum size of a request body as transferred (before decompression).
        max_connections: maximum number of open connections; further ones are closed at once.

    Raises:
        ConfigError: the door's target is not an http(s) URL, an allow pattern is malformed, or ``max_answers`` is
            below 1 or set without ``counted``.
    """

    def __init__(
        self,
        door: Door,
        sock: socket.socket,
        *,
        patience_s: float = PATIENCE_S,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.door = door
        self._patience_s = patience_s
        self._max_body_bytes = max_body_bytes
        self._max_connections = max_connections
        self._socket = sock
        self._routes, self._counted = RouteMatcher(door.allow), RouteMatcher(door.counted)
        self._limit = None if door.max_answers is None else AnswerLimit(door.max_answers)
        self._target = URL(door.target)
        if self._target.scheme not in ("http", "https") or not self._target.host:
            raise ConfigError(f"door '{door.name}': target '{door.target}' is not an http:// or https:// URL")
        if door.max_answers is not None and (door.max_answers < 1 or not door.counted):
            raise ConfigError(f"door '{door.name}': max_answers must be at least 1 and needs 'counted' routes")
        self._base = self._target.raw_path.rstrip("/")
        self._dropped = _HOP_BY_HOP | _CREDENTIALS | {name.lower() for name in door.headers}
        self._runner: web.ServerRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self.statistics = DoorStatistics()

    async def start(self) -> None:
        """Start accepting connections; earlier ones wait in the socket's backlog. If the start fails or is cancelled,
        the socket is closed."""
        # Not cancelled half-way: the event loop would keep accepting for a server that no caller can close.
        try:
            await finish(self._start())
        except BaseException:
            await self.aclose()
            raise

    async def _start(self) -> None:
        from aiohttp import web

        server = _listener_class()(
            self._handle,
            max_connections=self._max_connections,
            handler_cancellation=True,
            access_log=None,
            # Also the limit for receiving a head: aiohttp starts this timer at the connect or the last response.
            keepalive_timeout=self._patience_s,
            # Bodies pass compressed. A decompressed body would no longer match its Content-Length, and a small
            # compressed one could fill this process's memory.
            auto_decompress=False,
            lingering_time=_LINGER_S,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, backlog=1024).start()

    async def aclose(self) -> None:
        """Stop accepting, cancel requests in progress, close every connection and the socket. Idempotent."""
        runner, client = self._runner, self._client
        self._runner = self._client = None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            # Aborting a connection cancels its handler, which otherwise could run until the model's response ends.
            for connection in runner.server.connections if runner.server else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
        if client is not None:
            await client.close()
        self._socket.close()

    def _session(self) -> aiohttp.ClientSession:
        # Created at the first request: most eval boxes never use their doors.
        if self._client is None:
            self._client = new_session(
                aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                keepalive_s=_KEEPALIVE_S,
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._client

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw_path, _, query = request.raw_path.partition("?")
        path = normalize_path(raw_path)
        if path is None or not self._routes.allows(request.method, path):
            self.statistics.forbidden += 1
            return self._problem(
                403,
                "door_route",
                f"door '{self.door.name}' does not allow {request.method} {raw_path[:200]}",
                started="no",
            )
        if self._runner is None:
            return self._problem(502, "door_closed", f"door '{self.door.name}' is closed", started="no")
        counts = self._counted.allows(request.method, path)
        limit = self._limit if counts else None
        if limit is not None and not await limit.enter():
            self.statistics.over_limit += 1
            detail = f"door '{self.door.name}' has reached its limit of {self.door.max_answers} responses"
            return self._problem(403, "door_limit", detail, started="no")
        try:
            with self.statistics.exchange(counts=counts, tells=counts or not self.door.counted) as exchange:
                return await self._forward(request, path, query, exchange)
        finally:
            if limit is not None:
                limit.leave(answered=exchange.is_turn)

    async def _forward(
        self, request: web.BaseRequest, path: str, query: str, exchange: Exchange
    ) -> web.StreamResponse:
        url = self._target.origin().join(URL(self._base + path + (f"?{query}" if query else ""), encoded=True))
        headers = self._request_headers(request.headers)
        body: _Body | None = None
        if request.body_exists:
            if (request.content_length or 0) > self._max_body_bytes:
                return self._problem(413, "door_body", self._too_large(), started="no")
            if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = _Body(request.content, patience_s=self._patience_s, max_bytes=self._max_body_bytes)
        try:
            upstream = await self._session().request(
                request.method,
                url,
                headers=headers,
                data=None if body is None else body.pieces(),
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            exchange.unreachable(detail := self._failure_text("cannot be reached", error))
            return self._problem(502, "door_unreachable", detail, started="no")
        except (aiohttp.ClientError, TimeoutError) as error:
            # The target received an incomplete body, which no server processes as a request.
            if body is not None and body.is_too_large:
                return self._problem(413, "door_body", self._too_large(), started="no")
            if body is not None and body.is_too_slow:
                detail = f"door '{self.door.name}' waited {self._patience_s:g} s for the rest of the body"
                return self._problem(408, "door_slow", detail, started="no")
            exchange.unreachable(detail := self._failure_text("failed before it answered", error))
            return self._problem(502, "door_failed", detail, started="unknown")
        async with upstream:
            return await self._relay(request, upstream, exchange, body)

    async def _relay(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, exchange: Exchange, body: _Body | None
    ) -> web.StreamResponse:
        from aiohttp import web

        exchange.answers(upstream.status, upstream.headers)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        connection_headers = _connection_tokens(upstream.headers)
        for key, value in upstream.headers.items():
            if key.lower() not in _HOP_BY_HOP | connection_headers | {"set-cookie"}:
                response.headers.add(key, value)
        await response.prepare(request)
        try:
            async for data in upstream.content.iter_any():
                exchange.saw(data)
                await response.write(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            exchange.broke_off(self._failure_text("broke off its response", error))
            # The target broke off. Abort, so that the box does not take the partial body for a complete one.
            if request.transport is not None:
                request.transport.abort()
            return response
        exchange.ends(asked=body is None or body.is_whole)
        await response.write_eof()
        return response

    def _request_headers(self, incoming: CIMultiDictProxy[str]) -> CIMultiDict[str]:
        dropped = self._dropped | _connection_tokens(incoming)
        headers: CIMultiDict[str] = CIMultiDict()
        for key, value in incoming.items():
            if key.lower() not in dropped and not _FORWARDING.fullmatch(key):
                headers.add(key, value)
        headers.update(self.door.headers)
        return headers

    def _too_large(self) -> str:
        return f"door '{self.door.name}' forwards bodies of at most {self._max_body_bytes} bytes"

    def _failure_text(self, problem: str, error: BaseException) -> str:
        return f"the target of door '{self.door.name}' {problem} ({type(error).__name__})"

    @staticmethod
    def _problem(status: int, code: str, detail: str, *, started: str) -> web.Response:
        from aiohttp import web

        body = problem_body(status, code, detail, retryable=status == 502, started=started)
        response = web.Response(status=status, body=body, content_type="application/problem+json")
        if status in (408, 413):
            response.force_close()  # otherwise the rest of the body would be parsed as the next request
        return response


@functools.cache
def _listener_class() -> type[Any]:
    from aiohttp import web

    class Listener(web.Server):
        """An HTTP server that allows at most ``max_connections`` connections."""

        def __init__(self, handler: Any, *, max_connections: int, **options: Any) -> None:
            super().__init__(handler, **options)
            self._max_connections = max_connections

        def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
            super().connection_made(handler, transport)
            if len(self.connections) > self._max_connections:
                transport.abort()

    return Listener


class _Body:
    """A request body that streams to the target, with limits on its size and on the time the box takes to send it."""

    def __init__(self, content: aiohttp.StreamReader, *, patience_s: float, max_bytes: int) -> None:
        self._content = content
        self._remaining_s = patience_s
        self._remaining_bytes = max_bytes
        self.is_whole = self.is_too_large = self.is_too_slow = False

    async def pieces(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        while True:
            # Only the box's share of the time counts: it is not to blame for a target that reads slowly.
            began = clock()
            try:
                async with asyncio.timeout(self._remaining_s):
                    piece = await self._content.readany()
            except TimeoutError:
                self.is_too_slow = True
                raise
            self._remaining_s -= clock() - began
            if not piece:
                self.is_whole = True
                return
            self._remaining_bytes -= len(piece)
            if self._remaining_bytes < 0:
                self.is_too_large = True
                raise aiohttp.ClientPayloadError("the request's body is too large")
            yield piece


def _connection_tokens(headers: CIMultiDictProxy[str]) -> set[str]:
    """Return the lower-case header names that ``Connection`` headers declare as hop-by-hop."""
    return {token.strip().lower() for value in headers.getall("Connection", ()) for token in value.split(",")}


def door_server(door: Door, sock: socket.socket) -> DoorServer | EgressProxy:
    """Return the server for a door of this kind, on a bound socket."""
    return EgressProxy(door, sock) if door.kind == "proxy" else DoorServer(door, sock)
