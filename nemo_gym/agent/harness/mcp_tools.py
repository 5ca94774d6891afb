"""Tools of MCP servers, by whichever major version of the MCP library is installed.

NeMo Gym's plugins ask for the first (``mcp<2``), this suite's extra ``mcp`` takes both. Only the second speaks the
current protocol, in which a server needs no session; with the first each attempt makes one, as it does with servers of
older protocols. What `connect` returns looks the same with both.
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
    """Whether the installed library is of its first major version."""
    import mcp

    return not hasattr(mcp, "MCPError")


class ToolConnection(Protocol):
    """One attempt's way to one MCP server. Its methods raise what the library raises."""

    async def tools(self) -> Sequence[Tool | FirstTool]:
        """All the server has for this attempt."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult | FirstResult: ...


async def connect(stack: AsyncExitStack, server: McpServer) -> ToolConnection:
    """A connection to ``server`` for as long as ``stack`` is open. Raises what the library raises; whoever cannot use
    it then says so by `forget`."""
    if is_first_library():
        return await mcp_first.connect(stack, server)
    from nemo_gym.agent.harness import mcp_client

    return await mcp_client.connect(stack, server)


def forget(server: McpServer) -> None:
    """Ask ``server`` again what it speaks: it may be another by now. The first library asks in every attempt."""
    if not is_first_library():
        from nemo_gym.agent.harness import mcp_client

        mcp_client.forget(server)


def protocol_error() -> type[Exception]:
    """What the library raises for an error that a server tells, and for no answer in time."""
    import mcp

    found: type[Exception] = getattr(mcp, "McpError" if is_first_library() else "MCPError")
    return found
