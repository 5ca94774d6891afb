"""The documentation's environment of two servers, a facade and a broker, asked as a pipeline asks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.session import SessionDescriptor, Topology
from nemo_gym.sandbox.providers.remote import RemoteProvider
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from tests.architecture.docs import write_examples
from tests.servers.stack import Stack, response, rollout, running_stack

ROW = {"responses_create_params": {"input": "work"}, "task": "say 42", "expected": "42"}
SESSION = {"rollout": rollout().model_dump()}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    backend = {"local": {"state_dir": str(tmp_path / "boxes"), "linger_s": 1}}
    process = BrokerProcess(tmp_path / "broker", backend, on_stop="destroy")
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture
def facade(tmp_path: Path, broker: BrokerProcess) -> Iterator[Stack]:
    write_examples("design.md", tmp_path)
    path = tmp_path / "resources_servers/facade/app.py"
    spec = importlib.util.spec_from_file_location("facade_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with running_stack() as running:
        running.add("task", module.TaskServer, Role.ENVIRONMENT)
        running.add("checker", module.VerifyServer, Role.ENVIRONMENT)
        running.add(
            "facade",
            module.Facade,
            Role.ENVIRONMENT,
            ("task", "checker"),
            task_server={"type": "resources_servers", "name": "task"},
            verify_server={"type": "resources_servers", "name": "checker"},
            broker=broker.remote()["remote"],
        )
        yield running


async def post(stack: Stack, path: str, body: dict[str, Any], token: str | None = None) -> tuple[int, Any]:
    headers = {CONTROL_TOKEN_HEADER: token} if token else {}
    reply = await stack.client().post("facade", path, json=body, headers=headers)
    return reply.status, await reply.json()


async def test_facade_delegates_task_and_verdict_and_lends_the_world(facade: Stack, broker: BrokerProcess) -> None:
    session = {**SESSION, "topology": "env_sandboxed", "box_needs": {}}
    status, seeded = await post(facade, "/seed_session", {**ROW, "_ng_session": session})
    assert status == 200, seeded
    descriptor, control = SessionDescriptor.model_validate(seeded["descriptor"]), seeded["control_token"]
    assert (descriptor.environment, descriptor.placement.topology) == ("facade", Topology.ENV_SANDBOXED)
    assert descriptor.sandbox is not None and descriptor.sandbox.ref is not None
    assert "expected" not in str(seeded["public_row"])
    agent = RemoteProvider(**broker.remote()["remote"])
    try:
        box = await agent.connect(descriptor.sandbox.ref.model_dump())
        done = await agent.exec(box, "grep -o 42 task > answer", cwd="/srv/world")
        assert done.ok, done
    finally:
        await agent.aclose()
    status, harvested = await post(facade, "/harvest", SESSION, control)
    assert status == 200, harvested
    judged = {**SESSION, "artifacts": harvested["artifacts"]}
    status, verdict = await post(facade, "/verify", {**ROW, "response": response(), "_ng_session": judged}, control)
    assert (status, verdict["valid"], verdict["reward"]) == (200, True, 1.0), verdict


async def test_driver_may_choose_only_a_topology_that_the_task_supports(facade: Stack) -> None:
    session = {**SESSION, "topology": "whole_interaction"}
    status, problem = await post(facade, "/seed_session", {**ROW, "_ng_session": session})
    assert status == 400
    assert "agent_in_env, env_sandboxed" in problem["detail"]
