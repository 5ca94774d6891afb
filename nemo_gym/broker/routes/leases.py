"""``…/lease`` and ``…/leases``: renew, mint, take back."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.access import Grant, narrower
from nemo_gym.broker.box import Box
from nemo_gym.broker.boxes import gone, too_many_of_box
from nemo_gym.broker.registry.records import LeaseRecord
from nemo_gym.broker.routes.bodies import RESPONSES, json_body, parse
from nemo_gym.broker.routes.models import reply
from nemo_gym.broker.routes.sandboxes import checked_ttl
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.wire.boxes import LeaseView, MintLease, RenewLease
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import SANDBOXES

MAX_LEASES = 1000
"""Of one box, beside its owner's."""

BOX = f"{SANDBOXES}/{{sandbox_id}}"


def lease_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["leases"], responses=RESPONSES)

    @router.put(
        f"{BOX}/lease", response_model=LeaseView, openapi_extra=json_body(RenewLease), summary="Renew a box's lease"
    )
    async def renew(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease. Relative to now, so sending it again does no harm."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, RenewLease, broker.config)
        box = live(grant)
        await broker.boxes.renew(box, checked_ttl(broker, body.ttl_s))
        return reply(box.lease_view(box.owner_lease))

    @router.post(
        f"{BOX}/leases",
        status_code=201,
        response_model=LeaseView,
        openapi_extra=json_body(MintLease),
        summary="Mint a narrower lease",
    )
    async def mint(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease. The token is told in this answer alone."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, MintLease, broker.config)
        if not narrower(body.scope, grant.scope):
            raise BrokerError("scope", f"a lease of scope '{body.scope}' is not narrower than '{grant.scope}'")
        box = live(grant)
        if sum(not lease.revoked and lease.epoch == box.epoch for lease in box.leases.values()) > MAX_LEASES:
            raise too_many_of_box(sandbox_id, MAX_LEASES, "leases; take some back first")
        expires_at = None if body.ttl_s is None else time.time() + body.ttl_s
        lease = LeaseRecord(f"le-{uuid.uuid4().hex}", sandbox_id, body.scope, box.epoch, expires_at)
        await broker.boxes.store.mint(lease)
        box.leases[lease.lease_id] = lease
        return reply(box.lease_view(lease, broker.access.signer.issue(lease)), 201)

    @router.delete(f"{BOX}/leases", status_code=204, summary="Fence every borrower")
    async def fence(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease, and begins a new epoch: every other lease made so far gets 409 `fenced`, and the
        commands that were submitted by them are killed before this answers."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        box = live(grant)
        epoch = box.epoch + 1
        await broker.boxes.store.fence(sandbox_id, epoch)
        box.epoch = max(box.epoch, epoch)
        box.owner_lease.epoch = box.epoch
        await broker.execs.end_those_of(box, {le.lease_id for le in box.leases.values() if le.epoch < box.epoch})
        return Response(status_code=204)

    @router.delete(f"{BOX}/leases/{{lease_id}}", status_code=204, summary="Take one lease back")
    async def revoke(request: Request, sandbox_id: str, lease_id: str) -> Response:
        """Takes the owner's lease, whose own ends with the box. The commands that were submitted by the lease are
        killed before this answers."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        box = live(grant)
        lease = box.leases.get(lease_id)
        if lease is None:
            said = f"box '{sandbox_id}' has no lease '{lease_id[:80]}'"
            raise BrokerError("lease_not_found", said, sandbox_id=sandbox_id)
        if lease.scope is LeaseScope.OWNER:
            raise BrokerError("scope", "the owner's lease ends with the box; delete the box instead")
        await broker.boxes.store.revoke(lease_id)
        lease.revoked = True
        await broker.execs.end_those_of(box, {lease_id})
        return Response(status_code=204)

    return router


def live(grant: Grant) -> Box:
    """The box of a grant. Raises `BrokerError` ``sandbox_gone``."""
    if grant.box is None:
        raise gone(grant.sandbox_id, (grant.record.reason if grant.record else None) or "closed")
    return grant.box
