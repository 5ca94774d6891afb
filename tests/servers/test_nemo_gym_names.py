"""Names, stubs and sessions that plugins written for NeMo Gym rely on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from aiohttp import ClientResponseError
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import JSONResponse

import nemo_gym
from nemo_gym import global_config
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ResourcesCloseSessionRequest,
    ResourcesCloseSessionResponse,
    ResourcesSeedSessionRequest,
    ResourcesSeedSessionResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import (
    AgentCloseSessionRequest,
    AgentCloseSessionResponse,
    AgentSeedSessionRequest,
    AgentSessionState,
    BaseResponsesAPIAgentConfig,
    SimpleResponsesAPIAgent,
)
from nemo_gym.base_responses_api_model import start_model_execution
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.episode_types import EpisodeFailure, EpisodeId, TaskId
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from nemo_gym.judge import JudgeError, judge_failsafe
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.responses_converter import ResponsesConverter, split_responses_input_output_items
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.sandbox import AsyncSandbox, SandboxHandle
from nemo_gym.server_utils import ServerClient, raise_for_status
from nemo_gym.task_data import load_task_data_schema, materialize_task, normalize_task_fields, validate_jsonl_rows
from nemo_gym.testing.session_conformance import check_resources_session_contract
from nemo_gym.tool_access import DirectHTTPToolAccess
from nemo_gym.verifier_fixture import VerifierFixture, VerifierFixtureError, exercise_verifier_fixture

EPISODE = EpisodeId(rollout_id="r", attempt=1)
TASK = TaskId(taskset="t", task_id="0")


class Remembers(SimpleResourcesServer):
    ray_enabled = False
    config: BaseResourcesServerConfig

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.__dict__["open"], self.__dict__["closed"] = set(), set()

    async def seed_session(
        self, body: BaseSeedSessionRequest | ResourcesSeedSessionRequest
    ) -> ResourcesSeedSessionResponse | BaseSeedSessionResponse:
        if not isinstance(body, ResourcesSeedSessionRequest):
            return BaseSeedSessionResponse()
        if body.resources_session_id in self.__dict__["closed"]:
            raise ValueError("closed")
        self.__dict__["open"].add(body.resources_session_id)
        return ResourcesSeedSessionResponse(resources_session_id=body.resources_session_id)

    async def close_resources_session(self, body: ResourcesCloseSessionRequest) -> ResourcesCloseSessionResponse:
        self.__dict__["closed"].add(body.resources_session_id)
        return ResourcesCloseSessionResponse(resources_session_id=body.resources_session_id)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


class Forgets(SimpleResourcesServer):
    config: BaseResourcesServerConfig


def environment(kind: type[SimpleResourcesServer]) -> SimpleResourcesServer:
    config = BaseResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="e")
    return kind(config=config, server_client=MagicMock(spec=ServerClient))


@pytest.mark.parametrize(("kind", "keeps_state"), [(Remembers, True), (Forgets, False)])
def test_an_environment_keeps_the_session_contract(kind: type[SimpleResourcesServer], keeps_state: bool) -> None:
    seed = ResourcesSeedSessionRequest(
        resources_session_id="one", episode_id=EPISODE, task_id=TASK, task_data={"secret": 1}
    )
    check_resources_session_contract(environment(kind).setup_webserver(), seed, keeps_state=keeps_state)


def test_a_conformance_check_names_a_seed_that_a_closed_session_took() -> None:
    seed = ResourcesSeedSessionRequest(resources_session_id="one", episode_id=EPISODE, task_id=TASK, task_data={})
    with pytest.raises(AssertionError, match="closed session"):
        check_resources_session_contract(environment(Forgets).setup_webserver(), seed, keeps_state=True)


class Agent(SimpleResponsesAPIAgent):
    ray_enabled = False
    config: BaseResponsesAPIAgentConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:
        raise NotImplementedError

    async def _seed_agent_session_state(self, body: AgentSeedSessionRequest) -> AgentSessionState:
        return AgentSessionState(body)

    async def _close_agent_session_state(self, state: AgentSessionState) -> AgentCloseSessionResponse:
        return AgentCloseSessionResponse(agent_session_id=state.request.agent_session_id, resources_cookies={"a": "b"})


def test_an_agent_session_is_seeded_once_and_its_close_can_be_asked_for_again() -> None:
    access = DirectHTTPToolAccess(name="tools", required=True, base_url="http://127.0.0.1:1")
    config = BaseResponsesAPIAgentConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="a", tool_accesses=[access]
    )
    agent = Agent(config=config, server_client=MagicMock(spec=ServerClient))
    seed = AgentSeedSessionRequest(agent_session_id="s", episode_id=EPISODE, task_id=TASK)
    granted = access.model_copy(update={"required": False})
    assert agent.effective_tool_accesses(seed) == [access]
    assert agent.effective_tool_accesses(seed.model_copy(update={"tool_accesses": [granted]})) == [granted]
    close = AgentCloseSessionRequest(agent_session_id="s", episode_id=EPISODE).model_dump(mode="json")
    with TestClient(agent.setup_webserver(), raise_server_exceptions=False) as client:
        body = seed.model_dump(mode="json")
        assert client.post("/v1/agent_sessions", json=body).json() == {"agent_session_id": "s"}
        assert client.post("/v1/agent_sessions", json=body).status_code == 200
        assert agent._require_agent_session("s").request == seed
        other = {**close, "episode_id": {"rollout_id": "other", "attempt": 0}}
        assert client.post("/v1/agent_sessions/close", json=other).status_code >= 400
        first = client.post("/v1/agent_sessions/close", json=close).json()
        assert first["resources_cookies"] == {"a": "b"}
        assert client.post("/v1/agent_sessions/close", json=close).json() == first
        assert client.post("/v1/agent_sessions", json=body).status_code >= 400
        unseen = {**close, "agent_session_id": "unseen"}
        assert client.post("/v1/agent_sessions/close", json=unseen).status_code == 200
        late = {**body, "agent_session_id": "unseen"}
        assert client.post("/v1/agent_sessions", json=late).status_code >= 400


async def test_a_stub_that_states_ok_is_judged_by_it() -> None:
    await raise_for_status(MagicMock(ok=True, spec_set=["ok"]))
    failed = MagicMock(ok=False, status=500, content=MagicMock(read=AsyncMock(return_value=b"no")))
    with pytest.raises(ClientResponseError) as told:
        await raise_for_status(failed)
    assert told.value.response_content == b"no"  # type: ignore[attr-defined]


async def test_a_judge_failure_is_starlettes_json_response() -> None:
    @judge_failsafe
    async def verify() -> None:
        raise JudgeError("offline")

    reply = await verify()
    assert isinstance(reply, JSONResponse)
    said = json.loads(bytes(reply.body))
    assert said["_ng_failure_judge_error"] == "offline" and said["reward"] is None


class NemoProvider:
    """As NeMo Gym's: it knows no archives and no streams, and leaves the spec's files to the facade."""

    name = "theirs"

    def __init__(self, *, refuses: bool = False) -> None:
        self.files: dict[str, str] = {}
        self.closed = 0
        self._refuses = refuses

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return SandboxHandle(sandbox_id="1", provider_name=self.name)

    async def upload_file(self, handle: SandboxHandle, local: Path, remote: str) -> None:
        if self._refuses:
            raise OSError("full")
        self.files[remote] = local.read_text()

    async def close(self, handle: SandboxHandle) -> None:
        self.closed += 1


async def test_files_of_a_spec_reach_a_box_of_a_nemo_gym_provider() -> None:
    provider: Any = NemoProvider()
    async with AsyncSandbox(provider, SandboxSpec(image="x", files={"/a/run.py": "print(1)"})):
        assert provider.files == {"/a/run.py": "print(1)"}
    assert provider.closed == 1


async def test_a_box_whose_files_cannot_be_put_is_closed() -> None:
    provider: Any = NemoProvider(refuses=True)
    with pytest.raises(OSError, match="full"):
        await AsyncSandbox(provider, SandboxSpec(image="x", files={"/a": ""})).start()
    assert provider.closed == 1


def test_a_process_without_configuration_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, raising=False)
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    assert global_config.maybe_get_global_config_dict() is None
    monkeypatch.setenv(global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, "a: 1")
    found = global_config.maybe_get_global_config_dict()
    assert found is not None and found["a"] == 1


def test_a_relative_path_is_found_below_the_extra_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "p.yaml").write_text("user: x")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    assert nemo_gym._resolve_under_cwd_or_install("prompts/p.yaml") == tmp_path / "prompts" / "p.yaml"
    assert nemo_gym._resolve_under_cwd_or_install("nowhere.yaml") == Path.cwd() / "nowhere.yaml"


def test_an_episode_keeps_names_that_can_be_taken_apart() -> None:
    assert EPISODE.capture_key == "r-a1"
    with pytest.raises(ValueError, match="rename"):
        EpisodeId(rollout_id="r-a1")
    failure = EpisodeFailure(failure_reason="why", terminal=False)
    assert failure.model_dump() == {"failure_reason": "why", "terminal": False}


def test_a_conversation_survives_the_way_to_chat_and_back() -> None:
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}
    converter = ResponsesConverter(return_token_id_information=True)
    said = {"type": "message", "role": "user", "content": "hi"}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "think"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "c", **tokens}
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    asked = NeMoGymResponseCreateParamsNonStreaming(input=[said, thought, call, result], model="m")
    chat = converter.responses_to_chat_completion_create_params(asked)
    user, assistant, tool = (dict(message) for message in chat.messages)
    assert user["content"] == "hi" and assistant["content"] == "<think>think</think>"
    assert [made["id"] for made in assistant["tool_calls"]] == [tool["tool_call_id"]] == ["c"]
    assert assistant["generation_token_ids"] == [2]
    message = {"role": "assistant", "content": "<think>a</think>b", **tokens}
    completion = {"id": "x", "model": "m", "created": 1, "choices": [{"message": message, "finish_reason": "stop"}]}
    reply = converter.chat_completion_to_response(asked, completion, preserve_envelope_id=True)
    assert reply.id == "x" and [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[-1].generation_token_ids == [2]
    before, after = split_responses_input_output_items(asked.input)
    assert len(before) == 1 and len(after) == 3


SCHEMA = """
from pydantic import BaseModel
class TaskData(BaseModel):
    answer: str
