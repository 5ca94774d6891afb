"""An environment's ``/mcp`` route: it authenticates a caller for one attempt, and serves the tools of that attempt.

An attempt's URL names its rollout (``/ng-rollout/<id>/mcp``), and its token must belong to that rollout. A wrong,
expired or foreign token is refused with 401, the token of a replaced or closed attempt with 409. There is no stream to
subscribe to, so GET and DELETE are not served.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import orjson
import structlog
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym._util.exact_json import dumps_exactly
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, mac_of
from nemo_gym.contract.errors import ConfigError, CredentialError
from nemo_gym.contract.session import TOOL_UNAVAILABLE, McpServer, RolloutIdentity, SessionDescriptor
from nemo_gym.environment.attempts import AttemptKey, AttemptStore
from nemo_gym.environment.hooks import ALLOWED_TOOLS_SESSION_KEY, MCP_PATH, RouteTool, catch_all_of, tools_of
from nemo_gym.http.problems import problem_response
from nemo_gym.http.requests import CookieCodec
from nemo_gym.http.telemetry import ROLLOUT_ID_HEADER, TRACEPARENT, attempt_context, rollout_path_prefix, tool_call

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams

    from nemo_gym.environment.hooks import EnvironmentHooks

NEMO_GYM_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
"""The header in which NeMo Gym's agents send the token."""

TOOLS_TTL_MS = 300_000
"""How long a client may cache the list of tools, across attempts, if no attempt has a list of its own."""

_SAME_FOR_ALL: dict[str, Any] = {"ttlMs": TOOLS_TTL_MS, "cacheScope": "public"}
_ATTEMPT = "nemo_gym.mcp_attempt"

log = structlog.get_logger(__name__)
MCP_TOKEN_TTL_S = 24 * 3600.0
"""How long a token is valid at most; closing or replacing its attempt invalidates it earlier."""
_KIND = "ngm1"


