"""The base class of every agent server.

A new agent implements ``act``: the `ActRequest` holds everything it needs, the `ActResponse` everything it produced.
A NeMo Gym agent implements ``responses`` and perhaps ``run``; it works unmodified. An agent with only ``responses`` is
called through ``act`` like any other. An agent that overrides ``run`` seeds and verifies itself, with a row reference
instead of the private part of its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import uuid4

import orjson
import structlog
from fastapi import Body
from pydantic import Field, PrivateAttr, field_validator
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nemo_gym.agent.acts import ACTS, ActRegistry, OwnRunMiddleware, at_wall_clock
from nemo_gym.agent.bindings import response_object
from nemo_gym.agent.sessions import (
    AgentCloseSessionRequest,
    AgentCloseSessionResponse,
    AgentSeedSessionRequest,
    AgentSeedSessionResponse,
    AgentSessions,
    AgentSessionSetupError,
    AgentSessionState,
    _AgentSessionRecord,
)
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, BaseRunServerInstanceConfig
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.episodes import ToolAccess, unique_tool_names
from nemo_gym.contract.errors import (
    AgentError,
    ConfigError,
    ContractError,
    InvalidBodyError,
    ModelError,
    ServerError,
)
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    BoxNeeds,
    Limits,
    RolloutIdentity,
    Topology,
)
from nemo_gym.contract.verdict import (
    ATTEMPT_INDEX_KEY,
    PARAMS_KEY,
    RESPONSE_KEY,
    ROLLOUT_INDEX_KEY,
    SESSION_KEY,
    TASK_INDEX_KEY,
    StageError,
    Verdict,
    dataset_fields,
    failure_of_outcome,
    outcome_of_model_error,
)
from nemo_gym.http.client import count_calls, expect_json, inference_context, server_config_of
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError
from nemo_gym.http.middleware import TOKEN_CAPTURE, Application
from nemo_gym.http.peers import PeerError, PeerReply, Peers
from nemo_gym.http.plugin_call import PluginCall, plain
from nemo_gym.http.requests import JsonResponse, describe_request, parse_json_object, require_role, validated
from nemo_gym.http.server import BaseServer, SimpleServer
from nemo_gym.http.telemetry import (
    Reading,
    apply_rollout_prefix,
    maybe_rollout_id_from_run_body,
    rollout_path_prefix,
)
from nemo_gym.reward_profile import AggregateMetricsMixin, compute_aggregate_metrics
from nemo_gym.rollout import MODEL_SESSION_KEYS, Attempt, Budgets, RolloutSteps, Servers
from nemo_gym.sandbox.door_statistics import DoorStatistics

if TYPE_CHECKING:
    from aiohttp import ClientResponse

    from nemo_gym.http.environment_bodies import (
        BaseRunRequest,
        BaseVerifyRequest,
        BaseVerifyResponse,
        NeMoGymResponse,
        NeMoGymResponseCreateParamsNonStreaming,
    )

__all__ = [
    "AgentCloseSessionRequest",
    "AgentCloseSessionResponse",
    "AgentSeedSessionRequest",
    "AgentSeedSessionResponse",
    "AgentSessionSetupError",
    "AgentSessionState",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseResponsesAPIAgent",
    "BaseResponsesAPIAgentConfig",
    "BaseRunRequest",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "Body",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "Request",
    "SimpleResponsesAPIAgent",
]

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 60.0


class BaseResponsesAPIAgentConfig(BaseRunServerInstanceConfig):
    """Configuration of an agent. Most also have ``resources_server`` and ``model_server``."""

    skip_verification: bool = False
    """Have ``/run`` skip the verification and return ``skip_verification_reward``."""
    skip_verification_reward: float = 0.0
    token_id_capture: bool = False
    """A setting of NeMo Gym's, accepted for compatibility. Token ids come from the model server's session."""
    session_close_retry_window_seconds: float = Field(default=300, gt=0, allow_inf_nan=False)
    """How long a repeated close of a session gets the same reply."""
    tool_accesses: list[ToolAccess] = Field(default_factory=list)
    """Tools that every session of NeMo Gym's protocol gets."""
    row_access: Literal["public", "full", "validation"] = "public"
    """Which part of a row this agent gets. ``full`` is for agents that read private fields, and labels their results;
    ``validation`` is for oracle agents."""

    @field_validator("tool_accesses")
    @classmethod
    def _unique_tool_names(cls, accesses: list[ToolAccess]) -> list[ToolAccess]:
        return unique_tool_names(accesses)


