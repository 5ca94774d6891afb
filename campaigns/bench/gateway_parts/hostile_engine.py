"""An OpenAI-compatible endpoint in a separate process that does what the last message of a request says.

``poison`` gets a 500, the response to ``endless`` never ends, and anything else gets a short answer at once. ``POST
/mode`` takes ``{"mode": "well" | "sick" | "waiting"}``: a sick endpoint responds with 500 to everything, its health
route included; a waiting one is healthy, and responds to all calls with a ``Retry-After`` of thirty years.

    python hostile_engine.py FD        with FD a listening socket
"""

from __future__ import annotations

import contextlib
import socket
import sys

import orjson
from aiohttp import web

_ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
_MODE = web.AppKey("mode", dict[str, str])
_PIECE = b" " * (256 << 10)


async def mode(request: web.Request) -> web.Response:
    request.app[_MODE].update(orjson.loads(await request.read()))
    return web.Response()


async def health(request: web.Request) -> web.Response:
    return web.Response(status=500 if request.app[_MODE]["mode"] == "sick" else 200, text="{}")


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    now = request.app[_MODE]["mode"]
    tail = body[-200:]
    if now == "sick" or b"poison" in tail:
        return web.Response(status=500, text='{"error": {"message": "broken"}}')
    if now == "waiting":
        return web.Response(status=429, text="{}", headers={"Retry-After": "999999999"})
    if b"endless" not in tail:
        return web.json_response(_ANSWER)
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    await answer.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await answer.write(_PIECE)
    return answer


def main() -> None:
    app = web.Application(client_max_size=1 << 30)
    app[_MODE] = {"mode": "well"}
    app.router.add_post("/mode", mode)
    app.router.add_get("/v1/models", health)
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, sock=socket.socket(fileno=int(sys.argv[1])), print=None, handle_signals=False)


if __name__ == "__main__":
    main()
