"""``/v1/capabilities``, health, readiness and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nemo_gym.broker.permissions import is_trusted
from nemo_gym.broker.routes.bodies import RESPONSES
from nemo_gym.broker.routes.models import reply
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.problems import JsonResponse
from nemo_gym.sandbox.wire.capabilities import BrokerLimits, CapabilitiesView
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import CAPABILITIES


def service_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["service"], responses=RESPONSES)

    @router.get(CAPABILITIES, response_model=CapabilitiesView, summary="What this broker and its backend can do")
    async def capabilities(request: Request) -> Response:
        """Takes a caller's credential, or a lease of any scope."""
        await broker.access.anyone(request)
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
        missing = await not_ready(broker)
        if missing is None:
            return JsonResponse({"status": "ready"})
        return JsonResponse({"status": "not_ready", **missing}, status_code=503)

    @router.get("/metrics", summary="Metrics in Prometheus' format", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Takes a caller's credential, of any role but `agent`: they tell of all who have boxes here."""
        caller = broker.access.caller(request)
        if not is_trusted(caller.role) and not broker.access.is_outsider(caller):
            raise BrokerError("not_permitted", f"/metrics is not for '{caller.name}', which is '{caller.role}'")
        return Response(broker.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


async def not_ready(broker: BrokerService) -> dict[str, Any] | None:
    """``None`` when the broker can do its work, else why not."""
    if broker.draining.is_set():
        return {"detail": "the broker is stopping"}
    if broker.upkeep.unreconciled is not None:
        return {"detail": f"the backend was not reconciled: {broker.upkeep.unreconciled}"}
    try:
        await broker.boxes.store.ping()
    except NemoGymError as error:
        return {"detail": error.message}
    return None
