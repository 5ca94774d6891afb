from __future__ import annotations

import openai
import pytest
from aiohttp import web

from nemo_gym.gateway.live_session import Repeat, request_hints
from nemo_gym.http.delivery import Connection

HERE, THERE = ("127.0.0.1", 5), ("127.0.0.1", 6)


@pytest.mark.parametrize(
    ("headers", "connection", "answered_on", "expected"),
    [
        ({}, HERE, None, Repeat.UNKNOWN),
        ({}, HERE, THERE, Repeat.UNKNOWN),
        ({}, HERE, HERE, Repeat.RESAMPLE),
        ({}, None, None, Repeat.UNKNOWN),
        ({"x-stainless-retry-count": "0"}, HERE, THERE, Repeat.UNKNOWN),
        ({"x-stainless-retry-count": "2"}, HERE, HERE, Repeat.RETRY),
        ({"x-stainless-retry-count": "²"}, HERE, THERE, Repeat.UNKNOWN),
        ({"x-stainless-retry-count": "9" * 5000}, HERE, THERE, Repeat.RETRY),
    ],
)
def test_repeat_is_read_from_count_and_connection(
    headers: dict[str, str], connection: Connection | None, answered_on: Connection | None, expected: Repeat
) -> None:
    assert request_hints(headers, connection, answered_on).repeat is expected


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"idempotency-key": " k "}, "k"),
        ({"x-idempotency-key": "k"}, "k"),
        ({"idempotency-key": " "}, None),
    ],
)
def test_key_is_read_from_either_header(headers: dict[str, str], key: str | None) -> None:
    assert request_hints(headers, None, None).key == key


async def test_openai_client_counts_its_retries_where_they_are_read() -> None:
    seen: list[Repeat] = []

    async def handler(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen.append(request_hints(headers, None, None).repeat)
        return web.Response(status=500, headers={"retry-after-ms": "1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=[])
    finally:
        await runner.cleanup()
    assert seen == [Repeat.UNKNOWN, Repeat.RETRY, Repeat.RETRY]
