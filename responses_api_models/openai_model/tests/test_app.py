"""The server in front of real endpoints: one that speaks everything, ones that lack a dialect, and broken ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import orjson
import pytest
from aiohttp import ClientResponse, web

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import ModelError
from nemo_gym.server_utils import close_global_aiohttp_client, request
from responses_api_models.openai_model.app import SimpleModelServer, without_usage
from tests.servers.stack import Stack, rollout, running_stack

KEY = "sk-KEY-CANARY-123"
CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "real",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "chat says hi"}}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = {**CHAT, "choices": [{"index": 0, "finish_reason": "tool_calls", "message": CALLING}]}
RESPONSE = {
    "id": "r1",
    "object": "response",
    "created_at": 1,
    "model": "real",
    "status": "completed",
    "output": [
        {
            "id": "m1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "responses says hi", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 6, "output_tokens": 3, "total_tokens": 9},
}
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"content":"par"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"ts"},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]
UNCOUNTED = [*EVENTS[:2], EVENTS[3]]

REMOTE_FILE = {"type": "input_file", "file_url": "https://example.com/solution.patch"}
PROXYS_FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "HTTPS://example.com/a.pdf"}}
"""OpenRouter takes an address where others take data."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """A real HTTP server whose routes a test chooses."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.gone = asyncio.Event()
        self.url = ""

    def reply(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
        async def handler(asked: web.Request) -> web.Response:
            await self._note(asked)
            return web.json_response(body, status=status, headers=headers)

        return handler

    def sequence(self, *handlers: Handler) -> Handler:
        left = [*handlers]

        async def handler(asked: web.Request) -> web.StreamResponse:
            return await (left.pop(0) if len(left) > 1 else left[0])(asked)

        return handler

    async def _note(self, asked: web.Request) -> None:
        self.seen.append((asked.path, orjson.loads(await asked.read() or b"{}"), dict(asked.headers)))

    def stream(self, *events: bytes, cut: int = 10_000, pause_s: float = 0.0) -> Handler:
        """``cut``: the size of the pieces that are sent. ``pause_s``: between two events."""

        async def handler(asked: web.Request) -> web.StreamResponse:
            await self._note(asked)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(asked)
            for sent in events if pause_s else [b"".join(events)]:
                for start in range(0, len(sent), cut):
                    await stream.write(sent[start : start + cut])
                await asyncio.sleep(pause_s)
            return stream

        return handler

    async def hang(self, asked: web.Request) -> web.StreamResponse:
        await self._note(asked)
        try:
            await asyncio.sleep(3600)
        finally:
            self.gone.set()
        return web.Response()


@pytest.fixture
async def endpoint() -> AsyncIterator[Callable[..., Awaitable[Endpoint]]]:
    runners: list[web.AppRunner] = []

    async def start(**routes: Handler) -> Endpoint:
        made = Endpoint()
        app = web.Application()
        for name, handler in routes.items():
            app.router.add_post({"chat": "/v1/chat/completions"}.get(name, f"/v1/{name}"), handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return made

    yield start
    for runner in runners:
        await runner.cleanup()
    await close_global_aiohttp_client()


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


class Session:
    """A harness's view of the server in front of an endpoint."""

    def __init__(self, stack: Stack, opened: dict[str, Any]) -> None:
        self._stack, self._opened = stack, opened

    async def post(self, path: str, **body: Any) -> ClientResponse:
        headers = {"Authorization": f"Bearer {self._opened['inference_token']}"}
        return await request("POST", self._opened["base_url"] + path, json=body, headers=headers)

    async def chat(self, **body: Any) -> Any:
        reply = await self.post("/chat/completions", messages=[{"role": "user", "content": "hi"}], **body)
        return reply.status, await reply.json(content_type=None)

    async def finalize(self) -> dict[str, Any]:
        path = f"/sessions/{self._opened['session_id']}/finalize"
        headers = {CONTROL_TOKEN_HEADER: self._opened["control_token"]}
        reply = await self._stack.client().post("model", path, json={}, headers=headers)
        summary: dict[str, Any] = await reply.json()
        return summary


async def session(stack: Stack, url: str, **block: Any) -> Session:
    settings = {"openai_base_url": url, "openai_api_key": KEY, "openai_model": "real", **block}
    stack.add("model", SimpleModelServer, Role.MODEL, **settings)
    reply = await stack.client().post("model", "/sessions", json={"rollout": rollout().model_dump()})
    return Session(stack, await reply.json())


async def test_reply_is_passed_through_with_the_endpoints_model_and_key(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(CHAT), responses=made.reply(RESPONSE))
    harness = await session(stack, real.url, extra_body={"top_k": 5, "temperature": 1})
    assert await harness.chat(model="anything", temperature=0) == (200, CHAT)
    answer = await (await harness.post("/responses", input="hi")).json()
    assert answer == RESPONSE
    (path, body, headers), (other, *_) = made.seen
    assert (path, other) == ("/v1/chat/completions", "/v1/responses")
    assert body["model"] == "real" and body["temperature"] == 0 and body["top_k"] == 5
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert (await harness.finalize())["usage"] == {"input_tokens": 11, "output_tokens": 5, "total_tokens": 16}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/responses", {"input": "hi", "tools": [{"type": "web_search"}]}),
        ("/responses", {"input": "hi", "tools": [{"type": "function", "name": "f"}, {"type": "web_search_preview"}]}),
        ("/responses", {"input": "hi", "tools": [{"type": "mcp", "server_url": "https://mcp.example/"}]}),
        ("/responses", {"input": "hi", "metadata": {"extra_body": '{"plugins": [{"id": "web"}]}'}}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "web_search_options": {}}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "plugins": [{"id": "web"}]}),
        ("/responses", {"input": [{"role": "user", "content": [REMOTE_FILE]}]}),
        ("/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": [REMOTE_FILE]}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [PROXYS_FILE]}]}),
    ],
)
async def test_box_gets_no_network_through_the_endpoints_own_tools(
    stack: Stack, endpoint: Any, path: str, asked: dict[str, Any]
) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(CHAT), responses=made.reply(RESPONSE))
    reply = await (await session(stack, real.url)).post(path, **asked)
    assert (reply.status, made.seen) == (400, [])
    assert "hosted_tools" in await reply.text()