class McpEndpoint:
    """One environment's tools over MCP. Raises `ConfigError` when the ``mcp`` package is not installed."""

    def __init__(self, server: EnvironmentHooks, attempts: AttemptStore, app: FastAPI) -> None:
        try:
            import mcp.server  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"environment '{server.config.name}' serves its tools over MCP, which needs the package 'mcp': install"
                " the extra 'mcp' of this suite",
                key="tool_access",
            ) from error
        self._server = server
        self._attempts = attempts
        self._app = app
        self._key = server.derive_key("mcp-token")
        self._cookies = CookieCodec(server.derive_key("session-cookie"))
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", server.config.name)
        self._protocol = self._handlers()
        self._tools: dict[str, RouteTool] | None = None
        self._manager: StreamableHTTPSessionManager | None = None
        self._started: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        app.router.routes.append(Route(MCP_PATH, self._route, methods=["POST"]))

    @property
    def tools(self) -> dict[str, RouteTool]:
        """The tools by name, collected on first use because plugins add their routes after the base class."""
        if self._tools is None:
            strict = not self._server.overrides("mcp_tools")  # it may leave out what cannot be one
            route_tools = [*tools_of(self._app.routes, strict=strict).values()]
            exposed = self._server.mcp_tools(route_tools, catch_all_of(self._app.routes)) or []
            self._tools = {tool.name: tool for tool in exposed}
        return self._tools

    def allowed(self, session: Mapping[str, Any]) -> dict[str, RouteTool]:
        """The tools that the session's attempt may call: all, unless its seed restricted them."""
        names = session.get(ALLOWED_TOOLS_SESSION_KEY)
        return self.tools if names is None else {name: self.tools[name] for name in names if name in self.tools}

    def offered(self, descriptor: SessionDescriptor) -> SessionDescriptor:
        """Add this endpoint and the attempt's token to the descriptor."""
        if not self.tools or any(server.name == self.name for server in descriptor.mcp):
            return descriptor
        rollout = descriptor.rollout
        base = self._server.server_client.base_url(self._server.config.name)
        endpoint = McpServer(
            name=self.name,
            url=f"{base}{rollout_path_prefix(rollout.rollout_id)}{MCP_PATH}",
            headers={"Authorization": f"Bearer {self.token(rollout)}"},
        )
        return descriptor.model_copy(update={"mcp": (*descriptor.mcp, endpoint)})

    def token(self, rollout: RolloutIdentity) -> str:
        return issue_mcp_token(self._key, rollout)

    def nemo_metadata(self, rollout: RolloutIdentity) -> dict[str, Any]:
        """The description of this endpoint in a NeMo Gym seed's reply."""
        return {
            "server_name": self.name,
            "url_path": MCP_PATH,
            "transport": "http",
            "headers": {NEMO_GYM_TOKEN_HEADER: self.token(rollout)},
        }

    # -- HTTP ----------------------------------------------------------------------------------------------------

    async def _route(self, request: Request) -> Response:
        try:
            attempt = check_mcp_token(self._key, _token(request))
            rollout_id = request.headers.get(ROLLOUT_ID_HEADER) or request.scope.get("path_params", {}).get(
                "rollout_id"
            )
            if rollout_id not in (None, attempt.rollout_id):
                raise CredentialError("the MCP token is another rollout's", rollout_id=rollout_id)
        except CredentialError as error:
            log.info("request refused", route=MCP_PATH, code=error.code, status=error.status)
            response = problem_response(error)
            response.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
            return response
        await self._attempts.session_of(*attempt)  # raises 409 for an ended attempt, before any MCP
        request.scope[_ATTEMPT] = attempt
        return _Protocol(await self._running())

    async def _running(self) -> StreamableHTTPSessionManager:
        """The MCP library's request handler, started by the first request, so that servers whose tools are not called
        over MCP never load it."""
        if self._manager is None or self._started is None:
            from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

            self._manager = StreamableHTTPSessionManager(self._protocol, json_response=True, stateless=True)
            self._started = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(_serve(self._manager, self._started))
        manager = self._manager
        await asyncio.shield(self._started)
        return manager

    async def aclose(self) -> None:
        """End requests in flight. Idempotent."""
        serving, self._serving = self._serving, None
        self._manager = None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    # -- protocol ------------------------------------------------------------------------------------------------

    def _handlers(self) -> Server[Any]:
        from mcp.server import Server

        if not hasattr(Server, "list_tools"):
            return Server(
                self.name,
                on_list_tools=self._list_tools,
                on_call_tool=self._call_tool,
                get_tool_input_schema=self._schema,
            )
        # The library's major version 1, which NeMo Gym's plugins require, registers handlers by request type, and its
        # server holds the current request's context. Type checkers see version 2.
        from mcp import types

        server_v1: Any = Server
        types_v1: Any = types
        protocol = server_v1(self.name)

        async def list_tools(request: Any) -> Any:
            return types_v1.ServerResult(await self._list_tools(protocol.request_context, None))

        async def call_tool(request: Any) -> Any:
            return types_v1.ServerResult(await self._call_tool(protocol.request_context, request.params))

        protocol.request_handlers |= {types.ListToolsRequest: list_tools, types.CallToolRequest: call_tool}
        return cast("Server[Any]", protocol)

    def _schema(self, name: str) -> dict[str, Any] | None:
        tool = self.tools.get(name)
        return tool.input_schema if tool is not None else None

    async def _list_tools(
        self, context: ServerRequestContext[Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        from mcp.types import ListToolsResult

        allowed = self.allowed(await self._attempts.session_of(*_attempt_of(context)))
        # Fields by their names in MCP messages, which are the same in both major versions of the library.
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "inputSchema": tool.input_schema,
                "outputSchema": tool.output_schema,
            }
            for tool in allowed.values()
        ]
        cache_hints = {} if self._server.overrides("mcp_allowed_tools_for_session") else _SAME_FOR_ALL
        return ListToolsResult.model_validate({"tools": tools, **cache_hints})

    async def _call_tool(self, context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        attempt = _attempt_of(context)
        session = await self._attempts.session_of(*attempt)
        tools = self.allowed(session)
        tool = tools.get(params.name)
        if tool is None:
            message = f"there is no tool '{params.name[:100]}'; there are: {', '.join(tools)}"
            return _result(message, is_error=True)
        cookie = self._server.get_session_middleware_key()
        session_cookie = self._cookies.encode(session)
        headers = {"Cookie": f"{cookie}={session_cookie}", ROLLOUT_ID_HEADER: attempt.rollout_id}
        if (credential := self._server.own_credential()) is not None:
            headers[CREDENTIAL_HEADER] = credential
        assert context.request is not None
        parent = attempt_context(attempt, context.request.headers.get(TRACEPARENT))
        with tool_call(tool.name, parent=parent, rollout_id=attempt.rollout_id) as calling:
            reply = await call_route(self._app, tool.path, params.arguments or {}, headers)
            if not reply.ok:
                calling.outcome = str(reply.status)
        await self._keep_session(attempt, cookie, session_cookie, reply.headers.getlist("set-cookie"))
        if reply.status >= 500:
            log.warning("a tool failed", tool=tool.name, rollout_id=attempt.rollout_id, status=reply.status)
        value = reply.value()
        structured = value if reply.ok and isinstance(value, dict) else None
        meta = {TOOL_UNAVAILABLE: True} if reply.status == 503 else None
        return _result(reply.text(tool.name), structured, is_error=not reply.ok, meta=meta)

    async def _keep_session(self, attempt: AttemptKey, name: str, session_cookie: str, cookies: list[str]) -> None:
        """Store the session that the tool changed, so that the next call gets it like a caller that keeps cookies."""
        for cookie in cookies:
            key, _, value_and_attributes = cookie.partition("=")
            value = value_and_attributes.partition(";")[0]
            if key == name and value != session_cookie and (session := self._cookies.decode(value)) is not None:
                await self._attempts.keep_session(*attempt, session)


def _result(
    text: str, structured: dict[str, Any] | None = None, *, is_error: bool, meta: dict[str, Any] | None = None
) -> CallToolResult:
    from mcp.types import CallToolResult

    content = [{"type": "text", "text": text}]
    fields = {"content": content, "structuredContent": structured, "isError": is_error, "_meta": meta}
    return CallToolResult.model_validate(fields)


def _attempt_of(context: ServerRequestContext[Any]) -> AttemptKey:
    assert context.request is not None
    attempt: AttemptKey = context.request.scope[_ATTEMPT]
    return attempt


class _Protocol(Response):
    """A response that lets the MCP library answer the request."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        super().__init__()
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)


async def _serve(manager: StreamableHTTPSessionManager, started: asyncio.Future[None]) -> None:
    async with manager.run():
        started.set_result(None)
        await asyncio.Event().wait()


def _token(request: Request) -> str | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return token.strip()
    return request.headers.get(NEMO_GYM_TOKEN_HEADER)


# Tokens for one attempt at one environment's MCP endpoint, valid nowhere else.
#
# Format: ``ngm1.<claims>.<mac>``; the claims are base64 of ``[run id, rollout id, attempt, expiry in Unix seconds]``


def issue_mcp_token(key: bytes, rollout: RolloutIdentity, *, ttl_s: float = MCP_TOKEN_TTL_S) -> str:
    """Issue a token for ``rollout``'s attempt that expires in ``ttl_s`` seconds."""
    claims = orjson.dumps([*AttemptKey.of(rollout), int(time.time() + ttl_s)])
    body = f"{_KIND}.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}"
    return f"{body}.{mac_of(key, body)}"


def check_mcp_token(key: bytes, token: str | None) -> AttemptKey:
    """Return the attempt that a token is for. Raises `CredentialError` for a missing, forged or expired token."""
    if not token:
        raise CredentialError("/mcp needs the header Authorization: Bearer <token of the attempt>")
    body, _, mac = token.rpartition(".")
    kind, _, claims = body.partition(".")
    if kind != _KIND or not hmac.compare_digest(mac.encode(), mac_of(key, body).encode()):
        raise CredentialError("the MCP token is not one of this environment")
    run_id, rollout_id, attempt, expiry = orjson.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    if expiry < time.time():
        raise CredentialError("the MCP token has expired", rollout_id=rollout_id)
    return AttemptKey(run_id, rollout_id, attempt)


@dataclass(slots=True)
class Reply:
    """A route's response; status 500 without a body if the route raised an error."""

    status: int = 500
    headers: MutableHeaders = field(default_factory=MutableHeaders)
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def value(self) -> Any:
        """The body parsed as JSON, or ``None`` if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def text(self, tool: str) -> str:
        """The text to show a model: the body, or what was wrong with the call."""
        if self.ok:
            return self.body.decode("utf-8", "replace")
        if self.status >= 500:
            return f"tool '{tool}' failed; it may work when it is called again"
        value = self.value()
        return _complaint(value.get("detail")) if isinstance(value, dict) else f"status {self.status}"


def _complaint(detail: Any) -> str:
    """Format an error's ``detail``: the framework's list of wrong arguments, or a plugin's own text."""
    if isinstance(detail, list) and all(isinstance(item, dict) for item in detail):
        errors = [(".".join(map(str, item.get("loc", ())[1:])), item.get("msg", "")) for item in detail]
        return "; ".join(f"{where or 'arguments'}: {message}" for where, message in errors)
    return detail if isinstance(detail, str) else orjson.dumps(detail, default=str).decode()


async def call_route(app: ASGIApp, path: str, arguments: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Send ``POST path`` inside this process. An error of the handler is logged and becomes a reply of status 500."""
    body = dumps_exactly(dict(arguments))
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()],
        "client": None,
        "server": None,
    }
    reply = Reply()
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this caller never disconnects; the call ends or is cancelled
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], MutableHeaders(raw=list(message["headers"]))
        elif message["type"] == "http.response.body":
            reply.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        # The boundary of plugin code: a server without credentials raises errors instead of answering 500.
        log.exception("a tool failed", route=path)
        return Reply()
    return reply
