"""A client for MCP servers with major version 2 of the MCP library.

The library implements the protocol; its requests go through the agent server's pooled HTTP session, like all others.
The library's own HTTP client would cost each attempt a TLS context (25 ms of CPU) and connections that are not reused.

With the current protocol every request is independent, without a handshake or a session. For servers known to speak
it, the library's session uses a `PostDispatcher` instead of the library's transport with its tasks and HTTP client.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx2
import orjson
import yarl
from mcp import Client, MCPError
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import CallOptions
from mcp.types import (
    REQUEST_TIMEOUT,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    DiscoverResult,
    ErrorData,
    PaginatedRequestParams,
    Tool,
)

from nemo_gym._util.exact_json import dumps_exactly
from nemo_gym._util.lazy import lazily
from nemo_gym.agent.harness import MCP_CONNECT_TIMEOUT_S, MCP_READ_TIMEOUT_S
from nemo_gym.contract.session import McpServer
from nemo_gym.http.client import get_global_aiohttp_client
from nemo_gym.http.telemetry import ROLLOUT_PATH_PREFIX, inject

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

_MESSAGE_HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
_ROLLOUT = re.compile(f"/{ROLLOUT_PATH_PREFIX}/[^/]+")
_EVENT_END = re.compile(rb"\r?\n\r?\n")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request


@dataclass(slots=True)
class _KnownServer:
    """The cached description of a server."""

    discovered: DiscoverResult
    tools: Sequence[Tool] = ()
    tools_until: float = 0.0
    """The monotonic time in seconds until which every attempt may use ``tools``, as allowed by the server."""


_known_servers: dict[tuple[str, str], _KnownServer] = {}
"""Servers of the current protocol, by URL (without the part that names a rollout) and name. Attempts after the first
skip the discovery of the protocol, and skip listing the tools while the server allows it."""
MAX_KNOWN = 256


class McpConnection:
    """One attempt's connection to one MCP server. Its methods raise what the library raises."""

    def __init__(self, session: ClientSession, known: _KnownServer | None) -> None:
        self._session, self._known_server = session, known

    async def tools(self) -> Sequence[Tool]:
        """List all tools that the server offers this attempt."""
        if self._known_server is not None and time.monotonic() < self._known_server.tools_until:
            return self._known_server.tools
        page = await self._session.list_tools()
        tools, cacheable_s = [*page.tools], page.ttl_ms / 1000 if page.cache_scope == "public" else 0.0
        while page.next_cursor is not None:
            page = await self._session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            tools += page.tools
            cacheable_s = 0.0
        # To call a tool that takes arguments in headers, the library's session must have listed the tools itself.
        if self._known_server is not None and not any("x-mcp-header" in str(tool.input_schema) for tool in tools):
            self._known_server.tools, self._known_server.tools_until = tools, time.monotonic() + cacheable_s
        return tools

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult:
        # Bypasses the library's `call_tool`, which compiles the tool's output schema in every session, so in every
        # attempt: 0.9 ms, to validate structured content that is unused here.
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        return await self._session.send_request(request, CallToolResult, request_read_timeout_seconds=timeout_s)


async def connect(stack: AsyncExitStack, server: McpServer) -> McpConnection:
    """Connect to ``server`` for as long as ``stack`` is open. Raises what the library raises; a caller that cannot use
    the connection must call `forget`."""
    if (known := _known_servers.get(_key(server))) is not None:
        session = ClientSession(dispatcher=PostDispatcher(server))
        session.adopt(known.discovered)
        return McpConnection(session, known)
    http = await stack.enter_async_context(
        httpx2.AsyncClient(
            headers=dict(server.headers),
            trust_env=False,
            transport=SharedSessionTransport(),
            timeout=httpx2.Timeout(MCP_CONNECT_TIMEOUT_S, read=MCP_READ_TIMEOUT_S),
        )
    )
    client = await stack.enter_async_context(Client(streamable_http_client(server.url, http_client=http)))
    # A server of an older protocol opens a session for each client, so nothing is cached for it.
    if (discovered := client.session.discover_result) is not None:
        known = _known_servers[_key(server)] = _KnownServer(discovered)
        if len(_known_servers) > MAX_KNOWN:
            _known_servers.pop(next(iter(_known_servers)))
    return McpConnection(client.session, known)


