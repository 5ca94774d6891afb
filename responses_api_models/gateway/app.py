"""The model gateway: one endpoint for every harness, exact tokens for training, and calls spread over many engines."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel
from nemo_gym.config_types import CommandPath
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError, CredentialError, InvalidBodyError
from nemo_gym.gateway.backend import Backend, CallLimits, SessionShare, step_begins
from nemo_gym.gateway.capture import CallCapture, CaptureConfig
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.errors import dialect_of
from nemo_gym.gateway.durable_sessions import DurableSessions
from nemo_gym.gateway.engines import EngineConfig
from nemo_gym.gateway.engines.calls import RetryConfig
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.engines.router import HealthState, RoutingConfig
from nemo_gym.gateway.engines.types import EngineCheck
from nemo_gym.gateway.inference import FIRST_EVENT_GRACE_S, PING_INTERVAL_S, CallRequest, Inference
from nemo_gym.gateway.journal_log import Durability
from nemo_gym.gateway.live_session import LiveSession
from nemo_gym.gateway.model_server import BaseResponsesAPIModelConfig, reward_in
from nemo_gym.gateway.routes import (
    LENGTH_DIGITS,
    InferenceShortcut,
    OpenSession,
    PathTokenMiddleware,
    engine_routes,
    require_engine,
)
from nemo_gym.gateway.sessions import (
    COMPLETION_TOKEN_PREFIX,
    KEEP_CLOSED_S,
    GatewaySessions,
    completion_token,
    opener_of,
    token_digest,
    token_in,
)
from nemo_gym.gateway.text_backend import TextBackend
from nemo_gym.gateway.tokens import History
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError
from nemo_gym.http.middleware import Application
from nemo_gym.http.requests import (
    JsonResponse,
    check_messages,
    json_object,
    parse_json_object,
    refuse_encoded,
    require_role,
)
from nemo_gym.http.telemetry import Reading

if TYPE_CHECKING:
    from nemo_gym.gateway.token_backend import TokenBackend

_LIMITS = CallLimits()
_ABSURD_CONTEXT = 10**8
"""A ``model_max_length`` from here on means no limit: tokenizers without one write a number of thirty digits."""
SESSION_PREFIX = "/sessions/{session_id}"
COUNT_TOKENS = "/v1/messages/count_tokens"
_STEPS = ("_inference_route", "_session_of", "_authorize")
"""The steps of an inference call. If a subclass overrides one, the shortcut is off, so that no call skips it."""


class PolicyConfig(BaseModel):
    """The policy's tokenizer and chat template; needed by engines that take token ids."""

    model_config = ConfigDict(extra="forbid")

    path: CommandPath
    """The model's local directory: ``tokenizer.json``, ``tokenizer_config.json``, a chat template. Nothing is
    downloaded, and no weights are read."""
    chat_template: CommandPath | None = None
    """A Jinja file in place of the directory's own template."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Tokens that end a turn, in addition to those that the directory names."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables passed to every rendering of the template, for example ``enable_thinking: true``."""
    special_tokens_in_content: Literal["text", "control"] = "text"
    """How the spelling of a special token (``<|im_end|>``) in a message is encoded: as the letters it is made of, or
    as the token itself, with which a tool's output can end its message and start another."""
    tool_parser: str = "auto"
    """The parser of tool calls in sampled text; ``auto`` chooses by what the chat template writes."""
    reasoning_parser: str = "auto"
    history: History = History.VERBATIM
    """How to treat earlier reasoning that the chat template would leave out: ``verbatim`` keeps it, and the
    conversation stays one trajectory; ``template`` follows the template, and the conversation splits."""
    max_context_tokens: int | None = Field(None, gt=0)
    """Limit of prompt and answer together. Default: the one in ``config.json`` or ``tokenizer_config.json``."""
    max_answer_tokens: int | None = Field(None, gt=0)
    """Limit of one answer. Default: what the prompt leaves of the context. A request may ask for less."""

    def backend(self, pool: EnginePool, *, model: str) -> TokenBackend:
        """Return the backend for this policy and a pool of token engines. Raises `ConfigError` for a directory, a
        template or a parser that cannot be used."""
        from nemo_gym.gateway.parsing import answer_parser
        from nemo_gym.gateway.token_backend import TokenBackend
        from nemo_gym.gateway.tokens import PolicyTokenizer

        policy = PolicyTokenizer.load(
            self.path,
            chat_template=_read(self.chat_template) if self.chat_template is not None else None,
            stop_tokens=self.stop_tokens,
            template_variables=self.template_variables,
            special_tokens_in_content=self.special_tokens_in_content,
        )
        parser = answer_parser(policy, tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
        return TokenBackend(
            policy,
            parser,
            pool,
            model=model,
            max_context_tokens=self._context_tokens(),
            max_answer_tokens=self.max_answer_tokens,
            history=self.history,
        )

    def _context_tokens(self) -> int:
        if self.max_context_tokens is not None:
            return self.max_context_tokens
        for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
            try:
                config = orjson.loads((self.path / file).read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            inner = config.get("text_config") or config
            value = inner.get(key)
            if isinstance(value, int | float) and 0 < value < _ABSURD_CONTEXT:
                return int(value)
        raise ConfigError(
            f"policy: '{self.path}' does not define the policy's context length; set max_context_tokens",
            key="policy.max_context_tokens",
        )


class GatewayConfig(BaseResponsesAPIModelConfig):
    """Configuration of a gateway."""

    model: str = "policy"
    """The model name in every reply, whatever name a harness asks for."""
    engines: list[EngineConfig] = Field(default_factory=list)
    """The engines that run the policy: all of them take token ids (``vllm``, ``sglang``), or all of them text
    (``openai``). More can be added while the gateway runs."""
    policy: PolicyConfig | None = None
    """Needed with engines that take token ids."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """For text engines: parameters added to every request that does not set them itself."""
    remote_images: bool = False
    """Whether a session's requests may name images by http(s) address, which the engine then fetches from its own
    network: also for a harness in a box that reaches nothing but its model. Needed for rows that hold addresses."""
    return_token_ids: bool = False
    """Whether replies carry the exact tokens: ``prompt_token_ids``, ``generation_token_ids``,
    ``generation_log_probs``."""
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    retries: RetryConfig = Field(default_factory=RetryConfig)
    journal_dir: CommandPath | None = None
    """The directory of the journal, which stores sessions and turns. Default: in the run's directory; for a gateway
    started by hand, ``gateway-journal`` in the working directory."""
    durability: Durability = "process"
    """What a committed turn survives: the death of the ``process``, or a ``power_loss`` as well, for which every
    commit waits for the disk."""
    max_session_messages: int = Field(_LIMITS.max_session_messages, gt=0)
    """Limit of messages in all conversations of one session; a message that later requests repeat counts once. A
    session above the limit gets no further answer (413)."""
    max_session_bytes: int = Field(_LIMITS.max_session_bytes, gt=0)
    """Limit of bytes that one session's turns hold in memory; 413 as well."""
    max_session_in_flight_bytes: int = Field(_LIMITS.max_session_in_flight_bytes, gt=0)
    """Limit of the request bodies of one session's unanswered calls, and of its replies that nobody has read; a call
    that would exceed it is refused with 429. A body whose length is not announced counts as ``max_body_bytes``."""
    keep_closed_s: float = Field(KEEP_CLOSED_S, ge=0)
    """How long a closed session answers a repeated finalize. The oldest are forgotten sooner when more than 1,024
    sessions, or more than 256 MiB of their conversations, are kept."""
    ping_interval_s: float = Field(PING_INTERVAL_S, gt=0)
    """How long a stream is silent before a keep-alive ping."""
    first_event_grace_s: float = Field(FIRST_EVENT_GRACE_S, ge=0)
    """How long a stream's headers wait for the answer; a failure within that time becomes an HTTP status."""
    capture: CaptureConfig | None = None
    """Record every call for observers, with secrets removed. By default no call is recorded."""
    path_tokens: bool = False
    """Also accept the inference token in the path (``/sessions/<id>/token/<token>/v1``), and a completion token
    (``…/complete``), for trusted runners that can set a URL but no header."""

    def limits(self) -> CallLimits:
        return CallLimits(**{limit.name: getattr(self, limit.name) for limit in fields(CallLimits)})

    @property
    def kind(self) -> Literal["text", "token"]:
        """The kind of the engines."""
        return "text" if self.policy is None else "token"

    @model_validator(mode="after")
    def _engines_fit(self) -> GatewayConfig:
        kinds = {"text" if engine.type == "openai" else "token" for engine in self.engines}
        if len(kinds) > 1:
            raise ValueError("engines: 'openai' takes text, 'vllm' and 'sglang' take token ids; use one kind")
        if kinds == {"token"} and self.policy is None:
            raise ValueError("policy: is missing; engines that take token ids need the policy's local directory")
        if kinds == {"text"} and self.policy is not None:
            raise ValueError(
                "policy: is for engines that take token ids; an 'openai' engine renders and encodes by itself"
            )
        return self


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        key = "policy.chat_template"
        raise ConfigError(f"{key}: '{file}' cannot be read ({error})", key=key) from error


class Gateway(SimpleResponsesAPIModel):
    """A gateway."""

    config: GatewayConfig

    _pool: EnginePool = PrivateAttr()
    _backend: Backend[Any, Any] = PrivateAttr()
    _durable: DurableSessions[Any, Any] = PrivateAttr()
    _inference: Inference[Any, Any] = PrivateAttr()
    _capture: CallCapture | None = PrivateAttr(default=None)

    def _build(self) -> None:
        config = self.config
        self._pool = EnginePool(config.engines, routing=config.routing, retries=config.retries, kind=config.kind)
        if config.policy is None:
            self._backend = TextBackend(self._pool, model=config.model, extra_body=config.extra_body)
        else:
            self._backend = config.policy.backend(self._pool, model=config.model)
        self._durable = DurableSessions(self._backend, ttl_s=config.session_ttl_s, keep_closed_s=config.keep_closed_s)
        keys = [engine.api_key for engine in config.engines if engine.api_key]
        if config.capture is not None:
            self._capture = CallCapture(config.capture, secrets=keys)
        self._inference = Inference(
            self._backend,
            self._durable,
            model=config.model,
            return_token_ids=config.return_token_ids,
            ping_interval_s=config.ping_interval_s,
            first_event_grace_s=config.first_event_grace_s,
            capture=self._capture,
            limits=config.limits(),
            remote_images=config.remote_images,
            request_timeout_s=config.request_timeout_s,
        )

    # -- life ----------------------------------------------------------------------------------------------------

    async def startup(self) -> None:
        await self._durable.open_journal(self.journal_dir(), self.config.durability)
        await self._pool.start(self.journal_dir() / "weights.json")

    async def shutdown(self) -> None:
        await self._durable.aclose()
        await self._pool.aclose()
        if self._capture is not None:
            self._capture.close()

    async def ready(self) -> dict[str, Any] | None:
        if (refusal := self._durable.journal.log.refusal) is not None:
            return {"detail": str(refusal)}
        return self._pool.ready()

    async def preflight(self) -> list[EngineCheck]:
        limit = self._backend.context_tokens
        return [_with_context_warning(check, limit) for check in await self._pool.check(self._backend.tokenizer_probe)]

    def readings(self) -> Iterable[Reading]:
        yield from super().readings()
        engines, waiting = self._pool.router.status(), float(self._pool.router.waiting)
        labelled = [({"engine": engine.name}, engine) for engine in engines]
        health = [
            (labels, float(engine.state is HealthState.UP and not engine.draining)) for labels, engine in labelled
        ]
        yield Reading("nemo_gym_engine_up", "Whether an engine gets calls", health)
        in_flight = [(labels, float(engine.in_flight)) for labels, engine in labelled]
        yield Reading("nemo_gym_engine_calls_in_flight", "Calls that an engine is answering", in_flight)
        yield Reading("nemo_gym_engine_calls_waiting", "Calls without a place at any engine", [({}, waiting)])
        sessions = [({"state": state}, float(count)) for state, count in self._durable.states.items()]
        yield Reading("nemo_gym_gateway_sessions", "Sessions that are kept, by state", sessions)

    def journal_dir(self) -> Path:
        if self.config.journal_dir is not None:
            return self.config.journal_dir
        state_dir = self._launch.state_dir if self._launch is not None else None
        return Path(state_dir or ".") / f"{self.config.name}-journal"

    def make_sessions(self) -> GatewaySessions:
        return self._durable

    def model_name(self) -> str:
        return self.config.model

    # -- routes --------------------------------------------------------------------------------------------------

    def is_inference(self, path: str) -> bool:
        return super().is_inference(_without_session(path))

    def checks_token(self, path: str) -> bool:
        path = _without_session(path)
        return super().checks_token(path) or path == COUNT_TOKENS or path.startswith("/v1/models/")

    def _needs_no_credential(self, scope: Scope) -> bool:
        if _without_session(scope["path"]) == "/complete":
            return token_in(Headers(scope=scope), COMPLETION_TOKEN_PREFIX) is not None
        return super()._needs_no_credential(scope)

    def setup_webserver(self) -> FastAPI:
        self._build()
        app = super().setup_webserver()
        add = app.router.routes.append
        add(Route(SESSION_PREFIX, self._state_route, methods=["GET"]))
        add(Route(f"{SESSION_PREFIX}/complete", self._complete_route, methods=["POST"]))
        # The base class adds the same paths without the session prefix.
        for path in PATHS:
            add(Route(f"{SESSION_PREFIX}{path}", self._inference_route, methods=["POST"]))
        add(Route(f"{SESSION_PREFIX}/v1/models", self._models_route, methods=["GET"]))
        for prefix in ("", SESSION_PREFIX):
            add(Route(f"{prefix}{COUNT_TOKENS}", self._count_tokens_route, methods=["POST"]))
            add(Route(f"{prefix}/v1/models/{{model:path}}", self._models_route, methods=["GET"]))
        app.router.routes.extend(engine_routes(self._pool, require_role))
        if self.config.path_tokens:
            app.add_middleware(PathTokenMiddleware)
        assert isinstance(app, Application)
        if all(getattr(type(self), step) is getattr(Gateway, step) for step in _STEPS):
            app.take_shortcut(InferenceShortcut(self._durable, self._inference))
        return app

    async def _open_route(self, request: Request) -> Response:
        caller = require_role(request, Role.PIPELINE, Role.AGENT)
        requested = OpenSession.read(await parse_json_object(request))
        if requested.engine is not None:
            require_engine(self._pool, requested.engine)
        opened = await self._durable.open(
            requested.rollout,
            requested.sampling,
            opener=opener_of(caller),
            limits=requested.limits,
            ttl_s=requested.ttl_s,
            reward_source=requested.reward_source,
        )
        if requested.engine is not None and requested.engine in self._pool:  # it may have been removed meanwhile
            self._pool.router.pin(opened.session_id, requested.engine)
        # The harness reaches this server at the same address as the client that opens the session.
        base = f"{str(request.base_url).rstrip('/')}/sessions/{opened.session_id}"
        urls = {"base_url": f"{base}/v1", "complete_url": f"{base}/complete"}
        if self.config.path_tokens:
            urls["path_token_base_url"] = f"{base}/token/{opened.inference_token}/v1"
            path_token = completion_token(token_digest(opened.control_token))
            urls["path_token_complete_url"] = f"{base}/token/{path_token}/complete"
        return self._opened_reply(opened, requested.limits, urls)

    async def _state_route(self, request: Request) -> Response:
        return JsonResponse(self._durable.state(*self._control(request)))

    async def _complete_route(self, request: Request) -> Response:
        # A runner may come with the completion token instead of the opener's.
        if (token := token_in(request.headers, COMPLETION_TOKEN_PREFIX)) is not None:
            session_id = request.path_params["session_id"]
        else:
            session_id, token = self._control(request)
        self._durable.require_completable(session_id, token)  # nobody else's body is read
        reward, info = reward_in(await parse_json_object(request))
        if reward is not None:
            info = {**(info or {}), "reward": reward}
        return JsonResponse(await self._durable.complete(session_id, token, info))

    async def _inference_route(self, request: Request) -> Response:
        live = self._session_of(request)
        dialect = dialect_of(request.scope["path"])
        assert dialect is not None  # only inference routes come here
        refuse_encoded(request)
        call_request = CallRequest(request.headers, request.scope.get("client"), request.receive)
        if live is None:
            body = await parse_json_object(request, max_values=self.config.max_body_values)
            call_request = replace(call_request, body_bytes=len(await request.body()))
            try:
                return await self._inference.answer(dialect, body, call_request, None)
            except CallerGoneError:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
        with self._claimed(request, live.share):
            parts = [await request.body()]
            return await self._inference.answer_session(dialect, live, request.scope["path"], parts, call_request)

    async def _count_tokens_route(self, request: Request) -> Response:
        live = self._session_of(request)
        share = live.share if live is not None else SessionShare()
        refuse_encoded(request)
        with self._claimed(request, share):
            raw = await request.body()
            await self._inference.admit(raw, share)
            working = step_begins(len(raw))
            body = json_object(raw, request.scope["path"])
            check_messages(body, self.config.max_messages)
            lowered = ADAPTERS[Dialect.MESSAGES].lower({"max_tokens": 1, **body})
            share.worked(working)
            await self._inference.turns.wait(share)
            count = await self._backend.count_tokens(lowered)
        if count is None:
            raise InvalidBodyError("count_tokens: the endpoint's tokenizer is unknown, so tokens cannot be counted")
        return JsonResponse({"input_tokens": count})

    def _claimed(self, request: Request, share: SessionShare) -> AbstractContextManager[None]:
        """Claim the body of a request that was not read yet."""
        limits = self._inference.limits
        content_length = request.headers.get("content-length", "")
        size = limits.max_body_bytes
        if content_length.isdecimal() and len(content_length) <= LENGTH_DIGITS:
            size = min(int(content_length), size)
        return share.claimed(size, limits.max_session_in_flight_bytes)

    def _session_of(self, request: Request) -> LiveSession[Any] | None:
        session = self._authorize(request)
        path_session_id = request.path_params.get("session_id")
        if session is None:
            if path_session_id is not None:
                raise CredentialError("this route needs the session's inference token")
            return None
        if path_session_id is not None and path_session_id != session.session_id:
            raise CredentialError("the inference token is not this session's", session_id=path_session_id)
        return self._durable.live(session.session_id)


def _with_context_warning(check: EngineCheck, limit: int | None) -> EngineCheck:
    if limit is None or check.context_tokens is None or check.context_tokens >= limit:
        return check
    warning = (
        f"engine '{check.engine}' takes {check.context_tokens} tokens, the policy's configuration says {limit}:"
        f" conversations end at {check.context_tokens}"
    )
    return replace(check, warning=warning)


def _without_session(path: str) -> str:
    """Return ``/v1/…`` for ``/sessions/{session_id}/v1/…``, and any other path unchanged."""
    parts = path.split("/", 3)
    return f"/{parts[3]}" if parts[1:2] == ["sessions"] and len(parts) == 4 else path


if __name__ == "__main__":
    Gateway.run_webserver()