async def test_data_of_a_file_reaches_the_endpoint(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(responses=made.reply(RESPONSE))
    harness = await session(stack, real.url)
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aHR0cDovLw=="}
    assert (await harness.post("/responses", input=[{"role": "user", "content": ["hi", file]}])).status == 200
    assert made.seen[0][1]["input"][0]["content"][1] == file


async def test_endpoints_own_tools_are_used_where_a_run_allows_them(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(responses=made.reply(RESPONSE))
    harness = await session(stack, real.url, hosted_tools=True)
    assert (await harness.post("/responses", input="hi", tools=[{"type": "web_search"}])).status == 200
    assert made.seen[0][1]["tools"] == [{"type": "web_search"}]


@pytest.mark.parametrize("missing", [(), ("responses",)], ids=["passed through", "translated"])
async def test_parameters_in_metadata_reach_the_endpoint(
    stack: Stack, endpoint: Any, missing: tuple[str, ...]
) -> None:
    made = Endpoint()
    routes = {"chat": made.reply(CHAT), "responses": made.reply(RESPONSE)}
    real = await endpoint(**{name: reply for name, reply in routes.items() if name not in missing})
    harness = await session(stack, real.url)
    metadata = {"chat_template_kwargs": '{"enable_thinking": false}', "extra_body": '{"top_k": 5, "temperature": 1}'}
    await harness.post("/responses", input="hi", metadata=metadata, temperature=0)
    _, body, _ = made.seen[-1]
    assert (body["chat_template_kwargs"], body["top_k"]) == ({"enable_thinking": False}, 5)
    assert "metadata" not in body and body["temperature"] == 0


async def test_responses_are_translated_when_the_endpoint_has_only_chat(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(TOOLS))
    harness = await session(stack, real.url)
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    first = await (await harness.post("/responses", input="hi", instructions="be brief", tools=tools)).json()
    call = first["output"][-1]
    assert (call["type"], call["call_id"], first["usage"]["input_tokens"]) == ("function_call", "call_1", 5)
    result = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
    items = [{"role": "user", "content": "hi"}, *first["output"], result]
    await harness.post("/responses", input=items, tools=tools, max_output_tokens=7)
    sent = made.seen[-1][1]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["tool_calls"][0]["id"] == "call_1" and sent["max_tokens"] == 7
    assert made.seen[0][1]["messages"][0] == {"role": "system", "content": "be brief"}
    assert made.seen[0][1]["tools"][0]["function"]["name"] == "look"


async def test_chat_is_translated_when_the_endpoint_has_only_responses(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(responses=made.reply(RESPONSE))
    harness = await session(stack, real.url)
    status, completion = await harness.chat(max_tokens=9)
    assert status == 200 and completion["choices"][0]["message"]["content"] == "responses says hi"
    assert completion["usage"]["prompt_tokens"] == 6 and made.seen[0][1]["max_output_tokens"] == 9


async def test_messages_are_answered_by_a_chat_endpoint(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(CHAT))
    harness = await session(stack, real.url)
    asked = {"max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "hi"}]}
    answer = await (await harness.post("/messages", **asked)).json()
    assert answer["content"] == [{"type": "text", "text": "chat says hi"}] and answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_answer_that_the_endpoint_broke_off_is_no_reply(stack: Stack, endpoint: Any, path: str) -> None:
    made = Endpoint()
    choice = {"index": 0, "message": {"role": "assistant", "content": "The first half"}, "finish_reason": "error"}
    real = await endpoint(chat=made.reply({**CHAT, "choices": [choice]}))
    harness = await session(stack, real.url)
    reply = await harness.post(path, max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    assert (reply.status, reply.headers["x-should-retry"]) == (502, "true")


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize(
    ("code", "status", "tries"),
    [(502, 502, 2), ("server_error", 502, 2), (429, 429, 1), ("429", 429, 1), (408, 408, 1), (400, 400, 1)],
)
async def test_error_in_a_body_with_status_200_is_treated_as_the_status_that_it_names(
    stack: Stack, endpoint: Any, path: str, code: int | str, status: int, tries: int
) -> None:
    made = Endpoint()
    told = made.reply({"error": {"code": code, "message": "Provider returned error"}, "user_id": "u"})
    real = await endpoint(chat=told, responses=told)
    harness = await session(stack, real.url, max_retries=1)
    asked = {"input": "hi"} if path == "/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    reply = await harness.post(path, max_tokens=9, **asked)
    assert (reply.status, len(made.seen)) == (status, tries)
    assert "Provider returned error" in await reply.text()


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"status": "failed", "error": {"code": "server_error", "message": "it broke"}, "output": []}, "it broke"),
        ({"status": "cancelled", "error": None}, "cancelled"),
    ],
)
async def test_response_that_the_endpoint_did_not_finish_is_no_reply(
    stack: Stack, endpoint: Any, path: str, changed: dict[str, Any], said: str
) -> None:
    real = await endpoint(responses=Endpoint().reply({**RESPONSE, **changed}))
    harness = await session(stack, real.url)
    asked = {"input": "hi"} if path == "/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    reply = await harness.post(path, max_tokens=9, **asked)
    assert (reply.status, reply.headers["x-should-retry"]) == (502, "true")
    assert said in await reply.text()


async def test_token_limit_gets_the_name_that_the_endpoint_asks_for(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    refused = made.reply({"error": {"message": said}}, 400)
    real = await endpoint(chat=made.sequence(refused, made.reply(CHAT)))
    harness = await session(stack, real.url)
    assert await harness.chat(max_tokens=9) == (200, CHAT)
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert (await harness.post("/messages", **asked)).status == 200
    assert [body.get("max_tokens") for _, body, _ in made.seen] == [9, None, None]
    assert [body.get("max_completion_tokens") for _, body, _ in made.seen] == [None, 9, 9]


async def test_stream_is_relayed_event_by_event_and_counted(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.stream(*EVENTS))
    harness = await session(stack, real.url)
    for asked, events in [
        ({}, UNCOUNTED),
        ({"stream_options": {"include_usage": False}}, UNCOUNTED),
        ({"stream_options": {"include_usage": True}}, EVENTS),
    ]:
        reply = await harness.post("/chat/completions", messages=[], stream=True, **asked)
        assert await reply.read() == b"".join(events)
        assert made.seen[-1][1]["stream_options"] == {"include_usage": True}
    summary = await harness.finalize()
    assert (summary["turns"], summary["usage"]["total_tokens"]) == (3, 21)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_usage_that_was_not_asked_for_is_left_out_however_the_stream_is_cut(size: int, newline: bytes) -> None:
    others = [b": ping\n\n", b'data: {"choices":[],"prompt_filter_results":[]}\n\n', b'data: "usage"\n\n', *UNCOUNTED]
    sent, expected = (
        b"".join(events).replace(b"\n", newline).removesuffix(newline) for events in ([*others[:3], *EVENTS], others)
    )

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(sent), size):
            yield sent[start : start + size]

    assert b"".join([piece async for piece in without_usage(pieces())]) == expected


async def test_stream_is_one_of_the_concurrent_requests_until_its_end(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    may_end = asyncio.Event()

    async def slow_events(asked: web.Request) -> web.StreamResponse:
        stream = await made.stream(*EVENTS)(asked)
        await may_end.wait()
        return stream

    real = await endpoint(chat=made.sequence(slow_events, made.reply(CHAT)))
    harness = await session(stack, real.url, max_concurrent_requests=1)
    streamed = await harness.post("/chat/completions", messages=[], stream=True)
    await streamed.content.readexactly(len(EVENTS[0]))
    other = asyncio.create_task(harness.chat())
    await asyncio.wait({other}, timeout=0.5)
    assert (other.done(), len(made.seen)) == (False, 1)
    may_end.set()
    await streamed.read()
    assert await other == (200, CHAT)


async def test_stream_that_nobody_reads_leaves_the_concurrent_requests(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.sequence(made.stream(*EVENTS), made.reply(CHAT)))
    harness = await session(stack, real.url, max_concurrent_requests=1)
    server: Any = stack.servers["model"]
    infer = server.infer

    async def infer_for_nobody(call: Any) -> Any:
        del server.__dict__["infer"]
        await infer(call)
        raise ModelError("its caller left")

    server.__dict__["infer"] = infer_for_nobody
    assert (await harness.post("/chat/completions", messages=[], stream=True)).status == 502
    assert await asyncio.wait_for(harness.chat(), 20) == (200, CHAT)


@pytest.mark.parametrize("cut", [1, 10_000])
async def test_stream_that_the_endpoint_broke_off_ends_with_an_error(stack: Stack, endpoint: Any, cut: int) -> None:
    half = [EVENTS[0], b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', *EVENTS[2:]]
    real = await endpoint(chat=Endpoint().stream(*half, cut=cut))
    harness = await session(stack, real.url)
    reply = await harness.post("/chat/completions", messages=[], stream=True)
    *before, last = (await reply.read()).removesuffix(b"\n\n").split(b"\n\n")
    error = orjson.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], "'abort'" in error["message"]) == ("server_error", True)
    assert b"".join(before) in (b"", EVENTS[0].strip())
    assert (await harness.finalize())["turns"] == 0


async def test_stream_of_comments_alone_reaches_the_caller_before_the_model_has_thought(
    stack: Stack, endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_api_models.openai_model.app.COMMENTS_HELD_S", 0.01, raising=False)
    opened = asyncio.Event()

    async def thinking(asked: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(asked)
        for _ in range(200):
            if not opened.is_set():
                await stream.write(b": OPENROUTER PROCESSING\n\n")
                await asyncio.sleep(0.01)
        await stream.write(b"".join(EVENTS) if opened.is_set() else b'data: {"error": {"code": 400}}\n\n')
        return stream

    real = await endpoint(chat=thinking)
    harness = await session(stack, real.url)
    reply = await harness.post("/chat/completions", messages=[], stream=True)
    opened.set()
    assert reply.status == 200 and EVENTS[0] in await reply.read()


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("breaks", [True, False], ids=["connection breaks", "body ends"])
async def test_stream_that_ends_without_saying_so_ends_with_an_error(
    stack: Stack, endpoint: Any, path: str, breaks: bool
) -> None:
    begun = b'event: response.created\ndata: {"type":"response.created","response":{"status":"in_progress"}}\n\n'

    async def cut_off(asked: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(asked)
        await stream.write(begun if path == "/responses" else EVENTS[0])
        if breaks and asked.transport is not None:
            asked.transport.close()  # after what was written
        return stream

    real = await endpoint(chat=cut_off, responses=cut_off)
    harness = await session(stack, real.url, max_retries=0)
    reply = await harness.post(path, stream=True, messages=[], input="hi")
    *_, last = (await reply.read()).removesuffix(b"\n\n").split(b"\n\n")
    assert b"server_error" in last
    assert (await harness.finalize())["turns"] == 0


async def test_stream_whose_answer_is_whole_needs_no_marker(stack: Stack, endpoint: Any) -> None:
    real = await endpoint(chat=Endpoint().stream(*EVENTS[:2]))
    harness = await session(stack, real.url)
    assert await (await harness.post("/chat/completions", messages=[], stream=True)).read() == b"".join(EVENTS[:2])


@pytest.mark.parametrize(("kind", "is_error"), [("response.completed", True), ("response.failed", False)])
async def test_stream_of_responses_that_was_aborted_does_not_end_as_a_whole_one(
    stack: Stack, endpoint: Any, kind: str, is_error: bool
) -> None:
    begun = b'event: response.created\ndata: {"type":"response.created","response":{"status":"in_progress"}}\n\n'
    ends = {"type": kind, "response": {"status": "cancelled" if is_error else "failed", "output": []}}
    end = f"event: {kind}\n".encode() + b"data: " + orjson.dumps(ends) + b"\n\n"
    real = await endpoint(responses=Endpoint().stream(begun, end))
    harness = await session(stack, real.url)
    said = await (await harness.post("/responses", stream=True, input="hi")).read()
    assert (b"'cancelled'" in said, said.endswith(end)) == (is_error, not is_error)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("form", ["event", "event after a comment", "event long after a comment", "object"])
@pytest.mark.parametrize(("code", "status", "tries"), [(502, 502, 2), ("429", 429, 1), (400, 400, 1)])
async def test_error_before_a_stream_begins_is_treated_as_the_status_that_it_names(
    stack: Stack, endpoint: Any, path: str, form: str, code: int | str, status: int, tries: int
) -> None:
    made, told = Endpoint(), {"error": {"code": code, "message": "Provider returned error"}}
    comment = b": OPENROUTER PROCESSING\n\n" if "comment" in form else b""
    event = b"data: " + orjson.dumps(told) + b"\n\ndata: [DONE]\n\n"
    pause_s = 0.05 if form == "event long after a comment" else 0.0
    handler = made.reply(told) if form == "object" else made.stream(comment, event, pause_s=pause_s)
    real = await endpoint(chat=handler, responses=handler)
    harness = await session(stack, real.url, max_retries=1)
    asked = {"input": "hi"} if path == "/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    reply = await harness.post(path, stream=True, **asked)
    assert (reply.status, len(made.seen)) == (status, tries)
    assert "Provider returned error" in await reply.text()


async def test_leaving_ends_the_endpoints_work(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.hang)
    harness = await session(stack, real.url)
    asking = asyncio.create_task(harness.chat())
    deadline = time.monotonic() + 20
    while not made.seen:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait_for(made.gone.wait(), 20)
    assert (await harness.finalize())["turns"] == 0


async def test_rate_limit_is_passed_on_with_its_wait(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply({"error": {"message": "slow down"}}, 429, {"Retry-After": "7"}))
    harness = await session(stack, real.url)
    reply = await harness.post("/chat/completions", messages=[])
    said = (await reply.json())["error"]
    assert (reply.status, said["type"], said["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert (float(reply.headers["Retry-After"]), reply.headers["x-should-retry"]) == (7.0, "true")
    assert len(made.seen) == 1


async def test_passing_failure_is_tried_again_and_a_lasting_one_is_reported(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    once = made.sequence(made.reply({}, 503), made.reply(CHAT))
    real = await endpoint(chat=once, responses=made.reply({"error": "broken"}, 500))
    harness = await session(stack, real.url, max_retries=1)
    assert (await harness.chat())[0] == 200
    reply = await harness.post("/responses", input="hi")
    said = (await reply.json())["error"]
    assert (reply.status, said["type"], reply.headers["x-should-retry"]) == (502, "server_error", "true")
    assert "500" in said["message"]
    assert len(made.seen) == 4


async def test_wait_that_an_overloaded_endpoint_asks_for_is_kept_and_passed_on(
    stack: Stack, endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_api_models.openai_model.app.FIRST_BACKOFF_S", 3600)
    made = Endpoint()
    once = made.sequence(made.reply({}, 503, {"Retry-After": "0"}), made.reply({}, 503, {"Retry-After": "7"}))
    real = await endpoint(chat=once)
    harness = await session(stack, real.url, max_retries=1, request_timeout_s=20)
    reply = await harness.post("/chat/completions", messages=[])
    assert (reply.status, reply.headers.get("Retry-After"), len(made.seen)) == (502, "7", 2)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "context length exceeded"}}),
        (404, {"error": {"message": "The model `real` does not exist", "code": "model_not_found"}}),
    ],
)
async def test_refused_request_is_the_harnesss_to_read(
    stack: Stack, endpoint: Any, status: int, body: dict[str, Any]
) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(body, status), responses=made.reply(RESPONSE))
    harness = await session(stack, real.url)
    assert await harness.chat() == (status, body)
    assert (await harness.finalize())["turns"] == 0


async def test_refused_request_is_said_in_the_dialect_of_a_harness_that_speaks_another(
    stack: Stack, endpoint: Any
) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply({"error": {"message": "context length exceeded"}}, 400))
    harness = await session(stack, real.url)
    reply = await harness.post("/messages", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert (reply.status, await reply.json()) == (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "context length exceeded"}},
    )


