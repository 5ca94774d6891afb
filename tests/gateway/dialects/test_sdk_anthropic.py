"""The official Anthropic client reads what the adapter says, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from nemo_gym.gateway.policy_request import AnswerEnd
from tests.gateway.dialects.bodies import SCHEMA, answer, call
from tests.gateway.dialects.conftest import Served

if TYPE_CHECKING:
    import anthropic

LONG = "Zeile 🙂 " * 200
USER: Any = [{"role": "user", "content": "q"}]
TOOLS: Any = [{"name": "bash", "input_schema": SCHEMA}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic  # here, because it takes a second, and every test process imports this file

    async with anthropic.AsyncAnthropic(api_key="k", base_url=served.url, max_retries=0) as made:
        yield made


async def test_messages_stream_adds_up_to_the_whole_reply(client: anthropic.AsyncAnthropic, served: Served) -> None:
    served.answer = answer(LONG, call(1, "bash", '{"command": "ä"}'), call(2, "bash", ""), reasoning="r" * 600)
    asked: Any = {"model": "m", "max_tokens": 4096, "messages": USER, "tools": TOOLS, "thinking": THINKING}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        events = [event async for event in stream]
        made = await stream.get_final_message()
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert made.model_dump(exclude={"usage", "parsed_output"}) == whole.model_dump(exclude={"usage"})
    assert made.stop_reason == "tool_use"
    assert made.content[2].input == {"command": "ä"} and made.content[3].input == {}  # type: ignore[union-attr]
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == 100
    assert made.usage.output_tokens == whole.usage.output_tokens == 7
    assert events[0].type == "message_start" and events[-1].type == "message_stop"


@pytest.mark.parametrize(
    ("given", "reason", "sequence"),
    [
        (answer("a"), "end_turn", None),
        (answer("a", end=AnswerEnd.LENGTH), "max_tokens", None),
        (answer("a", stop="END"), "stop_sequence", "END"),
        (answer(None, call(1, "bash", "{}"), end=AnswerEnd.STOP), "tool_use", None),
        (answer("a", end=AnswerEnd.CONTENT_FILTER), "refusal", None),
    ],
)
async def test_end_of_an_answer_has_anthropics_name(
    client: anthropic.AsyncAnthropic, served: Served, given: Any, reason: str, sequence: str | None
) -> None:
    served.answer = given
    made = await client.messages.create(model="m", max_tokens=9, messages=USER)
    async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        streamed = await stream.get_final_message()
    assert (made.stop_reason, made.stop_sequence) == (reason, sequence)
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)


async def test_thinking_is_shown_only_where_it_is_enabled(client: anthropic.AsyncAnthropic, served: Served) -> None:
    served.answer = answer("a", reasoning="hmm")
    made = await client.messages.create(model="m", max_tokens=9, messages=USER)
    assert [block.type for block in made.content] == ["text"]
    made = await client.messages.create(model="m", max_tokens=9, messages=USER, thinking={"type": "adaptive"})
    assert [block.type for block in made.content] == ["thinking", "text"]


async def test_answer_without_content_still_has_a_block(client: anthropic.AsyncAnthropic, served: Served) -> None:
    served.answer = answer(None)
    async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        made = await stream.get_final_message()
    assert [block.type for block in made.content] == ["text"]


async def test_tokens_are_counted_without_a_budget(client: anthropic.AsyncAnthropic, served: Served) -> None:
    assert (await client.messages.count_tokens(model="m", messages=USER, tools=TOOLS)).input_tokens == 11
    counted = served.seen[-1]
    await client.messages.create(model="m", max_tokens=9, messages=USER, tools=TOOLS)
    assert (counted.messages, counted.tools) == (served.seen[-1].messages, served.seen[-1].tools)
    assert "max_tokens" not in counted.asked


async def test_models_are_listed_for_the_anthropic_client(client: anthropic.AsyncAnthropic) -> None:
    assert [(model.id, model.type) async for model in client.models.list()] == [
        ("policy", "model"),
        ("other", "model"),
    ]
