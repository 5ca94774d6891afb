"""Model calls that NeMo Gym's model servers write, and what rows are told of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.agent.server import SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_agent import AgentCloseSessionRequest, AgentSeedSessionRequest
from nemo_gym.base_responses_api_model import (
    BaseResponsesAPIModelConfig,
    CaptureStore,
    ModelCallCaptureConfig,
    SimpleResponsesAPIModel,
    aggregate_model_call_metrics,
    install_model_call_capture,
    merge_model_call_capture_into_record,
    read_model_call_records,
)
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.episode_types import EpisodeId, TaskId
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.errors import status_of
from nemo_gym.gateway.model_calls import reply_of_events
from nemo_gym.openai_utils import (
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import ResponsesConverter, split_responses_input_output_items
from nemo_gym.responses_streaming import sanitize_streaming_responses_body
from nemo_gym.rollout_collection import _attach_trajectory_record, _trajectory_identity
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ModelCallRef,
    ToolCallObservation,
    TrajectoryRecord,
)

REPLY = {
    "id": "resp_1",
    "created_at": 1.0,
    "model": "m",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 7,
        "output_tokens": 2,
        "total_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens_details": {"reasoning_tokens": 1},
    },
}


class PluginModel(SimpleResponsesAPIModel):
    """A model server as NeMo Gym's are."""

    config: BaseResponsesAPIModelConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(REPLY)


def served(directory: Path | None) -> TestClient:
    found = {} if directory is None else {"observability_enabled": True, "model_call_capture_dir": str(directory)}
    config = BaseResponsesAPIModelConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="policy")
    client: Any = SimpleNamespace(global_config_dict=found)
    return TestClient(PluginModel.model_construct(config=config, server_client=client).setup_webserver())


def test_a_call_is_written_before_its_reply_ends(tmp_path: Path) -> None:
    asked = {"input": "hello", "metadata": {"api_key": "sk-abcdefghijklmnop1234"}}
    reply = served(tmp_path).post("/ng-rollout/r.0-0/v1/responses", json=asked, headers={"x-session-id": "s"})
    assert reply.status_code == 200
    store = CaptureStore(tmp_path)
    [call] = read_model_call_records(store, "r.0-0")
    assert call.model_ref is not None
    assert (call.model_ref.name, call.dialect, call.client_session_id) == ("policy", "responses", "s")
    assert (call.response_id, call.response_status, call.finish_reason) == ("resp_1", "completed", None)
    assert (call.tokens_in, call.tokens_out, call.tokens_reasoning, call.cached_tokens) == (7, 2, 1, 4)
    assert (call.cache_hit, call.error_category, call.call_index) == (True, None, 0)
    assert call.request["input"] == "hello"
    assert "sk-abcdef" not in json.dumps(call.request)
    assert aggregate_model_call_metrics(store, "r.0-0")["num_calls"] == 1
    assert read_model_call_records(store, "other") == []


def test_a_call_that_names_no_rollout_is_not_written_and_nothing_is_unless_asked_for(tmp_path: Path) -> None:
    assert served(tmp_path).post("/v1/responses", json={"input": "hello"}).status_code == 200
    assert served(None).post("/ng-rollout/r/v1/responses", json={"input": "hello"}).status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_messages_are_answered_by_the_hook_that_there_is_and_written(tmp_path: Path) -> None:
    asked = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    reply = served(tmp_path).post("/ng-rollout/r/v1/messages", json=asked)
    assert (reply.status_code, "event: message_stop" in reply.text) == (200, True)
    [call] = read_model_call_records(CaptureStore(tmp_path), "r")
    assert (call.dialect, call.finish_reason, call.error_category) == ("messages", "end_turn", None)
    assert call.response["content"] == [{"type": "text", "text": "ok"}]


def test_a_field_that_the_hooks_types_refuse_is_unprocessable(tmp_path: Path) -> None:
    reply = served(tmp_path).post("/ng-rollout/r/v1/responses", json={"input": "hello", "no_such": 1})
    assert reply.status_code == 422
    assert [call.error_category for call in read_model_call_records(CaptureStore(tmp_path), "r")] == ["http_422"]
    assert status_of(InvalidBodyError("of the gateway's own")) == 400