async def test_refused_key_is_named_and_never_shown(
    stack: Stack, endpoint: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    made = Endpoint()
    real = await endpoint(chat=made.reply({"error": f"Incorrect API key provided: {KEY}"}, 401))
    harness = await session(stack, real.url)
    status, problem = await harness.chat()
    assert status == 502 and "openai_api_key" in problem["error"]["message"]
    shown = capfd.readouterr()
    for text in (str(problem), caplog.text, shown.out, shown.err, repr(stack.servers["model"].config)):
        assert KEY not in text


async def test_unreachable_endpoint_is_named_with_its_setting(stack: Stack) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    harness = await session(stack, f"http://127.0.0.1:{port}/v1", max_retries=0)
    status, problem = await harness.chat()
    said = problem["error"]
    assert (status, said["type"], said["code"]) == (502, "server_error", "model")
    assert f"127.0.0.1:{port}" in said["message"] and "openai_base_url" in said["message"]
    ready = await request("GET", stack.url("model") + "/ready")
    assert ready.status == 503 and f"127.0.0.1:{port}" in (await ready.json())["detail"]


async def test_endpoint_without_any_route_is_named_with_its_setting(stack: Stack, endpoint: Any) -> None:
    real = await endpoint()
    harness = await session(stack, real.url.removesuffix("/v1"))
    status, problem = await harness.chat()
    assert status == 502 and "neither" in problem["error"]["message"] and "/v1" in problem["error"]["message"]


async def test_hanging_endpoint_is_given_up_after_its_time(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.hang)
    harness = await session(stack, real.url, request_timeout_s=0.2, max_retries=0)
    status, problem = await harness.chat()
    assert status == 504 and "longer than 0.2 s" in problem["error"]["message"]
    await asyncio.wait_for(made.gone.wait(), 20)


async def test_what_chat_cannot_say_is_refused_by_name(stack: Stack, endpoint: Any) -> None:
    made = Endpoint()
    real = await endpoint(chat=made.reply(CHAT))
    harness = await session(stack, real.url, api="chat")
    for field, value in (("previous_response_id", "resp_0"), ("tools", [{"type": "file_search"}])):
        reply = await harness.post("/responses", input="hi", **{field: value})
        said = (await reply.json())["error"]
        assert (reply.status, said["type"]) == (400, "invalid_request_error")
        assert field.split("_")[0] in said["message"]
    assert made.seen == []
