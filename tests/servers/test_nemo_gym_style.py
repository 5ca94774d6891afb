"""Plugins as NeMo Gym's authors write and test them: constructed by hand, with a mocked client."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, MagicMock

import orjson
import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from nemo_gym.base_resources_server import BaseMultiRewardVerifyResponse, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.judge import JudgeError, call_judge, judge_failsafe
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient
from tests.servers.plugins import CounterConfig, CounterEnvironment, CounterVerifyRequest
from tests.servers.stack import response


def plugin() -> CounterEnvironment:
    config = CounterConfig(host="0.0.0.0", port=8080, entrypoint="", name="counter")
    return CounterEnvironment(config=config, server_client=MagicMock(spec=ServerClient))


def test_plugin_serves_a_session_by_its_cookies_alone() -> None:
    client = TestClient(plugin().setup_webserver())
    client.post("/seed_session", json={"start": 2, "responses_create_params": {"input": "x"}})
    assert client.post("/add", json={"amount": 3}).json() == {"count": 5}
    body = {"responses_create_params": {"input": "x"}, "response": response(), "expected": 5}
    reply = client.post("/verify", json=body).json()
    assert reply["reward"] == 1.0 and reply["counted"] == 5 and "valid" not in reply
    assert reply["response"]["output"][0]["content"][0]["text"] == "hello"


async def test_hook_can_be_called_directly() -> None:
    server = plugin()
    request = MagicMock(spec=Request, session={"session_id": "s"})
    body = CounterVerifyRequest(
        responses_create_params=NeMoGymResponseCreateParamsNonStreaming(input="x"),
        response=NeMoGymResponse.model_validate(response()),
        expected=0,
    )
    assert (await server.verify(request, body)).reward == 1.0


def test_wrong_body_is_answered_with_422_and_the_field() -> None:
    client = TestClient(plugin().setup_webserver())
    reply = client.post("/verify", json={"responses_create_params": {"input": "x"}, "response": response()})
    assert reply.status_code == 422 and reply.json()["errors"][0]["loc"] == ["expected"]


def test_error_of_a_plugin_is_raised_in_its_own_tests() -> None:
    client = TestClient(plugin().setup_webserver())
    with pytest.raises(RuntimeError, match="would have been"):
        client.post("/broken_tool")


def test_rollout_prefix_leads_to_the_same_route() -> None:
    client = TestClient(plugin().setup_webserver())
    assert client.post("/ng-rollout/0-1/add", json={"amount": 4}).json() == {"count": 4}
    assert client.post("/ng-rollout/0-1/training-token-capture/add", json={"amount": 4}).json() == {"count": 8}


class Judged(CounterEnvironment):
    async def verify(self, request: Request, body: CounterVerifyRequest) -> Any:
        await call_judge(
            self.server_client, server_name="judge", url_path="/v1/responses", json={}, response_model=NeMoGymResponse
        )


def test_failed_judge_leaves_no_reward() -> None:
    server = Judged(
        config=CounterConfig(host="0.0.0.0", port=8080, entrypoint="", name="judged"),
        server_client=MagicMock(spec=ServerClient, post=AsyncMock(side_effect=ConnectionError("no judge there"))),
    )
    body = {"responses_create_params": {"input": "x"}, "response": response(), "expected": 5}
    reply = TestClient(server.setup_webserver()).post("/verify", json=body).json()
    assert (reply["reward"], reply["mask_sample"], reply["_ng_failure_class"]) == (None, True, "judge_failed")
    assert "no judge there" in reply["failure_reason"]


async def test_judge_failsafe_leaves_no_reward_when_it_wraps_a_hook() -> None:
    @judge_failsafe
    async def verify(body: BaseVerifyRequest) -> BaseVerifyResponse:
        raise JudgeError("503")

    body = BaseVerifyRequest.model_validate({"responses_create_params": {"input": "x"}, "response": response()})
    reply = orjson.loads((await verify(body=body)).body)
    assert reply["reward"] is None and reply["valid"] is False and reply["response"]["id"] == "resp_1"


def test_several_rewards_keep_their_names() -> None:
    body = {"responses_create_params": {"input": "x"}, "response": response(), "reward": 1}
    reply = BaseMultiRewardVerifyResponse.model_validate({**body, "reward_components": {"format": 1, "answer": 0}})
    assert reply.reward_components == {"format": 1.0, "answer": 0.0}


class TypedModel(SimpleResponsesAPIModel):
    """A model server in NeMo Gym's style."""

    config: BaseResponsesAPIModelConfig

    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        said = str(body.messages[-1]["content"]) * 200
        return NeMoGymChatCompletion.model_validate(
            {
                "id": "c1",
                "object": "chat.completion",
                "created": 1,
                "model": "typed",
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
            }
        )


def typed_model(kind: type[SimpleResponsesAPIModel] = TypedModel) -> TestClient:
    config = BaseResponsesAPIModelConfig(host="0.0.0.0", port=8080, entrypoint="", name="typed")
    return TestClient(kind(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver())


def test_typed_model_server_answers_and_streams_the_same() -> None:
    client = typed_model()
    body = {"messages": [{"role": "user", "content": "echo "}]}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert whole == "echo " * 200 == "".join(parts)
    assert text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("model", "path", "kind"),
    [
        (TypedModel, "/v1/responses", "server_error"),
        (SimpleResponsesAPIModel, "/v1/chat/completions", "server_error"),
        (SimpleResponsesAPIModel, "/v1/messages", "api_error"),
    ],
)
def test_dialect_that_a_model_server_does_not_speak_is_answered_with_501(
    model: type[SimpleResponsesAPIModel], path: str, kind: str
) -> None:
    reply = typed_model(model).post(path, json={"input": "x", "messages": []})
    assert reply.status_code == 501 and reply.json()["error"]["type"] == kind
    assert reply.headers["x-should-retry"] == "false"
