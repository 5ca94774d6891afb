"""The service over HTTP. Each route needs a token of the role in the last column.

POST /v1/jobs             submit a batch                          submit
GET  /v1/jobs/{id}        one job, wait_s= waits for its end      read
GET  /v1/jobs             pages: group= run= state= cursor=       read
GET  /v1/results          stream of results (SSE)                 read
POST /v1/cancel           jobs, a group or a run                  operate
POST /v1/drain            claim no more jobs                      operate
GET  /v1/runs             progress of runs, running attempts      read
GET  /v1/status           stages, servers, counts                 read
…    /v1/servers          register, drain, remove                 operate
GET  /metrics             Prometheus' text                        read
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nemo_gym._util.exact_json import loads_exactly
from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.credentials import RoleError
from nemo_gym.contract.errors import ConfigError, CredentialError, InvalidBodyError, reject_unknown_keys
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.http.client import ServerClient, is_server_url
from nemo_gym.http.middleware import Application, BodyLimitMiddleware, BodyLimits, UnknownErrorMiddleware
from nemo_gym.http.problems import install_problem_handlers
from nemo_gym.http.requests import JsonResponse, parse_json_object, validated
from nemo_gym.http.telemetry import CONTENT_TYPE, Reading, render
from nemo_gym.http.webserver import served
from nemo_gym.rollouts.interfaces import JobSelector, JobState
from nemo_gym.service.client import ADDRESS_FILE
from nemo_gym.service.service import RolloutService, open_service, write_address
from nemo_gym.service.submission import jobs_of

MAX_WAIT_S = 3600.0
MAX_PAGE = 1000
STOP_GRACE_S = 10
"""How long a stopping service waits for open requests, as those of clients that do not read what is sent to them. Only
then does the pipeline stop and release its sandboxes, for which schedulers leave it half a minute before they kill."""
SSE_IDLE_S = 15.0
"""Seconds between keep-alive messages of a stream without results."""

T = TypeVar("T", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]
Id = Annotated[str, Field(pattern=IDENTIFIER.pattern, max_length=256)]
MIN_TOKEN_CHARS = 16


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CancelBody(_Body):
    job_id: Id | None = None
    job_ids: list[Id] | None = Field(None, min_length=1, max_length=100_000)
    group: Id | None = None
    run: Id | None = None
    everything: bool = False
    reason: str = Field("cancelled by its caller", min_length=1, max_length=500, pattern=r"^[^\x00]+$")

    @model_validator(mode="after")
    def _selects(self) -> CancelBody:
        given = [name for name in ("job_id", "job_ids", "group", "run") if getattr(self, name) is not None]
        if bool(given) == self.everything:
            raise ValueError("give one or more of job_id, job_ids, group and run, or only everything=true")
        return self


class DrainBody(_Body):
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    resume: bool = False
    """Claim jobs again."""


class ServerBody(_Body):
    instance: str
    url: str = Field(max_length=2000)
    capacity: int | None = Field(None, ge=1)
    credential: str | None = Field(None, max_length=4000, repr=False)
    """The credential with which the pipeline calls the server, if it is not part of this service's stack."""

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str) -> str:
        if not is_server_url(url):
            raise ValueError("is not a valid server URL; give for example http://node-1:8000")
        return url


