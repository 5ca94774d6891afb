"""Tools of MCP servers, through either major version of the MCP library.

NeMo Gym's plugins require version 1 (``mcp<2``); this suite's extra ``mcp`` accepts both. Only version 2 speaks the
current protocol, which needs no session. With version 1, and with servers of older protocols, each attempt opens a
session. `connect` returns the same interface for both. Type checkers see version 2, so names that exist only in
version 1 are untyped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from nemo_gym.agent.harness import MCP_CONNECT_TIMEOUT_S, MCP_READ_TIMEOUT_S
from nemo_gym.contract.session import McpServer

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool


@dataclass(frozen=True, slots=True)
class FirstTool:
    """A tool, with the field names of version 2."""

    name: str
    description: str | None
    input_schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FirstResult:
    """A tool's result, with the field names of version 2."""

    content: Sequence[Any]
    is_error: bool
    meta: dict[str, Any] | None = None


@cache
def is_first_library() -> bool:
    """Whether major version 1 of the library is installed."""
    import mcp

    return not hasattr(mcp, "MCPError")


class ToolConnection(Protocol):
    """One attempt's connection to one MCP server. Its methods raise what the library raises."""

    async def tools(self) -> Sequence[Tool | FirstTool]:
        """List all tools that the server offers this attempt."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult | FirstResult: ...


async def connect(stack: AsyncExitStack, server: McpServer) -> ToolConnection:
    """Connect to ``server`` for as long as ``stack`` is open. Raises what the library raises. A caller that cannot use
    the connection must call `forget`."""
    if is_first_library():
        return await _connect_first(stack, server)
    from nemo_gym.agent.harness import mcp_client

    return await mcp_client.connect(stack, server)


def forget(server: McpServer) -> None:
    """Discover the protocol of ``server`` again at the next connection, because the server may have been replaced.
    Version 1 of the library does so in every attempt."""
    if not is_first_library():
        from nemo_gym.agent.harness import mcp_client

        mcp_client.forget(server)


def protocol_error() -> type[Exception]:
    """The exception that the library raises for a server's error response and for a timeout."""
    import mcp

    error_type: type[Exception] = getattr(mcp, "McpError" if is_first_library() else "MCPError")
    return error_type


# Version 1 of the library


class FirstConnection:
    """A session of version 1 of the library."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def tools(self) -> list[FirstTool]:
        tools: list[FirstTool] = []
        cursor = None
        while True:
            page = await self._session.list_tools(cursor=cursor)
            tools += [FirstTool(tool.name, tool.description, tool.inputSchema) for tool in page.tools]
            if (cursor := page.nextCursor) is None:
                return tools

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> FirstResult:
        # Bypasses the library's `call_tool`, which lists the tools again to validate structured content, unused here.
        types: Any = _modules()[1]
        params = types.CallToolRequestParams(name=name, arguments=arguments)
        request = types.ClientRequest(types.CallToolRequest(method="tools/call", params=params))
        limit = timedelta(seconds=timeout_s)
        result = await self._session.send_request(request, types.CallToolResult, request_read_timeout_seconds=limit)
        return FirstResult(result.content, bool(result.isError), result.meta)


def _modules() -> tuple[Any, Any]:
    from mcp import types
    from mcp.client import streamable_http

    return streamable_http, types


async def _connect_first(stack: AsyncExitStack, server: McpServer) -> FirstConnection:
    import httpx
    from mcp import ClientSession

    session_of: Any = ClientSession
    timeout = httpx.Timeout(MCP_CONNECT_TIMEOUT_S, read=MCP_READ_TIMEOUT_S)
    http = await stack.enter_async_context(
        httpx.AsyncClient(headers=dict(server.headers), trust_env=False, timeout=timeout)
    )
    transport, _ = _modules()
    streams = await stack.enter_async_context(transport.streamable_http_client(server.url, http_client=http))
    session = await stack.enter_async_context(session_of(streams[0], streams[1]))
    await session.initialize()
    return FirstConnection(session)
