"""The base of every model server: sessions per attempt, and the inference routes they open.

A new model server implements ``infer``, which gets a parsed request and returns a reply or a stream. A NeMo Gym model
server implements ``chat_completions`` and ``responses`` with their typed bodies; it works unmodified, and for a stream
its whole reply is cut into events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
import structlog
from fastapi import Body
from pydantic import Field, PrivateAttr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from nemo_gym._util.lazy import lazily
from nemo_gym._util.tasks import retry_after_s, without_exit
from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, CREDENTIAL_HEADER, Role
from nemo_gym.contract.errors import CredentialError, InvalidBodyError, ModelError
from nemo_gym.contract.session import NONE_CHOSEN, REQUEST_TIMEOUT_S, SESSION_TTL_S, ChosenLimits, RolloutIdentity
from nemo_gym.gateway.dialects import PATHS, Dialect, apply_sampling, messages, responses
from nemo_gym.gateway.dialects.adapters import (
    ADAPTERS,
    EVENT_STREAM,
    models_reply,
    sanitize_streaming_responses_body,
    with_namespaces,
)
from nemo_gym.gateway.dialects.errors import dialect_error, inference_refusal
from nemo_gym.gateway.engines.types import EngineCheck
from nemo_gym.gateway.model_calls import (
    CallWriter,
    CaptureStore,
    ModelCallCaptureConfig,
    aggregate_model_call_metrics,
    install_model_call_capture,
    merge_model_call_capture_into_record,
    read_model_call_records,
)
from nemo_gym.gateway.policy_request import StreamedUsage, Usage, answered, limited_call, model_call
from nemo_gym.gateway.sessions import (
    GatewaySession,
    GatewaySessions,
    InferenceCall,
    InMemoryGatewaySessions,
    OpenedSession,
    opener_of,
    token_in,
)
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError, while_connected
from nemo_gym.http.middleware import Application
from nemo_gym.http.plugin_call import PluginCall, plain
from nemo_gym.http.problems import shape_errors
from nemo_gym.http.requests import (
    JsonResponse,
    caller_of,
    check_messages,
    parse_json_object,
    require_role,
    validated,
)
from nemo_gym.http.server import BaseServer, SimpleServer
from nemo_gym.rollout_observability import ModelCallRecord

if TYPE_CHECKING:
    import aiohttp

    from nemo_gym.openai_types.chat import NeMoGymChatCompletion, NeMoGymChatCompletionCreateParamsNonStreaming
    from nemo_gym.openai_types.responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
else:
    aiohttp = lazily("aiohttp")

__all__ = [
    "BaseResponsesAPIModel",
    "BaseResponsesAPIModelConfig",
    "Body",
    "CaptureStore",
    "DialectError",
    "InferenceCall",
    "ModelCallCaptureConfig",
    "ModelCallRecord",
    "RateLimitedError",
    "Request",
    "SimpleResponsesAPIModel",
    "aggregate_model_call_metrics",
    "dialect_error",
    "install_model_call_capture",
    "merge_model_call_capture_into_record",
    "read_model_call_records",
    "start_model_execution",
]

_CaptureMiddleware = CallWriter
"""NeMo Gym's name, which the test suites of its model servers import."""

INFERENCE_PATHS = frozenset({*PATHS, "/v1/models"})
log = structlog.get_logger(__name__)


class RateLimitedError(ModelError):
    """The endpoint asks to come back later, after ``details['retry_after_s']`` seconds if it named a time."""

    code = "model_rate_limited"
    status = 429


class DialectError(ModelError):
    """This model server does not speak the dialect of the request."""

    code = "dialect"
    status = 501


class BaseResponsesAPIModelConfig(BaseRunServerInstanceConfig):
    """Configuration of a model server."""

    request_timeout_s: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Limit of one inference call with its retries; then it ends with 504. See `nemo_gym.contract.session`."""
    session_ttl_s: float = SESSION_TTL_S
    """How long an attempt's inference token is valid."""
    max_body_bytes: int = Field(32 << 20, gt=0)
    """Size limit of one request; a larger request gets 413."""
    max_body_values: int = Field(200_000, gt=0)
    """Limit of JSON values (numbers, strings, lists, objects) in one inference request; 413 as well. A message with a
    tool call has about ten."""
    max_messages: int = Field(10_000, gt=0)
    """Limit of elements in a request's history; 413 as well."""


class BaseResponsesAPIModel(BaseServer):
    config: BaseResponsesAPIModelConfig


