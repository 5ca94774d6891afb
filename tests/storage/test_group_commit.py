"""The thread that commits the writes of many callers in one transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import weakref

from nemo_gym.contract.errors import ServerError
from nemo_gym.storage import SqliteWriter


class Payload:
    """Data of an operation, such as a model's response of some megabytes."""


async def test_writer_without_work_holds_nothing_of_what_it_has_written() -> None:
    writer = SqliteWriter(
        lambda: sqlite3.connect(":memory:", isolation_level=None),
        name="test",
        translate=lambda error: ServerError(str(error)),
    )
    held: list[weakref.ref[Payload]] = []

    def write() -> asyncio.Future[bool]:
        payload = Payload()
        held.append(weakref.ref(payload))
        return writer.call(lambda _: isinstance(payload, Payload))

    assert await asyncio.gather(*(write() for _ in range(20))) == [True] * 20
    async with asyncio.timeout(10):
        while any(payload() is not None for payload in held):  # noqa: ASYNC110 - nothing tells of a freed object
            await asyncio.sleep(0.01)
    await writer.aclose()
