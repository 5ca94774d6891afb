"""Connections to MCP servers of others: what an attempt is given, whatever protocol a server speaks and however it
answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.caching import CacheHint
from mcp.server.mcpserver import Context
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.agent.harness.mcp_client import (
    McpConnection,
    McpServerError,
    PostDispatcher,
    connect,
    forget,
)
from nemo_gym.contract.session import McpServer
from nemo_gym.http.client import close_global_aiohttp_client


def tools() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("tools")

    @server.tool()
    async def double(number: int) -> int:
        return 2 * number

    @server.tool()
    async def slow_double(number: int, context: Context[Any, Any]) -> int:
        await context.report_progress(0.5, 1.0, "half way\n\nthere")
        return 2 * number

    @server.tool()
    async def sleep(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    return server


async def rest() -> str:
    return "rested"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        try:
            yield url
        finally:
            forget(McpServer(name="tools", url=url))
            server.should_exit = True
            await task
            await close_global_aiohttp_client()


@asynccontextmanager
async def connected(url: str, headers: dict[str, str] | None = None) -> AsyncIterator[McpConnection]:
    async with AsyncExitStack() as stack:
        yield await connect(stack, McpServer(name="tools", url=url, headers=headers or {}))


def recorded(app: ASGIApp, methods: list[str]) -> ASGIApp:
    """``app``, with what each request's header says of its method written down: the current protocol's have one."""

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            methods.append(dict(scope["headers"]).get(b"mcp-method", b"another protocol's").decode())
        await app(scope, receive, send)

    return recording


async def answers(connection: McpConnection, tool: str, **arguments: Any) -> str:
    result = await connection.call(tool, arguments, 10.0)
    return "".join(part.text for part in result.content if part.type == "text")


@pytest.mark.parametrize("options", [{"json_response": True}, {}, {"stateless_http": True}], ids=str)
async def test_tools_are_called_by_every_attempt_however_the_server_answers(options: dict[str, Any]) -> None:
    async with serving(tools().streamable_http_app(**options)) as url:
        for _ in range(3):
            async with connected(url) as connection:
                assert [tool.name for tool in await connection.tools()] == ["double", "slow_double", "sleep"]
                assert await answers(connection, "double", number=3) == "6"
                assert await answers(connection, "slow_double", number=4) == "8"


async def test_server_that_says_nothing_of_its_list_is_asked_for_it_by_every_attempt() -> None:
    asked: list[str] = []
    async with serving(recorded(tools().streamable_http_app(json_response=True), asked)) as url:
        for _ in range(3):
            async with connected(url) as connection:
                await connection.tools()
    assert asked == ["server/discover", "tools/list", "tools/list", "tools/list"]


async def test_list_is_used_again_while_its_server_allows_that_and_for_no_server_beside_it() -> None:
    hints = {"tools/list": CacheHint(ttl_ms=60_000, scope="public")}
    one, other = MCPServer[Any]("one", cache_hints=hints), MCPServer[Any]("other", cache_hints=hints)
    one.tool(name="of_one")(rest)
    other.tool(name="of_other")(rest)
    asked: list[str] = []
    apps = {
        path: server.streamable_http_app(streamable_http_path=path, json_response=True)
        for path, server in (("/one", one), ("/other", other))
    }

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[scope["path"]](scope, receive, send)

    async with one.session_manager.run(), other.session_manager.run(), serving(recorded(by_path, asked)) as url:
        for path in ("/one", "/other") * 2:
            async with connected(url.removesuffix("/mcp") + path) as connection:
                assert [tool.name for tool in await connection.tools()] == [f"of_{path[1:]}"]
    assert asked == ["server/discover", "tools/list"] * 2


def older(app: ASGIApp) -> ASGIApp:
    """``app``, as a server that has not heard of the current protocol."""

    async def without_discovery(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"mcp-method") == b"server/discover":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return without_discovery


async def test_server_of_an_older_protocol_has_a_session_for_each_attempt() -> None:
    async with serving(older(tools().streamable_http_app())) as url:
        for _ in range(2):
            async with connected(url) as connection:
                assert len(await connection.tools()) == 3
                assert await answers(connection, "slow_double", number=4) == "8"


async def test_call_that_takes_too_long_is_an_error_and_the_next_one_works() -> None:
    async with serving(tools().streamable_http_app(json_response=True)) as url:
        async with connected(url):
            pass
        async with connected(url) as connection:
            with pytest.raises(MCPError, match="not answered in time"):
                await connection.call("sleep", {"seconds": 60}, 0.2)
            assert await answers(connection, "double", number=3) == "6"


def refusing(status: int, body: bytes, content_type: str) -> Callable[[ASGIApp], ASGIApp]:
    def refused(app: ASGIApp) -> ASGIApp:
        async def answering(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and dict(scope["headers"]).get(b"x-token") == b"wrong":
                headers = [(b"content-type", content_type.encode())]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
            await app(scope, receive, send)

        return answering

    return refused


@pytest.mark.parametrize(
    ("status", "body", "content_type", "error", "said"),
    [
        (401, b'{"code":"credential","detail":"no"}', "application/problem+json", McpServerError, "answered 401"),
        (502, b"<html>", "text/html", McpServerError, "answered 502"),
        (200, b"", "text/event-stream", McpServerError, "answered 200 without a result"),
        (
            400,
            b'{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"bad"}}',
            "application/json",
            MCPError,
            "bad",
        ),
    ],
)
async def test_error_says_whether_the_call_or_the_server_is_at_fault(
    status: int, body: bytes, content_type: str, error: type[Exception], said: str
) -> None:
    app = refusing(status, body, content_type)(tools().streamable_http_app(json_response=True))
    async with serving(app) as url:
        async with connected(url) as connection:
            assert await answers(connection, "double", number=3) == "6"
        async with connected(url, {"X-Token": "wrong"}) as connection:
            with pytest.raises(error, match=said):
                await answers(connection, "double", number=3)


async def test_events_are_read_across_pieces_and_whatever_ends_their_lines() -> None:
    request_id = '{"jsonrpc":"2.0","id":1,'
    pieces = [
        b": ping\r\n\r\nevent: message\r\nda",
        b'ta: {"jsonrpc":"2.0","method":"notifications/progress","params":{}}\r\n\r',
        b"\nevent: message\ndata: " + request_id.encode() + b"\n",
        b'data: "result":{"content":[{"type":"text","text":"6"}],"resultType":"complete"}}\n\n',
    ]

    async def streamed(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
            await asyncio.sleep(0.02)
        await asyncio.sleep(30)  # the stream stays open: the answer is all that is waited for
        return reply

    other = web.Application()
    other.router.add_post("/mcp", streamed)
    runner = web.AppRunner(other, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        await web.SockSite(runner, listener).start()
        dispatcher = PostDispatcher(McpServer(name="tools", url=url))
        try:
            async with asyncio.timeout(10):
                result = await dispatcher.send_raw_request("tools/call", {"name": "double"})
            assert result["content"] == [{"type": "text", "text": "6"}]
        finally:
            await close_global_aiohttp_client()
            await runner.cleanup()