class BaseResponsesAPIAgent(BaseServer):
    config: BaseResponsesAPIAgentConfig


class SimpleResponsesAPIAgent(AgentSessions, BaseResponsesAPIAgent, AggregateMetricsMixin, SimpleServer):
    """An agent. Override ``act``, or NeMo Gym's ``responses`` and ``run``."""

    config: BaseResponsesAPIAgentConfig

    ROLE: ClassVar[Role] = Role.AGENT
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.NONE, Topology.ENV_SANDBOXED)
    """The topologies that this agent supports. A composition with another topology is refused before it starts."""
    tool_access: ClassVar[tuple[str, ...]] = ("mcp", "http")
    """How this agent reaches a world from outside of it: ``mcp``, ``http`` (tool routes) or ``exec`` (in its box)."""
    needs_prompt: ClassVar[bool] = True
    """Whether the agent starts from the row's prompt; if so, rows without one are refused. ``False`` for an agent that
    gets its task elsewhere: from tools, or from a stepped environment."""
    enforce_row_sampling: ClassVar[bool] = False
    """Whether the model session enforces the row's sampling parameters, as it does a run's, on every model call. For
    an agent whose harness cannot be told all of them."""

    _acts: ActRegistry = PrivateAttr(default_factory=ActRegistry)
    _session_records: dict[str, _AgentSessionRecord] = PrivateAttr(default_factory=dict)

    # -- hooks ---------------------------------------------------------------------------------------------------

    async def act(self, request: ActRequest) -> ActResponse:
        """Run one attempt. It is cancelled if the pipeline disconnects, cancels or starts a newer attempt, so release
        everything in a shielded ``finally``. For failures that are not the policy's, raise `AgentError` or
        `ModelError`."""
        return await self._act_by_responses(request, {})

    async def act_in_session(self, request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        """Like ``act``, for agents that call the environment's tool routes: ``cookies`` are those of the environment's
        seed and identify the attempt's session. Default: ``act``, or ``responses`` of a NeMo Gym agent."""
        if self.overrides("act"):
            return await self.act(request)
        return await self._act_by_responses(request, cookies)

    async def box_needs(self) -> BoxNeeds:
        """What this agent's harness needs in a world's box that the environment creates. Default: nothing."""
        return BoxNeeds()

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Answer one prompt, calling tools and model through ``self.server_client``; a hook of NeMo Gym's."""
        raise NotImplementedError(f"{type(self).__name__} implements neither act() nor responses()")

    async def run(self, body: BaseRunRequest) -> BaseVerifyResponse:
        """Run a whole rollout; a hook of NeMo Gym's. By default ``/run`` consists of seed, act and verify instead."""
        raise NotImplementedError(f"{type(self).__name__} does not override run()")

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Metrics over all results: the environment's, unless this agent overrides how they are computed."""
        environment = self._server_name("resources_server")
        if environment is None or self.has_own_metrics():
            return await asyncio.to_thread(
                compute_aggregate_metrics,
                body.verify_responses,
                self.compute_metrics,
                self.get_key_metrics,
                self.compute_repeat_metrics,
            )
        reply = await self.server_client.post(environment, "/aggregate_metrics", json=body, idempotent=True)
        return AggregateMetrics.model_validate(await _json_reply(reply, environment))

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether a subclass implements ``hook`` itself."""
        return getattr(cls, hook) is not getattr(SimpleResponsesAPIAgent, hook)

    @classmethod
    def has_own_metrics(cls) -> bool:
        """Whether a subclass computes metrics itself. An overridden ``aggregate_metrics`` does not count: NeMo Gym's
        agents override it to pass the rows on to their environment, which a run asks anyway."""
        return any(map(cls.overrides, ("compute_metrics", "compute_repeat_metrics", "get_key_metrics")))

    def facts(self) -> dict[str, Any]:
        return {
            "overrides_run": self.overrides("run"),
            "overrides_metrics": self.has_own_metrics(),
            "row_access": self.config.row_access,
            "needs_prompt": self.needs_prompt,
            "enforce_row_sampling": self.enforce_row_sampling,
            "topologies": [str(topology) for topology in self.topologies],
            "limits": sorted(self.kept_limits()),
        }

    def readings(self) -> Iterable[Reading]:
        yield from super().readings()
        yield Reading("nemo_gym_acts_running", "Acts under way", [({}, float(self._acts.active))])

    def kept_limits(self) -> frozenset[str]:
        """The names of the `Limits` that this agent obeys. Default: all, which `act_in_world` enforces; for a NeMo Gym
        agent with ``responses`` only the wall clock, and none for one with its own ``run``."""
        if self.overrides("run"):
            return frozenset()
        return frozenset(Limits.model_fields) if self.overrides("act") else frozenset({"wall_clock_s"})

    # -- wiring --------------------------------------------------------------------------------------------------

    def contract_app(self) -> Application:
        app = self.base_app()
        app.router.routes.append(Route("/act", self._act_route, methods=["POST"]))
        app.router.routes.append(Route("/box_needs", self._box_needs_route, methods=["GET"]))
        app.router.routes.append(Route("/cancel", self._cancel_route, methods=["POST"]))
        if self.overrides("responses"):
            app.post("/v1/responses")(self.responses)
        if self.overrides("_seed_agent_session_state"):
            self._add_session_routes(app)
        if self.overrides("run"):
            # The innermost layer, because it reads bodies, which the outer layers admit and bound.
            inner = Middleware(
                OwnRunMiddleware,
                agent=self.config.name,
                environment=self._server_name("resources_server"),
                model=self._server_name("model_server"),
            )
            app.user_middleware.append(inner)
            app.post("/run")(self.run)
        else:
            app.router.routes.append(Route("/run", self._run_route, methods=["POST"]))
        app.router.routes.append(Route("/aggregate_metrics", self._aggregate_route, methods=["POST"]))
        return app

    async def stopping(self) -> None:
        await self._acts.finish()

    def _server_name(self, key: str) -> str | None:
        reference = getattr(self.config, key, None)
        return reference.name if reference is not None else None

    async def _aggregate_route(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR, Role.AGENT)
        body = await parse_json_object(request)
        if not isinstance(body.get("verify_responses"), list):
            raise InvalidBodyError("/aggregate_metrics needs 'verify_responses': a list of result rows")
        metrics_request = AggregateMetricsRequest.model_construct(verify_responses=body["verify_responses"])
        return JsonResponse(plain(await self.aggregate_metrics(metrics_request)))

    async def _act_route(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE)
        act_request = validated(ActRequest, await parse_json_object(request), "/act")
        if act_request.validation is not None and self.config.row_access != "validation":
            raise ContractError(
                f"agent '{self.config.name}' may not see a task's solution; only agents with row_access: validation"
                " may"
            )
        cookies, rollout = dict(request.cookies), act_request.descriptor.rollout
        # By OpenTelemetry's conventions for generative AI.
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": self.config.name}
        describe_request(request.scope, f"invoke_agent {self.config.name}", attributes)
        try:
            response = await self._acts.run(rollout, partial(self._act_in_session, act_request, cookies), request)
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        ACTS.add(str(response.outcome))
        failure = failure_of_outcome(response.outcome, response.outcome_detail)
        if failure is not None and not response.within_reach:
            log.warning(
                "the act left nothing to grade",
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                outcome=str(response.outcome),
                reason=failure.reason,
            )
        return Response(response.model_dump_json().encode(), media_type="application/json")

    async def _act_in_session(self, act_request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        """`act_in_session`. A `ModelError` that leaves it has the outcome that `act_in_world` would give it."""
        try:
            return await self.act_in_session(act_request, cookies)
        except ModelError as error:
            nothing = response_object([], model=act_request.inference.model)
            return ActResponse(response=nothing, outcome=outcome_of_model_error(error), outcome_detail=error.message)

    async def _act_by_responses(self, act_request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        """Run ``act`` by a NeMo Gym agent's ``responses``, with the session's cookies and the attempt's token."""
        topology = act_request.descriptor.placement.topology
        if topology not in self.topologies:
            raise ConfigError(
                f"agent '{self.config.name}' cannot work in topology '{topology}'; it supports"
                f" {', '.join(self.topologies)}",
                key="topology",
            )
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        headers = [(b"cookie", header.encode("latin-1"))] if header else []
        request = Request({"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers})
        seconds, statistics = act_request.wall_clock_s(None), DoorStatistics()
        model = self._server_name("model_server") or ""
        try:
            async with asyncio.timeout(seconds) as deadline:
                token = act_request.inference.token
                with inference_context(model, token), count_calls(model, statistics.exchange):
                    reply = await PluginCall(self.responses)(request, act_request.responses_create_params)
        except TimeoutError:
            if not deadline.expired():
                raise
            # An agent without calls may reach a model in another way, or need none.
            known = statistics if statistics.requests else None
            outcome, detail = at_wall_clock(known, f"stopped after {seconds:g} s of wall-clock time")
            nothing = response_object([], model=act_request.inference.model)
            return ActResponse(response=nothing, outcome=outcome, outcome_detail=detail)
        response = plain(reply, hook="responses")
        if not isinstance(response.get("output"), list):
            raise AgentError(
                f"responses() of '{self.config.name}' returned no Responses object, which has a list 'output'; return"
                " a NeMoGymResponse"
            )
        return ActResponse(response=response)

    async def _box_needs_route(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        return Response((await self.box_needs()).model_dump_json().encode(), media_type="application/json")

    async def _cancel_route(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        rollout = validated(RolloutIdentity, (await parse_json_object(request)).get("rollout"), "'rollout'")
        cancelled, seconds = await self._acts.cancel(rollout)
        return JsonResponse({"cancelled": cancelled, "seconds": seconds})

    # -- /run ----------------------------------------------------------------------------------------------------

    async def _run_route(self, request: Request) -> Response:
        """Run one rollout for a caller outside of the pipeline.

        The caller has stored the row with the environment (``/rows``) and sends the reply: this server gets the row's
        public part, and a reference that lets it seed, verify and close this one attempt.
        """
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        row = await parse_json_object(request)
        environment = self._server_name("resources_server")
        if environment is None:
            raise ConfigError(f"agent '{self.config.name}' has no 'resources_server'; set one", key="resources_server")
        if not isinstance(row.get(PARAMS_KEY) or {}, dict):
            raise InvalidBodyError(f"/run: '{PARAMS_KEY}' must be a JSON object")
        session = row.pop(SESSION_KEY, None) or {}
        if not isinstance(session, dict):
            raise InvalidBodyError(f"/run: '{SESSION_KEY}' must be a JSON object")
        rollout = (
            validated(RolloutIdentity, session["rollout"], "'rollout'") if "rollout" in session else _row_identity(row)
        )
        ref = session.get("row_ref")
        if self.secured and not isinstance(ref, str):
            raise InvalidBodyError(
                f"/run needs '{SESSION_KEY}.row_ref': POST {{'row': …, 'rollout': …}} to /rows of '{environment}', and"
                f" send its 'public_row' here with '{SESSION_KEY}': {{'rollout': …, 'row_ref': …}}"
            )
        servers = Servers(
            self.config.name,
            environment,
            self._server_name("model_server"),
            enforce_row_sampling=self.enforce_row_sampling,
            skipped_reward=self.config.skip_verification_reward if self.config.skip_verification else None,
        )
        attempt = Attempt(
            servers, rollout.model_dump(), orjson.dumps(row), row_ref=ref or None, cookies=dict(request.cookies)
        )
        try:
            return JsonResponse(await self._acts.run(rollout, partial(self._rollout, attempt), request))
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _rollout(self, attempt: Attempt) -> dict[str, Any]:
        """Run an attempt. Returns the verify response, or after a failed stage the row with the failure, no reward."""
        response_fields: dict[str, Any] = {}

        async def call_agent(attempt: Attempt, body: dict[str, Any]) -> PeerReply:
            response = await self._act_in_session(ActRequest.model_validate(body), attempt.cookies)
            response_fields[RESPONSE_KEY] = response.response
            return PeerReply(response.model_dump_json().encode(), {})

        steps = RolloutSteps(Peers(self.server_client), call_agent=call_agent)
        try:
            verified = await steps.run(attempt, Budgets(close_s=CLOSE_TIMEOUT_S))
        except PeerError as error:
            raise _error_of_peer(error) from error
        except StageError as error:
            invalid = Verdict.invalid(error.failure.kind, error.failure.reason)
            return {
                **dataset_fields(attempt.row_with()),
                **invalid.as_fields(),
                **response_fields,
                **(attempt.reply or {}),
            }
        return {key: value for key, value in verified.items() if key not in MODEL_SESSION_KEYS}

    # -- names that NeMo Gym agents use --------------------------------------------------------------------------

    def _global_config(self) -> Mapping[str, Any]:
        config = getattr(self.server_client, "global_config_dict", None)
        return config if isinstance(config, Mapping) else {}

    def _model_call_capture_enabled(self) -> bool:
        return bool(self._global_config().get("observability_enabled", False))

    def _token_id_capture_enabled(self) -> bool:
        block = self._global_config().get("token_id_capture") or {}
        if not isinstance(block, Mapping) or not block.get("enabled", False):
            return False
        return bool(block.get("all_agents", False)) or self.config.token_id_capture

    def _capture_correlation_enabled(self) -> bool:
        return self._model_call_capture_enabled() or self._token_id_capture_enabled()

    def rollout_id_from_run(self, body: Any) -> str | None:
        """The rollout id under which the calls of a ``run`` body are captured; ``None`` if capture is off."""
        return maybe_rollout_id_from_run_body(body) if self._capture_correlation_enabled() else None

    def url_path_for_run(self, url_path: str, body: Any) -> str:
        """``url_path`` with a prefix that names the run's rollout, if its calls are captured."""
        prefix = rollout_path_prefix(self.rollout_id_from_run(body), token_capture=self._token_id_capture_enabled())
        return prefix + url_path

    def base_url_for_run(self, base_url: str, body: Any) -> str:
        """A model server's root URL with a prefix that names the run's rollout, if its calls are captured."""
        return apply_rollout_prefix(
            base_url, self.rollout_id_from_run(body), token_capture=self._token_id_capture_enabled()
        )

    def url_path_for_request(self, url_path: str, request: Request | None) -> str:
        """``url_path`` with the rollout prefix of ``request``'s own path, if it has one."""
        params = getattr(request, "path_params", None)
        rollout_id = params.get("rollout_id") if isinstance(params, Mapping) else None
        scope = getattr(request, "scope", None)
        capture = bool(scope.get(TOKEN_CAPTURE)) if isinstance(scope, Mapping) else False
        return rollout_path_prefix(rollout_id, token_capture=capture) + url_path

    def resolve_model_base_url(self, model_server_name: str, rollout_id: str | None = None) -> str:
        """A model server's base URL for a harness, ending in ``/v1``."""
        block = server_config_of(self.server_client.global_config_dict, model_server_name)
        has_replicas = bool(block.get("urls"))
        client = self.server_client
        root = client.base_url(model_server_name) if has_replicas else client._build_server_base_url(block)
        return f"{apply_rollout_prefix(root, rollout_id, token_capture=self._token_id_capture_enabled())}/v1"


async def _json_reply(reply: ClientResponse, server: str) -> dict[str, Any]:
    """`expect_json` for a request that forwards a caller's body: a peer's refusal of it becomes `InvalidBodyError`."""
    try:
        return await expect_json(reply, server)
    except ServerError as error:
        if error.details.get("peer_status") in (400, 413, 422):
            raise InvalidBodyError(error.message, **error.details) from error
        raise


def _error_of_peer(error: PeerError) -> InvalidBodyError | ServerError:
    """Translate a `PeerError` as `_json_reply` does."""
    kind = InvalidBodyError if error.status in (400, 413, 422) else ServerError
    problem = error.problem
    details = {"peer": error.server, "peer_status": error.status or None, "peer_code": problem.get("code")}
    return kind(str(error), retryable=bool(problem.get("retryable", not 0 < error.status < 500)), **details)


def _row_identity(row: Mapping[str, Any]) -> RolloutIdentity:
    """The identity of a row by the numbers that a NeMo Gym caller gave it, or a new identity."""
    numbers = {key: row[key] for key in (ATTEMPT_INDEX_KEY, TASK_INDEX_KEY, ROLLOUT_INDEX_KEY) if key in row}
    for key, number in numbers.items():
        if not isinstance(number, int) or not 0 <= number < 1 << 31:
            raise InvalidBodyError(
                f"/run: '{key}' must be a whole number from 0 to {(1 << 31) - 1}, not {number!r:.80}"
            )
    attempt = numbers.pop(ATTEMPT_INDEX_KEY, 0) + 1
    numbered = maybe_rollout_id_from_run_body(numbers)
    task = str(numbers.get(TASK_INDEX_KEY, numbered or "unnamed"))
    return validated(
        RolloutIdentity,
        {
            "rollout_id": numbered or uuid4().hex,
            "task_id": task,
            "group_id": task,
            "attempt": attempt,
            "run_id": "direct",
        },
        "'rollout'",
    )


def __getattr__(name: str) -> Any:
    """Import the rest of ``__all__`` when a plugin uses it, because it needs OpenAI's types."""
    if name in __all__:
        from nemo_gym.http import environment_bodies as wire

        return getattr(wire, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
