"""A client for MCP servers with major version 1 of the MCP library.

Type checkers see version 2, so names that exist only in version 1 are untyped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nemo_gym.contract.session import McpServer

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 300.0
"""The limit between two reads: long, as a tool may be silent until it is done. Each call has its own limit too."""


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


async def connect(stack: AsyncExitStack, server: McpServer) -> FirstConnection:
    import httpx
    from mcp import ClientSession

    session_of: Any = ClientSession
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    http = await stack.enter_async_context(
        httpx.AsyncClient(headers=dict(server.headers), trust_env=False, timeout=timeout)
    )
    transport, _ = _modules()
    streams = await stack.enter_async_context(transport.streamable_http_client(server.url, http_client=http))
    session = await stack.enter_async_context(session_of(streams[0], streams[1]))
    await session.initialize()
    return FirstConnection(session)
