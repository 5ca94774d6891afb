"""The scripted model over real sockets, through OpenAI's own client and raw requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from openai import AsyncOpenAI

from nemo_gym.contract.credentials import Role
from nemo_gym.server_utils import request
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.stack import Stack, rollout, running_stack

EXAMPLE = Path(__file__).parent.parent / "data" / "example_script.yaml"
FAULTS = """
tasks:
  - {name: busy, when: {user: busy}, turns: [{text: at last, fault: {status: 429, retry_after_s: 3, times: 2}}]}
  - {name: broken, when: {user: broken}, turns: [{text: at last, fault: {status: 500}}]}
  - {name: cut, when: {user: cut}, turns: [{text: at last, fault: {disconnect: true}}]}
  - {name: garbled, when: {user: garbled}, turns: [{text: at last, fault: {malformed: true}}]}
  - {name: hangs, when: {user: hangs}, turns: [{text: at last, fault: {hang_s: 3600}}]}
"""


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


async def session(stack: Stack, **block: Any) -> dict[str, Any]:
    if "model" not in stack.served:
        stack.add("model", ScriptedModel, Role.MODEL, **({"script": str(EXAMPLE)} | block))
    reply = await stack.client().post("model", "/sessions", json={"rollout": rollout().model_dump()})
    opened: dict[str, Any] = await reply.json()
    return opened


async def post(opened: dict[str, Any], path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    headers = {"Authorization": f"Bearer {opened['inference_token']}"}
    return await request("POST", opened["base_url"] + path, json=body, headers=headers)


async def test_openai_client_has_a_conversation_with_tools_in_both_dialects(stack: Stack) -> None:
    opened = await session(stack)
    async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["inference_token"]) as client:
        asked: list[Any] = [{"role": "user", "content": "weather in Oslo"}]
        first = (await client.chat.completions.create(model="m", messages=asked)).choices[0]
        call = first.message.tool_calls[0]  # type: ignore[index]
        assert first.finish_reason == "tool_calls" and call.function.arguments == '{"city":"Oslo"}'  # type: ignore[union-attr]
        observed = {"role": "tool", "tool_call_id": call.id, "content": "-3"}
        told = [*asked, first.message.model_dump(exclude_none=True), observed]
        assert (await client.chat.completions.create(model="m", messages=told)).choices[0].message.content == (
            "It is cold in Oslo."
        )
        response = await client.responses.create(model="m", input=asked)
        function_call = response.output[-1]
        items = [*asked, *(item.model_dump() for item in response.output)]
        items.append({"type": "function_call_output", "call_id": function_call.call_id, "output": "not found"})  # type: ignore[union-attr]
        assert (await client.responses.create(model="m", input=items)).output_text == "I could not find out."


async def test_streams_say_the_same_as_whole_replies(stack: Stack) -> None:
    opened = await session(stack)
    asked: list[Any] = [{"role": "user", "content": "weather in Oslo"}]
    async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["inference_token"]) as client:
        text, arguments = "", ""
        async for chunk in await client.chat.completions.create(model="m", messages=asked, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    arguments += (call.function and call.function.arguments) or ""
        assert (text, arguments) == ("I will look it up.", '{"city":"Oslo"}')
        async with client.responses.stream(model="m", input=asked) as stream:
            final = await stream.get_final_response()
        assert final.output_text == "I will look it up." and final.output[-1].type == "function_call"


async def test_messages_dialect_carries_tools_both_ways(stack: Stack) -> None:
    opened = await session(stack)
    asked: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "weather in Oslo"}]}
    first = await (await post(opened, "/messages", asked)).json()
    use = first["content"][-1]
    assert first["stop_reason"] == "tool_use" and use["input"] == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "-3"}]}
    asked["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    second = await (await post(opened, "/messages", asked)).json()
    assert second["content"] == [{"type": "text", "text": "It is cold in Oslo."}]
    lines = (await (await post(opened, "/messages", {**asked, "stream": True})).text()).splitlines()
    kinds = [orjson.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds


async def test_same_conversation_gets_the_same_answer_from_another_process(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "What is 8 plus zero"}]}
    first = await (await post(await session(stack), "/chat/completions", body)).read()
    with running_stack() as other:
        assert await (await post(await session(other), "/chat/completions", body)).read() == first


async def test_conversation_of_no_task_is_answered_with_422(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "anything else"}]}
    reply = await post(await session(stack), "/chat/completions", body)
    said = (await reply.json())["error"]
    assert (reply.status, said["code"]) == (422, "script") and "anything else" in said["message"]


async def test_faults_happen_as_often_as_scripted_and_then_it_answers(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(FAULTS)
    opened = await session(stack, script=str(path))

    async def said(prompt: str) -> Any:
        reply = await post(opened, "/chat/completions", {"messages": [{"role": "user", "content": prompt}]})
        content = await reply.read()
        return reply.status, reply.headers.get("Retry-After"), content

    busy = [await said("busy") for _ in range(3)]
    assert [status for status, _, _ in busy] == [429, 429, 200] and float(busy[0][1]) == 3
    assert [(await said("broken"))[0] for _ in range(2)] == [500, 200]
    with pytest.raises(aiohttp.ClientPayloadError):
        await said("cut")
    assert (await said("cut"))[0] == 200
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads((await said("garbled"))[2])
    assert b"at last" in (await said("garbled"))[2]
    another = await session(stack)
    headers = {"Authorization": f"Bearer {another['inference_token']}"}
    with pytest.raises(TimeoutError):
        await request(
            "POST",
            another["base_url"] + "/chat/completions",
            json={"messages": [{"role": "user", "content": "hangs"}]},
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=0.5),
        )


def test_missing_script_stops_the_start(tmp_path: Path) -> None:
    from nemo_gym.contract.errors import ConfigError
    from nemo_gym.server_utils import ServerClient

    block = {"model": {"responses_api_models": {"model": {"entrypoint": "app.py", "script": str(tmp_path / "gone")}}}}
    server = ScriptedModel(config=ScriptedModel.config_from("model", block), server_client=ServerClient())
    with pytest.raises(ConfigError, match="gone"):
        server.setup_webserver()


async def test_a_session_that_cannot_be_opened_is_told_by_field(stack: Stack) -> None:
    await session(stack)
    for wrong, told in (
        (
            {"rollout": {**rollout().model_dump(), "attempt": "two"}},
            "/sessions: 'rollout': attempt: Input should be a",
        ),
        ({"rollout": rollout().model_dump(), "limits": {"idle": 3}}, "/sessions: 'limits': unknown key 'idle'"),
        ({}, "/sessions: 'rollout': value: Input should be"),
    ):
        reply = await stack.client().post("model", "/sessions", json=wrong)
        said = await reply.text()
        assert reply.status == 422 and told in said and "pydantic" not in said, said
