"""All routes of the API, and its description at ``/openapi.json``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.routes import direct_submissions
from nemo_gym.broker.routes.archives import archive_routes
from nemo_gym.broker.routes.doors import door_routes
from nemo_gym.broker.routes.execs import exec_routes
from nemo_gym.broker.routes.images import image_routes
from nemo_gym.broker.routes.leases import lease_routes
from nemo_gym.broker.routes.request_ids import problem_reply
from nemo_gym.broker.routes.sandboxes import sandbox_routes
from nemo_gym.broker.routes.service import service_routes
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.http.problems import JsonResponse
from nemo_gym.sandbox.wire.boxes import CommitImage, CreateSandbox, MintLease, RenewLease
from nemo_gym.sandbox.wire.doors import DoorModel
from nemo_gym.sandbox.wire.execs import ExecSubmission, SignalExec
from nemo_gym.sandbox.wire.problems import Problem

_BODIES = (CreateSandbox, RenewLease, MintLease, ExecSubmission, SignalExec, DoorModel, CommitImage, Problem)
# In the order in which they are tried: the most frequent first.
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
    """Add every route; once, when the broker is started."""
    for make in _FACTORIES:
        app.include_router(make(broker))
    direct_submissions.install(app, broker)
    described: dict[str, Any] = {}

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not described:
            described.update(describe(app))
        return JsonResponse(described)


async def invalid_parameter(request: Request, error: Exception) -> Response:
    """A wrong query, path or header parameter, as a problem that names it. Added before the app serves anything: what
    is added later is not asked."""
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in error.errors()[:10]]
    return problem_reply(request.scope, InvalidBodyError("; ".join(wrong), started="no"))


def describe(app: FastAPI) -> dict[str, Any]:
    """The API as an OpenAPI document."""
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
            # The framework describes its own form of validation errors; here they are problems, as all others.
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document
