"""A broker that is told to stop: no new boxes, streams that break off instead of lying, and no long wait."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from resources_servers.sandbox.tests.api import calling, eventually
from resources_servers.sandbox.tests.conftest import StartBroker


async def test_open_streams_break_off_without_an_end_and_the_broker_stops_soon(start_broker: StartBroker) -> None:
    broker = start_broker(on_stop="keep")
    async with calling(broker) as api:
        box = await api.box()
        exec_id, _ = await box.submit("echo begun; sleep 600")

        async def begun() -> bool:
            return bool((await box.ask("GET", f"/execs/{exec_id}")).json["output_bytes"] == 6)

        await eventually(begun, "the command began")
        reading = asyncio.create_task(box.output(exec_id))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await asyncio.to_thread(broker.stop)
        assert time.monotonic() - started < 25
        with pytest.raises(aiohttp.ClientError):
            output = await reading
            assert output.ends, "the stream ended in order, without its end"
        broker.start()
        after = await box.output(exec_id)
        assert (after.stdout, after.end["outcome"]) == (b"begun\n", "lost")
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_waiting_creates_are_refused_or_served_but_never_left_hanging(start_broker: StartBroker) -> None:
    broker = start_broker(max_boxes=1, queue_timeout_s=60)
    async with calling(broker) as api:
        await api.box()
        waiting = asyncio.create_task(api.create())
        await asyncio.sleep(0.5)
        started = time.monotonic()
        await asyncio.to_thread(broker.stop)
        assert time.monotonic() - started < 25
        try:
            answer = await waiting
            assert answer.status == 503
        except aiohttp.ClientError:
            pass
