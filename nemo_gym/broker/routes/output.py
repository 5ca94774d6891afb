"""The output of an exec as a stream, resumed from any offset; it ends with exactly one terminal frame."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.broker.access import Grant
from nemo_gym.broker.exec_run import ExecRun
from nemo_gym.broker.service import BrokerService
from nemo_gym.broker.spool import Stream
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

OUTPUT_TYPES = (EVENT_STREAM, OCTET_STREAM)
_KINDS: dict[Stream, FrameKind] = {"stdout": FrameKind.STDOUT, "stderr": FrameKind.STDERR}
_HEAD_S = 0.01
"""How long the head of an answer waits for the command's first output, or its end."""
_LOOK_S = 0.1
"""Between two looks for the reader."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
Chunk = tuple[bytes, bool]
"""Bytes of an answer, and whether they are its last."""


class OutputReply(Response):
    """A stream that looks now and then for its reader.

    The framework's own waits for the reader's leaving beside the stream, in a group of tasks; most commands are over
    before such a group is made. Those are answered in one piece: the head waits a moment for what comes behind it.

    Args:
        chunks: what is sent. Nothing is sent behind the last one, so it is known to be the last.
        held: awaited before the head is sent.
    """

    def __init__(self, chunks: AsyncIterator[Chunk], held: Callable[[], Awaitable[object]], status: int, media: str):
        self.background = None
        self.status_code, self.media_type = status, media
        self.init_headers(_HEADERS)
        self._chunks, self._held = chunks, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        looked = time.monotonic()
        await self._held()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk, is_last in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last:
                return
            if time.monotonic() - looked > _LOOK_S:
                if await request.is_disconnected():
                    return
                looked = time.monotonic()


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

    async def held() -> None:
        if run.end is None and offset == run.size:
            await run.changed(_HEAD_S)

    if OCTET_STREAM in accept:
        return OutputReply(_frames(_pieces(broker, grant, run, offset), run), held, status, OCTET_STREAM)
    return OutputReply(_events(_pieces(broker, grant, run, offset), run, offset), held, status, EVENT_STREAM)


def _require_kept(run: ExecRun, offset: int) -> None:
    try:
        kept = bool(run.spool.read(offset, 1))
    except OSError:
        kept = False
    if not kept:
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
