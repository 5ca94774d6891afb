"""The simplest proxy between a harness and an engine: it streams the bytes and inspects none of them.
With ``read`` it is the simplest proxy that knows what it passes on: it parses and writes each body once.

    python raw_proxy.py FD ENGINE_URL [read]
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import orjson
import uvloop
from aiohttp import web

_KEPT = ("Content-Type", "Content-Length")


async def _client(app: web.Application) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        sys.argv[2], connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as http:
        app["http"] = http
        yield


async def _relay(request: web.Request) -> web.StreamResponse:
    http: aiohttp.ClientSession = request.app["http"]
    headers = {name: request.headers[name] for name in _KEPT if name in request.headers}
    async with http.request(request.method, request.path_qs, data=request.content, headers=headers) as reply:
        sent = {name: reply.headers[name] for name in _KEPT if name in reply.headers}
        response = web.StreamResponse(status=reply.status, headers=sent)
        await response.prepare(request)
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def _read(request: web.Request) -> web.Response:
    http: aiohttp.ClientSession = request.app["http"]
    body = orjson.dumps(orjson.loads(await request.read()))
    headers = {"Content-Type": "application/json"}
    async with http.request(request.method, request.path_qs, data=body, headers=headers) as reply:
        answer = orjson.dumps(orjson.loads(await reply.read()))
        return web.Response(status=reply.status, body=answer, headers=headers)


async def serve(listener: socket.socket) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(_client)
    app.router.add_route("*", "/{path:.*}", _read if "read" in sys.argv[3:] else _relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1]))))
