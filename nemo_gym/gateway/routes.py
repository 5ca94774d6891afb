"""The routes that the gateway adds to those of every model server: opening sessions, engines for the trainer, and the
shortcut that most inference calls take.

The shortcut serves a request with a whole body and its session's token. Every other request (other credentials,
prefixes, cookies, encodings, unknown tokens) goes through the server's layers. Both end in `Inference.answer_session`.
fern/pages/figures.md measures how much time the shortcut saves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Caller, Role
from nemo_gym.contract.errors import ConfigError, ContractError, InvalidBodyError, NemoGymError
from nemo_gym.contract.session import NONE_CHOSEN, ChosenLimits, RolloutIdentity
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.durable_sessions import DurableSessions, RewardSource, checked_depth
from nemo_gym.gateway.engines import EngineConfig, pinned_sampling
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.inference import CallRequest, Inference
from nemo_gym.gateway.live_session import LiveSession
from nemo_gym.gateway.sessions import token_in
from nemo_gym.http.problems import refused, unexpected
from nemo_gym.http.requests import JsonResponse, parse_json_object, validated
from nemo_gym.http.telemetry import ROLLOUT_ID_HEADER

_SESSIONS = "/sessions/"
_LAYER_HEADERS = frozenset(
    {CREDENTIAL_HEADER.lower(), ROLLOUT_ID_HEADER.lower(), "cookie", "content-encoding", "transfer-encoding"}
)
"""A request with one of these headers goes through the server's layers, which read them."""
LENGTH_DIGITS = 15


