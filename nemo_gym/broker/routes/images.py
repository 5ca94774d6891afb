"""``…/images``: a box's files as an image of the backend."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.permissions import is_trusted
from nemo_gym.broker.routes.bodies import RESPONSES, json_body, parse
from nemo_gym.broker.routes.leases import live
from nemo_gym.broker.routes.models import reply
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.wire.boxes import CommitImage, ImageView
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import IMAGES, SANDBOXES


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
        """Takes the owner's lease. The image is the box's creator's. Replaces an image of the same name that is its
        own too, as a whole or not at all; another's is refused. What an agent makes, it alone sees."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, CommitImage, broker.config)
        box = live(grant)
        await broker.images.commit(box.made_by, broker.boxes.ready(box), body.image, body.labels)
        return reply(ImageView(image=body.image, labels=dict(body.labels)), 201)

    @router.get(f"{IMAGES}/{{name:path}}", response_model=ImageView, summary="An image's labels")
    async def look(request: Request, name: str) -> Response:
        """Takes a caller's credential. An agent of the stack sees those it made."""
        caller = broker.access.caller(request)
        own_only = not is_trusted(caller.role) and not broker.access.is_outsider(caller)
        labels = await broker.images.labels(caller, name, own_only=own_only)
        if labels is None:
            raise BrokerError("image_not_found", f"the backend has no image '{name[:200]}'")
        return reply(ImageView(image=name, labels=dict(labels)))

    @router.delete(f"{IMAGES}/{{name:path}}", status_code=204, summary="Forget an image")
    async def remove(request: Request, name: str) -> Response:
        """Takes a caller's credential; another's image is refused. Also 204 when there is none."""
        await broker.images.remove(broker.access.caller(request), name)
        return Response(status_code=204)

    return router
