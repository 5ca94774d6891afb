"""The official OpenAI client reads what the adapters say, whole and streamed, and sends it back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from nemo_gym.gateway.policy_request import AnswerEnd, AnswerTokens
from tests.gateway.dialects.bodies import SCHEMA, answer, call
from tests.gateway.dialects.conftest import Served

LONG = "Zeile 🙂 " * 200
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA, "strict": True}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
USER: Any = [{"role": "user", "content": "q"}]


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="k", base_url=f"{served.url}/v1", max_retries=0) as made:
        yield made


async def test_chat_client_reads_text_reasoning_and_usage(client: openai.AsyncOpenAI, served: Served) -> None:
    served.answer = answer("hello", reasoning="hmm", end=AnswerEnd.LENGTH)
    made = await client.chat.completions.create(model="m", messages=USER)
    choice = made.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello", "length")
    assert choice.message.model_extra == {"reasoning_content": "hmm"}
    assert made.usage is not None and made.usage.prompt_tokens_details is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (100, 7)
    assert made.usage.prompt_tokens_details.cached_tokens == 60
    assert made.created == 1_700_000_000 and made.id.startswith("chatcmpl-")


async def test_chat_stream_adds_up_to_the_whole_reply(client: openai.AsyncOpenAI, served: Served) -> None:
    arguments = '{"command": "' + "x" * 1000 + '"}'
    served.answer = answer(LONG, call(1, "bash", arguments), call(2, "bash", "{}"), reasoning="r" * 600)
    async with client.chat.completions.stream(
        model="m", messages=USER, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        made = await stream.get_final_completion()
    message = made.choices[0].message
    assert message.content == LONG
    assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()] == [
        ("call_1", "bash", arguments),
        ("call_2", "bash", "{}"),
    ]
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.usage is not None and made.usage.total_tokens == 107
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk" and event.chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "r" * 600


async def test_chat_stream_reports_usage_only_where_asked(client: openai.AsyncOpenAI, served: Served) -> None:
    plain = [chunk async for chunk in await client.chat.completions.create(model="m", messages=USER, stream=True)]
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    asked = await client.chat.completions.create(
        model="m", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in asked]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_chat_logprobs_name_each_sampled_token(client: openai.AsyncOpenAI, served: Served) -> None:
    count = 150
    tokens = AnswerTokens([1, 2], [*range(count)], [-0.5] * count, [f"é{number} " for number in range(count)])
    served.answer = answer("short", tokens=tokens)
    made = await client.chat.completions.create(
        model="m", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(bytes(one.bytes or ()).decode(), one.logprob) for one in logprobs.content] == [
        (f"é{number} ", -0.5) for number in range(count)
    ]
    extra = made.choices[0].message.model_extra
    assert extra is not None
    assert extra["prompt_token_ids"] == [1, 2] and extra["generation_token_ids"] == [*range(count)]
    assert extra["generation_log_probs"] == [-0.5] * count
    async with client.chat.completions.stream(model="m", messages=USER, logprobs=True) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.logprobs == logprobs
    assert not streamed.message.model_extra or "prompt_token_ids" not in streamed.message.model_extra


async def test_responses_client_reads_every_kind_of_item(client: openai.AsyncOpenAI, served: Served) -> None:
    served.answer = answer("hello", call(1, "bash", '{"command":"ls"}'), reasoning="hmm")
    made = await client.responses.create(model="m", input="q", tools=FLAT_TOOLS)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output_text == "hello" and made.status == "completed"
    assert made.usage is not None and made.usage.input_tokens_details.cached_tokens == 60
    assert made.usage.output_tokens_details.reasoning_tokens == 2
    Response.model_validate(made.model_dump())


async def test_responses_stream_adds_up_to_the_whole_reply(client: openai.AsyncOpenAI, served: Served) -> None:
    arguments = '{"command": "' + "ü" * 700 + '"}'
    served.answer = answer(LONG, call(1, "bash", arguments), reasoning="r" * 600)
    whole = await client.responses.create(model="m", input="q", tools=FLAT_TOOLS)
    async with client.responses.stream(model="m", input="q", tools=FLAT_TOOLS) as stream:
        events = [event async for event in stream]
        made = await stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[0].type, events[1].type, events[-1].type) == (
        "response.created",
        "response.in_progress",
        "response.completed",
    )
    assert made.output_text == LONG
    assert made.model_dump() == {**whole.model_dump(), "output": made.model_dump()["output"]}
    assert _joined(events, "response.output_text.delta") == LONG
    assert _joined(events, "response.reasoning_summary_text.delta") == "r" * 600
    assert _joined(events, "response.function_call_arguments.delta") == arguments
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in whole.output]


async def test_responses_stream_is_incomplete_when_cut(client: openai.AsyncOpenAI, served: Served) -> None:
    served.answer = answer("hel", end=AnswerEnd.LENGTH)
    events = [event async for event in await client.responses.create(model="m", input="q", stream=True)]
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


async def test_responses_stream_carries_logprobs_once(client: openai.AsyncOpenAI, served: Served) -> None:
    texts = [f"w{number} " for number in range(300)]
    served.answer = answer("".join(texts), tokens=AnswerTokens([1], [*range(300)], [-1.0] * 300, texts))
    made = await client.responses.create(model="m", input="q", stream=True, include=["message.output_text.logprobs"])
    events = [event async for event in made]
    told = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert told == texts
    part = events[-1].response.output[0].content[0]  # type: ignore[union-attr]
    assert [one.token for one in part.logprobs] == texts


async def test_custom_tool_call_streams_free_text(client: openai.AsyncOpenAI, served: Served) -> None:
    served.answer = answer(None, call(1, "apply_patch", '{"input": "*** Begin\\n+ü"}'))
    tools: Any = [{"type": "custom", "name": "apply_patch"}]
    events = [event async for event in await client.responses.create(model="m", input="q", tools=tools, stream=True)]
    assert _joined(events, "response.custom_tool_call_input.delta") == "*** Begin\n+ü"
    item = events[-1].response.output[0]  # type: ignore[union-attr]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", "*** Begin\n+ü")
    chat_tools: Any = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    chat = await client.chat.completions.create(model="m", messages=USER, tools=chat_tools)
    made = (chat.choices[0].message.tool_calls or [])[0]
    assert made.type == "custom" and made.custom.input == "*** Begin\n+ü"


async def test_models_are_listed_for_the_openai_client(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["policy", "other"]


def _joined(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == kind)
