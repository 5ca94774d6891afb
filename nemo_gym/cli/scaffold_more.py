"""What `ng env init --step` and `--judge` write: an environment with a state, and one that asks a judge model."""

from __future__ import annotations

STEP_APP = '''"""$Title: a number is guessed step by step."""

from typing import Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_resources_server import ReverifyMode, SimpleResourcesServer
from nemo_gym.contract.session import SessionDescriptor, Topology
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.attempts import AttemptKey
from nemo_gym.environment.routes import attempt_of


class Guess(BaseModel):
    number: int


class $Class(SimpleResourcesServer):
    REVERIFY_MODE = ReverifyMode.UNSUPPORTED  # the steps are known only while an attempt lives
    topologies: ClassVar = (Topology.NONE, Topology.ENV_SANDBOXED)
    tool_access: ClassVar = ("mcp", "http")
    _episodes: dict[AttemptKey, dict[str, Any]] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/guess")(self.guess)
        return app

    async def open_session(self, row: dict[str, Any], rollout: Any) -> SessionDescriptor:
        self._episodes[AttemptKey.of(rollout)] = {"secret": row["secret"], "steps": 0, "found": False}
        return await super().open_session(row, rollout)

    async def close_session(self, rollout: Any) -> None:
        self._episodes.pop(AttemptKey.of(rollout), None)

    async def guess(self, request: Request, body: Guess) -> dict[str, str]:
        """Guess the number; says whether it is larger or smaller."""
        return self.step(self._episodes[attempt_of(request)], body.number)

    def step(self, episode: dict[str, Any], number: int) -> dict[str, str]:
        episode["steps"] += 1
        episode["found"] |= number == episode["secret"]
        if number == episode["secret"]:
            return {"the number is": "found"}
        return {"the number is": "larger" if number < episode["secret"] else "smaller"}

    async def grade(self, row: dict[str, Any], response: Any, artifacts: Any, rollout: Any) -> Verdict:
        episode = self._episodes[AttemptKey.of(rollout)]
        return Verdict.of(float(episode["found"]), details={"steps": episode["steps"]})


if __name__ == "__main__":
    $Class.run_webserver()
'''
STEP_TEST = '''"""What $name rewards, without a server."""

from typing import Any

from nemo_gym.testing.environments import attempt, make_environment
from resources_servers.$name.app import $Class

ROW: dict[str, Any] = {"secret": 6}


async def play(*numbers: int) -> float | None:
    environment = make_environment($Class)
    await environment.open_session(ROW, attempt())
    (episode,) = environment._episodes.values()
    for number in numbers:
        environment.step(episode, number)
    return (await environment.grade(ROW, {}, (), attempt())).reward


async def test_number_that_was_found_is_rewarded() -> None:
    assert await play(4, 6, 9) == 1.0


async def test_number_that_was_not_is_not() -> None:
    assert await play(4, 5) == 0.0


def test_step_says_where_the_number_is() -> None:
    said = make_environment($Class).step({"secret": 6, "steps": 0, "found": False}, 4)
    assert said == {"the number is": "larger"}
'''
_STEP_TASK = '"responses_create_params": {"input": "Guess my number'
STEP_ROWS = (
    f'{{"id": "low", "secret": 3, {_STEP_TASK}, it is below 5."}}}}\n'
    f'{{"id": "high", "secret": 8, {_STEP_TASK}, it is above 5."}}}}\n'
)
STEP_POLICY = """model: scripted-policy
tasks:
  - name: low
    when: {user: 'it is below 5'}
    turns:
      - tool_calls: [{tool: guess, arguments: {number: 2}}]
      - tool_calls: [{tool: guess, arguments: {number: 3}}]
      - {ends: true, text: It is 3.}
  - name: high
    when: {user: 'it is above 5'}
    turns:
      - tool_calls: [{tool: guess, arguments: {number: 6}}]
      - {ends: true, text: I give up.}
"""

JUDGE_APP = '''"""$Title: another model says whether the answer is right."""

from string import punctuation

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import ModelServerRef
from nemo_gym.judge import JudgeError, call_judge, judge_failsafe
from nemo_gym.openai_utils import NeMoGymResponse

PROMPT = "Is this answer the same as '{expected}'? Say yes or no.\\n\\n{said}"


class Config(BaseResourcesServerConfig):
    judge: ModelServerRef


class Request(BaseVerifyRequest):
    expected: str


class $Class(SimpleResourcesServer):
    config: Config

    @judge_failsafe
    async def verify(self, body: Request) -> BaseVerifyResponse:
        asked = {"input": PROMPT.format(expected=body.expected, said=body.response.output_text)}
        judge = self.config.judge.name
        reply = await call_judge(
            self.server_client, server_name=judge, url_path="/v1/responses", json=asked, response_model=NeMoGymResponse
        )
        first_word = (reply.output_text.lower().split() or [""])[0].strip(punctuation)
        if first_word not in ("yes", "no"):
            raise JudgeError(f"neither yes nor no: {reply.output_text[:80]}")
        return BaseVerifyResponse(**body.model_dump(), reward=float(first_word == "yes"))


if __name__ == "__main__":
    $Class.run_webserver()
'''
JUDGE_TEST = '''"""What $name makes of what its judge says, without a server."""

from typing import Any
from unittest.mock import AsyncMock, MagicMock

import orjson
import pytest

from nemo_gym.testing.environments import make_environment, reply
from resources_servers.$name.app import $Class, Request


async def grade(judged: str) -> Any:
    environment = make_environment($Class, judge={"type": "responses_api_models", "name": "judge"})
    environment.server_client = MagicMock()
    answer = MagicMock(ok=True, read=AsyncMock(return_value=orjson.dumps(reply(judged))))
    environment.server_client.post = AsyncMock(return_value=answer)
    body = {"responses_create_params": {"input": "?"}, "expected": "Paris", "response": reply("the city of Paris")}
    return await environment.verify(Request.model_validate(body))


async def test_yes_is_rewarded_and_no_is_not() -> None:
    assert (await grade("Yes, it is.")).reward == (await grade("**YES**")).reward == 1.0
    assert (await grade("no")).reward == 0.0


@pytest.mark.parametrize("judged", ["Hard to say.", "Not sure", "Note that yes", "None", "yes/no", "...", ""])
async def test_a_judge_that_does_not_answer_gives_no_verdict(judged: str) -> None:
    said = orjson.loads((await grade(judged)).body)
    assert (said["reward"], said["mask_sample"]) == (None, True)
'''
JUDGE_ROWS = (
    '{"id": "france", "expected": "Paris", "responses_create_params": {"input": "What is the capital of France?"}}\n'
    '{"id": "italy", "expected": "Rome", "responses_create_params": {"input": "What is the capital of Italy?"}}\n'
)
JUDGE_POLICY = """model: scripted-policy
tasks:
  - name: judged-right
    when: {user: 'same as .Paris'}
    turns: [{ends: true, text: 'yes'}]
  - name: judged-wrong
    when: {user: 'same as .Rome'}
    turns: [{ends: true, text: 'no'}]
  - name: france
    when: {user: 'capital of France'}
    turns: [{ends: true, text: The city of light.}]
  - name: italy
    when: {user: 'capital of Italy'}
    turns: [{ends: true, text: It is Milan.}]
"""
