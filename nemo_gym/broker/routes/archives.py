"""``…/archive``: directories as tar streams into and out of boxes, at the speed of the slower side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from nemo_gym.broker.access import Grant
from nemo_gym.broker.routes.bodies import (
    RESPONSES,
    bounded,
    raw_body,
    reply,
    request_id_of,
    require_media_type,
    stream_reply,
)
from nemo_gym.broker.routes.sandboxes import live
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.errors import NemoGymError, SandboxError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST
from nemo_gym.sandbox.wire.problems import BrokerError, Problem, problem_of
from nemo_gym.sandbox.wire.routes import SANDBOXES, TAR

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
