"""The conversation loop: keeps the policy's items verbatim and adds tool outputs, until the policy calls no tool. The
tools are those of the attempt's MCP servers, and the row's own, called as NeMo Gym's ``POST /<tool>``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import orjson

from nemo_gym._util.exact_json import dumps_exactly, loads_exactly
from nemo_gym.agent.acts import ContextExceededError, PolicyClient
from nemo_gym.agent.harness.events import Transcript
from nemo_gym.contract.errors import InvalidBodyError, ModelError, RowError, ServerError
from nemo_gym.contract.session import NO_SESSION, TOOL_UNAVAILABLE, AgentOutcome, McpServer
from nemo_gym.contract.verdict import MODEL_METADATA_KEYS, outcome_of_model_error
from nemo_gym.http.client import CONNECT_TIMEOUT_S, network_errors
from nemo_gym.http.connections import is_own_timeout
from nemo_gym.http.requests import require_shallow
from nemo_gym.http.telemetry import tool_call

if TYPE_CHECKING:
    from nemo_gym.agent.harness.mcp_tools import ToolConnection
    from nemo_gym.server_utils import ServerClient

_UNFINISHED = frozenset({"failed", "cancelled", "queued", "in_progress"})
"""Statuses of an answer that the endpoint did not end itself."""
MAX_OUTPUT_BYTES = 40 << 20
"""The limit of an attempt's tool outputs if none is set: the response holds them all, and in its JSON a byte may take
six. A response above the pipeline's limit of 256 MiB would end the attempt without a reward."""
_NOT_FOR_REQUESTS = frozenset({"tools", "input", "metadata", "model", "stream", "background", "store"})


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits that end a conversation before the policy does, and how tools are called."""

    max_turns: int | None = None
    """The limit of policy answers."""
    max_tool_calls: int | None = None
    max_output_bytes: int | None = None
    """The limit of the total size of all tool outputs; `MAX_OUTPUT_BYTES` by default."""
    parallel_calls: int = 1
    """The number of tool calls of one answer that run concurrently."""
    done_flag: bool = False
    """Whether a tool output that is a JSON object with a true ``done`` ends the conversation."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a conversation ended. ``detail`` explains in one sentence any outcome other than completed."""

    outcome: AgentOutcome
    detail: str | None = None
    incomplete: str | None = None
    """Why the endpoint did not complete the last answer (``incomplete_details.reason``)."""


async def converse(
    policy: PolicyClient, toolbox: Toolbox, params: Mapping[str, Any], transcript: Transcript, rules: Rules
) -> Ended:
    """Run the loop and record it in ``transcript``. Raises `ToolServerError` if a tool server cannot be used."""
    prompt = params.get("input", "")
    history: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    fixed_params = {key: value for key, value in params.items() if key not in _NOT_FOR_REQUESTS and value is not None}
    if isinstance(metadata := params.get("metadata"), Mapping) and MODEL_METADATA_KEYS & metadata.keys():
        fixed_params["metadata"] = {key: metadata[key] for key in MODEL_METADATA_KEYS & metadata.keys()}
    if toolbox.definitions:
        fixed_params["tools"] = toolbox.definitions
    else:
        fixed_params.pop("tool_choice", None)
    max_output_bytes = rules.max_output_bytes or MAX_OUTPUT_BYTES
    output_bytes = 0
    while rules.max_turns is None or transcript.turns < rules.max_turns:
        try:
            answer = await policy.ask("/responses", {**fixed_params, "input": history})
        except ContextExceededError as error:
            if not transcript.turns:
                return Ended(AgentOutcome.CONTEXT_EXCEEDED, f"the first request does not fit: {error.message}")
            return Ended(AgentOutcome.MAX_TURNS, error.message)
        except ModelError as error:
            return Ended(outcome_of_model_error(error), error.message)
        keys = _observe(transcript, answer)
        items = answer["output"]
        calls = [item for item in items if item.get("type") == "function_call"]
        if (ended := _end_of_answer(answer, has_calls=bool(calls))) is not None:
            return ended
        history += items
        room = max_output_bytes - output_bytes
        outputs = await _call_all(toolbox, calls, keys, transcript, rules.parallel_calls, room)
        if outputs is None:
            return Ended(AgentOutcome.MAX_OUTPUT, f"the tool outputs exceed the limit of {max_output_bytes} bytes")
        output_bytes += sum(map(_size, outputs))
        history += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            for call, output in zip(calls, outputs, strict=True)
        ]
        if rules.done_flag and any(map(_is_done_output, outputs)):
            return Ended(AgentOutcome.COMPLETED)
        if rules.max_tool_calls is not None and transcript.tool_calls >= rules.max_tool_calls:
            return Ended(
                AgentOutcome.MAX_TURNS,
                f"the policy made {transcript.tool_calls} tool calls; the limit is {rules.max_tool_calls}",
            )
    return Ended(
        AgentOutcome.MAX_TURNS, f"the policy still called tools in answer {rules.max_turns}, the last one allowed"
    )


