"""An environment that makes its attempts' boxes behind a broker, and lends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import PrivateAttr

from nemo_gym.agent.world import HarnessRun, World, act_in_world
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import ContractError, FencedError, NemoGymError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    AgentOutcome,
    BoxNeeds,
    CommandHarvest,
    Egress,
    InferenceEndpoint,
    MountModel,
    Placement,
    ResourcesModel,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.environment.owned_boxes import OwnedBoxes
from nemo_gym.http.client import get_response_json
from nemo_gym.sandbox.base import BoxLabel, ExecOutcome, SandboxHandle, box_labels
from nemo_gym.sandbox.providers.remote import RemoteProvider
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from tests.docker_engine import docker_engine
from tests.servers.stack import Stack, rollout, running_stack

__all__ = ["docker_engine"]

MODEL = "http://127.0.0.1:9"
WORKDIR = "/srv/world"
ROW = {"responses_create_params": {"input": "work"}}
EVERY = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.WHOLE_INTERACTION)


def described(rollout: RolloutIdentity, disk_gib: float | None = None) -> SessionDescriptor:
    return SessionDescriptor(
        environment="world",
        task_id=rollout.task_id,
        rollout=rollout,
        placement=Placement(topology=Topology.AGENT_IN_ENV, supported=EVERY),
        sandbox=SandboxClause(
            spec=SandboxSpecModel(
                workdir="/srv/world",
                files={"/srv/world/note": "as it was"},
                env={"OF": "world"},
                resources=ResourcesModel(disk_gib=disk_gib),
            )
        ),
        egress=Egress(env={"EGRESS": "seen"}),
        harvest=(CommandHarvest(command="cat note", cwd=WORKDIR),),
    )


class WorldConfig(BaseResourcesServerConfig):
    broker: dict[str, Any]
    disk_gib: float | None = None
    lease_s: float = 60.0


class WorldEnvironment(SimpleResourcesServer):
    """A box with a note in it, from which the note is harvested."""

    config: WorldConfig
    _boxes: OwnedBoxes | None = PrivateAttr(default=None)

    def owned_boxes(self) -> OwnedBoxes:
        if self._boxes is None:
            self._boxes = OwnedBoxes(RemoteProvider(**self.config.broker), lease_s=self.config.lease_s)
        return self._boxes

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        return described(rollout, self.config.disk_gib)


class Pipeline:
    """What the pipeline asks of an environment, step by step."""

    def __init__(self, stack: Stack) -> None:
        self.client = stack.client()

    async def post(self, path: str, body: dict[str, Any], token: str | None = None) -> tuple[int, Any]:
        headers = {CONTROL_TOKEN_HEADER: token} if token else {}
        reply = await self.client.post("world", path, json=body, headers=headers)
        return reply.status, await get_response_json(reply)

    async def seed(self, who: RolloutIdentity, needs: dict[str, Any] | None = None, **more: Any) -> tuple[int, Any]:
        asked = {} if needs is None else {"box_needs": needs}
        return await self.post("/seed_session", {**ROW, "_ng_session": {"rollout": who.model_dump(), **asked, **more}})

    async def about(self, path: str, who: RolloutIdentity, token: str | None) -> tuple[int, Any]:
        return await self.post(path, {"rollout": who.model_dump()}, token)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    backend = {"local": {"state_dir": str(tmp_path / "boxes"), "linger_s": 1}}
    broker = BrokerProcess(tmp_path / "broker", backend, on_stop="destroy")
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


@pytest.fixture
def stack(broker: BrokerProcess) -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture
def world(stack: Stack, broker: BrokerProcess) -> Pipeline:
    return start_world(stack, broker)


def start_world(stack: Stack, broker: BrokerProcess, **block: Any) -> Pipeline:
    settings = broker.remote("world", Role.ENVIRONMENT)["remote"]
    stack.add("world", WorldEnvironment, Role.ENVIRONMENT, broker=settings, **block)
    return Pipeline(stack)


@pytest.fixture
async def agent() -> AsyncIterator[RemoteProvider]:
    """An agent server's client: it knows no broker and holds no credential, only what it is lent."""
    provider = RemoteProvider(patience_s=10)
    yield provider
    await provider.aclose()


