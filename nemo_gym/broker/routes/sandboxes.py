"""Routes of boxes, their leases, their doors, and their directories as tar streams."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Header, Path, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from nemo_gym.broker.access import OWNER_LABEL, Grant, is_trusted, narrower
from nemo_gym.broker.box import Box, CreateOrder, gone_view
from nemo_gym.broker.boxes import door_digest, gone, too_many_of_box
from nemo_gym.broker.registry import LeaseRecord
from nemo_gym.broker.routes.bodies import (
    RESPONSES,
    bounded,
    digest,
    json_body,
    parse,
    raw_body,
    reply,
    request_id_of,
    require_media_type,
    stream_reply,
)
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import InvalidBodyError, NemoGymError, SandboxError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError, while_connected
from nemo_gym.sandbox.wire import IDEMPOTENCY_KEY_HEADER, SANDBOXES, TAR, sandbox
from nemo_gym.sandbox.wire.models import (
    MAX_DOORS,
    CreatedSandbox,
    CreateSandbox,
    DoorModel,
    DoorsView,
    LeaseView,
    MintLease,
    ReapedView,
    RenewLease,
    SandboxPage,
    SandboxView,
)
from nemo_gym.sandbox.wire.problems import BrokerError, Problem, problem_of

# -- Boxes ---------------------------------------------------------------------------------------------------------

MAX_KEY_CHARS = 255
MAX_IMAGE_CHARS = 1024
"""The size of the registry's column."""
MAX_PAGE = 1000

Labels = Annotated[list[str], Query(alias="label", description="`name=value`; repeated: all of them")]


MAX_LEASES = 1000
"""Limit per box, in addition to the owner's lease."""


