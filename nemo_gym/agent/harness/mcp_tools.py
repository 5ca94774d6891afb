"""Tools of MCP servers, through either major version of the MCP library.

NeMo Gym's plugins require version 1 (``mcp<2``); this suite's extra ``mcp`` accepts both. Only version 2 speaks the
current protocol, which needs no session. With version 1, and with servers of older protocols, each attempt opens a
session. `connect` returns the same interface for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from nemo_gym.agent.harness import mcp_first
from nemo_gym.agent.harness.mcp_first import FirstResult, FirstTool
from nemo_gym.contract.session import McpServer

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool


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
        return await mcp_first.connect(stack, server)
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