async def _call_all(
    toolbox: Toolbox, calls: list[dict[str, Any]], keys: list[str], transcript: Transcript, at_once: int, room: int
) -> list[str] | None:
    """Call the tools and return their outputs in the order of the calls, whose keys in the transcript are ``keys``;
    ``None`` if they have more than ``room`` bytes. Raises `ToolServerError`."""
    slots = asyncio.Semaphore(at_once)  # served in the order of the calls
    failures: list[ToolServerError] = []

    async def one(call: dict[str, Any], key: str) -> str:
        nonlocal room
        async with slots:
            if failures or room < 0:
                return ""
            try:
                output, failed = await toolbox.call(str(call.get("name")), call.get("arguments"))
            except ToolServerError as error:
                # A task group that fails leaves its task marked as being cancelled in Python 3.11, and the MCP clients
                # would then end the attempt as cancelled.
                failures.append(error)
                return ""
            room -= _size(output)
            if room < 0:
                return ""
        transcript.returns(key, output, failed=failed)
        return output

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call, key)) for call, key in zip(calls, keys, strict=True)]
    if failures:
        raise failures[0]
    return None if room < 0 else [task.result() for task in tasks]


def _size(output: str) -> int:
    return len(output.encode("utf-8", "surrogatepass"))


def _is_done_output(output: str) -> bool:
    try:
        answer = orjson.loads(output)
    except orjson.JSONDecodeError:
        return False
    return isinstance(answer, dict) and bool(answer.get("done"))


def _observe(transcript: Transcript, answer: Mapping[str, Any]) -> list[str]:
    """Record an answer, and return the keys of its tool calls in the transcript."""
    usage = answer.get("usage") or {}
    details = usage.get("input_tokens_details") or {}
    transcript.turn(
        input_tokens=usage.get("input_tokens") or 0,
        output_tokens=usage.get("output_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
    )
    keys = []
    for item in answer["output"]:
        match item.get("type", "message"):
            case "message":
                transcript.says(_text(item, "output_text", "text") or _text(item, "refusal", "refusal"))
            case "reasoning":
                transcript.thinks("".join(part.get("text") or "" for part in item.get("summary") or []))
            case "function_call":
                name, arguments = str(item.get("name")), item.get("arguments") or "{}"
                # Engines may number the calls of each answer anew, so that ids are not unique in an attempt.
                keys.append(transcript.calls(item["call_id"], name, arguments, reported_once=True))
            case other:
                transcript.gap("unknown_item", str(other))
    return keys


def _end_of_answer(answer: Mapping[str, Any], *, has_calls: bool) -> Ended | None:
    """How the conversation ends with this answer; ``None`` if its tools must be called."""
    if (status := answer.get("status")) in _UNFINISHED:
        message = (answer.get("error") or {}).get("message") or "no reason given"
        detail = f"the policy endpoint could not finish its answer: it returned the status '{status}' ({message})"
        return Ended(AgentOutcome.MODEL_UNREACHABLE, detail)
    reason = (answer.get("incomplete_details") or {}).get("reason")
    if not has_calls and (
        reason == "content_filter" or any(_text(item, "refusal", "refusal") for item in answer["output"])
    ):
        return Ended(AgentOutcome.REFUSED, "the policy refused to answer", reason)
    if reason == "max_output_tokens":
        where = ", in its tool calls" if has_calls else ""
        return Ended(AgentOutcome.MAX_OUTPUT, f"an answer was cut off at its limit of tokens{where}", reason)
    return None if has_calls else Ended(AgentOutcome.COMPLETED)


def _text(item: Mapping[str, Any], kind: str, key: str) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content if kind == "output_text" else ""
    return "".join(part.get(key) or "" for part in content or [] if part.get("type") == kind)


# The tools of one attempt


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
