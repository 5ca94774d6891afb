"""A server on a socket that answers every dialect with the answer it is given, for real clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS, models_reply
from nemo_gym.gateway.dialects.errors import error_body
from nemo_gym.gateway.policy_request import Answer, PolicyRequest
from tests.gateway.dialects.bodies import answer


@dataclass
class Served:
    """What is answered, and what was asked."""

    url: str = ""
    answer: Answer = field(default_factory=lambda: answer("hello"))
    fail: NemoGymError | None = None
    seen: list[PolicyRequest] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        dialect = PATHS.get(request.path, Dialect.MESSAGES)
        adapter = ADAPTERS[dialect]
        body = await request.json()
        self.bodies.append(body)
        try:
            lowered = adapter.lower(body)
            if self.fail is not None:
                raise self.fail
        except NemoGymError as error:
            status, said = error_body(dialect, error)
            return web.json_response(said, status=status, headers={"x-should-retry": "false"})
        self.seen.append(lowered)
        if request.path.endswith("count_tokens"):
            return web.json_response({"input_tokens": 11})
        reply = adapter.reply(self.answer, lowered, body)
        if not lowered.stream:
            return web.json_response(reply)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for event in adapter.events(reply, with_usage=lowered.stream_usage):
            await stream.write(event)
        await stream.write_eof()
        return stream

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(models_reply(request.headers, ["policy", "other"]))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    state = Served()
    app = web.Application(client_max_size=2**26)
    for path in (*PATHS, "/v1/messages/count_tokens"):
        app.router.add_post(path, state.infer)
    app.router.add_get("/v1/models", state.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield state
    await runner.cleanup()