@pytest.fixture
async def operator(broker: BrokerProcess) -> AsyncIterator[RemoteProvider]:
    provider = RemoteProvider(**broker.remote()["remote"])
    yield provider
    await provider.aclose()


async def boxes_of(operator: RemoteProvider, who: RolloutIdentity) -> list[str]:
    wanted = {BoxLabel.ROLLOUT: who.rollout_id, BoxLabel.ATTEMPT: str(who.attempt)}
    return [info.sandbox_id for info in await operator.list(wanted)]


async def said(agent: RemoteProvider, handle: SandboxHandle, command: str) -> str:
    result = await agent.exec(handle, command, timeout_s=60)
    assert result.ok, result
    return result.stdout or ""


async def test_agent_works_in_the_environments_box_with_what_it_needs_there(
    world: Pipeline, agent: RemoteProvider, tmp_path: Path
) -> None:
    (tmp_path / "tool").write_text("of the agent")
    needs = {"env": {"NEED": "1"}, "mounts": [{"source": str(tmp_path / "tool"), "target": "/opt/tool"}]}
    status, seeded = await world.seed(rollout(), needs)
    assert status == 200, seeded
    assert seeded["heartbeat_s"] == 15
    lent = seeded["descriptor"]["sandbox"]
    assert (lent["spec"], lent["ref"]["scope"], lent["ref"]["workdir"]) == (None, "operate", "/srv/world")
    handle = await agent.connect(lent["ref"])
    command = 'pwd; cat note /opt/tool; echo " $OF $NEED $EGRESS"'
    assert await said(agent, handle, command) == "/srv/world\nas it wasof the agent world 1 seen\n"
    status, again = await world.seed(rollout(), needs)
    # Each answer has a token of its own, which tells the second in which it ends.
    first, second = seeded.pop("control_token"), again.pop("control_token")
    assert (status, again) == (200, seeded)
    for token in (first, second):
        assert (await world.about("/heartbeat", rollout(), token))[0] == 200


async def test_borrower_can_neither_renew_nor_lend_nor_destroy(
    world: Pipeline, agent: RemoteProvider, operator: RemoteProvider
) -> None:
    _, seeded = await world.seed(rollout(), {})
    handle = await agent.connect(seeded["descriptor"]["sandbox"]["ref"])
    with pytest.raises(ContractError, match="scope"):
        await agent.renew(handle, 1000)
    with pytest.raises(ContractError, match="scope"):
        await agent.serialize_handle(handle, scope="read")
    await agent.close(handle)
    assert await boxes_of(operator, rollout()) == [handle.sandbox_id]


async def test_harvest_shuts_the_borrower_out_and_leaves_no_box(
    world: Pipeline, agent: RemoteProvider, operator: RemoteProvider
) -> None:
    _, seeded = await world.seed(rollout(), {})
    token = seeded["control_token"]
    handle = await agent.connect(seeded["descriptor"]["sandbox"]["ref"])
    await said(agent, handle, "printf changed > note")
    status, harvested = await world.about("/harvest", rollout(), token)
    assert status == 200, harvested
    assert [(each["name"], each["data"]) for each in harvested["artifacts"]] == [("output", "changed")]
    assert await boxes_of(operator, rollout()) == []
    with pytest.raises(NemoGymError):
        await agent.exec(handle, "true")
        raise AssertionError("a fenced borrower still runs commands")
    assert await world.about("/harvest", rollout(), token) == (200, harvested)
    assert (await world.about("/heartbeat", rollout(), token))[0] == 200
    assert (await world.about("/close", rollout(), token))[0] == 200


async def test_lent_box_that_was_ended_for_what_its_policy_wrote_is_a_crash_to_be_graded(
    stack: Stack, agent: RemoteProvider, docker_engine: str, tmp_path: Path
) -> None:
    async def fills_the_disk(world: World, run: HarnessRun) -> None:
        await world.exec("head -c 200000000 /dev/zero > /srv/world/big; sleep 600")

    backend = {"docker": {"base_url": docker_engine}}
    broker = BrokerProcess(tmp_path / "docker", backend, on_stop="destroy", endpoints=[MODEL])
    try:
        broker.start()
        world = start_world(stack, broker, disk_gib=0.05)
        _, seeded = await world.seed(rollout(), {})
        request = ActRequest(
            responses_create_params={"input": "work"},
            descriptor=SessionDescriptor.model_validate(seeded["descriptor"]),
            inference=InferenceEndpoint(base_url=f"{MODEL}/v1", token="token"),
        )
        answer = await act_in_world(request, agent, fills_the_disk)
        assert (answer.outcome, answer.within_reach) == (AgentOutcome.CRASHED, True)
        status, harvested = await world.about("/harvest", rollout(), seeded["control_token"])
        assert status == 200, harvested
        (artifact,) = harvested["artifacts"]
        assert (artifact["data"], artifact["error"]) == ("", answer.outcome_detail)
        assert "its limit disk_gib allows 53687091" in artifact["error"]
    finally:
        broker.close()


