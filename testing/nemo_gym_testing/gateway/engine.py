"""The part of a fake engine that is the same on every wire: its server, its log, its faults."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from nemo_gym_testing.gateway.asked import Asked
from nemo_gym_testing.gateway.faults import Abort, CutOff, Fault, Garbage, Hang, Status
from nemo_gym_testing.gateway.sampler import Sampler, hashed_sampler

Outcome = Literal["sampling", "answered", "cancelled", "faulted", "refused", "failed"]


@dataclass(slots=True)
class CallLog:
    """One inference request, as the engine received it."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    connection: int = 0
    """The client's port, which identifies the connection."""
    outcome: Outcome = "sampling"
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    """Why sampling stopped; ``None`` until it has."""
    stop_reason: str | int | None = None
    """The stop string or requested stop token that ended sampling."""
    cached_tokens: int | None = None
    """Prompt tokens that came from the cache; ``None`` if the engine has no cache."""
    fault: Fault | None = None


@dataclass(slots=True)
class Answer:
    """A complete response on one wire, and the same response as events of a stream."""

    whole: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    done_marker: bool = True


class FakeEngine:
    """``async with FakeVllmEngine() as engine`` serves at ``engine.url`` until the block ends. ``stop()`` and
    ``start()`` take it down and up again at the same port, as a crash and a restart would."""

    ROUTES: tuple[str, ...] = ()
    HEALTH: str = "/health"

    def __init__(self, sampler: Sampler | None = None, *, weights_version: str = "w0", port: int = 0) -> None:
        """``port``: 0 chooses a free port."""
        self.sampler = sampler or hashed_sampler()
        self.weights_version = weights_version
        self.calls: list[CallLog] = []
        self.probes = 0
        self.healthy = True
        self.faults: deque[Fault] = deque()
        """Each fault is used up by one inference request."""
        self.chance: Callable[[], Fault | None] = lambda: None
        """Called for a fault at every inference request for which `faults` has none."""
        self.gate = asyncio.Event()
        """Responses wait for this event; it is set unless a test clears it."""
        self.gate.set()
        self.event_gate: asyncio.Semaphore | None = None
        """If there is one, each event of a stream acquires a permit first."""
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def answered(self) -> list[CallLog]:
        return [call for call in self.calls if call.outcome == "answered"]

    def answer(self, call: CallLog) -> Answer:
        """Sample for ``call``, fill in its tokens, and return the response in the wire's format."""
        raise NotImplementedError

    def sample(self, call: CallLog, prompt_ids: Sequence[int], max_tokens: int) -> str:
        """Sample for ``call`` into its log; return the finish reason."""
        sampled = self.sampler(prompt_ids, max_tokens, len(self.calls))
        count = len(sampled.token_ids)
        finish = "stop" if sampled.stopped else "length"
        if isinstance(call.fault, Abort):
            count, finish = call.fault.after_tokens, "abort"
        call.token_ids, call.logprobs = sampled.token_ids[:count], sampled.logprobs[:count]
        call.finish_reason = finish
        call.stop_reason = sampled.stop_reason if finish == "stop" else None
        return finish

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        for route in self.ROUTES:
            app.router.add_post(route, self._infer)
        app.router.add_get(self.HEALTH, self._probe)
        self.add_routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    def add_routes(self, app: web.Application) -> None:
        """Add routes besides inference and health."""

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self.stop()

    async def _probe(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        call = CallLog(request.path, orjson.loads(await request.read()), dict(request.headers))
        if request.transport is not None:
            call.connection = request.transport.get_extra_info("peername")[1]
        self.calls.append(call)
        call.fault = self.faults.popleft() if self.faults else self.chance()
        try:
            reply = await self._reply(request, call)
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            raise
        except ConnectionError:
            call.outcome = "cancelled"
            raise
        if call.outcome == "sampling":
            call.outcome = "answered" if call.fault is None else "faulted"
        return reply

    async def _reply(self, request: web.Request, call: CallLog) -> web.StreamResponse:
        fault = call.fault
        await self.gate.wait()
        if isinstance(fault, Status):
            return web.Response(status=fault.code, body=fault.body, headers=fault.headers)
        if isinstance(fault, Garbage):
            return web.Response(body=fault.body)
        if isinstance(fault, Hang):
            await asyncio.Event().wait()
        return await self.respond(request, call)

    async def respond(self, request: web.Request, call: CallLog) -> web.StreamResponse:
        """Send the response, with the faults that happen while it is sent."""
        fault = call.fault
        answer = self.answer(call)
        if not call.body.get("stream"):
            if isinstance(fault, CutOff):
                self.cut(request)
            return web.Response(body=orjson.dumps(answer.whole), content_type="application/json")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        async for number, event in self._events(answer):
            if isinstance(fault, CutOff) and number >= fault.after_events:
                self.cut(request)
                return reply
            await reply.write(b"data: " + orjson.dumps(event) + b"\n\n")
        if answer.done_marker:
            await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()
        return reply

    async def _events(self, answer: Answer) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        for number, event in enumerate(answer.events):
            if self.event_gate is not None:
                await self.event_gate.acquire()
            yield number, event

    @staticmethod
    def cut(request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()


class FakeTokenEngine(FakeEngine):
    """An engine whose wire carries token ids. Subclasses read the requests and write the responses."""

    max_model_len: int | None = None
    """The model's length in ``/v1/models``; with ``None`` that route answers 404."""
    tokenizer: Callable[[str], list[int]] | None = None
    """The function behind ``/tokenize``; with ``None`` that route answers 404."""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/tokenize", self._tokenize)

    async def _list_models(self, request: web.Request) -> web.Response:
        if self.max_model_len is None:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            raise web.HTTPNotFound
        ids = self.tokenizer((await request.json())["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    def asked(self, call: CallLog) -> Asked:
        raise NotImplementedError

    def whole(self, call: CallLog, asked: Asked) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        raise NotImplementedError

    def event(self, call: CallLog, asked: Asked, start: int, end: int, *, last: bool) -> dict[str, Any]:
        """Return the event with tokens ``[start:end]``."""
        raise NotImplementedError

    def closing(self, call: CallLog, asked: Asked) -> list[dict[str, Any]]:
        """Return the events after the last token."""
        return []

    def answer(self, call: CallLog) -> Answer:
        asked = self.asked(call)
        self.sample(call, asked.prompt_ids, asked.max_tokens)
        count = len(call.token_ids)
        events = [self.event(call, asked, i, i + 1, last=i == count - 1) for i in range(count)]
        events = events or [self.event(call, asked, 0, 0, last=True)]
        return Answer(self.whole(call, asked), events + self.closing(call, asked))
