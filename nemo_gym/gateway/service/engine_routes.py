"""Engines over HTTP, for the trainer that starts them and updates their weights, and for operators.

| route | body | answer |
|---|---|---|
| ``GET /engines`` | | ``{kind, engines: [...], waiting, retries_saved}`` |
| ``POST /engines`` | an engine as in ``engines`` of the configuration | 201 and its status |
| ``DELETE /engines/{name}?drain_timeout_s=`` | | ``{name, removed}`` |
| ``POST /engines/{name}/drain`` | ``{timeout_s?: 0}`` | its status, ``in_flight`` what still runs |
| ``POST /engines/{name}/undrain`` | | its status |
| ``POST /engines/{name}/weight`` | ``{weight}`` | its status |
| ``POST /weights`` | ``{version, engines?: [name, ...]}`` | ``{version, engines}`` |

404 for a name that is not known, 409 for one that is taken, 422 for a body that names its wrong field. What is added
here is gone when the gateway restarts: the trainer adds it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.errors import ConfigError, ContractError, InvalidBodyError
from nemo_gym.gateway.engines import EngineConfig
from nemo_gym.gateway.service.pool import EnginePool
from nemo_gym.http.problems import JsonResponse, parse_json_object

T = TypeVar("T")
RequireRole = Callable[..., Caller | None]
"""`nemo_gym.http.middleware.require_role`."""
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


def engine_routes(pool: EnginePool, require_role: RequireRole) -> list[Route]:
    """The routes of one gateway. Each asks ``require_role`` for a credential of the pipeline or an operator."""

    def checked(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            require_role(request, Role.PIPELINE, Role.OPERATOR)
            return await handler(request)

        return endpoint

    def known(request: Request) -> str:
        name: str = request.path_params["name"]
        if name not in pool:
            raise UnknownEngineError(f"there is no engine '{name}'; there are: {', '.join(pool.names) or 'none'}")
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
        given = request.query_params.get("drain_timeout_s")
        timeout_s = None if given is None else _valid(TypeAdapter(_Drain), {"timeout_s": given}).timeout_s
        # A caller that leaves has still said what it wants.
        await asyncio.shield(pool.remove(name, timeout_s))
        return JsonResponse({"name": name, "removed": True})

    async def drain(request: Request) -> Response:
        name = known(request)
        wanted = _valid(TypeAdapter(_Drain), await parse_json_object(request))
        await pool.drain(name, timeout_s=wanted.timeout_s)
        return JsonResponse(pool.engine_status(known(request)))  # it may have been removed meanwhile

    async def undrain(request: Request) -> Response:
        name = known(request)
        pool.undrain(name)
        return JsonResponse(pool.engine_status(name))

    async def weight(request: Request) -> Response:
        name = known(request)
        pool.set_weight(name, _valid(TypeAdapter(_Weight), await parse_json_object(request)).weight)
        return JsonResponse(pool.engine_status(name))

    async def weights(request: Request) -> Response:
        wanted = _valid(TypeAdapter(_Weights), await parse_json_object(request))
        for name in wanted.engines or ():
            if name not in pool:
                raise UnknownEngineError(f"engines: there is no engine '{name}'; there are: {', '.join(pool.names)}")
        pool.set_weights_version(wanted.version, wanted.engines)
        names = pool.names if wanted.engines is None else wanted.engines
        return JsonResponse({"version": wanted.version, "engines": names})

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
    """The body as what the route takes. The error names the field and never its value, which may be a key."""
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        # A union's tag stands before the field; it is the caller's own 'type'.
        path = [str(part) for part in first["loc"] if part != body.get("type")] or ["type"]
        field = ".".join(path)
        raise InvalidBodyError(f"{field}: {first['msg']}", param=field) from None