def test_an_application_that_a_plugin_built_is_captured_and_a_full_disk_costs_only_records(tmp_path: Path) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat() -> dict[str, Any]:
        raise HTTPException(503, "busy")

    directory = tmp_path / "calls"
    config = ModelCallCaptureConfig(observability_enabled=True, model_call_capture_dir=directory)
    install_model_call_capture(app, config, model_server_name="policy")
    assert TestClient(app).post("/ng-rollout/r/v1/chat/completions", json={}).status_code == 503
    [call] = read_model_call_records(CaptureStore(directory), "r")
    assert (call.status_code, call.error_category, call.tokens_in) == (503, "http_503", None)
    (directory / "full").write_text("a file where a directory must be")
    assert TestClient(app).post("/ng-rollout/full/v1/chat/completions", json={}).status_code == 503


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES])
def test_a_stream_is_put_together_again(dialect: Dialect) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    replies: dict[Dialect, dict[str, Any]] = {
        Dialect.CHAT: {
            "id": "x",
            "model": "m",
            "created": 1,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hi", "tool_calls": [call]},
                    "finish_reason": "tool_calls",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        },
        Dialect.MESSAGES: {
            "id": "x",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
            "stop_reason": "tool_use",
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 2},
        },
        Dialect.RESPONSES: REPLY,
    }
    reply = replies[dialect]
    stream = b"".join(ADAPTERS[dialect].events(reply))
    whole = reply_of_events(dialect, stream)
    assert whole is not None
    assert {key: whole.get(key) for key in reply} == reply
    assert reply_of_events(dialect, stream[: len(stream) // 2]) is None


def test_calls_complete_what_an_agent_observed(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    model_ref = {"type": "responses_api_models", "name": "policy"}
    for index, (response_id, session) in enumerate((("a", None), (None, "root"), ("b", None))):
        said = {"model_call_id": f"call-{index}", "response_id": response_id, "client_session_id": session}
        store.record("0-1", {**said, "started_at": 5.0 - index, "model_ref": model_ref, "request": {"n": index}})
    refs = [ModelCallRef.model_validate({"model_ref": model_ref, "response_id": name}) for name in ("b", "a")]
    seen = AgentObservationBundle(
        source="no_such",
        records=[
            AgentInvocation(
                invocation_id="root",
                model_calls=refs,
                conversation=[{"type": "function_call_output", "call_id": "t", "output": "4"}],
            ),
            ToolCallObservation(invocation_id="root", tool_call_id="t", status="completed"),
        ],
    )
    row: dict[str, Any] = {"_ng_task_index": 0, "_ng_rollout_index": 1, "task_id": "org/name"}
    row["ng_agent_observations"] = seen.model_dump(mode="json")
    merge_model_call_capture_into_record(row, [tmp_path], include_payloads=True)
    [invocation, _] = row["ng_agent_observations"]["records"]
    # In the order in which they began.
    assert [ref["model_call_id"] for ref in invocation["model_calls"]] == ["call-2", "call-1", "call-0"]

    _attach_trajectory_record(row, row)
    trajectory = TrajectoryRecord.model_validate(row["ng_trajectory"])
    assert (trajectory.task_id, trajectory.rollout_id) == _trajectory_identity(row) == ("org/name", "0-1")
    assert [call.request for call in trajectory.model_calls] == [{"n": 2}, {"n": 1}, {"n": 0}]
    assert [call.output for call in trajectory.tool_calls] == ["4"]
    assert trajectory.invocations[0].conversation[0].type == "function_call_output"
    assert [gap.code for gap in trajectory.gaps] == ["turns_unavailable"]

    chains: dict[str, Any] = {"_ng_task_index": 0, "_ng_rollout_index": 1, "ng_trajectory": [{"chain": 0}]}
    _attach_trajectory_record(chains, chains)
    assert chains["ng_trajectory"] == [{"chain": 0}]


def test_a_chat_request_has_known_names_and_messages_may_have_thoughts() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning_content": "z"}]
    asked = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": said, "verbosity": "low"})
    assert (asked.verbosity, asked.model_dump(exclude_unset=True)["messages"]) == ("low", said)
    with pytest.raises(ValidationError, match="not permitted: verbose"):
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": said, "verbose": 1})


def test_a_store_refuses_ids_that_are_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a rollout id"):
        CaptureStore(tmp_path).record("../x", {})


def test_tools_of_a_namespace_stand_beside_the_others() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}}
    cleaned, names = sanitize_streaming_responses_body(
        {"input": "x", "stream": True, "tools": [{"type": "namespace", "name": "n", "tools": [tool]}]}
    )
    assert (cleaned, names) == ({"input": "x", "tools": [tool]}, {"f": "n"})
    space = {"type": "namespace", "name": "n", "tools": [tool]}
    with pytest.raises(ValueError, match="two namespaces"):
        sanitize_streaming_responses_body({"tools": [space, {**space, "name": "o"}]})


async def test_a_dispatching_model_server_answers_as_it_likes() -> None:
    class Dispatching(PluginModel):
        async def responses_dispatch(self, request: Request, body: dict[str, Any]) -> Response:
            if body.pop("prefix", None):
                body["input"] = "prefixed"
            return await super().responses_dispatch(request, body)

    config = BaseResponsesAPIModelConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="policy")
    client: Any = SimpleNamespace(global_config_dict={})
    app = Dispatching.model_construct(config=config, server_client=client).setup_webserver()
    assert TestClient(app).post("/v1/responses", json={"input": "x", "prefix": 1}).json()["id"] == "resp_1"
    streamed = TestClient(app).post("/v1/responses", json={"input": "x", "prefix": 1, "stream": True})
    assert "response.completed" in streamed.text


