"""Routes of execs and their output."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, FastAPI, Path, Query
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.broker.access import Grant
from nemo_gym.broker.box import ExecRun, Stream
from nemo_gym.broker.routes.bodies import (
    RESPONSES,
    digest,
    json_body,
    parse,
    raw_body,
    read,
    reply,
    require_media_type,
    stream_reply,
)
from nemo_gym.broker.routes.sandboxes import live
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.session import IDENTIFIER, LeaseScope
from nemo_gym.http.middleware import DirectRoutesMiddleware, Endpoint
from nemo_gym.sandbox.wire import EVENT_STREAM, OCTET_STREAM, SANDBOXES
from nemo_gym.sandbox.wire.frames import (
    MAX_PAYLOAD_BYTES,
    PING,
    PING_INTERVAL_S,
    Frame,
    FrameKind,
    encode_end,
    encode_event,
    encode_output,
)
from nemo_gym.sandbox.wire.models import ExecSubmission, ExecView, SignalExec
from nemo_gym.sandbox.wire.problems import BrokerError

# -- Output --------------------------------------------------------------------------------------------------------

OUTPUT_TYPES = (EVENT_STREAM, OCTET_STREAM)
_KINDS: dict[Stream, FrameKind] = {"stdout": FrameKind.STDOUT, "stderr": FrameKind.STDERR}
_FIRST_OUTPUT_S = 0.01
"""How long a response waits for the command's first output or its end, so that a short command's is sent in one piece.
"""
_LOOK_S = 0.1
"""Seconds between two checks whether the client is still connected."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
Chunk = tuple[bytes, bool]
"""Bytes of a response, and whether they are the last."""


class OutputReply(Response):
    """A streaming response that checks periodically whether the client is still connected, and starts no tasks for it.
    The framework's own waits for the disconnect in a task group, and most commands end before such a group is set up.

    Args:
        chunks: the body. The last chunk is marked as such, so no empty message follows it.
    """

    def __init__(self, chunks: AsyncIterator[Chunk], status: int, media_type: str) -> None:
        self.background = None
        self.status_code, self.media_type = status, media_type
        self.init_headers(_HEADERS)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        looked = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk, is_last in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last:
                return
            if time.monotonic() - looked > _LOOK_S:
                if await request.is_disconnected():
                    return
                looked = time.monotonic()


async def output_reply(
    broker: BrokerService, grant: Grant, run: ExecRun, accept: str, offset: int, status: int = 200
) -> Response:
    """Return a response that streams the output from ``offset`` on. Raises `BrokerError` ``offset_out_of_range`` or
    ``output_gone``."""
    if offset > run.size or (run.end is not None and offset > run.end.output_bytes):
        raise BrokerError(
            "offset_out_of_range", f"offset {offset} lies beyond the output of {run.size} bytes", size_bytes=run.size
        )
    if run.end is not None and offset < run.end.output_bytes:
        _require_kept(run, offset)
    if run.end is None and offset == run.size:
        await run.changed(_FIRST_OUTPUT_S)
    pieces = _pieces(broker, grant, run, offset)
    if OCTET_STREAM in accept:
        return OutputReply(_frames(pieces, run), status, OCTET_STREAM)
    return OutputReply(_events(pieces, run, offset), status, EVENT_STREAM)


def _require_kept(run: ExecRun, offset: int) -> None:
    try:
        is_kept = bool(run.spool.read(offset, 1))
    except OSError:
        is_kept = False
    if not is_kept:
        raise BrokerError("output_gone", f"the output of exec '{run.exec_id}' was dropped to make room")


Pieces = AsyncIterator[list[tuple[Stream, bytes]] | None]


async def _frames(pieces: Pieces, run: ExecRun) -> AsyncIterator[Chunk]:
    async for piece in pieces:
        if piece is None:
            yield PING, False
        else:
            yield b"".join(frame for stream, data in piece for frame in encode_output(stream, data)), False
    assert run.end is not None
    yield encode_end(run.end), True


async def _events(pieces: Pieces, run: ExecRun, offset: int) -> AsyncIterator[Chunk]:
    async for piece in pieces:
        if piece is None:
            yield encode_event(Frame(FrameKind.PING), offset), False
            continue
        for stream, data in piece:
            offset += len(data)
            yield encode_event(Frame(_KINDS[stream], data), offset), False
    assert run.end is not None
    yield encode_event(Frame(FrameKind.EXIT, run.end.model_dump_json().encode()), offset), True


async def _pieces(broker: BrokerService, grant: Grant, run: ExecRun, offset: int) -> Pieces:
    """Yield the output from ``offset`` to the end, and ``None`` after each `PING_INTERVAL_S` without output. If the
    broker stops or the lease no longer holds, the connection breaks off without a terminal frame; a client that
    reconnects gets the rest, or an error with the reason."""
    while not broker.draining.is_set() and grant.holds:
        if offset < run.size:
            pieces = run.spool.read(offset, MAX_PAYLOAD_BYTES)
            offset += sum(len(data) for _, data in pieces)
            yield [*pieces]
        elif run.end is not None:
            return
        elif not await run.changed(PING_INTERVAL_S):
            yield None
    raise ConnectionAbortedError("the broker is stopping, or the lease has ended")


