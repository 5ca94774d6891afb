"""Servers that sample from a tiny policy's model, on the wires of real engines.

Logprobs are those of the raw distribution, at temperature 1 and before truncation, whatever the request's sampling
parameters. vLLM returns these by default, SGLang if it is set to return original logprobs, and trainers recompute
them. All forward passes run in one thread beside the event loop, in small pieces by turns, so concurrent calls share
the model, and a call whose client disconnects stops within a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from aiohttp import web

from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym_testing.gateway.asked import Asked
from nemo_gym_testing.gateway.engine import CallLog, FakeTokenEngine, Outcome
from nemo_gym_testing.gateway.faults import Abort, CutOff
from nemo_gym_testing.gateway.sglang import FakeSglangEngine
from nemo_gym_testing.gateway.tiny.generation import Generation
from nemo_gym_testing.gateway.tiny.log import EngineCall, EngineLog
from nemo_gym_testing.gateway.tiny.model import TinyModel
from nemo_gym_testing.gateway.tiny.prefixes import PrefixCache
from nemo_gym_testing.gateway.tiny.rendering import AnswerRenderer
from nemo_gym_testing.gateway.tiny.script import CallView, Script
from nemo_gym_testing.gateway.vllm import FakeVllmEngine

T = TypeVar("T")
_PIECE_TOKENS = 16
"""Tokens that one call samples before other calls have their turn."""


class TinyEngine(FakeTokenEngine):
    """``async with TinyVllmEngine(policy_dir) as engine`` serves at ``engine.url``. ``engine.log.calls`` records what
    it sampled; with ``log`` the record is also a file, for `check_truth` and for other processes."""

    def __init__(
        self,
        policy_dir: str | Path,
        script: Script | None = None,
        *,
        log: str | Path | None = None,
        seed: int = 0,
        first_token_delay_s: float = 0.0,
        tokens_per_second: float | None = None,
        max_context_tokens: int = 131_072,
        **server: Any,
    ) -> None:
        """``seed``: for calls without a seed of their own; each call draws differently. ``tokens_per_second``: limits
        the speed of each call. ``server``: arguments of the fake engine of the same wire.

        Raises `ConfigError` for an incomplete policy directory.
        """
        super().__init__(**server)
        self.policy = PolicyTokenizer.load(policy_dir)
        self.model = TinyModel.load(policy_dir)
        self.script = script
        self.log = EngineLog(log)
        self.prefixes = PrefixCache(self.model.shape)
        self._renderer = AnswerRenderer(self.policy) if script is not None else None
        self._seed = seed
        self._first_token_delay_s = first_token_delay_s
        self._token_delay_s = 1 / tokens_per_second if tokens_per_second else 0.0
        self._max_context_tokens = max_context_tokens
        self._thread: ThreadPoolExecutor | None = None

    async def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tiny-model")
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.prefixes.clear()
        self.log.close()

    async def respond(self, request: web.Request, call: CallLog) -> web.StreamResponse:
        number = len(self.calls) - 1
        try:
            asked = self.asked(call)
            refusal = self._refusal(asked)
        except (KeyError, TypeError, ValueError) as error:
            refusal = f"the body is not this wire's: {type(error).__name__}: {error}"
        if refusal is not None:
            call.outcome = "refused"
            return _error(400, "BadRequestError", refusal)
        try:
            forced = await self._in_thread(lambda: self._forced_ids(asked, number))
        except Exception as error:
            call.outcome = "failed"
            return _error(500, "ScriptError", f"the script failed: {type(error).__name__}: {error}")
        generation = Generation(
            asked,
            self.model,
            self.prefixes,
            end_ids=self.policy.stop_ids,
            decode=self.policy.decode,
            rng=np.random.default_rng(asked.seed if asked.seed is not None else [self._seed, number]),
            forced=forced,
        )
        fault = type(call.fault).__name__ if call.fault is not None else None
        entry = self.log.begin(
            asked.request_id, asked.prompt_ids, asked.max_tokens, forced=forced is not None, fault=fault
        )
        delivery = _Delivery(self, request, call, asked)
        outcome: Outcome = "failed"
        try:
            async for _ in self._pieces(generation, entry, call):
                if asked.stream:
                    await delivery.send()
                if delivery.cut:
                    break
            reply = await delivery.end()
            outcome = call.outcome = "faulted" if delivery.cut or isinstance(call.fault, Abort) else "answered"
        except (asyncio.CancelledError, ConnectionError):
            outcome = "faulted" if delivery.cut else "cancelled"
            raise
        else:
            return reply
        finally:
            self.log.end(entry, outcome, delivery.sent)
            if self._thread is not None:
                self._thread.submit(generation.release)

    async def _pieces(self, generation: Generation, entry: EngineCall, call: CallLog) -> AsyncIterator[None]:
        """Advance the generation; yield each time new tokens are in the logs, and when it is done."""
        await asyncio.sleep(self._first_token_delay_s)
        budget = call.fault.after_tokens if isinstance(call.fault, Abort) else None
        while generation.finish is None:
            done = len(generation.token_ids)
            if budget is not None and done >= budget:
                generation.finish = "abort"
            else:
                piece = 1 if self._token_delay_s else _PIECE_TOKENS
                piece = piece if budget is None else min(piece, budget - done)
                try:
                    await self._in_thread(lambda piece=piece: generation.advance(piece), generation.cancel)  # type: ignore[misc]
                finally:
                    call.token_ids, call.logprobs = tuple(generation.token_ids), tuple(generation.logprobs)
                    call.cached_tokens = entry.cached_tokens = generation.cached_tokens
                    entry.finish = generation.finish
                    if len(generation.token_ids) > done:
                        self.log.sampled(entry, generation.token_ids[done:], generation.logprobs[done:])
            call.finish_reason, call.stop_reason = generation.finish, generation.stop_reason
            entry.finish = generation.finish
            if len(generation.token_ids) > done or generation.finish is not None:
                yield
                await asyncio.sleep(self._token_delay_s)

    async def _in_thread(self, work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """Run ``work`` in the model's thread. If this task is cancelled, call ``cancel`` and wait for ``work``."""
        if self._thread is None:
            raise ConnectionError("the engine is stopped")
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancel()
            await asyncio.wait([running])
            raise

    def _refusal(self, asked: Asked) -> str | None:
        prompt, limit = len(asked.prompt_ids), self._max_context_tokens
        if not prompt:
            return "the prompt is empty"
        if not all(isinstance(token, int) and 0 <= token < self.model.shape.vocabulary for token in asked.prompt_ids):
            return f"the prompt holds what is no token id below {self.model.shape.vocabulary}"
        if asked.max_tokens < 1:
            return f"max_tokens must be at least 1, got {asked.max_tokens}"
        if prompt + asked.max_tokens > limit:
            return (
                f"the maximum context length is {limit} tokens, and {prompt + asked.max_tokens} are asked for"
                f" ({prompt} of the prompt, {asked.max_tokens} to sample)"
            )
        return None

    def _forced_ids(self, asked: Asked, number: int) -> list[int] | None:
        if self.script is None or self._renderer is None:
            return None
        at = self._renderer.split(asked.prompt_ids)
        prefix = list(asked.prompt_ids[at:])
        prompt_ids = asked.prompt_ids[:at]
        answer = self.script(CallView(self.policy.decode(prompt_ids), prompt_ids, number, self._renderer))
        ids = self._renderer.ids(answer) if answer is not None else []
        # Continue an answer that broke off on another engine where it was, unless it was not forced there.
        return ids[len(prefix) :] if len(ids) > len(prefix) and ids[: len(prefix)] == prefix else None


