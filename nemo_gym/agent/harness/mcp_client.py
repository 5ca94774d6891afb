"""MCP servers of one attempt, reached from an agent server.

The protocol is the library's; its requests go through the server's one pooled HTTP session, as all others do. A client
of the library's own costs each attempt a TLS context (25 ms of CPU) and connections that nobody uses again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp
import httpx2
import yarl
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import DiscoverResult

from nemo_gym.contract.session import McpServer
from nemo_gym.http.client import get_global_aiohttp_client

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 300.0
"""Between two reads: a tool may be silent until it is done, and each call has a limit of its own."""

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it writes a line for every request

_discovered: dict[tuple[str, str], tuple[str, DiscoverResult]] = {}
"""What servers said of themselves, by address and name: attempts after the first do not ask again, which is one of an
attempt's three or more requests. An environment has one address for all its attempts."""
MAX_DISCOVERED = 256


async def connect(stack: AsyncExitStack, server: McpServer) -> Client:
    """A client of ``server`` for as long as ``stack`` is open. Raises what the library raises; whoever cannot use the
    client then says so by `forget`."""
    http = await stack.enter_async_context(
        httpx2.AsyncClient(
            headers=dict(server.headers),
            trust_env=False,
            transport=SharedSessionTransport(),
            timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        )
    )
    transport = streamable_http_client(server.url, http_client=http)
    if (known := _discovered.get(_key(server))) is not None:
        return await stack.enter_async_context(Client(transport, mode=known[0], prior_discover=known[1]))
    client = await stack.enter_async_context(Client(transport))
    # A server of an older protocol makes a session for each client, and has to be asked each time.
    if (said := client.session.discover_result) is not None and len(_discovered) < MAX_DISCOVERED:
        _discovered[_key(server)] = (client.protocol_version, said)
    return client


def forget(server: McpServer) -> None:
    """Ask ``server`` again what it speaks: it may be another by now."""
    _discovered.pop(_key(server), None)


def _key(server: McpServer) -> tuple[str, str]:
    parts = urlsplit(server.url)
    return f"{parts.scheme}://{parts.netloc}", server.name


class SharedSessionTransport(httpx2.AsyncBaseTransport):
    """Sends the library's requests through the running loop's shared session, which outlives it."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        limits = request.extensions.get("timeout", {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read"))
        try:
            reply = await get_global_aiohttp_client().request(
                request.method,
                yarl.URL(str(request.url), encoded=True),
                data=await request.aread(),
                headers=request.headers.multi_items(),
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _error_of(error, request) from error
        # The session has undone the encoding.
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
        self._reply.release()  # a body that was not read to its end closes its connection


def _error_of(error: Exception, request: httpx2.Request) -> httpx2.TransportError:
    """What the library's own transport would have raised."""
    if isinstance(error, aiohttp.ClientConnectorError):
        kind: type[httpx2.TransportError] = httpx2.ConnectError
    elif isinstance(error, aiohttp.ConnectionTimeoutError):
        kind = httpx2.ConnectTimeout
    else:
        kind = httpx2.ReadTimeout if isinstance(error, TimeoutError) else httpx2.ReadError
    return kind(str(error) or type(error).__name__, request=request)
