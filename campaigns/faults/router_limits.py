"""A healthy engine without capacity: it responds to every call with 429 and ``Retry-After``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web


@dataclass
class Limited:
    port: int = 0
    asked: int = 0


@asynccontextmanager
async def limited_engine(retry_after_s: int) -> AsyncIterator[Limited]:
    limited = Limited()

    async def infer(request: web.Request) -> web.Response:
        limited.asked += 1
        await request.read()
        body = {"error": {"message": "too many requests", "code": 429}}
        return web.json_response(body, status=429, headers={"Retry-After": str(retry_after_s)})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", infer)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    limited.port = runner.addresses[0][1]
    try:
        yield limited
    finally:
        await runner.cleanup()
