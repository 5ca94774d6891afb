"""The loop in an environment of NeMo Gym's style, by ``/run``: its session and limits, tools at once or in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Body, FastAPI, Request, Response
from pydantic import BaseModel, Field

from nemo_gym.base_resources_server import (
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.contract.credentials import Role
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import SESSION_ID_KEY, get_response_json, raise_for_status
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.stack import Stack, rollout, running_stack


class NoteRequest(BaseModel):
    word: str
    wait_for: int = 1
    """How many calls must be under way at once before this one answers."""


class Notes(SimpleResourcesServer):
    """Keeps words in its session, and sees how many calls are under way."""

    words: dict[str, list[str]] = Field(default_factory=dict)
    under_way: int = 0
    most_at_once: int = 0

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/note")(self.note)
        app.post("/finish")(self.finish)
        return app

    async def seed_session(  # type: ignore[override] # as NeMo Gym's plugins do
        self, request: Request, body: BaseSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        self.words[request.session[SESSION_ID_KEY]] = []
        return BaseSeedSessionResponse()

    async def note(self, request: Request, body: NoteRequest) -> dict[str, Any]:
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            for _ in range(500):
                if self.most_at_once >= body.wait_for:
                    break
                await asyncio.sleep(0.01)
            words = self.words[request.session[SESSION_ID_KEY]]
            words.append(body.word)
            return {"words": len(words)}
        finally:
            self.under_way -= 1

    async def finish(self) -> dict[str, Any]:
        return {"done": True}

    async def verify(  # type: ignore[override]
        self, request: Request, body: BaseVerifyRequest
    ) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=float(len(self.words[request.session[SESSION_ID_KEY]])))


def note(word: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "note", "arguments": {"word": word, **arguments}}


SCRIPT = {
    "model": "scripted",
    "tasks": [
        {"name": words, "when": {"user": words}, "turns": turns, **options}
        for words, turns, options in [
            ("three at once", [{"tool_calls": [note(word) for word in "abc"]}, {"text": "Noted."}], {}),
            ("three together", [{"tool_calls": [note(w, wait_for=3) for w in "abc"]}, {"text": "Noted."}], {}),
            ("never stop", [{"tool_calls": [note("a"), note("b")]}], {"repeat_last": True}),
            ("finish", [{"tool_calls": [{"name": "finish", "arguments": {}}]}, {"tool_calls": [note("late")]}], {}),
        ]
    ],
}
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("note", "finish")
]


@contextmanager
def stack(directory: Path, agent: type[SimpleAgent] = SimpleAgent, **settings: Any) -> Iterator[Stack]:
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with running_stack() as running:
        running.add("policy", ScriptedModel, Role.MODEL, script=str(script))
        running.add("notes", Notes, Role.ENVIRONMENT)
        references = {
            "resources_server": {"type": "resources_servers", "name": "notes"},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        running.add("simple", agent, Role.AGENT, ("policy", "notes"), **references, **settings)
        yield running


async def run(running: Stack, words: str) -> tuple[list[str], dict[str, Any]]:
    """The words in the session of the rollout, as ``verify`` found them there, and its result."""
    client = running.client()
    row = {"responses_create_params": {"input": words, "tools": TOOLS}}
    stored = await (await client.post("notes", "/rows", json={"row": row, "rollout": rollout().model_dump()})).json()
    session = {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}
    reply = await client.post("simple", "/run", json={**stored["public_row"], "_ng_session": session})
    body: dict[str, Any] = await reply.json()
    assert reply.status == 200, body
    (written,) = notes(running).words.values()
    assert body["reward"] == len(written)
    return written, body


def notes(running: Stack) -> Notes:
    server = running.servers["notes"]
    assert isinstance(server, Notes)
    return server


def outputs(answer: dict[str, Any]) -> list[dict[str, Any]]:
    items = answer["response"]["output"]
    return [json.loads(item["output"]) for item in items if item["type"] == "function_call_output"]


async def test_calls_of_one_answer_run_in_the_policys_order_by_default(tmp_path: Path) -> None:
    with stack(tmp_path) as running:
        words, answer = await run(running, "three at once")
        assert (words, notes(running).most_at_once) == (["a", "b", "c"], 1)
    assert outputs(answer) == [{"words": 1}, {"words": 2}, {"words": 3}]


async def test_calls_of_one_answer_run_at_once_when_they_may(tmp_path: Path) -> None:
    with stack(tmp_path, max_parallel_tool_calls=3) as running:
        words, answer = await run(running, "three together")
        assert notes(running).most_at_once == 3
    assert sorted(words) == ["a", "b", "c"], "all in the session of the seed"
    calls = [item["call_id"] for item in answer["response"]["output"] if item["type"] == "function_call"]
    given = [item["call_id"] for item in answer["response"]["output"] if item["type"] == "function_call_output"]
    assert sorted(calls) == sorted(given)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"max_steps": 2}, 4),
        ({"max_steps": 3, "count_tool_calls": True}, 4),
        ({"max_steps": 0, "max_turns": 1}, 2),
    ],
)
async def test_limits_of_nemo_gyms_blocks_hold(tmp_path: Path, settings: dict[str, Any], kept: int) -> None:
    with stack(tmp_path, **settings) as running:
        words, _ = await run(running, "never stop")
    assert len(words) == kept


async def test_tool_that_says_done_ends_the_attempt_where_that_is_asked_for(tmp_path: Path) -> None:
    with stack(tmp_path, use_done_flag=True) as running:
        assert (await run(running, "finish"))[0] == []
    with stack(tmp_path, max_turns=2) as running:
        assert (await run(running, "finish"))[0] == ["late"]


class OneNoteAgent(SimpleAgent):
    """As NeMo Gym's plugins are made: the model is asked and the tool called by ``server_client``."""

    async def responses(  # type: ignore[override]
        self,
        request: Request,
        response: Response,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008
    ) -> NeMoGymResponse:
        said = await self.server_client.post("notes", "/note", json={"word": "by hand"}, cookies=request.cookies)
        await raise_for_status(said)
        asked = body.model_copy(update={"input": "three at once"})
        answer = await self.server_client.post(self.config.model_server.name, "/v1/responses", json=asked)
        await raise_for_status(answer)
        return NeMoGymResponse.model_validate(await get_response_json(answer))


async def test_plugin_made_of_this_agent_answers_by_its_own_responses(tmp_path: Path) -> None:
    with stack(tmp_path, OneNoteAgent) as running:
        words, answer = await run(running, "anything")
    assert words == ["by hand"], "its loop called none of the model's tools, in the session of the seed"
    assert [item["type"] for item in answer["response"]["output"]].count("function_call") == 3


def test_bodies_of_nemo_gyms_simple_agent_keep_a_rows_own_fields() -> None:
    from responses_api_agents.simple_agent.app import SimpleAgentRunRequest

    body = SimpleAgentRunRequest.model_validate({"responses_create_params": {"input": "hi"}, "expected": 5})
    assert body.model_dump()["expected"] == 5