def test_a_converter_says_what_an_endpoint_reported() -> None:
    completion = {
        "id": "c",
        "model": "m",
        "created": 1,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "native_finish_reason": "refusal",
                "message": {"role": "assistant", "content": None, "refusal": "No."},
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 9},
    }
    asked = NeMoGymResponseCreateParamsNonStreaming(input="x")
    response = ResponsesConverter().chat_completion_to_response(asked, completion).model_dump(mode="json")
    assert response["native_finish_reason"] == "refusal"
    assert response["output"][0]["content"] == [{"refusal": "No.", "type": "refusal"}]
    assert response["usage"]["total_tokens"] == 9
    assert response["usage"]["input_tokens_details"]["cached_tokens"] is None
    completion["usage"] |= {"prompt_tokens_details": {"cached_tokens": 2.7}}  # type: ignore[operator]
    with pytest.raises(ValidationError, match=r"input_tokens_details\.cached_tokens"):
        ResponsesConverter().chat_completion_to_response(asked, completion)
    said = {"content": "<think>t</think>a"}
    [kept] = ResponsesConverter(uses_reasoning_parser=False).postprocess_assistant_message_dict(said)
    assert kept.content[0].text == "<think>t</think>a"
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    assert split_responses_input_output_items([search]) == ([], [search])


async def test_a_closed_session_is_a_conflict_and_several_workers_keep_none() -> None:
    class Agent(SimpleResponsesAPIAgent):
        async def _seed_agent_session_state(self, body: Any) -> Any:
            return SimpleNamespace(request=body)

    def agent(workers: int | None) -> Any:
        config = SimpleNamespace(
            name="a", num_workers=workers, tool_accesses=[], session_close_retry_window_seconds=300.0
        )
        made: Any = Agent.model_construct(config=config, server_client=None)
        object.__setattr__(made, "_session_records", {})
        return made

    request: Any = SimpleNamespace(session={})
    body = AgentSeedSessionRequest(
        agent_session_id="s",
        episode_id=EpisodeId(rollout_id="r", attempt=0),
        task_id=TaskId(taskset="t", task_id="0"),
    )
    one = agent(None)
    await one.seed_agent_session(request, body)
    await one.close_agent_session(request, AgentCloseSessionRequest(agent_session_id="s", episode_id=body.episode_id))
    with pytest.raises(HTTPException) as closed:
        await one.seed_agent_session(request, body)
    assert closed.value.status_code == 409
    with pytest.raises(ValueError, match="num_workers=1"):
        await agent(2).seed_agent_session(request, body)
