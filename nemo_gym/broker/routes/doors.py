"""``…/doors``: ways out of a box, opened and closed while it runs, and what went through them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.boxes import door_digest, too_many_of_box
from nemo_gym.broker.permissions import is_trusted
from nemo_gym.broker.routes.bodies import RESPONSES, json_body, parse
from nemo_gym.broker.routes.leases import live
from nemo_gym.broker.routes.models import reply
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import InvalidBodyError, SandboxError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.wire.doors import DoorModel, DoorStatisticsModel, DoorsView
from nemo_gym.sandbox.wire.fields import MAX_DOORS
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import SANDBOXES

DOORS = f"{SANDBOXES}/{{sandbox_id}}/doors"

DoorName = Annotated[str, Path(min_length=1, max_length=256)]


def door_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["doors"], responses=RESPONSES)

    @router.put(
        f"{DOORS}/{{name}}",
        status_code=204,
        openapi_extra=json_body(DoorModel),
        summary="Open a door on a running box",
    )
    async def open_door(request: Request, sandbox_id: str, name: DoorName) -> Response:
        """Takes a lease of scope `operate`. Again with the same body does nothing. Its headers are answered by no
        route, and stored sealed. Borrowers, and owners who are agents, open doors to the routes of models and MCP
        servers alone."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        body = await parse(request, DoorModel, broker.config)
        if body.name != name:
            raise InvalidBodyError(f"name: '{body.name}' is not the door of this path, '{name}'", started="no")
        box = live(grant)
        if grant.scope is not LeaseScope.OWNER or not is_trusted(box.creator_role):
            broker.permissions.check_doors([body])
        handle = broker.boxes.ready(box)
        sealed = broker.boxes.sealer.seal(body.model_dump_json().encode(), sandbox_id)
        async with box.doors_lock:
            known, asked = box.doors.get(name), door_digest(body)
            if known == asked:
                return Response(status_code=204)
            if known is not None:
                raise BrokerError("door_exists", f"box '{sandbox_id}' has another door '{name}'; close it first")
            if len(box.doors) >= MAX_DOORS:
                raise too_many_of_box(sandbox_id, MAX_DOORS, "doors; close one first")
            await broker.boxes.store.add_door(sandbox_id, name, sealed)
            try:
                await broker.backend.open_door(handle, body.to_door())
            except SandboxError as error:
                await broker.boxes.store.remove_door(sandbox_id, name)
                raise await broker.backend.judged(error, handle) from error
            except BaseException:
                await broker.boxes.store.remove_door(sandbox_id, name)
                raise
            box.doors[name] = asked
        return Response(status_code=204)

    @router.delete(f"{DOORS}/{{name}}", status_code=204, summary="Close a door")
    async def close_door(request: Request, sandbox_id: str, name: DoorName) -> Response:
        """Takes a lease of scope `operate`. Also 204 when there is none."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        box = live(grant)
        handle = broker.boxes.ready(box)
        async with box.doors_lock:
            await broker.boxes.store.remove_door(sandbox_id, name)
            await broker.backend.close_door(handle, name)
            box.doors.pop(name, None)
        return Response(status_code=204)

    @router.get(DOORS, response_model=DoorsView, summary="What went through each open door")
    async def look(request: Request, sandbox_id: str) -> Response:
        """Takes a lease of any scope."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.READ)
        box = live(grant)
        counted = broker.backend.door_statistics(broker.boxes.ready(box))
        doors = {name: DoorStatisticsModel.of(counted[name]) if name in counted else None for name in box.doors}
        return reply(DoorsView(doors=doors))

    return router
