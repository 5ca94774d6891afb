"""A stream that never goes silent: pings while nothing comes, before the first event and between any two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import structlog

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.streaming.failures import failure_event
from nemo_gym.gateway.streaming.pings import Pings

PING_INTERVAL_S = 15.0
"""Far below the shortest patience of a known harness after headers (300 s), and of proxies in between (60 s)."""
FIRST_EVENT_GRACE_S = 5.0
log = structlog.get_logger(__name__)


class KeepAlive:
    """Server-sent events, made of ``source`` and pings. ``source`` yields bytes cut anywhere.

    ``await started()`` first: until the grace is over, a failure is raised and can still become a status. Then send
    headers and iterate ``events()``: a failure there becomes the dialect's own event. Closing the iterator closes the
    source, which ends the work for it."""

    def __init__(
        self,
        dialect: Dialect,
        source: AsyncGenerator[bytes, None],
        *,
        opening: Mapping[str, Any] | None = None,
        interval_s: float = PING_INTERVAL_S,
        grace_s: float = FIRST_EVENT_GRACE_S,
    ) -> None:
        """``opening``: see `Pings`. ``interval_s``: silence before a ping. ``grace_s``: how long headers wait for the
        first bytes."""
        self._dialect = dialect
        self._source = source
        self._pings = Pings(dialect, opening)
        self._interval_s = interval_s
        self._grace_s = grace_s
        self._next: asyncio.Task[bytes | None] | None = None
        self._rest = b""
        self.pings = 0

    async def started(self) -> None:
        """Returns when the first bytes are there or the grace is over; raises what the source raises until then."""
        try:
            done = await self._wait(self._grace_s)
            if done and self._next is not None and (error := self._next.exception()) is not None:
                raise error
        except BaseException:
            await self.aclose()
            raise

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events and pings."""
        try:
            while True:
                if not await self._wait(self._interval_s):
                    self.pings += 1
                    yield self._pings.ping()
                    continue
                task, self._next = self._next, None
                assert task is not None
                chunk = task.result()
                if chunk is None:
                    break
                if ready := self._whole(chunk):
                    yield ready
            if self._rest:
                yield self._pings.passing(self._rest)
        except NemoGymError as error:
            log.info("a stream failed after it began", code=error.code, error=str(error))
            yield failure_event(
                self._dialect, error, response=self._pings.response, number=self._pings.failure_number()
            )
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the source. Also needed when `events` was never iterated."""
        task, self._next = self._next, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        elif task is not None and not task.cancelled():
            task.exception()
        await self._source.aclose()

    async def _wait(self, timeout_s: float) -> bool:
        """Whether the next bytes (or the end, or a failure) are there."""
        if self._next is None:
            self._next = asyncio.create_task(self._advance())
        done, _ = await asyncio.wait({self._next}, timeout=timeout_s)
        return bool(done)

    async def _advance(self) -> bytes | None:
        return await anext(self._source, None)

    def _whole(self, chunk: bytes) -> bytes:
        """The events that are complete with ``chunk``: a ping must not fall into the middle of one."""
        text = self._rest + chunk
        ready = b""
        while (end := _event_end(text)) > 0:
            ready += self._pings.passing(text[:end])
            text = text[end:]
        self._rest = text
        return ready


def _event_end(text: bytes) -> int:
    """Where the first event of ``text`` ends, its empty line included; 0 when it does not end."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := text.find(mark)) >= 0]
    return min(ends, default=0)