def forget(server: McpServer) -> None:
    """Discover the protocol of ``server`` again at the next connection, because the server may have been replaced."""
    _known_servers.pop(_key(server), None)


def _key(server: McpServer) -> tuple[str, str]:
    return _ROLLOUT.sub("", server.url, count=1), server.name


class McpServerError(Exception):
    """A server's reply is not an MCP message: the server refuses such requests, or refuses this attempt."""


class PostDispatcher:
    """Sends each request as a separate POST and reads the result from its reply, as in the current protocol."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._ids = count(1)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Send a request and return its result. Raises `MCPError` for an error response or a timeout,
        `McpServerError`, and `aiohttp`'s errors. Cancelling the caller closes the reply, which cancels the request."""
        options = opts or {}
        headers = {**self._server.headers, **_MESSAGE_HEADERS, **options.get("headers", {})}
        inject(headers)
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params or {}}
        try:
            async with get_global_aiohttp_client().post(
                self._server.url,
                data=dumps_exactly(request),
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    options.get("timeout", MCP_READ_TIMEOUT_S), sock_connect=MCP_CONNECT_TIMEOUT_S
                ),
                allow_redirects=False,
            ) as reply:
                async for message in _messages(reply):
                    if isinstance(error := message.get("error"), dict):
                        raise MCPError.from_error_data(ErrorData.model_validate(error))
                    if isinstance(result := message.get("result"), dict):
                        return result
                raise McpServerError(f"answered {reply.status} without a result")
        except aiohttp.ConnectionTimeoutError:
            raise
        except TimeoutError as error:
            raise MCPError(REQUEST_TIMEOUT, f"{method} was not answered in time") from error

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Do nothing: the current protocol has no notifications from clients."""

    async def run(self, *handlers: object, task_status: object = None) -> None:
        """Do nothing: servers send only replies, and a session on this dispatcher is never entered."""


async def _messages(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages in a reply, which is a single message or a stream of server-sent events."""
    if reply.content_type != "text/event-stream":
        yield _message(await reply.read())
        return
    unread = b""
    async for chunk in reply.content.iter_any():
        *events, unread = _EVENT_END.split(unread + chunk)
        for event in events:
            lines = [line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")]
            yield _message(b"\n".join(lines))


def _message(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; returns an empty one for anything else."""
    try:
        message = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}


class SharedSessionTransport(httpx2.AsyncBaseTransport):
    """Sends the library's requests through the running loop's shared session, which outlives this transport."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        limits = request.extensions.get("timeout", {})
        request_headers = [*request.headers.multi_items()]
        inject(trace_headers := dict[str, str]())
        request_headers += trace_headers.items()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read"))
        try:
            reply = await get_global_aiohttp_client().request(
                request.method,
                yarl.URL(str(request.url), encoded=True),
                data=await request.aread(),
                headers=request_headers,
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _error_of(error, request) from error
        # The session has already decoded the body.
        headers = [header for header in reply.raw_headers if header[0].lower() != b"content-encoding"]
        return httpx2.Response(reply.status, headers=headers, stream=_Body(reply, request), request=request)


class _Body(httpx2.AsyncByteStream):
    def __init__(self, reply: aiohttp.ClientResponse, request: httpx2.Request) -> None:
        self._reply, self._request = reply, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._reply.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _error_of(error, self._request) from error

    async def aclose(self) -> None:
        self._reply.release()  # closes the connection if the body was not read to its end


def _error_of(error: Exception, request: httpx2.Request) -> httpx2.TransportError:
    """The error that the library's own transport would raise."""
    if isinstance(error, aiohttp.ClientConnectorError):
        kind: type[httpx2.TransportError] = httpx2.ConnectError
    elif isinstance(error, aiohttp.ConnectionTimeoutError):
        kind = httpx2.ConnectTimeout
    else:
        kind = httpx2.ReadTimeout if isinstance(error, TimeoutError) else httpx2.ReadError
    return kind(str(error) or type(error).__name__, request=request)
