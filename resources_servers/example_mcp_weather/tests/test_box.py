"""The tools from a box without a network: a door on its loopback leads to them, and the box holds no token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.bindings import process_doors
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.contract.session import InferenceEndpoint, RolloutIdentity, SessionDescriptor, Topology
from nemo_gym.sandbox.egress import HarnessNeeds
from nemo_gym.sandbox.facade import create_provider
from resources_servers.example_mcp_weather.app import WeatherEnvironment
from tests.servers.stack import Stack, running_stack

ROW = json.loads((Path(__file__).parents[1] / "data" / "example.jsonl").read_text().splitlines()[3])
ENV = "example_mcp_weather"
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        running.add(ENV, WeatherEnvironment, Role.ENVIRONMENT)
        yield running


def post(url: str, body: dict[str, Any]) -> str:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    return (
        "import urllib.request as r, urllib.error\n"
        f"q = r.Request({url!r}, {json.dumps(body).encode()!r}, {headers!r})\n"
        "try: print(r.urlopen(q, timeout=20).read().decode())\n"
        "except urllib.error.HTTPError as e: print(e.code)\n"
    )


async def test_box_without_a_network_calls_the_tools_and_nothing_else_of_the_environment(stack: Stack) -> None:
    rollout = RolloutIdentity(rollout_id="r1", task_id=ROW["task_id"], group_id="g")
    body = {**ROW, "_ng_session": {"rollout": rollout.model_dump()}}
    seeded = await (await stack.client().post(ENV, "/seed_session", json=body)).json()
    descriptor = SessionDescriptor.model_validate(seeded["descriptor"])
    doors = process_doors(
        descriptor,
        InferenceEndpoint(base_url="", token="none"),
        topology=Topology.ENV_SANDBOXED,
        needs=HarnessNeeds(),
    )
    provider = create_provider("local")
    try:
        box = await provider.create(SandboxSpec(image="host", network=NetworkPolicy.NONE, doors=doors, ttl_s=120))
        try:
            root = f"http://127.0.0.1:{doors[0].port}"
            arguments = {"name": "get_weather", "arguments": {"city": "Quito"}}
            asked = post(f"{root}/mcp", {**CALL, "params": arguments})
            called = await provider.exec(box, ["python3", "-c", asked], timeout_s=60)
            assert called.ok, called.stderr
            result = json.loads(called.stdout or "")["result"]
            assert result["structuredContent"] == {"city": "Quito", **ROW["weather"]["Quito"]}
            direct = await provider.exec(box, ["python3", "-c", post(f"{root}/get_weather", {"city": "Quito"})])
            assert (direct.stdout or "").strip() == "403"
            token = descriptor.mcp[0].headers["Authorization"].removeprefix("Bearer ")
            seen = await provider.exec(box, "cat /proc/*/environ /proc/*/cmdline; true")
            assert token not in (seen.stdout or "")
        finally:
            await provider.close(box)
    finally:
        await provider.aclose()
