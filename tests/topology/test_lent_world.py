"""One attempt in a box that the environment lends: it is entered, worked in and left, however the attempt ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.world import HarnessRun, World, act_in_world
from nemo_gym.contract.errors import SandboxLostError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    AgentOutcome,
    CommandHarvest,
    InferenceEndpoint,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxRef,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider, SandboxStatus
from nemo_gym.sandbox.conformance.base import Upstream, upstream
from nemo_gym.sandbox.egress import HarnessNeeds
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.remote import RemoteProvider
from resources_servers.sandbox.tests.broker_process import BrokerProcess

ASK = (
    "python3 -c \"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/v1/responses', b'{}')"
    '.status)"'
)


@pytest.fixture
def broker(tmp_path: Path, model: Upstream) -> Iterator[BrokerProcess]:
    backend = {"local": {"state_dir": str(tmp_path / "boxes"), "linger_s": 1}}
    broker = BrokerProcess(tmp_path / "broker", backend, on_stop="destroy", endpoints=[model.url])
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


@pytest.fixture
async def owner(broker: BrokerProcess) -> AsyncIterator[RemoteProvider]:
    provider = RemoteProvider(**broker.remote()["remote"])
    yield provider
    await provider.aclose()


@pytest.fixture
async def box(owner: RemoteProvider) -> SandboxHandle:
    return await owner.create(SandboxSpec(ttl_s=120, workdir="/srv/world", files={"/srv/world/note": "here\n"}))


@pytest.fixture(params=["remote", "local"])
async def agents(
    request: pytest.FixtureRequest, broker: BrokerProcess, tmp_path: Path
) -> AsyncIterator[SandboxProvider]:
    """What the agent server has of its own: a client of the same broker, or boxes of another kind."""
    provider: SandboxProvider
    if request.param == "remote":
        provider = RemoteProvider(**broker.remote("agent")["remote"])
    else:
        provider = LocalProvider(state_dir=str(tmp_path / "own"), linger_s=1)
    yield provider
    await provider.aclose()


@pytest.fixture
async def model() -> AsyncIterator[Upstream]:
    async with upstream() as server:
        yield server


async def act_request(owner: RemoteProvider, box: SandboxHandle, model_url: str) -> ActRequest:
    lent = SandboxRef.model_validate(await owner.serialize_handle(box, scope="operate"))
    rollout = RolloutIdentity(rollout_id="r", task_id="t", group_id="g")
    return ActRequest(
        responses_create_params={"input": "do it"},
        descriptor=SessionDescriptor(
            environment="env",
            task_id="t",
            rollout=rollout,
            placement=Placement(topology=Topology.AGENT_IN_ENV),
            sandbox=SandboxClause(ref=lent.model_copy(update={"workdir": "/srv/world"})),
            harvest=(CommandHarvest(command="cat note"),),
        ),
        inference=InferenceEndpoint(base_url=f"{model_url}/v1", token="attempt-token"),
    )


async def act(request: ActRequest, provider: SandboxProvider, harness: Any) -> Any:
    return await act_in_world(request, provider, harness, needs=HarnessNeeds(model_in_box=True))


async def test_harness_works_in_the_lent_box_and_reaches_the_model_there(
    owner: RemoteProvider, box: SandboxHandle, agents: SandboxProvider, model: Upstream
) -> None:
    seen: dict[str, Any] = {}

    async def harness(world: World, run: HarnessRun) -> None:
        seen["said"] = (await world.exec(f"cat note; {ASK}; echo worked > note")).stdout
        seen["door"], seen["id"] = world.door_statistics("model"), world.handle.sandbox_id
        assert world.door_url("model") == "http://127.0.0.1:8000"

    answer = await act(await act_request(owner, box, model.url), agents, harness)
    assert (answer.outcome, answer.artifacts) == (AgentOutcome.COMPLETED, []), "the harvest is the environment's"
    assert (seen["said"], seen["id"], seen["door"].answered) == ("here\n200\n", box.sandbox_id, 1)
    assert model.seen[0][2]["authorization"] == "Bearer attempt-token"
    assert await owner.status(box) is SandboxStatus.RUNNING
    after = await owner.exec(box, f"cat note; {ASK} || echo closed", timeout_s=60)
    assert after.stdout == "worked\nclosed\n"


async def test_cancelled_attempt_leaves_the_box_to_its_owner_without_doors(
    owner: RemoteProvider, box: SandboxHandle, model: Upstream, broker: BrokerProcess
) -> None:
    begun = asyncio.Event()

    async def harness(world: World, run: HarnessRun) -> None:
        begun.set()
        await world.exec("sleep 600")

    agent = RemoteProvider()
    acting = asyncio.create_task(act(await act_request(owner, box, model.url), agent, harness))
    await begun.wait()
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    after = await owner.exec(box, f"{ASK} || echo closed", timeout_s=60)
    assert after.stdout == "closed\n"
    await agent.aclose()


async def test_box_that_is_gone_is_an_infrastructure_failure(
    owner: RemoteProvider, box: SandboxHandle, agents: SandboxProvider, model: Upstream
) -> None:
    request = await act_request(owner, box, model.url)

    async def vanishes(world: World, run: HarnessRun) -> None:
        await owner.close(box)
        await world.exec("true")

    with pytest.raises(SandboxLostError):
        await act(request, agents, vanishes)
    with pytest.raises(SandboxLostError):
        await act(request, agents, vanishes)


async def test_attempt_whose_box_was_taken_back_ends_without_touching_it(
    owner: RemoteProvider, box: SandboxHandle, agents: SandboxProvider, model: Upstream
) -> None:
    async def fenced(world: World, run: HarnessRun) -> None:
        await owner.fence(box)
        await world.exec("echo late > note")

    with pytest.raises(Exception, match="revoked"):
        await act(await act_request(owner, box, model.url), agents, fenced)
    assert (await owner.exec(box, "cat note", timeout_s=60)).stdout == "here\n"