class _Delivery:
    """The sending of one response: what was written, and where a fault cuts it off."""

    def __init__(self, engine: TinyEngine, request: web.Request, call: CallLog, asked: Asked) -> None:
        self._engine, self._request, self._call, self._asked = engine, request, call, asked
        self._reply: web.StreamResponse | None = None
        self._limit = call.fault.after_events if isinstance(call.fault, CutOff) else None
        self.sent = 0
        """Tokens written."""
        self.cut = False

    async def send(self) -> None:
        """Send the events of the new tokens."""
        call = self._call
        if self._reply is None:
            self._reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._reply.prepare(self._request)
        count, finished = len(call.token_ids), call.finish_reason is not None
        while self.sent < count and not self.cut:
            last = finished and self.sent == count - 1
            await self._write(self._engine.event(call, self._asked, self.sent, self.sent + 1, last=last))
            self.sent += not self.cut
        if finished and not count:
            await self._write(self._engine.event(call, self._asked, 0, 0, last=True))

    async def end(self) -> web.StreamResponse:
        """Send the end of a stream, or the complete response."""
        if self._reply is None:
            whole = web.json_response(self._engine.whole(self._call, self._asked))
            if self._limit is not None:
                self._cut()
                return whole
            await whole.prepare(self._request)
            await whole.write_eof()
            self.sent = len(self._call.token_ids)
            return whole
        for event in self._engine.closing(self._call, self._asked):
            await self._write(event)
        if not self.cut:
            await self._reply.write(b"data: [DONE]\n\n")
            await self._reply.write_eof()
        return self._reply

    async def _write(self, event: dict[str, Any]) -> None:
        if self._limit is not None and self.sent >= self._limit:
            self._cut()
        if self.cut or self._reply is None:
            return
        if self._engine.event_gate is not None:
            await self._engine.event_gate.acquire()
        await self._reply.write(b"data: " + orjson.dumps(event) + b"\n\n")

    def _cut(self) -> None:
        self.cut = True
        self._engine.cut(self._request)


class TinyVllmEngine(TinyEngine, FakeVllmEngine):
    """A tiny engine on vLLM's wire."""


class TinySglangEngine(TinyEngine, FakeSglangEngine):
    """A tiny engine on SGLang's wire; ``incremental`` as in `FakeSglangEngine`."""


Wire = Literal["vllm", "sglang"]
ENGINES: dict[Wire, type[TinyEngine]] = {"vllm": TinyVllmEngine, "sglang": TinySglangEngine}


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)
