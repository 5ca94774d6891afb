"""Pings stand where the dialect allows them, and the answer is the same with and without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web

from nemo_gym.contract.errors import ModelError, NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.engines.http import EventReader
from nemo_gym.gateway.inference import KeepAlive, failure_event

CHAT: dict[str, Any] = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello there"}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": 'hello "sequence_number": 7', "annotations": []}],
        }
    ],
    "usage": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hello there"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
REPLIES = {Dialect.CHAT: CHAT, Dialect.RESPONSES: RESPONSE, Dialect.MESSAGES: MESSAGE}
OPENING = {**RESPONSE, "status": "in_progress", "output": []}


class Source:
    """The chunks of a stream; before each it waits until the stream was pinged so many times."""

    def __init__(
        self, chunks: list[bytes], *, pings_before: Callable[[int], int], error: Exception | None = None
    ) -> None:
        self.chunks = chunks
        self.pings_before = pings_before
        self.error = error
        self.keepalive: KeepAlive | None = None
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            wanted = 0
            for number, chunk in enumerate(self.chunks):
                wanted += self.pings_before(number)
                while self.keepalive is not None and self.keepalive.pings < wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def keepalive(dialect: Dialect, source: Source, **options: Any) -> KeepAlive:
    made = KeepAlive(dialect, source(), interval_s=options.pop("interval_s", 0.003), **options)
    source.keepalive = made
    return made


async def sent(dialect: Dialect, source: Source, **options: Any) -> list[bytes]:
    made = keepalive(dialect, source, **options)
    return [event async for event in made.events()]


def events_of(raw: bytes) -> list[bytes]:
    return [*EventReader().feed(raw)]


def cut(raw: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    chunks = []
    while raw:
        size = chance.randrange(1, 90)
        chunks.append(raw[:size])
        raw = raw[size:]
    return chunks


def is_ping(data: bytes) -> bool:
    return orjson.loads(data).get("type") == "ping" if data != b"[DONE]" else False


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES])
@pytest.mark.parametrize("seed", range(5))
async def test_stream_without_its_pings_is_the_stream(dialect: Dialect, seed: int) -> None:
    raw = b"".join(ADAPTERS[dialect].events(REPLIES[dialect]))
    source = Source(cut(raw, seed), pings_before=lambda number: 1 if number % 3 == 0 else 0)
    got = await sent(dialect, source)
    assert source.keepalive is not None and source.keepalive.pings >= 3
    assert [data for data in events_of(b"".join(got)) if not is_ping(data)] == events_of(raw)
    assert all(piece.endswith(b"\n\n") for piece in got), "a ping never falls into an event"


@pytest.mark.parametrize("opening", [OPENING, None])
@pytest.mark.parametrize("seed", range(5))
async def test_responses_are_numbered_without_gaps_and_begin_once(seed: int, opening: dict[str, Any] | None) -> None:
    raw = b"".join(ADAPTERS[Dialect.RESPONSES].events(RESPONSE))
    source = Source(cut(raw, seed), pings_before=lambda number: 2 if number % 4 == 0 else 0)
    events = [
        orjson.loads(data) for data in events_of(b"".join(await sent(Dialect.RESPONSES, source, opening=opening)))
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert kinds.count("response.in_progress") > 1
    own = [orjson.loads(data) for data in events_of(raw)]
    drop = {"response.in_progress", "response.created"}
    unnumbered = [{**event, "sequence_number": 0} for event in events if event["type"] not in drop]
    assert unnumbered == [{**event, "sequence_number": 0} for event in own if event["type"] not in drop]


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_stream_passes_byte_for_byte_when_no_ping_is_needed(dialect: Dialect) -> None:
    raw = b"".join(ADAPTERS[dialect].events(REPLIES[dialect]))
    got = await sent(dialect, Source(cut(raw, 1), pings_before=lambda _: 0), interval_s=60.0)
    assert b"".join(got) == raw


async def test_unfinished_rest_of_a_stream_is_passed_on() -> None:
    got = await sent(Dialect.CHAT, Source([b"data: 1\n\ndata: 2"], pings_before=lambda _: 0), interval_s=60.0)
    assert got == [b"data: 1\n\n", b"data: 2"]


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_failure_after_the_headers_is_the_last_event(dialect: Dialect) -> None:
    first = next(iter(ADAPTERS[dialect].events(REPLIES[dialect])))
    source = Source([first], pings_before=lambda _: 0, error=ModelError("the engine is gone"))
    *_, last = events_of(b"".join(await sent(dialect, source, interval_s=60.0)))
    event = orjson.loads(last)
    said = {
        Dialect.CHAT: lambda: event["error"],
        Dialect.MESSAGES: lambda: event["error"],
        Dialect.RESPONSES: lambda: event["response"]["error"],
    }[dialect]()
    assert said["message"] == "the engine is gone" and source.closed
    if dialect is Dialect.RESPONSES:
        assert (event["type"], event["sequence_number"], event["response"]["id"]) == ("response.failed", 1, "resp_1")


async def test_unknown_failure_is_raised_and_not_told_to_the_harness() -> None:
    source = Source([b"data: 1\n\n"], pings_before=lambda _: 0, error=ZeroDivisionError("private"))
    with pytest.raises(ZeroDivisionError):
        await sent(Dialect.CHAT, source, interval_s=60.0)


@pytest.mark.parametrize("moment", ["before started", "while pinging", "between events"])
async def test_source_is_closed_when_the_stream_is_left(moment: str) -> None:
    source = Source([b"data: 1\n\n"] * 3, pings_before=lambda number: 10**9 if number == 1 else 0)
    made = keepalive(Dialect.CHAT, source)
    if moment != "before started":
        events = made.events()
        assert await anext(events) == b"data: 1\n\n"
        if moment == "while pinging":
            assert await anext(events) == b": ping\n\n"
        await events.aclose()
    else:
        await made.aclose()
    assert source.closed or moment == "before started"


@asynccontextmanager
async def served(dialect: Dialect, source: Source, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async def handler(request: web.Request) -> web.StreamResponse:
        made = keepalive(dialect, source, **options)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        async for piece in made.events():
            await reply.write(piece)
        await reply.write_eof()
        return reply

    app = web.Application()
    app.router.add_post("/v1/{route:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_openai_client_reads_a_chat_stream_through_pings() -> None:
    chunks = [*ADAPTERS[Dialect.CHAT].events(CHAT)]
    async with served(Dialect.CHAT, Source(chunks, pings_before=lambda _: 1)) as client:
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == "hello there"


@pytest.mark.parametrize("opening", [OPENING, None])
async def test_openai_client_accumulates_a_response_through_pings(opening: dict[str, Any] | None) -> None:
    source = Source([*ADAPTERS[Dialect.RESPONSES].events(RESPONSE)], pings_before=lambda _: 1)
    async with served(Dialect.RESPONSES, source, opening=opening) as client:
        async with client.responses.stream(model="m", input="hi") as stream:
            final = await stream.get_final_response()
    assert (final.id, final.output_text) == ("resp_1", 'hello "sequence_number": 7')
    assert source.keepalive is not None and source.keepalive.pings >= len(source.chunks)


async def test_openai_client_raises_when_a_stream_fails_after_the_headers() -> None:
    source = Source([*ADAPTERS[Dialect.CHAT].events(CHAT)][:1], pings_before=lambda _: 1, error=ModelError("gone"))
    async with served(Dialect.CHAT, source) as client:
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), (400, "invalid_request_error"), (502, "api_error")],
)
def test_messages_failure_has_the_type_that_clients_act_on(status: int, kind: str) -> None:
    error = NemoGymError("x")
    error.status = status  # type: ignore[misc]
    (data,) = events_of(failure_event(Dialect.MESSAGES, error))
    assert orjson.loads(data)["error"]["type"] == kind