# -- Execs ---------------------------------------------------------------------------------------------------------

EXEC = f"{SANDBOXES}/{{sandbox_id}}/execs/{{exec_id}}"
MAX_WAIT_S = 60.0

MAX_ID_LENGTH = 128
MAX_SUBMISSION_BYTES = 4 * 1024 * 1024
"""Twice the size that Linux allows for a command's arguments and environment. Submissions stay in memory until their
command ends."""

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
        """Takes a lease of scope `operate`. The client chooses the id; the command runs once, even if it is sent
        again. Returns when the command has started or, with `Accept: application/octet-stream`, streams its output
        from `offset` on."""
        return await submitted(broker, request, sandbox_id, exec_id, offset)

    @router.get(EXEC, response_model=ExecView, summary="Look at an exec, or wait for its end")
    async def look(
        request: Request,
        sandbox_id: str,
        exec_id: ExecId,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Takes a lease of any scope. With `wait_s`, returns when the exec has ended, or after that many seconds."""
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
        """Takes a lease of scope `operate`, for an exec that was submitted with `stdin: attached`. Possible only once;
        sending the same bytes again has no effect."""
        grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
        require_media_type(request, OCTET_STREAM)
        box = live(grant)
        run = await broker.execs.find(sandbox_id, box, exec_id)
        data = await read(request, broker.config.max_stdin_bytes)
        grant.require_held()
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
        """Takes a lease of any scope. Returns `text/event-stream` by default: each `id` is the offset after the event,
        and `Last-Event-ID` resumes there. Returns frames with `Accept: application/octet-stream`. The last event is
        exactly one `exit`; a stream that ends without it was cut off, and can be resumed from its offset."""
        grant, run = await find(request, sandbox_id, exec_id, LeaseScope.READ)
        if offset is None:
            last = request.headers.get("last-event-id", "")
            offset = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else 0
        return await output_reply(broker, grant, run, request.headers.get("accept", ""), offset)

    @router.post(
        f"{EXEC}/signal",
        status_code=204,
        openapi_extra=json_body(SignalExec),
        summary="Send a signal to a command's whole process tree",
    )
    async def signal(request: Request, sandbox_id: str, exec_id: ExecId) -> Response:
        """Takes a lease of scope `operate`. Also 204 if the command has ended."""
        grant, run = await find(request, sandbox_id, exec_id, LeaseScope.OPERATE)
        body = await parse(request, SignalExec, broker.config)
        grant.require_held()
        await broker.execs.signal(run, body.signal)
        return Response(status_code=204)

    return router


async def submitted(broker: BrokerService, request: Request, sandbox_id: str, exec_id: str, offset: int) -> Response:
    """Return the response to a submission whose parameters have been validated."""
    grant = await broker.access.box(request, sandbox_id, LeaseScope.OPERATE)
    body = await parse(request, ExecSubmission, broker.config, MAX_SUBMISSION_BYTES)
    grant.require_held()
    box = live(grant)
    handle = broker.boxes.ready(box)
    lease_id = None if grant.lease is None else grant.lease.lease_id
    run, is_new = await broker.execs.submit(box, handle, exec_id, body, digest(body), lease_id)
    status = 201 if is_new else 200
    if request.headers.get("accept") == OCTET_STREAM:
        return await output_reply(broker, grant, run, OCTET_STREAM, offset, status)
    return reply(run.view(), status)


# -- Submissions that skip the framework ---------------------------------------------------------------------------
# A shortcut to the route that every command uses.
#
# The framework matches each route in turn and resolves dependencies, which takes longer than the broker's own work for
# a short command. A request that is not clearly a submission goes through the framework, to the same function.

_PATH = re.compile(rf"{re.escape(SANDBOXES)}/([^/]+)/execs/([^/]+)")
_QUERY = re.compile(rb"(?:offset=([0-9]{1,18}))?")


class DirectSubmissions(DirectRoutesMiddleware):
    """The innermost middleware of the application, which routes submissions directly."""

    def __init__(self, app: ASGIApp, application: FastAPI) -> None:
        super().__init__(app, application)
        self._state = application.state

    def _find(self, scope: Scope) -> Endpoint | None:
        if scope["method"] != "PUT":
            return None
        path, query = _PATH.fullmatch(scope["path"]), _QUERY.fullmatch(scope["query_string"])
        if path is None or query is None:
            return None
        sandbox_id, exec_id = path.groups()
        if len(exec_id) > MAX_ID_LENGTH or IDENTIFIER.fullmatch(exec_id) is None:
            return None
        broker = cast("BrokerService", self._state.sandbox_broker)
        offset = int(query[1] or 0)

        async def submit(request: Request) -> Response:
            return await submitted(broker, request, sandbox_id, exec_id, offset)

        return submit


def add_direct_submissions(app: FastAPI) -> None:
    """Add the middleware. Call it before the application serves requests, and `install` once there is a broker."""
    app.user_middleware.append(Middleware(DirectSubmissions, application=app))


def install(app: FastAPI, broker: BrokerService) -> None:
    app.state.sandbox_broker = broker