async def host(client: ServerClient, config: ServiceConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    """Serve until cancelled, or until an error stops the pipeline; then raise that error."""
    tokens = ServiceTokens.load(config.tokens)
    async with AsyncExitStack() as undo:
        service = await undo.enter_async_context(open_service(client, config, run_dir))

        async def end_streams() -> None:
            service.end_streams()

        address = BaseServerConfig(host=config.host, port=config.port)
        app = application(service, tokens)
        url = await undo.enter_async_context(
            served(app, address, on_stop=end_streams, grace_s=STOP_GRACE_S, key="serve.port")
        )
        path = run_dir / ADDRESS_FILE
        role_tokens = {role.value: tokens.one_of(role) for role in ServiceRole}
        await asyncio.to_thread(write_address, path, url, role_tokens, service.store_id)
        undo.callback(path.unlink, missing_ok=True)
        say(f"rollouts are served at {url}; tokens in {path}")
        await service.dispatcher.stopped()


def application(service: RolloutService, tokens: ServiceTokens) -> Application:
    """Return an application with the service's routes, protected by its tokens."""
    routes = _Routes(service, tokens)
    app = Application(title="rollouts", openapi_url=None, docs_url=None, redoc_url=None)
    install_problem_handlers(app)
    config = service.config
    limits = BodyLimits(
        config.max_body_mib << 20, "serve.max_body_mib", config.max_body_values, "serve.max_body_values"
    )
    app.add_middleware(BodyLimitMiddleware, limits=limits, agent_limits=limits)
    app.add_middleware(UnknownErrorMiddleware)
    for path, method, role, endpoint in routes.table():
        app.router.routes.append(Route(path, routes.guarded(endpoint, role), methods=[method]))
    return app


class _Routes:
    def __init__(self, service: RolloutService, tokens: ServiceTokens) -> None:
        self._service = service
        self._tokens = tokens

    def table(self) -> list[tuple[str, str, ServiceRole | None, Endpoint]]:
        read, submit, operate = ServiceRole.READ, ServiceRole.SUBMIT, ServiceRole.OPERATE
        return [
            ("/health", "GET", None, self.health),
            ("/ready", "GET", None, self.health),
            ("/metrics", "GET", read, self.metrics),
            ("/v1/jobs", "POST", submit, self.submit),
            ("/v1/jobs", "GET", read, self.jobs),
            ("/v1/jobs/{job_id}", "GET", read, self.job),
            ("/v1/results", "GET", read, self.results),
            ("/v1/runs", "GET", read, self.runs),
            ("/v1/status", "GET", read, self.status),
            ("/v1/cancel", "POST", operate, self.cancel),
            ("/v1/drain", "POST", operate, self.drain),
            ("/v1/servers", "GET", read, self.servers),
            ("/v1/servers", "POST", operate, self.register),
            ("/v1/servers/{server_id}/drain", "POST", operate, self.drain_server),
            ("/v1/servers/{server_id}", "DELETE", operate, self.remove_server),
        ]

    def guarded(self, endpoint: Endpoint, role: ServiceRole | None) -> Endpoint:
        async def checked(request: Request) -> Response:
            if role is not None:
                route = f"{request.method} {request.scope['path']}"
                self._tokens.require(request.headers.get("authorization"), role, route)
            return await endpoint(request)

        return checked

    async def health(self, request: Request) -> Response:
        failure = self._service.dispatcher.failure
        return JsonResponse({"status": "ready" if failure is None else "stopped"}, 200 if failure is None else 503)

    # Jobs

    async def submit(self, request: Request) -> Response:
        body = await parse_json_object(request, loads_exactly, checks_depth=False)
        jobs = jobs_of(body, self._service.config.max_jobs_per_request)
        outcomes = await self._service.submit(jobs)
        errors = [each["error"] for each in outcomes if "error" in each]
        answer = {
            "accepted": sum(each.get("new") is True for each in outcomes),
            "known": sum(each.get("new") is False for each in outcomes),
            "refused": len(errors),
            "jobs": outcomes,
        }
        if len(errors) < len(outcomes):
            return JsonResponse(answer)
        # No job was accepted: respond with the first error, and list all of them.
        return JsonResponse({**errors[0], **answer}, status_code=errors[0]["status"])

    async def job(self, request: Request) -> Response:
        wait_s = _number(request, "wait_s", 0.0, at_most=MAX_WAIT_S)
        return JsonResponse(await self._service.job(request.path_params["job_id"], wait_s))

    async def jobs(self, request: Request) -> Response:
        limit = int(_number(request, "limit", 100, at_least=1, at_most=MAX_PAGE))
        selector = _selector(request, "group", "run", "state", "cursor", "limit")
        return JsonResponse(await self._service.jobs(selector, request.query_params.get("cursor"), limit))

    async def results(self, request: Request) -> Response:
        selector = _selector(request, "group", "run", "state", "after", "follow")
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        self._service.place_of(after)
        follow = _flag(request, "follow", default=True)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = self._events(selector, after, follow)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _events(self, selector: JobSelector, after: str | None, follow: bool) -> AsyncIterator[bytes]:
        yield b": results\n\n"
        async for record in self._service.results(selector, after, follow=follow, idle_s=SSE_IDLE_S):
            if record is None:
                yield b": idle\n\n"
                continue
            cursor = self._service.cursor(record.result_place or 0)
            data = orjson.dumps(self._service.view(record))
            yield b"id: %b\nevent: result\ndata: %b\n\n" % (cursor.encode(), data)

    async def cancel(self, request: Request) -> Response:
        body = await _body(CancelBody, request)
        ids = [*(body.job_ids or ()), *([body.job_id] if body.job_id is not None else ())]
        selector = JobSelector(job_ids=frozenset(ids) if ids else None, group_id=body.group, run_id=body.run)
        return JsonResponse(asdict(await self._service.cancel(selector, body.reason)))

    async def drain(self, request: Request) -> Response:
        body = await _body(DrainBody, request)
        if body.resume:
            self._service.dispatcher.resume()
            return JsonResponse({"state": "running", "under_way": len(self._service.dispatcher.held)})
        is_quiet = await self._service.drain(body.wait_s)
        state = "drained" if is_quiet else "draining"
        return JsonResponse({"state": state, "under_way": len(self._service.dispatcher.held)})

    async def runs(self, request: Request) -> Response:
        return JsonResponse(await self._service.runs())

    async def status(self, request: Request) -> Response:
        return JsonResponse(await self._service.status())

    # Servers

    async def servers(self, request: Request) -> Response:
        return JsonResponse({"servers": (await self._service.status())["servers"]})

    async def register(self, request: Request) -> Response:
        body = await _body(ServerBody, request)
        server = await self._service.register(body.instance, body.url, body.capacity, body.credential)
        return JsonResponse(server.as_dict())

    async def drain_server(self, request: Request) -> Response:
        server = self._service.pool.of_id(request.path_params["server_id"])
        self._service.pool.drain(server, "an operator drains it")
        return JsonResponse(server.as_dict())

    async def remove_server(self, request: Request) -> Response:
        server = self._service.pool.of_id(request.path_params["server_id"])
        given_back = await self._service.remove(server, "an operator removed it")
        return JsonResponse({"server_id": server.server_id, "given_back": given_back})

    # Metrics

    async def metrics(self, request: Request) -> Response:
        status = await self._service.status()
        jobs = [({"state": state}, float(count)) for state, count in status["jobs"].items()]
        readings = [Reading("nemo_gym_rollouts_jobs", "Jobs in the store, by state", jobs)]
        return Response(render(readings), media_type=CONTENT_TYPE)


async def _body(model: type[T], request: Request) -> T:
    return validated(model, await parse_json_object(request), f"the body of {request.scope['path']}")


def _number(request: Request, name: str, default: float, *, at_least: float = 0.0, at_most: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not at_least <= value <= at_most:
        raise InvalidBodyError(f"{name}: must be a number from {at_least:g} to {at_most:g}, got '{given[:40]}'")
    return value


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    if given not in (None, "true", "false"):
        raise InvalidBodyError(f"{name}: must be true or false, got '{given[:40]}'")
    return default if given is None else given == "true"


def _selector(request: Request, *known: str) -> JobSelector:
    query = request.query_params
    if unknown := [name for name in query if name not in known]:
        raise InvalidBodyError(f"unknown parameter '{unknown[0][:40]}'; there are: {', '.join(known)}")
    for name in ("group", "run"):
        if (value := query.get(name)) is not None and not IDENTIFIER.match(value):
            raise InvalidBodyError(f"{name}: '{value[:40]}' is not a valid {name}")
    states = query.get("state")
    try:
        chosen = None if states is None else frozenset(JobState(state) for state in states.split(","))
    except ValueError:
        raise ConfigError(
            f"state: '{states}' must be one or more of {', '.join(JobState)}, with commas between them", key="state"
        ) from None
    return JobSelector(group_id=query.get("group"), run_id=query.get("run"), states=chosen)


class ServiceRole(StrEnum):
    READ = "read"
    SUBMIT = "submit"
    """May submit and read."""
    OPERATE = "operate"
    """May do everything, also cancel, drain and change servers."""

    @property
    def rank(self) -> int:
        return list(ServiceRole).index(self)


class ServiceTokens:
    """The tokens of a service, by role."""

    def __init__(self, tokens: Mapping[ServiceRole, list[str]]) -> None:
        self._tokens = tokens

    @classmethod
    def load(cls, path: Path | None, environment: Mapping[str, str] = os.environ) -> ServiceTokens:
        """Load the tokens from a file or else from the environment, or else create new ones. Raises `ConfigError`."""
        if path is not None:
            return cls(_of_file(path))
        tokens = {role: environment.get(variable_of(role)) for role in ServiceRole}
        if any(tokens.values()):
            return cls({role: _checked([token], variable_of(role)) for role, token in tokens.items() if token})
        return cls({role: [secrets.token_urlsafe(24)] for role in ServiceRole})

    def one_of(self, role: ServiceRole) -> str | None:
        """Return the first token of a role."""
        return next(iter(self._tokens.get(role, ())), None)

    def require(self, authorization: str | None, role: ServiceRole, route: str) -> ServiceRole:
        """Return the caller's role. Raises `CredentialError` if the request has no token of this service, and
        `RoleError` if the token's role does not cover ``role``."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise CredentialError(f"{route} needs the header 'Authorization: Bearer <token>' with a token of {role}")
        roles = [
            each
            for each, tokens in self._tokens.items()
            for valid_token in tokens
            if hmac.compare_digest(valid_token.encode(), token.strip().encode())
        ]
        if not roles:
            raise CredentialError("the bearer token is not valid for this service")
        granted = max(roles, key=lambda each: each.rank)  # a token may be listed under several roles
        if granted.rank < role.rank:
            raise RoleError(f"{route} needs a token of role '{role}'; this one is of role '{granted}'", route=route)
        return granted


def variable_of(role: ServiceRole) -> str:
    return f"NEMO_GYM_SERVICE_{role.name}_TOKEN"


def _of_file(path: Path) -> dict[ServiceRole, list[str]]:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"tokens: '{path}' cannot be read ({type(error).__name__})", key="tokens") from None
    if not isinstance(content, dict):
        raise ConfigError(f"tokens: '{path}' must map roles to tokens, as in 'submit: [<token>]'", key="tokens")
    reject_unknown_keys(map(str, content), list(ServiceRole), where=f"tokens: '{path}'")
    return {
        ServiceRole(role): _checked([tokens] if isinstance(tokens, str) else tokens, f"'{path}', {role}")
        for role, tokens in content.items()
    }


def _checked(tokens: Any, where: str) -> list[str]:
    if not isinstance(tokens, list) or not all(
        isinstance(token, str) and len(token) >= MIN_TOKEN_CHARS and token.isascii() and token == token.strip()
        for token in tokens
    ):
        raise ConfigError(
            f"tokens: {where} must hold tokens of at least {MIN_TOKEN_CHARS} ASCII characters", key="tokens"
        )
    return tokens
