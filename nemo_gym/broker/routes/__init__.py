"""The HTTP API: the table of all routes, and the routes of the service itself and of images."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.access import is_trusted
from nemo_gym.broker.routes import execs
from nemo_gym.broker.routes.bodies import RESPONSES, json_body, parse, problem_reply, reply
from nemo_gym.broker.routes.execs import exec_routes
from nemo_gym.broker.routes.sandboxes import archive_routes, door_routes, lease_routes, live, sandbox_routes
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.requests import JsonResponse
from nemo_gym.sandbox.wire import CAPABILITIES, IMAGES, SANDBOXES
from nemo_gym.sandbox.wire.models import (
    BrokerLimits,
    CapabilitiesView,
    CommitImage,
    CreateSandbox,
    DoorModel,
    ExecSubmission,
    ImageView,
    MintLease,
    RenewLease,
    SignalExec,
)
from nemo_gym.sandbox.wire.problems import BrokerError, Problem

# -- Service -------------------------------------------------------------------------------------------------------


def service_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["service"], responses=RESPONSES)

    @router.get(CAPABILITIES, response_model=CapabilitiesView, summary="What this broker and its backend can do")
    async def capabilities(request: Request) -> Response:
        """Takes a caller's credential, or a lease of any scope."""
        await broker.access.any_caller(request)
        config = broker.config
        view = CapabilitiesView.of(
            await broker.backend.capabilities(),
            provider=broker.backend.name,
            door_statistics=broker.backend.counts_doors,
            limits=BrokerLimits(
                max_ttl_s=config.max_ttl_s,
                default_ttl_s=config.default_ttl_s,
                max_body_bytes=config.max_body_bytes,
                max_archive_bytes=config.max_archive_bytes,
                max_output_bytes=config.max_output_bytes,
                max_stdin_bytes=config.max_stdin_bytes,
                max_boxes=config.max_boxes,
            ),
        )
        return reply(view)

    @router.get("/healthz", summary="Whether the broker lives")
    async def healthz() -> Response:
        return JsonResponse({"status": "ok"})

    @router.get("/readyz", summary="Whether the broker can do its work", responses={503: {"description": "Not now"}})
    async def readyz() -> Response:
        missing = await broker.not_ready()
        if missing is None:
            return JsonResponse({"status": "ready"})
        return JsonResponse({"status": "not_ready", **missing}, status_code=503)

    return router


# -- Images --------------------------------------------------------------------------------------------------------


def image_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["images"], responses=RESPONSES)

    @router.post(
        f"{SANDBOXES}/{{sandbox_id}}/images",
        status_code=201,
        response_model=ImageView,
        openapi_extra=json_body(CommitImage),
        summary="Store a box's files as an image",
    )
    async def commit(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease. The image belongs to the box's creator. It atomically replaces the creator's own
        image of the same name; if another caller owns that name, it is refused. Only the agent itself sees its images.
        """
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, CommitImage, broker.config)
        box = live(grant)
        await broker.images.commit(box.made_by, broker.boxes.ready(box), body.image, body.labels)
        return reply(ImageView(image=body.image, labels=dict(body.labels)), 201)

    @router.get(f"{IMAGES}/{{name:path}}", response_model=ImageView, summary="An image's labels")
    async def look(request: Request, name: str) -> Response:
        """Takes a caller's credential. An agent of the stack sees only the images that it made."""
        caller = broker.access.caller(request)
        own_only = not is_trusted(caller.role) and not broker.access.is_outsider(caller)
        labels = await broker.images.labels(caller, name, own_only=own_only)
        if labels is None:
            raise BrokerError("image_not_found", f"the backend has no image '{name[:200]}'")
        return reply(ImageView(image=name, labels=dict(labels)))

    @router.delete(f"{IMAGES}/{{name:path}}", status_code=204, summary="Forget an image")
    async def remove(request: Request, name: str) -> Response:
        """Takes a caller's credential; another caller's image is refused. Also 204 if there is no such image."""
        await broker.images.remove(broker.access.caller(request), name)
        return Response(status_code=204)

    return router


# -- Table ---------------------------------------------------------------------------------------------------------

_BODIES = (CreateSandbox, RenewLease, MintLease, ExecSubmission, SignalExec, DoorModel, CommitImage, Problem)
# In the order in which requests are matched: the most frequent routes first.
_FACTORIES = (
    exec_routes,
    sandbox_routes,
    lease_routes,
    archive_routes,
    door_routes,
    image_routes,
    service_routes,
)
_DESCRIPTION = (
    "Boxes behind leases. `Authorization: Bearer <lease token>` opens one box, within the lease's scope; a caller's"
    " credential creates, lists and reaps. Errors are RFC 9457 problems with `code`, `retryable` and `started`."
)


def install_routes(app: FastAPI, broker: BrokerService) -> None:
    """Add every route. Call it once, when the broker is started."""
    for make in _FACTORIES:
        app.include_router(make(broker))
    execs.install(app, broker)
    described: dict[str, Any] = {}

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not described:
            described.update(describe(app))
        return JsonResponse(described)


async def invalid_parameter(request: Request, error: Exception) -> Response:
    """Return a problem response that names a wrong query, path or header parameter. Register it before the app serves
    requests; later handlers are ignored."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in error.errors()[:10]]
    return problem_reply(request.scope, InvalidBodyError("; ".join(problems), started="no"))


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the API as an OpenAPI document."""
    document = get_openapi(title="Sandbox broker", version="1", description=_DESCRIPTION, routes=app.routes)
    _, bodies = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **bodies["$defs"]}
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"bearer": []}]
    for item in document["paths"].values():
        for operation in item.values():
            # The framework documents its own form of validation errors; this API returns problems instead.
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document
