"""A TCP relay that breaks connections when it is told to: what a network does to a client and a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Between a client and the server at ``port``. All settings count for connections made after they are set."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_answers_after: int | None = None
        """Bytes from the server that reach the client before the connection is reset."""
        self.cut_requests_after: int | None = None
        """Bytes from the client that reach the server before the connection is reset."""
        self.cuts = 0
        """How often a connection was cut; no more than ``max_cuts``."""
        self.max_cuts: int | None = None
        self.swallow_answers = False
        """The server's answers go nowhere, and nothing is closed."""
        self.connections = 0
        self.url = ""
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def break_all(self) -> None:
        """Reset every connection there is."""
        for writer in self._open:
            writer.transport.abort()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.break_all()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        may_cut = self.max_cuts is None or self.cuts < self.max_cuts
        answers = self.cut_answers_after if may_cut else None
        requests = self.cut_requests_after if may_cut else None
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, upstream}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, upstream, requests, (writer, upstream)))
                group.create_task(
                    self._copy(upstream_reader, writer, answers, (writer, upstream), swallow=self.swallow_answers)
                )
        except* OSError:
            pass
        finally:
            self._open -= {writer, upstream}
            for each in (writer, upstream):
                each.transport.abort()

    async def _copy(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        limit: int | None,
        both: tuple[asyncio.StreamWriter, ...],
        *,
        swallow: bool = False,
    ) -> None:
        passed = 0
        while data := await source.read(65536):
            if swallow:
                continue
            kept = data if limit is None else data[: limit - passed]
            passed += len(kept)
            sink.write(kept)
            await sink.drain()
            if limit is not None and passed >= limit:
                self.cuts += 1
                for each in both:
                    each.transport.abort()
                return
        with contextlib.suppress(OSError):
            sink.write_eof()


@contextlib.asynccontextmanager
async def relay(port: int) -> AsyncIterator[Relay]:
    made = Relay(port)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