async def test_box_of_a_harvest_that_is_cancelled_at_its_end_is_destroyed(
    broker: BrokerProcess, operator: RemoteProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = RemoteProvider(**broker.remote("world", Role.ENVIRONMENT)["remote"])
    boxes, closing, close = OwnedBoxes(provider), asyncio.Event(), provider.close

    async def slow_close(handle: SandboxHandle) -> None:
        closing.set()
        await asyncio.sleep(0.1)
        await close(handle)

    monkeypatch.setattr(provider, "close", slow_close)
    try:
        await boxes.lend(described(rollout()), BoxNeeds())
        harvest = asyncio.create_task(boxes.harvest(rollout()))
        await closing.wait()
        harvest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await harvest
        assert await boxes_of(operator, rollout()) == []
    finally:
        await provider.aclose()


async def test_harvests_that_nobody_closes_are_kept_up_to_a_bound(
    world: Pipeline, operator: RemoteProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.environment.owned_boxes.MAX_KEPT_BYTES", 20)
    tokens = {}
    for number in range(4):
        who = rollout(f"r{number}")
        _, seeded = await world.seed(who, {})
        tokens[who] = seeded["control_token"]
        assert (await world.about("/harvest", who, tokens[who]))[0] == 200  # "as it was": 9 bytes
    again = [(await world.about("/harvest", who, token))[0] for who, token in tokens.items()]
    assert again == [409, 409, 200, 200]
    for who, token in tokens.items():
        assert (await world.about("/close", who, token))[0] == 200


async def test_boxes_whose_pipeline_was_killed_are_forgotten(world: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second) = rollout("r1"), rollout("r2")
    _, seeded = await world.seed(first, {})
    monkeypatch.setattr("nemo_gym.environment.owned_boxes._FORGOTTEN_AFTER_LEASES", -1)
    await world.seed(second, {})
    status, said = await world.about("/heartbeat", first, seeded["control_token"])
    assert status == 409 and "has no box" in said["detail"]


async def test_box_lives_by_heartbeats_and_dies_without_them(
    stack: Stack, broker: BrokerProcess, operator: RemoteProvider
) -> None:
    world = start_world(stack, broker, lease_s=4)
    _, seeded = await world.seed(rollout(), {})
    assert seeded["heartbeat_s"] == 1
    started = time.monotonic()
    while time.monotonic() - started < 9:
        assert (await world.about("/heartbeat", rollout(), seeded["control_token"]))[0] == 200
        await asyncio.sleep(0.5)
    assert len(await boxes_of(operator, rollout())) == 1
    deadline = time.monotonic() + 60
    while await boxes_of(operator, rollout()):
        assert time.monotonic() < deadline, "nobody asks for the box any more, and it is still there"
        await asyncio.sleep(0.2)
    status, refused = await world.about("/heartbeat", rollout(), seeded["control_token"])
    assert (status >= 400, refused["code"]) == (True, "sandbox_lost")


async def test_newer_attempt_takes_the_place_of_the_older_ones_box(
    world: Pipeline, agent: RemoteProvider, operator: RemoteProvider
) -> None:
    _, first = await world.seed(rollout(), {})
    _, second = await world.seed(rollout(attempt=2), {})
    assert await boxes_of(operator, rollout()) == []
    assert len(await boxes_of(operator, rollout(attempt=2))) == 1
    with pytest.raises((FencedError, NemoGymError)):
        await agent.connect(first["descriptor"]["sandbox"]["ref"])
    handle = await agent.connect(second["descriptor"]["sandbox"]["ref"])
    assert await said(agent, handle, "cat note") == "as it was"
    for path in ("/heartbeat", "/harvest"):
        status, refused = await world.about(path, rollout(), first["control_token"])
        assert (status, refused["code"]) == (409, "fenced")


async def test_close_destroys_the_box(world: Pipeline, operator: RemoteProvider) -> None:
    _, seeded = await world.seed(rollout(), {})
    assert (await world.about("/close", rollout(), seeded["control_token"]))[0] == 200
    assert await boxes_of(operator, rollout()) == []


async def test_environment_that_stops_destroys_its_boxes_and_closes_its_provider(
    stack: Stack, world: Pipeline, operator: RemoteProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[RemoteProvider] = []

    async def aclose(provider: RemoteProvider, close: Any = RemoteProvider.aclose) -> None:
        closed.append(provider)
        await close(provider)

    monkeypatch.setattr(RemoteProvider, "aclose", aclose)
    await world.seed(rollout(), {})
    await asyncio.to_thread(stack.stop, "world")
    assert await boxes_of(operator, rollout()) == []
    assert len(closed) == 1


async def test_box_of_a_restarted_environment_is_destroyed_by_its_labels(
    stack: Stack, broker: BrokerProcess, operator: RemoteProvider
) -> None:
    world = start_world(stack, broker)
    spec = SandboxSpec(ttl_s=60, metadata=dict(box_labels(run="run", rollout="r1", attempt=1, role="work")))
    earlier = RemoteProvider(**broker.remote("world", Role.ENVIRONMENT)["remote"])
    await earlier.create(spec)
    await earlier.aclose()
    _, seeded = await world.seed(rollout(), None)
    assert seeded["descriptor"]["sandbox"]["ref"] is None
    await world.about("/close", rollout(), seeded["control_token"])
    assert await boxes_of(operator, rollout()) == []


@pytest.mark.parametrize("path", ["/heartbeat", "/harvest"])
async def test_only_the_pipeline_with_the_attempts_token_may_renew_and_harvest(
    path: str, stack: Stack, world: Pipeline
) -> None:
    _, seeded = await world.seed(rollout(), {})
    assert (await world.about(path, rollout(), None))[0] == 401
    other = await world.seed(rollout("r2"), {})
    assert (await world.about(path, rollout(), other[1]["control_token"]))[0] == 401
    agent = stack.client(Role.AGENT, "agent")
    headers = {CONTROL_TOKEN_HEADER: seeded["control_token"]}
    reply = await agent.post("world", path, json={"rollout": rollout().model_dump()}, headers=headers)
    assert reply.status == 403


async def test_caller_that_will_not_care_for_a_box_is_given_its_description(
    world: Pipeline, operator: RemoteProvider
) -> None:
    _, seeded = await world.seed(rollout(), None)
    assert seeded["descriptor"]["sandbox"]["spec"]["workdir"] == "/srv/world"
    assert "heartbeat_s" not in seeded
    _, outer = await world.seed(rollout("outer"), {}, topology="whole_interaction")
    assert outer["descriptor"]["sandbox"]["spec"]["workdir"] == "/srv/world"
    assert await operator.list() == []


async def test_needs_that_contradict_the_world_are_refused_by_name(world: Pipeline, operator: RemoteProvider) -> None:
    status, refused = await world.seed(rollout(), {"env": {"OF": "agent"}})
    assert (status, refused["code"]) == (400, "config")
    assert "OF='world'" in refused["detail"] and "'agent'" in refused["detail"]
    missing = MountModel(source="/no/such/place", target="/opt/x").model_dump()
    status, refused = await world.seed(rollout("r2"), {"mounts": [missing]})
    assert status >= 400
    assert "/no/such/place" in refused["detail"]
    assert await operator.list() == []


async def test_lost_box_is_lost_to_the_borrower_and_to_the_harvest(
    world: Pipeline, agent: RemoteProvider, operator: RemoteProvider
) -> None:
    _, seeded = await world.seed(rollout(), {})
    handle = await agent.connect(seeded["descriptor"]["sandbox"]["ref"])
    await operator.reap({BoxLabel.ROLLOUT: "r1"})
    assert (await agent.exec(handle, "true")).outcome is ExecOutcome.LOST
    status, refused = await world.about("/harvest", rollout(), seeded["control_token"])
    assert (status >= 500, refused["code"]) == (True, "sandbox_lost")