"""


def test_rows_are_checked_against_a_plugins_schema(tmp_path: Path) -> None:
    assert load_task_data_schema(tmp_path) is None
    (tmp_path / "task_data.py").write_text(SCHEMA)
    schema = load_task_data_schema(tmp_path)
    assert schema is not None
    rows = [{"answer": "4"}, {"verifier_metadata": {"answer": 4}}, {"answer": "4", "anwser": "4"}]
    report = validate_jsonl_rows("e", schema, "rows.jsonl", [json.dumps(row) for row in rows])
    assert (report.rows, report.error_rows, dict(report.unknown_keys)) == (3, 1, {"anwser": 1})
    assert "row 1: answer" in report.summary() and not report.clean
    assert normalize_task_fields({"a": 1, "task_data": {"a": 2}}) == ({"a": 1}, ["a"])
    task = materialize_task({"id": "x", "_ng_task_index": 7, "responses_create_params": {"input": "?"}}, taskset="s")
    assert task["task_id"] == {"taskset": "s", "task_id": "7"}


class Sums:
    async def verify(self, body: BaseVerifyRequest) -> dict[str, float]:
        return {"reward": float("4" in body.response.output_text)}


def cases(path: Path, full: float) -> VerifierFixture:
    def request(text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        response = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": [message]}
        response |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        return {"responses_create_params": {"input": "2+2?"}, "response": response}

    written = [
        {"name": "right", "kind": "full_reward", "request": request("4"), "expected_reward": full},
        {"name": "wrong", "kind": "zero_reward", "request": request("5\u2028\x85")},
        {"name": "empty", "kind": "malformed", "request": {}, "expected_error": "response"},
    ]
    path.write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in written))
    return VerifierFixture(server_factory=Sums, request_model=BaseVerifyRequest, cases_path=path)


async def test_a_verifiers_cases_are_tried_without_a_server(tmp_path: Path) -> None:
    fixture = cases(tmp_path / "cases.jsonl", 1.0)
    results = await exercise_verifier_fixture(fixture, reward_range=(0, 1), determinism="deterministic")
    assert [(result.kind, result.observed_rewards) for result in results] == [
        ("full_reward", (1.0,)),
        ("zero_reward", (0.0,)),
        ("malformed", ()),
    ]


async def test_a_case_that_does_not_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerifierFixtureError, match=r"case 'right': expected reward 0\.5, got 1"):
        await exercise_verifier_fixture(
            cases(tmp_path / "cases.jsonl", 0.5), reward_range=(0, 1), determinism="unknown"
        )


def test_a_plugins_own_layer_for_errors_is_asked_first() -> None:
    class WithLayer(Forgets):
        def setup_exception_middleware(self, app: Any) -> None:
            @app.middleware("http")
            async def marked(request: Any, call_next: Any) -> Any:
                reply = await call_next(request)
                reply.headers["X-Marked"] = "yes"
                return reply

            super().setup_exception_middleware(app)

    with TestClient(environment(WithLayer).application()) as client:
        assert client.get("/health").headers["X-Marked"] == "yes"


def test_facts_of_a_model_call_stay_with_its_request() -> None:
    request = Request({"type": "http"})
    facts = start_model_execution(request, upstream_attempted=True)
    facts["response_source"] = "upstream"
    assert request.state.nemo_gym_model_execution == {"upstream_attempted": True, "response_source": "upstream"}


def test_a_program_composes_files_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my, own [1]" / "judge.yaml"
    file.parent.mkdir()
    file.write_text("_judge: strict\n")
    monkeypatch.setattr(tempfile, "tempdir", str(file.parent))
    given = {"config_paths": [str(file)], **GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT}
    composed = GlobalConfigDictParser().parse(GlobalConfigDictParserConfig(initial_global_config_dict=given))
    assert composed["_judge"] == "strict"


def test_a_run_request_knows_its_rollout_and_its_dumps_do_not() -> None:
    row = {"responses_create_params": {"input": "x"}, "_ng_rollout_id": "run.3-0", "_ng_attempt_index": 0}
    for given in (row, {**row, "more": 1}):
        body = BaseRunRequest.model_validate(given)
        assert body.capture_rollout_id == maybe_rollout_id_from_run_body(body) == "run.3-0"
        assert "run.3-0" not in body.model_dump_json()
