"""The tools of one attempt: those of its MCP servers, and the row's own, called as NeMo Gym's ``POST /<tool>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import orjson

from nemo_gym._util.exact_json import dumps_exactly, loads_exactly
from nemo_gym.contract.errors import InvalidBodyError, RowError, ServerError
from nemo_gym.contract.session import NO_SESSION, TOOL_UNAVAILABLE, AgentOutcome, McpServer
from nemo_gym.http.client import CONNECT_TIMEOUT_S, network_errors
from nemo_gym.http.connections import is_own_timeout
from nemo_gym.http.requests import require_shallow
from nemo_gym.http.telemetry import tool_call

if TYPE_CHECKING:
    from nemo_gym.agent.harness.mcp_tools import ToolConnection
    from nemo_gym.server_utils import ServerClient


class ToolServerError(Exception):
    """A tool server cannot be reached, does not accept the attempt's token, or declares that it cannot do its work."""

    outcome: ClassVar[AgentOutcome] = AgentOutcome.MCP_FAILED


class EnvironmentLostError(ToolServerError):
    """The environment's server went away while a tool was called as its route, or restarted without the session."""

    outcome = AgentOutcome.ENVIRONMENT_LOST


@dataclass(frozen=True, slots=True)
class _McpTool:
    server: McpServer
    name: str
    connection: ToolConnection


class Toolbox:
    """Calls tools by the names that the policy sees."""

    def __init__(
        self, server_client: ServerClient, environment: str, cookies: Mapping[str, str], timeout_s: float
    ) -> None:
        self.definitions: list[dict[str, Any]] = []
        """The tool definitions in the Responses API's format."""
        self._mcp: dict[str, _McpTool] = {}
        self._routes: set[str] = set()
        self._server_client, self._environment, self._timeout_s = server_client, environment, timeout_s
        self._cookies = dict(cookies)

    async def open(self, stack: AsyncExitStack, servers: Sequence[McpServer], tools: Sequence[Any]) -> None:
        """Connect to ``servers`` until ``stack`` closes, and add the row's ``tools`` that no server has. Raises
        `ToolServerError`, and `RowError` for a tool without a name."""
        routes = {_name_of(number, tool): dict(tool) for number, tool in enumerate(tools) if _is_function(tool)}
        if servers:  # the MCP packages are loaded only if they are needed
            from nemo_gym.agent.harness.mcp_tools import connect, forget
        for server in servers:
            try:
                await self._add(server, await connect(stack, server))
            except Exception as error:
                # The transports of the MCP library raise their own errors and exception groups.
                forget(server)
                raise ToolServerError(f"MCP server '{server.name}' cannot be used: {_reason(error)}") from error
        for name, tool in routes.items():
            if name not in self._mcp:
                self._routes.add(name)
                self.definitions.append(tool)

    async def _add(self, server: McpServer, connection: ToolConnection) -> None:
        for tool in await connection.tools():
            name = tool.name if tool.name not in self._mcp else f"{server.name}__{tool.name}"
            self._mcp[name] = _McpTool(server, tool.name, connection)
            self.definitions.append(
                {
                    "type": "function",
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                    "strict": False,
                }
            )

    async def call(self, name: str, arguments: Any) -> tuple[str, bool]:
        """Call a tool. Return the text for the policy and whether the call failed. Raises `ToolServerError`."""
        if name not in self._mcp and name not in self._routes:
            tool_names = ", ".join([*self._mcp, *sorted(self._routes)]) or "none"
            return f"there is no tool '{name[:100]}'; there are: {tool_names}", True
        try:
            parsed = orjson.loads(arguments or "{}")
        except (orjson.JSONDecodeError, TypeError):
            parsed = None
        if not isinstance(parsed, dict):
            return "the arguments are not a JSON object", True
        try:
            require_shallow(parsed, "the arguments")
        except InvalidBodyError as error:
            return str(error), True
        if arguments:
            parsed = loads_exactly(arguments.encode())  # after the check, which refuses integers beyond 64 bits
        with tool_call(name) as calling:
            if (tool := self._mcp.get(name)) is not None:
                text, is_error = await self._call_mcp(tool, parsed)
            else:
                text, is_error = await self._call_route(name, parsed)
            calling.outcome = "tool_error" if is_error else "ok"
        return text, is_error

    async def _call_mcp(self, tool: _McpTool, arguments: dict[str, Any]) -> tuple[str, bool]:
        from nemo_gym.agent.harness.mcp_tools import forget, protocol_error

        try:
            result = await tool.connection.call(tool.name, arguments, self._timeout_s)
        except protocol_error() as error:
            return f"tool '{tool.name}' failed: {error}", True
        except Exception as error:
            # Any error of the MCP library's transports: the server is gone or cannot be reached.
            forget(tool.server)
            raise ToolServerError(f"MCP server '{tool.server.name}' was lost: {_reason(error)}") from error
        if (result.meta or {}).get(TOOL_UNAVAILABLE):
            raise ToolServerError(f"tool '{tool.name}' of MCP server '{tool.server.name}' is unavailable (status 503)")
        text = "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        return text, bool(result.is_error)

    async def _call_route(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        # For one try: the client's tries to reach a server that went away must not end as a slow tool.
        limit = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        failures: tuple[type[Exception], ...] = (ServerError, *network_errors())
        try:
            reply = await self._server_client.post(
                self._environment,
                f"/{name}",
                data=dumps_exactly(arguments),
                headers={"Content-Type": "application/json"},
                cookies=self._cookies,
                timeout=limit,
            )
            text = await reply.text(errors="replace")
        except failures as error:
            if is_own_timeout(error):
                return f"tool '{name}' did not answer within {self._timeout_s:g} s", True
            raise EnvironmentLostError(f"environment '{self._environment}' was lost: {_reason(error)}") from error
        if reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ToolServerError(
                f"tool '{name}' of environment '{self._environment}' is unavailable (status 503): {text[:200]}"
            )
        if reply.status == HTTPStatus.CONFLICT and _has_no_session(text):
            raise EnvironmentLostError(f"environment '{self._environment}' lost the session: {text[:200]}")
        self._cookies.update({key: morsel.value for key, morsel in reply.cookies.items()})
        return text, reply.status >= 300


def _has_no_session(problem_text: str) -> bool:
    try:
        problem = orjson.loads(problem_text)
    except orjson.JSONDecodeError:
        return False
    return isinstance(problem, dict) and problem.get("code_hint") == NO_SESSION


def _is_function(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def _name_of(number: int, tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if isinstance(name, str) and name:
        return name
    where = f"responses_create_params.tools[{number}]"
    if isinstance(tool.get("function"), Mapping):
        raise RowError(
            f"{where}.function is the form of Chat Completions; put its fields beside 'type', as in the Responses API"
        )
    raise RowError(f"{where}.name must be the name of a tool, not {name!r}")


def _reason(error: BaseException) -> str:
    """Return the first real cause in an exception group. It must not contain headers, which hold the token."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]
