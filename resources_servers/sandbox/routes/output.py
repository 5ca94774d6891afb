"""The output of an exec as a stream, resumed from any offset; it ends with exactly one terminal frame."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import EVENT_STREAM, OCTET_STREAM
from resources_servers.sandbox.execs.run import ExecRun
from resources_servers.sandbox.execs.spool import Stream
from resources_servers.sandbox.leases.access import Grant
from resources_servers.sandbox.service import BrokerService

OUTPUT_TYPES = (EVENT_STREAM, OCTET_STREAM)
_KINDS: dict[Stream, FrameKind] = {"stdout": FrameKind.STDOUT, "stderr": FrameKind.STDERR}
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class OutputReply(Response):
    """A stream that looks for its reader with every piece and every ping.

    The framework's own waits for the reader's leaving beside the stream, in a group of tasks; most commands are over
    before such a group is made.
    """

    def __init__(self, chunks: AsyncIterator[bytes], status: int, media_type: str) -> None:
        self.background = None
        self.status_code, self.media_type = status, media_type
        self.init_headers(_HEADERS)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if await request.is_disconnected():
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def output_reply(
    broker: BrokerService, grant: Grant, run: ExecRun, accept: str, offset: int, status: int = 200
) -> Response:
    """Raises `BrokerError` ``offset_out_of_range`` or ``output_gone``."""
    if offset > run.size or (run.end is not None and offset > run.end.output_bytes):
        raise BrokerError(
            "offset_out_of_range", f"offset {offset} lies beyond the output of {run.size} bytes", size_bytes=run.size
        )
    if run.end is not None and offset < run.end.output_bytes:
        _require_kept(run, offset)
    if OCTET_STREAM in accept:
        return OutputReply(_frames(_pieces(broker, grant, run, offset), run), status, OCTET_STREAM)
    return OutputReply(_events(_pieces(broker, grant, run, offset), run, offset), status, EVENT_STREAM)


def _require_kept(run: ExecRun, offset: int) -> None:
    try:
        kept = bool(run.spool.read(offset, 1))
    except OSError:
        kept = False
    if not kept:
        raise BrokerError("output_gone", f"the output of exec '{run.exec_id}' was dropped to make room")


Pieces = AsyncIterator[list[tuple[Stream, bytes]] | None]


async def _frames(pieces: Pieces, run: ExecRun) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if piece is None:
            yield PING
        else:
            yield b"".join(frame for stream, data in piece for frame in encode_output(stream, data))
    if run.end is not None:
        yield encode_end(run.end)


async def _events(pieces: Pieces, run: ExecRun, offset: int) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if piece is None:
            yield encode_event(Frame(FrameKind.PING), offset)
            continue
        for stream, data in piece:
            offset += len(data)
            yield encode_event(Frame(_KINDS[stream], data), offset)
    if run.end is not None:
        yield encode_event(Frame(FrameKind.EXIT, run.end.model_dump_json().encode()), offset)


async def _pieces(broker: BrokerService, grant: Grant, run: ExecRun, offset: int) -> Pieces:
    """Output from ``offset`` to the end, ``None`` where a while passes without any. Where the broker is stopping or
    the lease does not hold any more, the connection breaks off without a terminal frame: a reader that comes back
    gets the rest, or is told why not."""
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
