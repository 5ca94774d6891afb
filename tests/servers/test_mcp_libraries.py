"""An environment's tools between this suite's own two ends, by whichever version of the MCP library is installed.

Nothing here imports the library, so that the file runs with ``mcp<2`` as well, in an environment that has it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from nemo_gym.agent.harness.mcp_tools import connect, forget, protocol_error
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import McpServer
from tests.servers.notes import PARAMS, NotesEnvironment
from tests.servers.stack import Stack, rollout


async def seeded(stack: Stack, **identity: Any) -> McpServer:
    body = {"responses_create_params": PARAMS, "_ng_session": {"rollout": rollout(**identity).model_dump()}}
    reply = await stack.client().post("notes", "/seed_session", json=body)
    answer: dict[str, Any] = await reply.json()
    assert reply.status == 200, answer
    (server,) = answer["descriptor"]["mcp"]
    return McpServer.model_validate(server)


@pytest.fixture
def notes(stack: Stack) -> Stack:
    stack.add("notes", NotesEnvironment, Role.ENVIRONMENT)
    return stack


async def test_tools_are_listed_and_called_with_either_library(notes: Stack) -> None:
    mine, other = await seeded(notes), await seeded(notes, rollout_id="r2")
    async with AsyncExitStack() as stack:
        connection, stranger = await connect(stack, mine), await connect(stack, other)
        for each in (connection, stranger):
            found = {tool.name: tool for tool in await each.tools()}
            assert [*found] == ["add_note", "list_notes", "explode"]
            assert found["add_note"].description == "Write a note down."
            assert found["add_note"].input_schema["required"] == ["text"]
        for text, written in (("milk", '{"notes":["milk"]}'), ("eggs", '{"notes":["milk","eggs"]}')):
            result = await connection.call("add_note", {"text": text}, 10.0)
            assert ([part.text for part in result.content], result.is_error) == ([written], False)
        assert [part.text for part in (await stranger.call("add_note", {"text": "x"}, 10.0)).content] == [
            '{"notes":["x"]}'
        ]
    async with AsyncExitStack() as stack:  # a later connection of the same attempt
        result = await (await connect(stack, mine)).call("add_note", {"text": "tea"}, 10.0)
        assert [part.text for part in result.content] == ['{"notes":["milk","eggs","tea"]}']


async def test_errors_of_tools_are_results_with_either_library(notes: Stack) -> None:
    async with AsyncExitStack() as stack:
        connection = await connect(stack, await seeded(notes))
        for name, arguments, said in (
            ("add_note", {}, "text: Field required"),
            ("drop_note", {}, "there is no tool 'drop_note'; there are: add_note, list_notes, explode"),
        ):
            result = await connection.call(name, arguments, 10.0)
            assert ([part.text for part in result.content], result.is_error) == ([said], True)
        failed = await connection.call("explode", {}, 10.0)
        assert failed.is_error and "secret" not in str(failed)


async def test_another_token_reaches_nothing_with_either_library(notes: Stack) -> None:
    mine = await seeded(notes)
    forged = mine.model_copy(update={"headers": {"Authorization": "Bearer ngm1.x.y"}})
    forget(forged)
    assert issubclass(protocol_error(), Exception)
    with pytest.raises(BaseException) as refused:  # the library's own error, or a group of them
        async with AsyncExitStack() as stack:
            await (await connect(stack, forged)).tools()
    assert isinstance(refused.value, Exception)
