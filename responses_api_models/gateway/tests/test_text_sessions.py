"""Sessions before an OpenAI-compatible endpoint, which renders and encodes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from campaigns.faults.gateway.wire import Call, Leave
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.session import MAX_ATTEMPT
from nemo_gym.gateway.journal import SessionJournal
from nemo_gym.server_utils import close_global_aiohttp_client, request
from nemo_gym_testing.gateway import FakeOpenAIEngine, Garbage, Status
from nemo_gym_testing.gateway.engine import Answer, CallLog
from responses_api_models.gateway.app import Gateway
from responses_api_models.gateway.tests.conftest import GatewayStack, Opened, Teller, until
from tests.servers.stack import rollout, running_stack


class TextStack(GatewayStack):
    """A gateway and its endpoint."""

    async def start(self, cls: type[Gateway] = Gateway, **block: Any) -> None:
        engines = [{"type": "openai", "base_url": self.engine.url, "model": "real", "logprobs": True}]
        await super().start(cls, **{"policy": None, "engines": engines, **block})


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[TextStack]:
    async with FakeOpenAIEngine() as engine:
        with running_stack() as stack:
            served = TextStack(stack, engine, Teller(), tmp_path)  # type: ignore[arg-type]
            await served.start()
            yield served
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)


def port_of(session: Opened) -> int:
    return int(session.facts["base_url"].split(":")[2].split("/")[0])


ADDRESS = "HTTP://169.254.169.254/latest/meta-data"
_CHAT = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ADDRESS}}]}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_RESULT = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": ADDRESS}]}
_BLOCK = {"type": "image", "source": {"type": "url", "url": ADDRESS}}
_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
_ITEM = {"type": "input_image", "image_url": ADDRESS}
_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [_ITEM]}
REMOTE: list[tuple[str, str, dict[str, Any]]] = [
    ("/chat/completions", "messages.0.content.0.image_url.url", {"messages": [_CHAT]}),
    (
        "/chat/completions",
        "messages.1.content.0.image_url",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [_CALL]}, _RESULT]},
    ),
    ("/messages", "messages.0.content.0.source.url", {"messages": [{"role": "user", "content": [_BLOCK]}]}),
    (
        "/messages",
        "messages.1.content.0.content.0.source.url",
        {
            "messages": [
                {"role": "assistant", "content": [_USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [_BLOCK]}]},
            ]
        },
    ),
    ("/responses", "input.0.content.0.image_url", {"input": [{"role": "user", "content": [_ITEM]}]}),
    (
        "/responses",
        "input.1.output.0.image_url",
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, _OUTPUT]},
    ),
]


@pytest.mark.parametrize(("path", "field", "body"), REMOTE)
async def test_address_of_an_image_reaches_the_endpoint_only_where_it_is_allowed(
    gateway: TextStack, path: str, field: str, body: dict[str, Any]
) -> None:
    session = await gateway.open()
    refused = await session.post(path, {"max_tokens": 9, **body})
    text = await refused.text()
    assert refused.status == 400 and f"'{field}'" in text and "remote_images: true" in text, text
    assert not gateway.engine.calls
    data_url = orjson.loads(orjson.dumps(body).replace(ADDRESS.encode(), b"data:image/png;base64,AAAA"))
    assert (await session.post(path, {"max_tokens": 9, **data_url})).status == 200
    await gateway.restart(remote_images=True)
    session = await gateway.open(attempt=1)
    assert (await session.post(path, {"max_tokens": 9, **body})).status == 200
    assert ADDRESS in str(gateway.engine.calls[-1].body)
    file = orjson.loads(orjson.dumps(body).replace(ADDRESS.encode(), b"file:///etc/passwd"))
    assert (await session.post(path, {"max_tokens": 9, **file})).status == 400


async def test_caller_of_the_stack_may_name_images_by_address(gateway: TextStack) -> None:
    client = gateway.stack.client(Role.ENVIRONMENT, "judge")
    assert (await client.post("gateway", "/v1/chat/completions", json={"messages": [_CHAT]})).status == 200
    assert ADDRESS in str(gateway.engine.calls[-1].body)


UNPINNABLE: dict[str, Any] = {"min_tokens": 4000, "ignore_eos": True, "use_beam_search": True, "mirostat": 2}


@pytest.mark.parametrize("pin", ["max_output_tokens", "max_completion_tokens"])
async def test_nothing_that_a_harness_asks_for_overrides_pinned_sampling(gateway: TextStack, pin: str) -> None:
    await gateway.restart(extra_body={"max_completion_tokens": 6000, "ignore_eos": False})
    session = await gateway.open({"sampling": {pin: 50}})
    budgets = dict.fromkeys(("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"), 7777)
    await session.chat(**budgets, n_predict=7777, **UNPINNABLE, user="me", chat_template_kwargs={"a": 1})
    sent = gateway.engine.calls[-1].body
    assert {key: value for key, value in sent.items() if value in (50, 6000, 7777)} == {"max_tokens": 50}
    assert sent["ignore_eos"] is False and not UNPINNABLE.keys() - {"ignore_eos"} & sent.keys()
    assert sent["user"] == "me" and sent["chat_template_kwargs"] == {"a": 1}
    await session.chat(max_new_tokens=7)
    assert gateway.engine.calls[-1].body["max_tokens"] == 7


async def test_one_budget_and_all_unknown_fields_reach_the_endpoint_where_nothing_is_pinned(
    gateway: TextStack,
) -> None:
    session = await gateway.open()
    await session.chat(max_output_tokens=9, n_predict=8, **UNPINNABLE)
    sent = gateway.engine.calls[-1].body
    assert sent["max_tokens"] == 9 and not {"max_output_tokens", "n_predict"} & sent.keys()
    assert UNPINNABLE.items() <= sent.items()


LONG = 6 << 20
"""More than the kernels at both ends of a connection take of what nobody reads."""


class Listener:
    """A harness that asks for one long answer again and again, and reads as much of it as a test wants."""

    def __init__(self, session: Opened) -> None:
        self.session = session
        self.calls: list[Call] = []

    async def ask(self, *, stream: bool) -> Call:
        port = port_of(self.session)
        headers = {"Authorization": f"Bearer {self.session.facts['inference_token']}", "Idempotency-Key": "one"}
        body = {"messages": self.session.messages, "stream": stream}
        self.calls.append(await Call.send(port, "/v1/chat/completions", body, headers, buffer_bytes=65_536))
        return self.calls[-1]


@pytest.fixture
async def listener(gateway: TextStack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    answer = FakeOpenAIEngine.answer

    def long_answer(self: FakeOpenAIEngine, call: CallLog) -> Answer:
        made = answer(self, call)
        made.whole["choices"][0] |= {"message": {"role": "assistant", "content": "a" * LONG}, "logprobs": None}
        return made

    monkeypatch.setattr(FakeOpenAIEngine, "answer", long_answer)
    await gateway.restart(max_session_in_flight_bytes=2 * LONG)
    listener = Listener(await gateway.open())
    yield listener
    for call in listener.calls:
        call.leave(Leave.RESET)


def share_of(gateway: TextStack, listener: Listener) -> Any:
    served: Any = gateway.stack.servers["gateway"]
    return served._durable.live(listener.session.facts["session_id"]).share


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_that_nobody_reads_are_in_flight(gateway: TextStack, listener: Listener, stream: bool) -> None:
    unread = await listener.ask(stream=stream)
    await unread.read_bytes(200)
    refused = await (await listener.ask(stream=stream)).whole()
    assert refused[0] == 429 and b"max_session_in_flight_bytes" in refused[1]
    other = await gateway.open(rollout_id="other")
    answered = await other.post("/chat/completions", {"messages": other.messages})
    assert answered.status == 200 and len(await answered.read()) > LONG
    await unread.whole()
    await until(lambda: share_of(gateway, listener).in_flight_bytes == 0)
    assert (await (await listener.ask(stream=stream)).whole())[0] == 200
    assert len(gateway.engine.calls) == 2, "the same answer each time"


async def test_late_stream_that_nobody_reads_is_in_flight(gateway: TextStack, listener: Listener) -> None:
    await gateway.restart(max_session_in_flight_bytes=2 * LONG, first_event_grace_s=0, port=port_of(listener.session))
    await (await listener.ask(stream=True)).read_bytes(2000)
    _, events = await (await listener.ask(stream=True)).whole()
    assert b"max_session_in_flight_bytes" in events and b"[DONE]" not in events


async def test_claim_of_a_reply_ends_with_its_connection(gateway: TextStack, listener: Listener) -> None:
    share = share_of(gateway, listener)
    for how in (Leave.CLOSE, Leave.HALF, Leave.RESET, Leave.RESET):
        call = await listener.ask(stream=False)
        assert (await call.read_bytes(17))[9:12] == b"200"
        assert share.in_flight_bytes > LONG
        call.leave(how)
        listener.calls.remove(call)
        await until(lambda: share.in_flight_bytes == 0)


async def three_turns(session: Opened) -> dict[str, Any]:
    for _ in range(3):
        await session.say("more")
    return await session.finalize(reward=1.0)


def said(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


async def test_trajectory_holds_the_conversation_and_the_logprobs_that_were_offered(gateway: TextStack) -> None:
    session = await gateway.open()
    summary = await three_turns(session)
    (row,) = summary["trajectories"]
    assert said(row["messages"]) == said(session.messages[:-1])
    assert row["prompt_ids"] == row["response_ids"] == []
    assert [turn["details"]["token_logprobs"] for turn in row["turns"]] == [
        [*call.logprobs] for call in gateway.engine.answered
    ]
    assert row["reward"] == 1.0


async def test_content_in_parts_is_text_for_harness_and_trajectory(
    gateway: TextStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Any] = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hmm"}]},
        {"type": "text", "text": "Hello"},
    ]
    answer = gateway.engine.answer

    def in_parts(call: CallLog) -> Answer:
        made = answer(call)
        made.whole["choices"][0]["message"]["content"] = parts
        return made

    monkeypatch.setattr(gateway.engine, "answer", in_parts)
    session = await gateway.open()
    message = await session.say("more")
    assert (message["content"], message["reasoning_content"]) == ("Hello", "hmm")
    await session.say("more")
    parts.append({"type": "image_url", "image_url": {"url": ADDRESS}})
    assert (await session.post("/chat/completions", {"model": "m", "messages": session.messages})).status == 502
    (row,) = (await session.finalize())["trajectories"]
    assert said(row["messages"])[-1] == ("assistant", "Hello")


async def test_agents_sessions_touch_none_but_its_own_also_after_a_restart(gateway: TextStack) -> None:
    victim = await gateway.open()
    await victim.say("more")
    intruder = await gateway.open(role=Role.AGENT, name="agent")
    fencer = await gateway.open(role=Role.AGENT, name="agent", attempt=MAX_ATTEMPT)
    rival = await gateway.open(role=Role.AGENT, name="rival", attempt=2)
    await gateway.restart(port=int(victim.facts["base_url"].split(":")[2].split("/")[0]))
    for session in (victim, fencer, rival):
        await session.say("more")
    assert (await intruder.post("/chat/completions", {"messages": intruder.messages, "model": "any"})).status == 409
    retried = await gateway.open(attempt=2)
    await retried.say("more")
    assert (await victim.post("/chat/completions", {"messages": victim.messages, "model": "any"})).status == 409
    summaries = [await session.finalize() for session in (retried, fencer, rival)]
    assert [summary["turns"] for summary in summaries] == [1, 1, 1]


async def test_attempt_that_no_rollout_comes_to_is_refused(gateway: TextStack) -> None:
    for attempt in (0, MAX_ATTEMPT + 1, 2**31):
        asked = {"rollout": {**rollout().model_dump(), "attempt": attempt}}
        for role in (Role.PIPELINE, Role.AGENT):
            refused = await gateway.stack.client(role, "any").post("gateway", "/sessions", json=asked)
            assert refused.status == 422
            assert "rollout.attempt" in (await refused.json())["detail"]


async def test_journal_of_a_release_without_openers_and_bounds_is_read(gateway: TextStack) -> None:
    session = await gateway.open()
    await session.say("more")
    await asyncio.to_thread(gateway.stack.stop, "gateway")
    directory = gateway.folder / "journal"
    journal, (found,) = SessionJournal.open(directory, durability="process")
    extra = {key: value for key, value in found.record.extra.items() if key != "opener"}
    asked = {**found.record.rollout, "rollout_id": "fenced", "attempt": 2**31}
    await journal.opened(replace(found.record, session_id="old", rollout=asked, extra=extra, inference_digest="x"))
    await journal.aclose()
    await gateway.start(port=int(session.facts["base_url"].split(":")[2].split("/")[0]))
    await session.say("more")
    state = await gateway.stack.client().get("gateway", "/sessions/old", headers={CONTROL_TOKEN_HEADER: "not its own"})
    assert state.status == 401, "it is known"
    assert (await session.finalize())["turns"] == 2


async def test_restarted_gateway_goes_on_with_the_conversation(gateway: TextStack) -> None:
    session = await gateway.open()
    await session.say("more")
    await gateway.restart(port=int(session.facts["base_url"].split(":")[2].split("/")[0]))
    (row,) = (await three_turns(session))["trajectories"]
    assert said(row["messages"]) == said(session.messages[:-1])


async def test_endpoint_gets_the_sessions_sampling_and_its_own_model_name(gateway: TextStack) -> None:
    session = await gateway.open({"sampling": {"temperature": 0.25, "max_output_tokens": 7}})
    reply = await session.post(
        "/messages", {"model": "claude", "max_tokens": 900, "temperature": 1, "messages": session.messages}
    )
    assert reply.status == 200
    body = gateway.engine.calls[0].body
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("real", 0.25, 7)


@pytest.mark.parametrize(
    ("said", "reason", "sequence"),
    [("END", "stop_sequence", "END"), (151645, "end_turn", None), (None, "end_turn", None)],
)
async def test_stop_string_that_the_endpoint_names_is_the_answers_end(
    gateway: TextStack, monkeypatch: pytest.MonkeyPatch, said: Any, reason: str, sequence: str | None
) -> None:
    answer = gateway.engine.answer

    def stopped(call: CallLog) -> Answer:
        made = answer(call)
        made.whole["choices"][0] |= {"finish_reason": "stop", "stop_reason": said}
        return made

    monkeypatch.setattr(gateway.engine, "answer", stopped)
    session = await gateway.open()
    asked = {"model": "m", "max_tokens": 9, "stop_sequences": ["END"], "messages": session.messages}
    reply = await (await session.post("/messages", asked)).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
async def test_answer_that_the_endpoint_broke_off_is_asked_for_again(
    gateway: TextStack, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    answer = gateway.engine.answer
    broken_off = [True]

    def answered(call: CallLog) -> Answer:
        made = answer(call)
        if broken_off.pop() if broken_off else False:
            made.whole["choices"][0]["finish_reason"] = reason
            made.whole["choices"][0]["message"]["content"] = "The first half of"
        return made

    monkeypatch.setattr(gateway.engine, "answer", answered)
    session = await gateway.open()
    assert (await session.say("more"))["content"] != "The first half of"
    assert len(gateway.engine.calls) == 2
    assert (await session.state())["turns"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_request_to_wait_is_passed_on_when_no_other_engine_can_help(
    gateway: TextStack, path: str, stream: bool
) -> None:
    """A stream is answered with the status as well, because its first event has not been sent yet."""
    session = await gateway.open()
    gateway.engine.faults.append(Status(429, headers={"Retry-After": "7"}))
    asked: dict[str, Any] = {"model": "m", "stream": stream}
    asked |= {"input": "hi"} if path == "/responses" else {"max_tokens": 5, "messages": session.messages}
    reply = await session.post(path, asked)
    assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
    assert reply.headers["Content-Type"].startswith("application/json")
    assert "rate_limit" in str((await reply.json())["error"])
    assert (await session.state())["turns"] == 0


async def test_what_the_endpoint_says_about_a_request_reaches_the_harness(gateway: TextStack) -> None:
    session = await gateway.open()
    gateway.engine.faults.append(Status(400, b'{"error": {"message": "maximum context length is 5"}}'))
    reply = await session.post("/chat/completions", {"model": "m", "messages": session.messages})
    assert reply.status == 400
    assert "maximum context length is 5" in (await reply.json())["error"]["message"]
    assert len(gateway.engine.calls) == 1


async def test_image_reaches_the_endpoint_and_the_trajectory_from_every_dialect(gateway: TextStack) -> None:
    data = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
    url = f"data:image/png;base64,{data}"
    text = {"type": "text", "text": "look"}
    asked: dict[str, dict[str, Any]] = {
        "/chat/completions": {
            "messages": [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}]
        },
        "/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}],
                }
            ]
        },
        "/messages": {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        text,
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                    ],
                }
            ],
        },
    }
    for number, (path, body) in enumerate(asked.items()):
        session = await gateway.open(rollout_id=f"r{number}")
        reply = await session.post(path, {"model": "m", **body})
        assert reply.status == 200, await reply.text()
        parts = gateway.engine.calls[number].body["messages"][0]["content"]
        assert parts[1]["image_url"]["url"] == url
        (row,) = (await session.finalize())["trajectories"]
        assert row["multimodal"] == [{"kind": "image", "source": url, "message": 0}]


async def test_runner_gives_the_reward_only_where_no_environment_does(gateway: TextStack) -> None:
    own = await gateway.open({"reward_source": "runner"}, rollout_id="own")
    await own.chat()
    assert (await own.control("complete", {"reward_info": {"reward": 0.75, "passed": 3}})).status == 200
    assert (await own.post("/chat/completions", {"model": "m", "messages": own.messages})).status == 409
    row = (await own.finalize())["trajectories"][0]
    assert (row["reward"], row["reward_info"]) == (0.75, {"passed": 3})
    bare = await gateway.open({"reward_source": "runner"}, rollout_id="bare")
    await bare.chat()
    assert (await bare.control("complete", {"reward": 0.5})).status == 200
    assert (await bare.finalize())["trajectories"][0]["reward"] == 0.5
    graded = await gateway.open(rollout_id="graded")
    assert (await graded.control("complete", {"reward": 1.0})).status == 409
    refused = await graded.control("complete", {"reward_info": {"reward": 1.0}})
    assert refused.status == 409
    assert "environment" in await refused.text()
    assert (await graded.control("complete")).status == 200


async def test_runner_completes_its_session_by_a_url_alone_and_can_do_nothing_else_with_it(gateway: TextStack) -> None:
    await gateway.restart(path_tokens=True)
    own = await gateway.open({"reward_source": "runner"}, rollout_id="own")
    other = await gateway.open({"reward_source": "runner"}, rollout_id="other")
    await own.chat()
    url = own.facts["path_token_complete_url"]
    elsewhere = url.replace(own.facts["session_id"], other.facts["session_id"])
    assert (await request("POST", elsewhere, json={"reward": 1.0})).status == 401
    assert (await request("POST", url.replace("/complete", "/finalize"), json={})).status == 401
    assert (await request("POST", url.replace("/complete", "/v1/chat/completions"), json={})).status == 401
    inference = own.facts["path_token_base_url"].removesuffix("/v1") + "/complete"
    assert (await request("POST", inference, json={"reward": 1.0})).status == 401
    done = await request("POST", url, json={"reward_info": {"score": 0.25}})
    assert done.status == 200, await done.text()
    assert (await request("POST", own.facts["complete_url"], json={})).status == 401
    (row,) = (await own.finalize())["trajectories"]
    assert row["reward_info"] == {"score": 0.25}


async def test_tools_that_a_harness_defers_are_known_to_the_endpoint(gateway: TextStack) -> None:
    session = await gateway.open()
    tools = [
        {"name": "Search", "description": "Find.", "input_schema": {"type": "object"}},
        {"name": "Later", "description": "Wait.", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": session.messages, "tools": tools}
    assert (await session.post("/messages", body)).status == 200
    sent = gateway.engine.calls[0].body
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["Search", "Later"]


async def test_endpoint_is_asked_for_nothing_that_needs_what_was_not_asked(gateway: TextStack) -> None:
    await gateway.restart(engines=[{"type": "openai", "base_url": gateway.engine.url}])
    session = await gateway.open(rollout_id="bare")
    await session.chat(parallel_tool_calls=True, top_logprobs=3)
    assert not {"parallel_tool_calls", "top_logprobs"} & {*gateway.engine.calls[0].body}


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (502, 502, "true"),
        ("server_error", 502, "true"),
        (408, 504, "false"),
        (429, 429, "true"),
        ("429", 429, "true"),
        (400, 400, None),
    ],
)
async def test_error_in_a_body_with_status_200_is_told_as_the_error_that_it_is(
    gateway: TextStack, code: int | str, status: int, retry: str | None
) -> None:
    await gateway.restart(retries={"max_tries": 1})
    session = await gateway.open()
    told = {"error": {"code": code, "message": "Provider returned error"}, "user_id": "u"}
    gateway.engine.faults.append(Garbage(orjson.dumps(told)))
    reply = await session.post("/chat/completions", {"messages": session.messages})
    assert (reply.status, reply.headers.get("x-should-retry")) == (status, retry), await reply.text()
    assert "Provider returned error" in (await reply.json())["error"]["message"]
    assert (await session.state())["turns"] == 0
