"""``…/execs/{exec_id}``: submit, look, feed, signal."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.broker.access import Grant
from nemo_gym.broker.exec_run import ExecRun
from nemo_gym.broker.routes.bodies import (
    RESPONSES,
    digest,
    json_body,
    parse,
    raw_body,
    read,
    require_media_type,
    stream_reply,
)
from nemo_gym.broker.routes.leases import live
from nemo_gym.broker.routes.models import reply
from nemo_gym.broker.routes.output import OUTPUT_TYPES, output_reply
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.session import IDENTIFIER, LeaseScope
from nemo_gym.sandbox.wire.execs import ExecSubmission, ExecView, SignalExec
from nemo_gym.sandbox.wire.routes import OCTET_STREAM, SANDBOXES

EXEC = f"{SANDBOXES}/{{sandbox_id}}/execs/{{exec_id}}"
MAX_WAIT_S = 60.0

MAX_ID_LENGTH = 128
MAX_SUBMISSION_BYTES = 4 * 1024 * 1024
"""Twice what Linux lets a command's words and variables take; submissions are kept until their command's end."""

ExecId = Annotated[str, Path(pattern=IDENTIFIER.pattern, max_length=MAX_ID_LENGTH)]


def exec_routes(broker: BrokerService) -> APIRouter:
    router = APIRouter(tags=["execs"], responses=RESPONSES)

    async def find(request: Request, sandbox_id: str, exec_id: str, scope: LeaseScope) -> tuple[Grant, ExecRun]:
        grant = await broker.access.box(request, sandbox_id, scope)
        return grant, await broker.execs.find(sandbox_id, grant.box, exec_id)

    @router.put(
        EXEC,
        status_code=201,
        response_model=ExecView,
        responses={200: {"model": ExecView, "description": "Submitted before"}},
        openapi_extra=json_body(ExecSubmission),
        summary="Run a command once",
    )
    async def submit(
        request: Request,
        sandbox_id: str,
        exec_id: ExecId,
        offset: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    ) -> Response:
        """Takes a lease of scope `operate`. The id is the client's: however often it is sent, the command runs once.
        Answers when the command has started; with `Accept: application/octet-stream`, by its output from
        `offset` on."""
        return await submitted(broker, request, sandbox_id, exec_id, offset)

    @router.get(EXEC, response_model=ExecView, summary="Look at an exec, or wait for its end")
    async def look(
        request: Request,
        sandbox_id: str,
        exec_id: ExecId,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Takes a lease of any scope. With `wait_s`, answers when it has ended, or after that many seconds."""
        _, run = await find(request, sandbox_id, exec_id, LeaseScope.READ)
        if wait_s:
            await run.ended(wait_s, broker.draining)
        return reply(run.view())

    @router.put(
        f"{EXEC}/stdin",
        response_model=ExecView,
        openapi_extra=raw_body(OCTET_STREAM),
        summary="Give a command its standard input, and start it",
    )
    async def attach_stdin(request: Request, sandbox_id: str, exec_id: ExecId) -> Response:
        """Takes a lease of scope `operate`, for an exec that was submitted with `stdin: attached`. Once; the same
        bytes again change nothing."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        require_media_type(request, OCTET_STREAM)
        box = live(grant)
        run = await broker.execs.find(sandbox_id, box, exec_id)
        data = await read(request, broker.config.max_stdin_bytes)
        await broker.execs.attach_stdin(box, broker.boxes.ready(box), run, data)
        return reply(run.view())

    @router.get(
        f"{EXEC}/output",
        responses=stream_reply(*OUTPUT_TYPES),
        summary="Read the output, from any place, until the end",
    )
    async def output(
        request: Request,
        sandbox_id: str,
        exec_id: ExecId,
        offset: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    ) -> Response:
        """Takes a lease of any scope. `text/event-stream` (the default; its `id` is the offset after the event, and
        `Last-Event-ID` goes on behind it), or frames with `Accept: application/octet-stream`. The last event, exactly
        one, is `exit`; a stream that ends without it was cut off, and is read on from its offset."""
        grant, run = await find(request, sandbox_id, exec_id, LeaseScope.READ)
        return output_reply(broker, grant, run, request.headers.get("accept", ""), wanted_offset(request, offset))

    @router.post(
        f"{EXEC}/signal",
        status_code=204,
        openapi_extra=json_body(SignalExec),
        summary="Send a signal to a command's whole process tree",
    )
    async def signal(request: Request, sandbox_id: str, exec_id: ExecId) -> Response:
        """Takes a lease of scope `operate`. Also 204 when it has ended."""
        _, run = await find(request, sandbox_id, exec_id, LeaseScope.OPERATE)
        body = await parse(request, SignalExec, broker.config)
        await broker.execs.signal(run, body.signal)
        return Response(status_code=204)

    return router


async def submitted(broker: BrokerService, request: Request, sandbox_id: str, exec_id: str, offset: int) -> Response:
    """The answer to a submission whose parameters are what they must be."""
    grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
    body = await parse(request, ExecSubmission, broker.config, MAX_SUBMISSION_BYTES)
    box = live(grant)
    handle = broker.boxes.ready(box)
    run, is_new = await broker.execs.submit(box, handle, exec_id, body, digest(body), lease_of(grant))
    status = 201 if is_new else 200
    if request.headers.get("accept") == OCTET_STREAM:
        return output_reply(broker, grant, run, OCTET_STREAM, offset, status)
    return reply(run.view(), status)


def lease_of(grant: Grant) -> str | None:
    return None if grant.lease is None else grant.lease.lease_id


def wanted_offset(request: Request, offset: int | None) -> int:
    """``?offset=``, else the header by which event streams go on."""
    if offset is not None:
        return offset
    last = request.headers.get("last-event-id", "")
    return int(last) if last.isascii() and last.isdigit() and len(last) < 19 else 0