class SimpleResponsesAPIModel(BaseResponsesAPIModel, SimpleServer):
    """A model server. Override ``infer``, or NeMo Gym's ``chat_completions`` and ``responses``."""

    config: BaseResponsesAPIModelConfig

    ROLE: ClassVar[Role] = Role.MODEL

    _sessions: GatewaySessions | None = PrivateAttr(default=None)

    # -- hooks ---------------------------------------------------------------------------------------------------

    def model_name(self) -> str:
        """The model's name as requests spell it."""
        return str(getattr(self.config, "openai_model", None) or getattr(self.config, "model", None) or "policy")

    def make_sessions(self) -> GatewaySessions:
        """Return the store of this server's sessions."""
        return InMemoryGatewaySessions(self.config.session_ttl_s)

    async def infer(self, call: InferenceCall) -> Response:
        """Answer one request in its own dialect, as a stream if it asks for one. Raise `ModelError` if the model
        cannot be reached, `RateLimitedError` if it asks to wait, `DialectError` for an unsupported dialect."""
        hook = {Dialect.CHAT: "chat_completions", Dialect.RESPONSES: "responses"}.get(call.dialect)
        if hook is not None and not self.overrides(hook):
            raise DialectError(f"model server '{self.config.name}' does not implement {call.request.url.path}")
        streamed = ("stream", "stream_options")
        body = {key: value for key, value in call.body.items() if key not in streamed}
        if hook is None:
            reply = await self._message(call, body)
        elif hook == "responses" and self.overrides("responses_dispatch"):
            return await PluginCall(self.responses_dispatch)(call.request, call.body)  # type: ignore[no-any-return]
        else:
            reply = plain(await PluginCall(getattr(self, hook))(call.request, body))
        return reply_in_dialect(call, reply)

    async def _message(self, call: InferenceCall, body: dict[str, Any]) -> dict[str, Any]:
        """Answer in Messages with whichever hook of NeMo Gym this server implements."""
        if not (self.overrides("responses") or self.overrides("chat_completions")):
            raise DialectError(f"model server '{self.config.name}' does not implement {call.request.url.path}")
        chat = messages.chat_request(body)
        if self.overrides("responses"):
            reply = plain(await PluginCall(self.responses)(call.request, responses.responses_request(chat)))
            completion = responses.completion_of_response(reply)
        else:
            completion = plain(await PluginCall(self.chat_completions)(call.request, chat))
        return messages.message_of_completion(completion, body)

    async def preflight(self) -> list[EngineCheck]:
        """Check each engine once before the first rollout: does it accept the API key, does it serve the model, how
        long is its context? Default: no checks, for a server without engines."""
        return []

    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        """NeMo Gym's hook; may also take the ``Request``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement chat_completions()")

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """NeMo Gym's hook; may also take the ``Request``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement responses()")

    async def responses_dispatch(self, request: Request, body: dict[str, Any]) -> Response:
        """NeMo Gym's hook: return the whole HTTP response to a Responses request, streamed if it asks for that. For
        servers that accept more than the dialect has; other servers implement ``responses``."""
        cleaned, namespaces = sanitize_streaming_responses_body(body)
        if body.get("stream"):
            return await self._stream_responses(request, cleaned, namespaces)
        return _orjson_dispatch_response(await self._invoke_responses(request, cleaned))

    async def _invoke_responses(self, request: Request, params: Any) -> Any:
        """Call ``responses``, with or without the request as its signature asks."""
        return await PluginCall(self.responses)(request, params)

    async def _stream_responses(self, request: Request, params: Any, namespaces: Mapping[str, str]) -> Response:
        reply = with_namespaces(plain(await self._invoke_responses(request, params)), namespaces)
        return Response(b"".join(ADAPTERS[Dialect.RESPONSES].events(reply)), media_type=EVENT_STREAM)

    @classmethod
    def overrides(cls, hook: str) -> bool:
        return getattr(cls, hook) is not getattr(SimpleResponsesAPIModel, hook)

    # -- wiring --------------------------------------------------------------------------------------------------

    def is_inference(self, path: str) -> bool:
        """Return whether a session's inference token opens a path."""
        return path.startswith("/v1/")

    def checks_token(self, path: str) -> bool:
        """Return whether the route of ``path`` checks the inference token itself."""
        return path in INFERENCE_PATHS

    def _needs_no_credential(self, scope: Scope) -> bool:
        """Return whether a request needs no credential of the stack. Where a plugin's own route does not check the
        inference token, it is checked here; raises for an invalid one."""
        path = scope["path"]
        if self.checks_token(path):
            return True
        token = token_in(Headers(scope=scope)) if self.is_inference(path) else None
        if token is not None:
            self.gateway_sessions.authorize(token)
        return token is not None

    @property
    def gateway_sessions(self) -> GatewaySessions:
        if self._sessions is None:
            self._sessions = self.make_sessions()
        return self._sessions

    def contract_app(self) -> Application:
        app = self.base_app(authenticates_itself=self._needs_no_credential)
        shape_errors(app, inference_refusal)
        routes = app.router.routes
        routes.append(Route("/sessions", self._open_route, methods=["POST"]))
        routes.append(Route("/sessions/{session_id}/finalize", self._finalize_route, methods=["POST"]))
        routes.append(Route("/sessions/{session_id}/abort", self._abort_route, methods=["POST"]))
        routes.append(Route("/preflight", self._preflight_route, methods=["POST"]))
        for path in PATHS:
            routes.append(Route(path, self._inference_route, methods=["POST"]))
        routes.append(Route("/v1/models", self._models_route, methods=["GET"]))
        if self.overrides("responses") or self.overrides("chat_completions"):
            global_config = getattr(self.server_client, "global_config_dict", None)
            settings = (
                {key: global_config.get(key) for key in ModelCallCaptureConfig.model_fields} if global_config else {}
            )
            set_values = {key: value for key, value in settings.items() if value is not None}
            config = ModelCallCaptureConfig.model_validate(set_values)
            install_model_call_capture(app, config, model_server_name=self.config.name)
        return app

    def facts(self) -> dict[str, Any]:
        return {"model": self.model_name()}

    async def _open_route(self, request: Request) -> Response:
        caller = require_role(request, Role.PIPELINE, Role.AGENT)
        body = await parse_json_object(request)
        rollout = validated(RolloutIdentity, body.get("rollout"), "/sessions: 'rollout'")
        limits = validated(ChosenLimits, body.get("limits") or {}, "/sessions: 'limits'")
        opened = await self.gateway_sessions.open(
            rollout, body.get("sampling"), opener=opener_of(caller), limits=limits
        )
        # The address by which the opener reached this server: its harness reaches it the same way.
        return self._opened_reply(opened, limits, {"base_url": f"{str(request.base_url).rstrip('/')}/v1"})

    def _opened_reply(self, opened: OpenedSession, limits: ChosenLimits, urls: Mapping[str, str]) -> Response:
        return JsonResponse(
            {
                "session_id": opened.session_id,
                **urls,
                "inference_token": opened.inference_token,
                "control_token": opened.control_token,
                "model": self.model_name(),
                "expires_at": opened.expires_at,
                "request_timeout_s": limits.request_timeout_s or self.config.request_timeout_s,
            }
        )

    async def _finalize_route(self, request: Request) -> Response:
        session_id, token = self._control(request)
        reward, reward_info = reward_in(await parse_json_object(request))
        summary = await self.gateway_sessions.finalize(session_id, token, reward=reward, reward_info=reward_info)
        return JsonResponse(summary)

    async def _preflight_route(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        return JsonResponse({"engines": [asdict(check) for check in await self.preflight()]})

    async def _abort_route(self, request: Request) -> Response:
        session_id, token = self._control(request)
        await self.gateway_sessions.abort(session_id, token)
        return JsonResponse({"session_id": session_id, "aborted": True})

    def _control(self, request: Request) -> tuple[str, str]:
        require_role(request, Role.PIPELINE, Role.AGENT)
        token = request.headers.get(CONTROL_TOKEN_HEADER)
        if not token:
            raise CredentialError(f"this route needs the header {CONTROL_TOKEN_HEADER}")
        return request.path_params["session_id"], token

    def _authorize(self, request: Request) -> GatewaySession | None:
        """The session of a request's token, or ``None`` for a caller with a credential of the stack."""
        if (token := token_in(request.headers)) is not None:
            return self.gateway_sessions.authorize(token)
        if self.secured and caller_of(request) is None:
            raise CredentialError(f"inference needs a session's token as bearer, or the header {CREDENTIAL_HEADER}")
        return None

    async def _models_route(self, request: Request) -> Response:
        self._authorize(request)
        listed = models_reply(request.headers, [self.model_name()])
        return JsonResponse(listed["data"][0] if "model" in request.path_params else listed)

    async def _inference_route(self, request: Request) -> Response:
        session = self._authorize(request)
        dialect = PATHS[request.scope["path"]]
        body = await parse_json_object(request, max_values=self.config.max_body_values)
        check_messages(body, self.config.max_messages)
        if session is not None and session.sampling:
            body = apply_sampling(dialect, body, dict(session.sampling))
        call = InferenceCall(dialect, body, session, request)
        try:
            # If the caller leaves, its work ends, here and at the endpoint.
            reply = await while_connected(request, without_exit(partial(self._infer_in_time, call)))
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except aiohttp.ClientResponseError as error:
            raise upstream_error(error.status, error.message, error.headers) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ModelError(f"the model endpoint failed: {type(error).__name__}: {error}", retryable=True) from error
        return self._count_call(call, reply)

    async def _infer_in_time(self, call: InferenceCall) -> Response:
        session = call.session
        limits = session.limits if session is not None else NONE_CHOSEN
        rollout, session_id = (session.rollout, session.session_id) if session is not None else (None, None)
        observed = model_call(
            self.model_name(), str(call.dialect), call.body, call.request.headers, rollout, session_id
        )
        with observed as calling:
            async with limited_call(limits, self.config.request_timeout_s):
                reply = await self.infer(call)
            answered(calling, call.usage)
            return reply

    def _count_call(self, call: InferenceCall, reply: Response) -> Response:
        """Count a successful call for its session: a plain reply now, a stream when it has completed."""
        session = call.session
        if session is None or reply.status_code != 200:
            return reply
        if isinstance(reply, StreamingResponse):
            reply.body_iterator = self._counted_stream(session, reply.body_iterator)
        else:
            usage = call.usage if call.usage is not None else _usage_in(reply)
            if usage is not None:
                session.count(usage)
        return reply

    async def _counted_stream(self, session: GatewaySession, stream: Any) -> AsyncIterator[bytes]:
        streamed_usage = StreamedUsage()
        async for chunk in stream:
            data = chunk.encode() if isinstance(chunk, str) else bytes(chunk)
            streamed_usage.feed(data)
            yield data
        if streamed_usage.completed:
            session.count(streamed_usage.usage)


def reply_in_dialect(call: InferenceCall, reply: Mapping[str, Any]) -> Response:
    """Return a reply of the call's dialect, as a stream if the call asks for one, and note its usage."""
    call.usage = Usage.of(reply.get("usage"))
    if not call.stream:
        return JsonResponse(reply)
    return Response(b"".join(ADAPTERS[call.dialect].events(reply)), media_type=EVENT_STREAM)


def reply_of_completion(call: InferenceCall, completion: dict[str, Any]) -> Response:
    """Return a chat completion as the reply to a call of any dialect."""
    reply = completion
    if call.dialect is Dialect.RESPONSES:
        reply = responses.response_of_completion(completion, call.body)
    elif call.dialect is Dialect.MESSAGES:
        reply = messages.message_of_completion(completion, call.body)
    return reply_in_dialect(call, reply)


def start_model_execution(request: Request, *, upstream_attempted: bool) -> dict[str, Any]:
    """NeMo Gym's hook: return facts of one call for its model server to fill in (``response_source``,
    ``upstream_status_code``). They stay with the request; the gateway records the call itself."""
    facts: dict[str, Any] = {"upstream_attempted": upstream_attempted}
    state = getattr(request, "state", None)
    if state is not None:
        state.nemo_gym_model_execution = facts
    return facts


def _orjson_dispatch_response(reply: Any) -> Response:
    """Return the HTTP response for ``reply``, a pydantic model or plain data. The name is NeMo Gym's."""
    return JsonResponse(plain(reply))


def reward_in(body: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """Return ``reward`` and ``reward_info`` of a request that ends a session; both may be missing. Raises
    `InvalidBodyError`."""
    reward, info = body.get("reward"), body.get("reward_info")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise InvalidBodyError(f"'reward' is a number or null, not {type(reward).__name__}", param="reward")
    if info is not None and not isinstance(info, dict):
        raise InvalidBodyError(f"'reward_info' is an object or null, not {type(info).__name__}", param="reward_info")
    try:
        return (None if reward is None else float(reward)), info
    except OverflowError:
        raise InvalidBodyError("'reward' is larger than any float", param="reward") from None


def _usage_in(reply: Response) -> Usage | None:
    """Return the usage in a reply; ``None`` if the body is no JSON object."""
    try:
        value = orjson.loads(bytes(reply.body))
    except orjson.JSONDecodeError:
        return None
    return Usage.of(value.get("usage")) if isinstance(value, dict) else None


def upstream_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> ModelError:
    """Return the caller's error for an endpoint's error status, with its ``Retry-After``. 429 is passed on."""
    wait_s = retry_after_s((headers or {}).get("Retry-After"))
    detail = f"the model endpoint answered {status}: {message[:500]}"
    if status == 429:
        return RateLimitedError(detail, retryable=True, upstream_status=status, retry_after_s=wait_s)
    retryable = status >= 500 or status == 408
    return ModelError(detail, retryable=retryable, upstream_status=status, retry_after_s=wait_s)


def __getattr__(name: str) -> Any:
    if name.startswith("NeMoGym"):
        from nemo_gym import openai_utils

        return getattr(openai_utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