class InferenceShortcut:
    """Answers inference calls of sessions without the server's layers (`nemo_gym.http.server.Shortcut`)."""

    def __init__(self, sessions: DurableSessions[Any, Any], inference: Inference[Any, Any]) -> None:
        self._sessions = sessions
        self._inference = inference
        self._limits = inference.limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path: str = scope["path"]
        path_session_id: str | None = None
        if (dialect := PATHS.get(path)) is None and path.startswith(_SESSIONS):
            path_session_id, slash, route = path[len(_SESSIONS) :].partition("/")
            dialect = PATHS.get(slash + route)
        if dialect is None:
            return None
        # If a header is repeated, the first value wins.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        length = headers.get("content-length", "")
        if not (length.isdecimal() and len(length) <= LENGTH_DIGITS and int(length) <= self._limits.max_body_bytes):
            return None
        if not _LAYER_HEADERS.isdisjoint(headers):
            return None
        live = self._session(headers, path_session_id)
        return None if live is None else self._serve(dialect, live, headers, int(length), scope, receive, send)

    def _session(self, headers: Mapping[str, str], path_session_id: str | None) -> LiveSession[Any] | None:
        token = token_in(headers)
        if token is None:
            return None
        try:
            live = self._sessions.authorized(token)
        except NemoGymError:
            return None
        return live if path_session_id is None or path_session_id == live.session_id else None

    async def _serve(
        self,
        dialect: Dialect,
        live: LiveSession[Any],
        headers: Mapping[str, str],
        length: int,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        with contextlib.ExitStack() as claim:
            response: Response
            try:
                claim.enter_context(live.share.claimed(length, self._limits.max_session_in_flight_bytes))
                parts: list[bytes] = []
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return  # the caller left before its whole body arrived: nobody waits for a response
                    parts.append(message["body"])
                    more = message["more_body"]
                request = CallRequest(headers, scope["client"], receive)
                response = await self._inference.answer_session(dialect, live, scope["path"], parts, request)
            except NemoGymError as error:
                response = refused(Request(scope), error)
            except Exception as error:  # noqa: BLE001 - the boundary of this server, as in `UnknownErrorMiddleware`
                response = unexpected(scope, error)
            await response(scope, receive, send)


# Tokens in the path, for runners that can set a URL and nothing else.
#
# The token is removed before any other code reads the path, so that no log and no error can show it.

_TOKEN_SEGMENT = "/token/"


class PathTokenMiddleware:
    """Rewrites ``/sessions/<id>/token/<token>/v1/…`` to ``/sessions/<id>/v1/…`` with the token as bearer; likewise
    ``…/complete``, with a completion token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/sessions/") and _TOKEN_SEGMENT in scope["path"]:
            before, _, after = scope["path"].partition(_TOKEN_SEGMENT)
            token, _, route = after.partition("/")
            # Clients insist on sending some key in a header; it is ignored.
            headers = [(k, v) for k, v in scope["headers"] if k not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", b"Bearer " + token.encode("latin-1", "replace")))
            path = f"{before}/{route}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.app(scope, receive, send)


# What opening a session takes.


MAX_SAMPLING_BYTES = 64 * 1024
"""Limit of a session's ``sampling`` as JSON: the journal stores it and every call reads it."""
MAX_TTL_S = 30 * 24 * 3600.0


class OpenSession(BaseModel):
    """The body of ``POST /sessions``."""

    model_config = ConfigDict(extra="forbid")

    rollout: RolloutIdentity
    sampling: dict[str, Any] | None = None
    """Parameters of every call of the session, whatever its harness asks for; ``max_output_tokens`` is an upper bound
    instead."""
    limits: ChosenLimits = NONE_CHOSEN
    """Time limits of its calls."""
    ttl_s: float | None = Field(None, gt=0, le=MAX_TTL_S)
    """Seconds until the session is aborted. The gateway's own setting is both the default and the maximum."""
    reward_source: RewardSource = "environment"
    engine: str | None = None
    """The engine that all of its calls go to while that engine is in service; by default the gateway chooses."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> OpenSession:
        """Validate the body of a request. Raises `InvalidBodyError`, which names the wrong field."""
        parsed = validated(cls, body, "/sessions")
        checked_depth(parsed.sampling, "sampling")
        if (size := len(orjson.dumps(parsed.sampling))) > MAX_SAMPLING_BYTES:
            raise InvalidBodyError(
                f"/sessions: sampling has {size} bytes of JSON; the limit is {MAX_SAMPLING_BYTES}; it may hold only"
                " sampling parameters",
                param="sampling",
            )
        pinned_sampling({}, parsed.sampling or {}, room_tokens=1)
        return parsed


# Engines over HTTP, for the trainer that starts them and updates their weights, and for operators.
#
# | route | body | answer |
# |---|---|---|
# | ``GET /engines`` | | ``{kind, engines: [...], waiting, retries_saved}`` |
# | ``POST /engines`` | an engine as in ``engines`` of the configuration | 201 and its status |
# | ``DELETE /engines/{name}?drain_timeout_s=`` | | ``{name, removed}`` |
# | ``POST /engines/{name}/drain`` | ``{timeout_s?: 0}`` | its status, ``in_flight`` what still runs |
# | ``POST /engines/{name}/undrain`` | | its status |
# | ``POST /engines/{name}/weight`` | ``{weight}`` | its status |
# | ``POST /weights`` | ``{version, engines?: [name, ...]}`` | ``{version, engines}`` |
#
# 404 for an unknown name, 409 for a name that is taken, 422 for an invalid body; the error names the wrong field. An
# engine that was added here is lost when the gateway restarts: the trainer adds it again.

T = TypeVar("T")
RequireRole = Callable[..., Caller | None]
"""`nemo_gym.http.requests.require_role`."""
MAX_DRAIN_S = 3600.0
_ENGINE: TypeAdapter[EngineConfig] = TypeAdapter(EngineConfig)


class UnknownEngineError(ContractError):
    """There is no engine of that name."""

    code = "unknown_engine"
    status = 404


class EngineNameTakenError(ContractError):
    """There is an engine of that name already."""

    code = "engine_name_taken"
    status = 409


class _Drain(BaseModel):
    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(0.0, ge=0, le=MAX_DRAIN_S)


class _Weight(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: float = Field(gt=0, allow_inf_nan=False)


class _Weights(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Annotated[str, Field(min_length=1, max_length=256)]
    engines: list[str] | None = None


def require_engine(pool: EnginePool, name: str) -> None:
    """Raise `UnknownEngineError` unless there is an engine of that name."""
    if name not in pool:
        raise UnknownEngineError(f"there is no engine '{name}'; there are: {', '.join(pool.names) or 'none'}")


def engine_routes(pool: EnginePool, require_role: RequireRole) -> list[Route]:
    """The routes of one gateway. Each asks ``require_role`` for a credential of the pipeline or an operator."""

    def checked(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            require_role(request, Role.PIPELINE, Role.OPERATOR)
            return await handler(request)

        return endpoint

    def known(request: Request) -> str:
        name: str = request.path_params["name"]
        require_engine(pool, name)
        return name

    async def show(request: Request) -> Response:
        return JsonResponse(pool.status())

    async def add(request: Request) -> Response:
        config = _valid(_ENGINE, await parse_json_object(request))
        if config.engine_name in pool:
            raise EngineNameTakenError(
                f"there is an engine '{config.engine_name}' already; remove it first, or give this one another 'name'"
            )
        try:
            return JsonResponse(pool.add(config), status_code=201)
        except ConfigError as error:
            raise InvalidBodyError(error.message, param="type") from None

    async def remove(request: Request) -> Response:
        name = known(request)
        drain_timeout = request.query_params.get("drain_timeout_s")
        timeout_s = (
            None if drain_timeout is None else _valid(TypeAdapter(_Drain), {"timeout_s": drain_timeout}).timeout_s
        )
        # The removal goes on if the caller disconnects.
        await asyncio.shield(pool.remove(name, timeout_s))
        return JsonResponse({"name": name, "removed": True})

    async def drain(request: Request) -> Response:
        name = known(request)
        body = _valid(TypeAdapter(_Drain), await parse_json_object(request))
        await pool.router.drain(name, timeout_s=body.timeout_s)
        return JsonResponse(pool.engine_status(known(request)))  # it may have been removed meanwhile

    async def undrain(request: Request) -> Response:
        name = known(request)
        pool.router.undrain(name)
        return JsonResponse(pool.engine_status(name))

    async def weight(request: Request) -> Response:
        name = known(request)
        pool.router.set_weight(name, _valid(TypeAdapter(_Weight), await parse_json_object(request)).weight)
        return JsonResponse(pool.engine_status(name))

    async def weights(request: Request) -> Response:
        body = _valid(TypeAdapter(_Weights), await parse_json_object(request))
        for name in body.engines or ():
            if name not in pool:
                raise UnknownEngineError(f"engines: there is no engine '{name}'; there are: {', '.join(pool.names)}")
        pool.set_weights_version(body.version, body.engines)
        names = pool.names if body.engines is None else body.engines
        return JsonResponse({"version": body.version, "engines": names})

    return [
        Route("/engines", checked(show), methods=["GET"]),
        Route("/engines", checked(add), methods=["POST"]),
        Route("/engines/{name}", checked(remove), methods=["DELETE"]),
        Route("/engines/{name}/drain", checked(drain), methods=["POST"]),
        Route("/engines/{name}/undrain", checked(undrain), methods=["POST"]),
        Route("/engines/{name}/weight", checked(weight), methods=["POST"]),
        Route("/weights", checked(weights), methods=["POST"]),
    ]


def _valid(adapter: TypeAdapter[T], body: dict[str, Any]) -> T:
    """Validate the body of a request. The error names the field and never its value, which may be an API key."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # In the error of a union, the tag (the caller's own 'type') precedes the field.
        path = [str(part) for part in first["loc"] if part != body.get("type")] or ["type"]
        field = ".".join(path)
        raise InvalidBodyError(f"{field}: {first['msg']}", param=field) from None
