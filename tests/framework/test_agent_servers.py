"""An agent server of this suite as a runner: the environment's verdict is the reward."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import ActRequest, ActResponse
from nemo_gym.framework import SessionHandle
from nemo_gym.framework.framework import AgentServerRunner
from nemo_gym.http.client import request
from nemo_gym.stack.endpoints import ServerEntry, StackEntry, start_ticks, write_stack
from tests.framework import runners
from tests.framework.conftest import Stage, prompts
from tests.servers.plugins import AgentConfig, PhraseEnvironment
from tests.servers.stack import response


class AskingAgent(SimpleResponsesAPIAgent):
    """Asks the model once; what the prompt says is its answer."""

    config: AgentConfig
    asks: dict[str, Any] = Field(default_factory=dict)
    """Parameters of its calls, whatever the run says."""

    async def act(self, request_: ActRequest) -> ActResponse:
        inference = request_.inference
        asked = {"model": inference.model, "input": request_.responses_create_params["input"], **self.asks}
        headers = {"Authorization": f"Bearer {inference.token}"}
        reply = await request("POST", f"{inference.base_url}/responses", json=asked, headers=headers)
        assert reply.status == 200, await reply.text()
        await reply.read()
        said = str(request_.responses_create_params["input"])
        assert "secret" not in str(request_.model_dump())
        return ActResponse(response=response(said))


class OwnRunAgent(SimpleResponsesAPIAgent):
    config: AgentConfig

    async def run(self, body: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {}


async def add_agent(stage: Stage, cls: type[SimpleResponsesAPIAgent] = AskingAgent) -> dict[str, Any]:
    """The servers of an agent, and what a framework needs to find it."""
    await stage.start()
    await asyncio.to_thread(stage.stack.add, "phrase", PhraseEnvironment, Role.ENVIRONMENT)
    reference = {"type": "resources_servers", "name": "phrase"}
    await asyncio.to_thread(lambda: stage.stack.add("agent", cls, Role.AGENT, ("phrase",), resources_server=reference))
    return {"agent_servers": lambda config: AgentServerRunner(config.agent_server, client=stage.stack.client())}


def rows(*texts: str) -> dict[str, Any]:
    """Prompts with these texts; the environment looks for "right" in the answers."""
    return prompts(
        len(texts),
        raw_prompt=[[{"role": "user", "content": text}] for text in texts],
        extra_info=[{"phrase": "right", "id": f"t{number}", "secret": "gold"} for number in range(len(texts))],
    )


async def test_verdict_of_the_environment_is_the_reward(stage: Stage) -> None:
    parts = await add_agent(stage)
    framework = stage.framework({"asking": {"agent_server": "agent"}}, rollout={"n": 2}, parts=parts)
    summary = await framework.run_batch(rows("this is right", "this is wrong"))
    assert (summary.trajectories, summary.failed_sessions) == (4, 0), summary.reasons
    assert {key: row.fields["rm_scores"][-1] for key, row in stage.sink.rows.items()} == {
        "u0_0_0": 1.0,
        "u0_1_0": 1.0,
        "u1_0_0": 0.0,
        "u1_1_0": 0.0,
    }
    assert {row.tag["reward_source"] for row in stage.sink.rows.values()} == {"environment"}
    environment: Any = stage.stack.servers["phrase"]
    assert len(environment.closed) == 4
    assert stage.live_sessions() == []


async def test_grading_that_fails_is_no_reward(stage: Stage) -> None:
    parts = await add_agent(stage)
    framework = stage.framework({"asking": {"agent_server": "agent"}}, rollout={"n": 1}, parts=parts)
    summary = await framework.run_batch(rows("broken grader", "right"))
    assert [stage.sink.status(uid)[-1] for uid in ("u0", "u1")] == ["failure", "finished"]
    assert [*stage.sink.rows] == ["u1_0_0"]
    assert "verifier_failed" in summary.reasons[0]


async def test_verdict_wins_over_what_somebody_posts(stage: Stage) -> None:
    parts = await add_agent(stage)
    framework = stage.framework({"asking": {"agent_server": "agent"}}, rollout={"n": 1}, parts=parts)
    finalize = framework._gateways.finalize

    async def posted_before(session: Any, **said: Any) -> Any:
        handle: SessionHandle = session.handle
        await runners.post_reward(handle, {"reward": 1.0})
        return await finalize(session, **said)

    framework._gateways.finalize = posted_before  # type: ignore[method-assign]
    await framework.run_batch(rows("wrong"))
    assert stage.sink.rows["u0_0_0"].fields["rm_scores"][-1] == 0.0


async def test_agent_that_runs_by_itself_is_no_runner(stage: Stage) -> None:
    parts = await add_agent(stage, OwnRunAgent)
    summary = await stage.framework({"own": {"agent_server": "agent"}}, parts=parts).run_batch(rows("right"))
    assert "overrides run()" in summary.reasons[0]


async def test_unknown_agent_server_is_told(stage: Stage) -> None:
    parts = await add_agent(stage)
    summary = await stage.framework({"own": {"agent_server": "agnet"}}, parts=parts).run_batch(rows("right"))
    assert "did you mean 'agent'" in summary.reasons[0]


def test_default_stack_is_the_only_one_with_the_agent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateways, which the trainer has started before, are a stack as well."""
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path))

    def write(run_id: str, *instances: str) -> None:
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        # Servers of other hosts are in the configuration alone.
        servers = (ServerEntry(instances[0], "t", "i", "http://127.0.0.1:9", None, "log"),)
        blocks = {each: {"responses_api_agents": {}} for each in instances if each.startswith("cod")}
        folder = tmp_path / "runs" / run_id
        folder.mkdir(parents=True)
        write_stack(
            StackEntry(run_id, str(folder), os.getpid(), ticks, "00" * 32, {}, servers, {"of": run_id, **blocks})
        )

    write("gateways", "gateway_1", "gateway_2")
    with pytest.raises(ConfigError, match="no running stack has a server 'coder'"):
        AgentServerRunner("coder")
    write("servers", "pipeline", "coder", "coding")
    assert AgentServerRunner("coder")._client.global_config_dict["of"] == "servers"
    with pytest.raises(ConfigError, match=r"no running stack has a server 'codr' \(did you mean 'coder'"):
        AgentServerRunner("codr")
    write("others", "coder")
    with pytest.raises(ConfigError, match="2 running stacks have a server 'coder'; choose one with stack_run_dir"):
        AgentServerRunner("coder")


def test_agent_server_needs_a_stack(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no stack runs in"):
        stage.framework(
            {"own": {"agent_server": "agent", "stack_run_dir": str(stage.folder)}},
            pool=object(),  # type: ignore[arg-type]
        )
