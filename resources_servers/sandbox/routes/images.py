"""``…/images``: a box's files as an image of the backend."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.errors import SandboxError
from nemo_gym.sandbox.capabilities import SupportsSnapshot, require
from nemo_gym.sandbox.wire.boxes import CommitImage, ImageView
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import IMAGES, SANDBOXES
from nemo_gym.session import LeaseScope
from resources_servers.sandbox.routes.bodies import RESPONSES, json_body, parse
from resources_servers.sandbox.routes.leases import live
from resources_servers.sandbox.routes.models import reply
from resources_servers.sandbox.service import BrokerService


def image_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["images"], responses=RESPONSES)

    def snapshots() -> SupportsSnapshot:
        provider = broker.backend.provider
        require(provider, SupportsSnapshot, why="for images")
        assert isinstance(provider, SupportsSnapshot)
        return provider

    @router.post(
        f"{SANDBOXES}/{{sandbox_id}}/images",
        status_code=201,
        response_model=ImageView,
        openapi_extra=json_body(CommitImage),
        summary="Store a box's files as an image",
    )
    async def commit(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease. Replaces an image of the same name, as a whole or not at all."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, CommitImage, broker.config.max_body_bytes)
        handle = broker.boxes.ready(live(grant))
        try:
            await snapshots().commit(handle, body.image, body.labels)
        except SandboxError as error:
            raise await broker.backend.judged(error, handle) from error
        return reply(ImageView(image=body.image, labels=dict(body.labels)), 201)

    @router.get(f"{IMAGES}/{{name:path}}", response_model=ImageView, summary="An image's labels")
    async def look(request: Request, name: str) -> Response:
        """Takes a caller's credential."""
        broker.access.caller(request)
        labels = await snapshots().image_labels(name)
        if labels is None:
            raise BrokerError("image_not_found", f"the backend has no image '{name[:200]}'")
        return reply(ImageView(image=name, labels=dict(labels)))

    @router.delete(f"{IMAGES}/{{name:path}}", status_code=204, summary="Forget an image")
    async def remove(request: Request, name: str) -> Response:
        """Takes a caller's credential. Also 204 when there is none."""
        broker.access.caller(request)
        await snapshots().remove_image(name)
        return Response(status_code=204)

    return router