def sandbox_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["sandboxes"], responses=RESPONSES)

    @router.post(
        SANDBOXES,
        status_code=201,
        response_model=CreatedSandbox,
        responses={200: {"model": CreatedSandbox, "description": "Made before, by the same key"}},
        openapi_extra=json_body(CreateSandbox),
        summary="Create a box",
    )
    async def create(
        request: Request,
        key: Annotated[str | None, Header(alias=IDEMPOTENCY_KEY_HEADER, max_length=MAX_KEY_CHARS)] = None,
    ) -> Response:
        """Takes a caller's credential. Waits in a queue for a place, and returns when the box accepts commands. Agents
        get boxes without a network, and only the mounts and backend options that the configuration permits."""
        caller = broker.access.caller(request)
        if not key:
            raise BrokerError(
                "idempotency_key_missing",
                f"creating a box needs the header {IDEMPOTENCY_KEY_HEADER}: a name of your own for this request, so"
                " that it can be sent again without making a second box",
            )
        body = await parse(request, CreateSandbox, broker.config)
        broker.permissions.check_create(caller, body, is_outsider=broker.access.is_outsider(caller))
        body_digest = digest(body)
        if "\0" in (body.spec.workdir or ""):
            raise InvalidBodyError("spec.workdir: a path must not contain a zero byte", started="no")
        if body.spec.image is not None:
            if len(body.spec.image) > MAX_IMAGE_CHARS or "\0" in body.spec.image:
                raise InvalidBodyError(
                    f"spec.image: a name has at most {MAX_IMAGE_CHARS} characters and no zero byte", started="no"
                )
            image = await broker.images.of_box(caller, body.spec.image)
            if image != body.spec.image:
                body = body.model_copy(update={"spec": body.spec.model_copy(update={"image": image})})
        ttl_s = checked_ttl(broker, body.ttl_s or broker.config.default_ttl_s)
        owner = body.labels.get(OWNER_LABEL) or caller.name
        order = CreateOrder(caller.name, caller.role, owner, key, body_digest, ttl_s, body)
        try:
            box, is_new = await while_connected(request, broker.creations.create(order))
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        lease = box.owner_lease
        created = CreatedSandbox(
            sandbox=box.view(broker.backend.name),
            lease=box.lease_view(lease, broker.access.signer.issue(lease)),
        )
        return reply(created, 201 if is_new else 200, {"Location": sandbox(box.sandbox_id)})

    @router.get(SANDBOXES, response_model=SandboxPage, summary="List boxes that are not gone")
    async def list_boxes(
        request: Request,
        labels: Labels = [],  # noqa: B006 - the framework copies it
        cursor: Annotated[str | None, Query(max_length=400)] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 200,
    ) -> Response:
        """Takes a caller's credential. An operator or pipeline sees all boxes, other callers only their own."""
        caller = broker.access.caller(request)
        boxes = broker.boxes.select(parsed_labels(labels), broker.access.sees(caller))
        if cursor is not None:
            after = _position(cursor)
            boxes = [box for box in boxes if _key(box) > after]
        page, remaining = boxes[:limit], boxes[limit:]
        views = tuple(box.view(broker.backend.name) for box in page)
        return reply(SandboxPage(sandboxes=views, next_cursor=_cursor(page[-1]) if remaining else None))

    @router.get(f"{SANDBOXES}/{{sandbox_id}}", response_model=SandboxView, summary="Look at a box")
    async def look(request: Request, sandbox_id: str) -> Response:
        """Takes a lease of any scope, or its creator's credential. A box that is gone is still shown for a while, with
        the reason."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.READ, creator_may=True)
        if grant.box is not None:
            await broker.boxes.look(grant.box)
            return reply(grant.box.view(broker.backend.name))
        assert grant.record is not None
        return reply(gone_view(grant.record, broker.backend.name))

    @router.delete(f"{SANDBOXES}/{{sandbox_id}}", status_code=204, summary="Destroy a box")
    async def destroy(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease, or its creator's credential. Also 204 if the box is already gone."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER, creator_may=True)
        if grant.box is not None:
            await broker.boxes.destroy(grant.box, "closed")
        return Response(status_code=204)

    @router.delete(SANDBOXES, response_model=ReapedView, summary="Destroy every box with these labels")
    async def reap(
        request: Request,
        labels: Labels = [],  # noqa: B006 - the framework copies it
        key: Annotated[str | None, Query(alias="idempotency_key", min_length=1, max_length=MAX_KEY_CHARS)] = None,
    ) -> Response:
        """Takes a caller's credential. An operator or pipeline reaps all such boxes, other callers only their own.
        With `idempotency_key` instead of labels, undoes the caller's own create, even if that is yet to arrive."""
        caller = broker.access.caller(request)
        label_values = parsed_labels(labels)
        if key is not None and not label_values:
            taken_back = await broker.creations.discard(caller.name, key)
            return reply(ReapedView(reaped=() if taken_back is None else (taken_back,)))
        if key is not None:
            raise InvalidBodyError("idempotency_key: give it, or labels, not both", started="no")
        if not label_values:
            raise InvalidBodyError(
                "reaping needs at least one label (?label=name=value), as without any it would destroy every box",
                started="no",
            )
        boxes = broker.boxes.select(label_values, broker.access.sees(caller))
        results = await asyncio.gather(*(broker.boxes.destroy(box, "reaped") for box in boxes), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        return reply(ReapedView(reaped=tuple(box.sandbox_id for box in boxes)))

    return router


def checked_ttl(broker: BrokerService, ttl_s: float) -> float:
    """Return ``ttl_s``. Raises `BrokerError` ``ttl_too_long`` beyond the broker's limit."""
    limit_s = broker.config.max_ttl_s
    if ttl_s > limit_s:
        raise BrokerError(
            "ttl_too_long",
            f"ttl_s: {ttl_s:g} s is longer than this broker's max_ttl_s of {limit_s:g} s; renew instead",
            limit_s=limit_s,
        )
    return ttl_s


def parsed_labels(given: list[str]) -> dict[str, str]:
    """Parse ``name=value`` pairs. Raises `InvalidBodyError`."""
    labels: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise InvalidBodyError(f"label: '{item[:80]}' is not name=value", started="no")
        if labels.setdefault(name, value) != value:
            raise InvalidBodyError(f"label: '{name[:80]}' is given twice, with two values", started="no")
    return labels


def _key(box: Box) -> tuple[float, str]:
    return (box.created_at, box.sandbox_id)


def _cursor(box: Box) -> str:
    return base64.urlsafe_b64encode(f"{box.created_at!r} {box.sandbox_id}".encode()).decode()


def _position(cursor: str) -> tuple[float, str]:
    try:
        created_at, _, sandbox_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        return (float(created_at), sandbox_id)
    except (ValueError, binascii.Error):
        raise InvalidBodyError("cursor: this is not a cursor that the broker returned", started="no") from None


# -- Leases --------------------------------------------------------------------------------------------------------

BOX = f"{SANDBOXES}/{{sandbox_id}}"


def lease_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["leases"], responses=RESPONSES)

    @router.put(
        f"{BOX}/lease", response_model=LeaseView, openapi_extra=json_body(RenewLease), summary="Renew a box's lease"
    )
    async def renew(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease. The new end counts from now, so repeating the request is harmless."""
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
        """Takes the owner's lease. Only this response contains the token."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        body = await parse(request, MintLease, broker.config)
        if not narrower(body.scope, grant.scope):
            raise BrokerError("scope", f"a lease of scope '{body.scope}' is not narrower than '{grant.scope}'")
        box = live(grant)
        if sum(not lease.revoked and lease.epoch == box.epoch for lease in box.leases.values()) > MAX_LEASES:
            raise too_many_of_box(sandbox_id, MAX_LEASES, "leases; revoke some first")
        expires_at = None if body.ttl_s is None else time.time() + body.ttl_s
        lease = LeaseRecord(f"le-{uuid.uuid4().hex}", sandbox_id, body.scope, box.epoch, expires_at)
        await broker.boxes.store.mint(lease)
        box.leases[lease.lease_id] = lease
        return reply(box.lease_view(lease, broker.access.signer.issue(lease)), 201)

    @router.delete(f"{BOX}/leases", status_code=204, summary="Fence every borrower")
    async def fence(request: Request, sandbox_id: str) -> Response:
        """Takes the owner's lease, and begins a new epoch. Requests with any other lease made so far get 409 `fenced`,
        and the commands submitted with those leases are killed before this request returns."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        box = live(grant)
        epoch = box.epoch + 1
        await broker.boxes.store.fence(sandbox_id, epoch)
        box.epoch = max(box.epoch, epoch)
        box.owner_lease.epoch = box.epoch
        await broker.execs.end_execs_of(box, {le.lease_id for le in box.leases.values() if le.epoch < box.epoch})
        return Response(status_code=204)

    @router.delete(f"{BOX}/leases/{{lease_id}}", status_code=204, summary="Take one lease back")
    async def revoke(request: Request, sandbox_id: str, lease_id: str) -> Response:
        """Takes the owner's lease, which itself cannot be revoked. The commands submitted with the revoked lease are
        killed before this request returns."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OWNER)
        box = live(grant)
        lease = box.leases.get(lease_id)
        if lease is None:
            detail = f"box '{sandbox_id}' has no lease '{lease_id[:80]}'"
            raise BrokerError("lease_not_found", detail, sandbox_id=sandbox_id)
        if lease.scope is LeaseScope.OWNER:
            raise BrokerError("scope", "the owner's lease ends with the box; delete the box instead")
        await broker.boxes.store.revoke(lease_id)
        lease.revoked = True
        await broker.execs.end_execs_of(box, {lease_id})
        return Response(status_code=204)

    return router


def live(grant: Grant) -> Box:
    """Return the live box of a grant. Raises `BrokerError` ``sandbox_gone``."""
    if grant.box is None:
        raise gone(grant.sandbox_id, (grant.record.reason if grant.record else None) or "closed")
    return grant.box


# -- Doors ---------------------------------------------------------------------------------------------------------

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
        """Takes a lease of scope `operate`. Repeating it with the same body has no effect. No route returns the door's
        headers, which are stored sealed. Borrowers, and owners who are agents, may open doors only to the routes of
        models and MCP servers."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        body = await parse(request, DoorModel, broker.config)
        grant.require_held()
        if body.name != name:
            raise InvalidBodyError(f"name: '{body.name}' is not the door of this path, '{name}'", started="no")
        box = live(grant)
        if grant.scope is not LeaseScope.OWNER or not is_trusted(box.creator_role):
            broker.permissions.check_doors([body])
        handle = broker.boxes.ready(box)
        sealed = broker.boxes.sealer.seal(body, sandbox_id)
        async with box.doors_lock:
            grant.require_held()
            known_digest, new_digest = box.doors.get(name), door_digest(body)
            if known_digest == new_digest:
                return Response(status_code=204)
            if known_digest is not None:
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
            box.doors[name] = new_digest
        return Response(status_code=204)

    @router.delete(f"{DOORS}/{{name}}", status_code=204, summary="Close a door")
    async def close_door(request: Request, sandbox_id: str, name: DoorName) -> Response:
        """Takes a lease of scope `operate`. Also 204 if there is no such door."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        box = live(grant)
        handle = broker.boxes.ready(box)
        async with box.doors_lock:
            grant.require_held()
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
        return reply(DoorsView(doors={name: counted.get(name) for name in box.doors}))

    return router


# -- Archives ------------------------------------------------------------------------------------------------------

ARCHIVE = f"{SANDBOXES}/{{sandbox_id}}/archive"

MAX_FAILURES = 1000
"""Number of broken-off archives whose reasons are kept."""

BoxPath = Annotated[
    str, Query(min_length=1, max_length=8192, pattern=r"^/[^\x00]*$", description="An absolute path in the box")
]


async def held(grant: Grant, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks. Raises `FencedError` as soon as the lease no longer holds."""
    async for chunk in chunks:
        grant.require_held()
        yield chunk


def archive_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["files"], responses=RESPONSES)
    limit = broker.config.max_archive_bytes
    failures: dict[tuple[str, str], Problem] = {}

    @router.put(ARCHIVE, status_code=204, openapi_extra=raw_body(TAR), summary="Unpack a tar stream in a box")
    async def put(request: Request, sandbox_id: str, path: BoxPath) -> Response:
        """Takes a lease of scope `operate`. A member that leaves `path`, by name or by link, is refused, and nothing
        outside `path` changes; the members before it may already be unpacked."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        require_media_type(request, TAR)
        handle = broker.boxes.ready(live(grant))
        try:
            await broker.backend.provider.put_archive(
                handle, path, held(grant, bounded(request, limit, "archive_too_large"))
            )
        except SandboxError as error:
            raise await broker.backend.judged(error, handle) from error
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(status_code=204)

    @router.get(ARCHIVE, responses=stream_reply(TAR), summary="A file or directory of a box as a tar stream")
    async def get(
        request: Request,
        sandbox_id: str,
        path: BoxPath,
        exclude: Annotated[list[str], Query(max_length=1000)] = [],  # noqa: B006 - the framework copies it
        max_bytes: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    ) -> Response:
        """Takes a lease of scope `read`. An error before the first byte is a problem response; a later one (more than
        `max_bytes`) breaks the connection off, so that a truncated archive never looks complete."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.READ)
        handle = broker.boxes.ready(live(grant))
        chunks = cast(
            "AsyncGenerator[bytes, None]",
            broker.backend.provider.get_archive(
                handle, path, exclude=exclude, max_bytes=limit if max_bytes is None else min(max_bytes, limit)
            ),
        )
        try:
            first = await anext(chunks, b"")
        except SandboxError as error:
            await chunks.aclose()
            raise await broker.backend.judged(error, handle, "path_not_found") from error
        except BaseException:
            await chunks.aclose()
            raise
        return StreamingResponse(relay(request_id_of(request), sandbox_id, first, chunks), media_type=TAR)

    @router.get(f"{ARCHIVE}/failure", summary="Why an archive broke off after its answer had begun")
    async def failure(
        request: Request, sandbox_id: str, request_id: Annotated[str, Query(min_length=1, max_length=128)]
    ) -> Response:
        """Takes a lease of scope `read`. Returns 200 with the problem; only the latest failures are kept."""
        await broker.access.box(request, sandbox_id, LeaseScope.READ)
        problem = failures.get((sandbox_id, request_id))
        if problem is None:
            raise BrokerError("route_not_found", f"no failure is recorded for request '{request_id}'")
        return reply(problem)

    async def relay(
        request_id: str, sandbox_id: str, first: bytes, chunks: AsyncGenerator[bytes, None]
    ) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(chunks):
            yield first
            try:
                async for chunk in chunks:
                    yield chunk
            except NemoGymError as error:
                failures[(sandbox_id, request_id)] = problem_of(error, request_id=request_id)
                while len(failures) > MAX_FAILURES:
                    del failures[next(iter(failures))]
                # The head was already sent, so only a broken connection can show that the body is incomplete.
                raise ConnectionAbortedError(error.message) from error

    return router
