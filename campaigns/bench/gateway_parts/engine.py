"""A scripted engine in a separate process: one prepared response after a delay, at a few tens of µs per call.

It speaks vLLM's ``/v1/completions`` (with ``return_token_ids``: the prompt's ids are repeated, as vLLM does) and
OpenAI's ``/v1/chat/completions``. ``POST /scenario`` prepares the response to all following calls; ``GET /calls``
returns how many there were.

    python engine.py FD        with FD a listening socket
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import orjson
import uvloop

from nemo_gym.http.webserver import keep_memory

_PLACE = "<<prompt>>"


@dataclass(frozen=True)
class Scenario:
    """The response to all following calls."""

    text: str
    """The text as the policy samples it, including tool calls."""
    content: str | None
    """The text that remains after an endpoint has parsed the tool calls."""
    calls: list[dict[str, str]]
    """``{name, arguments}``."""
    ids: list[int]
    """Sampled tokens."""
    tokens: list[str]
    """Their texts."""
    logprobs: list[float]
    delay_s: float = 0.0
    """The average delay of the response."""
    jitter: float = 0.0
    """The largest deviation of a call's delay from the average, as a share of the average."""

    def to_json(self) -> bytes:
        return orjson.dumps(self.__dict__)


@dataclass
class Prepared:
    """A scenario as bytes: those before and those after the part that differs from call to call."""

    scenario: Scenario
    completion: tuple[bytes, bytes] = field(init=False)
    chat: tuple[bytes, bytes] = field(init=False)
    chat_logprobs: tuple[bytes, bytes] = field(init=False)
    delays: list[float] = field(init=False)

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.completion = _cut(_completion(scenario))
        self.chat = _cut(_chat(scenario, logprobs=False))
        self.chat_logprobs = _cut(_chat(scenario, logprobs=True))
        spread = random.Random(5)
        self.delays = [
            scenario.delay_s * (1 + scenario.jitter * (2 * at / 512 - 1)) for at in spread.sample(range(513), 513)
        ]


def _cut(answer: dict[str, Any]) -> tuple[bytes, bytes]:
    before, behind = orjson.dumps(answer).split(b'"' + _PLACE.encode() + b'"')
    return before, behind


def _usage(scenario: Scenario) -> dict[str, Any]:
    return {"prompt_tokens": 1000, "completion_tokens": len(scenario.ids), "total_tokens": 1000 + len(scenario.ids)}


def _completion(scenario: Scenario) -> dict[str, Any]:
    offsets = []
    at = 0
    for token in scenario.tokens:
        offsets.append(at)
        at += len(token)
    choice = {
        "index": 0,
        "text": scenario.text,
        "logprobs": {
            "text_offset": offsets,
            "token_logprobs": scenario.logprobs,
            "tokens": scenario.tokens,
            "top_logprobs": [{t: lp} for t, lp in zip(scenario.tokens, scenario.logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": scenario.ids,
        "prompt_logprobs": None,
        "prompt_token_ids": _PLACE,
    }
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "policy"}
    return {**head, "choices": [choice], "usage": _usage(scenario)}


def _chat(scenario: Scenario, *, logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": scenario.content}
    if scenario.calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": c} for n, c in enumerate(scenario.calls)
        ]
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if scenario.calls else "stop",
    }
    if logprobs:
        choice["logprobs"] = {
            "content": [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in zip(scenario.tokens, scenario.logprobs, strict=True)
            ]
        }
        choice["token_ids"] = scenario.ids
    head = {"id": _PLACE, "object": "chat.completion", "created": 1, "model": "policy"}
    return {**head, "choices": [choice], "usage": _usage(scenario)}


class Answers(Protocol):
    """What all connections of a server share."""

    def answer(self, path: bytes, body: bytes) -> tuple[bytes, float]:
        """Return the response's body and its delay in seconds. Raises `KeyError` for an unknown route."""
        ...


class Engine:
    """Responds with the prepared scenario."""

    def __init__(self) -> None:
        self.calls = 0
        self.prepared: Prepared | None = None

    def answer(self, path: bytes, body: bytes) -> tuple[bytes, float]:
        """Return the response's body and its delay in seconds. Raises `KeyError` for an unknown route."""
        if path == b"/scenario":
            self.prepared = Prepared(Scenario(**orjson.loads(body)))
            return b"{}", 0.0
        if path == b"/calls":
            return orjson.dumps({"calls": self.calls}), 0.0
        if path in (b"/health", b"/v1/models"):
            return b'{"object":"list","data":[]}', 0.0
        prepared = self.prepared
        if prepared is None:
            raise KeyError(path)
        self.calls += 1
        delay = prepared.delays[self.calls % len(prepared.delays)]
        if path == b"/v1/completions":
            before, behind = prepared.completion
            return before + _prompt(body) + behind, delay
        if path == b"/v1/chat/completions":
            before, behind = prepared.chat_logprobs if b'"logprobs":true' in body else prepared.chat
            return b'%b"chatcmpl-%d"%b' % (before, self.calls, behind), delay
        raise KeyError(path)


def _prompt(body: bytes) -> bytes:
    """Return the prompt's ids, byte for byte as the request has them."""
    start = body.index(b'"prompt":') + len(b'"prompt":')
    start = body.index(b"[", start)
    return body[start : body.index(b"]", start) + 1]


class EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Answers) -> None:
        self._engine = engine
        self._held = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        self._held += data
        while self._held and len(self._held) >= self._needed:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._held[:end])
            lowered = head.lower()
            length = 0
            if (at := lowered.find(b"content-length:")) >= 0:
                length = int(lowered[at + 15 :].split(b"\r\n", 1)[0])
            self._needed = end + 4 + length
            if len(self._held) < self._needed:
                return
            body = bytes(self._held[end + 4 : self._needed])
            del self._held[: self._needed]
            self._needed = 0
            self._serve(head.split(b" ", 2)[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        try:
            answer, delay = self._engine.answer(path, body)
            status = b"200 OK"
        except (KeyError, ValueError) as error:
            answer, delay, status = orjson.dumps({"error": {"message": repr(error)}}), 0.0, b"400 Bad Request"
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(answer))
        if delay:
            asyncio.get_running_loop().call_later(delay, self._write, head, answer)
        else:
            self._write(head, answer)

    def _write(self, head: bytes, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(head + answer)


async def serve(listener: socket.socket) -> None:
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(
        lambda: EngineConnection(engine), sock=listener, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    keep_memory()
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1]))))
