"""The tools as harnesses call them, through a door as well, and what an answer is worth."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from nemo_gym.agent.bindings import process_doors, response_object, text_message
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import InferenceEndpoint, RolloutIdentity, SessionDescriptor, Topology
from nemo_gym.sandbox.doors import DoorServer
from nemo_gym.sandbox.egress import HarnessNeeds
from resources_servers.example_mcp_weather.app import WeatherEnvironment, contains_number
from tests.servers.stack import Stack, running_stack

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "example.jsonl").read_text().splitlines()]
ENV = "example_mcp_weather"


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        running.add(ENV, WeatherEnvironment, Role.ENVIRONMENT)
        yield running


def identity(row: dict[str, Any], rollout_id: str = "r1") -> RolloutIdentity:
    return RolloutIdentity(rollout_id=rollout_id, task_id=row["task_id"], group_id=row["task_id"])


async def seed(stack: Stack, row: dict[str, Any], rollout_id: str = "r1") -> tuple[SessionDescriptor, dict[str, Any]]:
    body = {**row, "_ng_session": {"rollout": identity(row, rollout_id).model_dump()}}
    reply = await stack.client().post(ENV, "/seed_session", json=body)
    answer = await reply.json()
    assert reply.status == 200, answer
    return SessionDescriptor.model_validate(answer["descriptor"]), answer


async def verdict(
    stack: Stack, row: dict[str, Any], seeded: dict[str, Any], *output: dict[str, Any]
) -> dict[str, Any]:
    body = {**row, "response": response_object([*output], model="m")}
    body["_ng_session"] = {"rollout": identity(row).model_dump()}
    headers = {"X-NeMo-Gym-Control-Token": seeded["control_token"]}
    reply: dict[str, Any] = await (await stack.client().post(ENV, "/verify", json=body, headers=headers)).json()
    return reply


@asynccontextmanager
async def tools(url: str, headers: dict[str, str]) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            yield client


async def look_up(client: Client, row: dict[str, Any]) -> tuple[str, float, list[dict[str, Any]]]:
    """What a policy would do: ask for the city's weather, and say what the tool gave."""
    city, measurement = row["answer"]["city"], row["answer"]["measurement"]
    given = await client.call_tool("get_weather", {"city": city})
    assert given.structured_content is not None
    text = given.content[0].text  # type: ignore[union-attr]
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": f"mcp__{ENV}__get_weather",
        "arguments": json.dumps({"city": city}),
    }
    shown = [call, {"type": "function_call_output", "call_id": "c1", "output": text}]
    return city, given.structured_content[measurement], shown


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["task_id"])
async def test_reward_is_one_when_the_answer_is_what_the_tool_gave(stack: Stack, row: dict[str, Any]) -> None:
    descriptor, seeded = await seed(stack, row)
    (server,) = descriptor.mcp
    async with tools(server.url, dict(server.headers)) as client:
        city, measured, shown = await look_up(client, row)
    judged = await verdict(stack, row, seeded, *shown, text_message(f"It is {city}, with {measured}."))
    assert (judged["valid"], judged["reward"]) == (True, 1.0)
    assert judged["details"] == {"tool_calls": ["get_weather"], "expected": measured}


@pytest.mark.parametrize(
    "said",
    [
        "I cannot know that.",
        "Nairobi, at 21.0 degrees.",
        "Bergen, at 34.3 degrees.",
        "Nairobi: 31.3 32.3 33.3 34.3",
        "",
    ],
)
async def test_reward_is_zero_and_valid_when_the_answer_is_another(stack: Stack, said: str) -> None:
    _, seeded = await seed(stack, ROWS[0])
    judged = await verdict(stack, ROWS[0], seeded, text_message(said))
    assert (judged["valid"], judged["reward"]) == (True, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answer", None),
        ("answer", {"city": "Nairobi"}),
        ("answer", {"city": "Nairobi", "measurement": "city"}),
        ("answer", {"city": "Nairobi", "measurement": ["wind_m_s"]}),
        ("answer", {"city": "Atlantis", "measurement": "wind_m_s"}),
        ("answer", {"city": ["Nairobi"], "measurement": "wind_m_s"}),
        ("weather", None),
        ("weather", ["Nairobi"]),
        ("weather", {"Nairobi": 34.3}),
        ("weather", {"Nairobi": {"temperature": 34.3, "wind_m_s": 2}}),
        ("weather", {"Nairobi": {"temperature_c": "hot", "wind_m_s": 2}}),
    ],
)
async def test_row_is_refused_with_its_field_when_it_cannot_be_graded(stack: Stack, field: str, value: Any) -> None:
    row = {**ROWS[0], field: value}
    body = {**row, "_ng_session": {"rollout": identity(row).model_dump()}}
    reply = await stack.client().post(ENV, "/seed_session", json=body)
    answer = await reply.json()
    assert (reply.status, answer["code"]) == (422, "row"), answer
    assert f"'{field}'" in answer["detail"]


async def test_prompt_and_descriptor_hold_no_measurement(stack: Stack) -> None:
    for row in ROWS:
        descriptor, seeded = await seed(stack, row, row["task_id"])
        public = json.dumps([seeded["public_row"], descriptor.model_dump(mode="json", exclude={"mcp"})])
        assert str(row["weather"][row["answer"]["city"]][row["answer"]["measurement"]]) not in public
        assert "weather" not in seeded["public_row"] and "answer" not in seeded["public_row"]
        assert descriptor.placement.topology is Topology.ENV_SANDBOXED


async def test_each_attempt_has_its_own_weather(stack: Stack) -> None:
    first, _ = await seed(stack, ROWS[0])
    second, _ = await seed(stack, ROWS[1], "r2")
    async with tools(first.mcp[0].url, dict(first.mcp[0].headers)) as client:
        assert (await client.call_tool("list_cities")).structured_content == {"cities": sorted(ROWS[0]["weather"])}
        stranger = await client.call_tool("get_weather", {"city": "Sapporo"})
        assert stranger.is_error and "list_cities" in stranger.content[0].text  # type: ignore[union-attr]
    async with tools(second.mcp[0].url, dict(second.mcp[0].headers)) as client:
        assert (await client.call_tool("list_cities")).structured_content == {"cities": sorted(ROWS[1]["weather"])}


@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
async def test_city_is_found_by_the_name_that_the_list_gives_and_in_any_case(stack: Stack, spelling: Any) -> None:
    measured = {"temperature_c": 20.0, "wind_m_s": 2.0}
    cities = ["Rio de Janeiro", "Xi'an"]
    row = {**ROWS[0], "weather": dict.fromkeys(cities, measured)}
    row["answer"] = {"city": "Xi'an", "measurement": "wind_m_s"}
    descriptor, _ = await seed(stack, row)
    async with tools(descriptor.mcp[0].url, dict(descriptor.mcp[0].headers)) as client:
        assert (await client.call_tool("list_cities")).structured_content == {"cities": cities}
        for city in cities:
            found = await client.call_tool("get_weather", {"city": spelling(city)})
            assert found.structured_content == {"city": city, **measured}, found


async def test_box_reaches_the_tools_through_a_door_without_a_token(stack: Stack) -> None:
    descriptor, _ = await seed(stack, ROWS[0])
    (door,) = process_doors(
        descriptor,
        InferenceEndpoint(base_url="", token="none"),
        topology=Topology.ENV_SANDBOXED,
        needs=HarnessNeeds(),
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    served = DoorServer(door, listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await served.start()
    try:
        async with tools(f"{url}/mcp", {"Authorization": "Bearer whatever the box has"}) as client:
            assert await look_up(client, ROWS[0])
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert [(await http.post(url + path)).status_code for path in ("/verify", "/get_weather")] == [403, 403]
    finally:
        await served.aclose()


async def test_tools_are_plain_routes_for_agents_that_keep_cookies(stack: Stack) -> None:
    row = ROWS[3]
    body = {**row, "_ng_session": {"rollout": identity(row).model_dump()}}
    client = stack.client()
    seeded = await client.post(ENV, "/seed_session", json=body)
    reply = await client.post(ENV, "/get_weather", json={"city": "Quito"}, cookies=seeded.cookies)
    assert await reply.json() == {"city": "Quito", **row["weather"]["Quito"]}
    without = await client.post(ENV, "/get_weather", json={"city": "Quito"})
    assert without.status == 409 and "session of an attempt" in await without.text()


@pytest.mark.parametrize(
    ("text", "expected", "stated"),
    [
        ("34.3 °C", 34.3, True),
        ("It is −1.8 degrees.", -1.8, True),
        ("It is -1.8.", -1.8, True),
        ("It is \N{EN DASH}1.8.", -1.8, True),
        ("It is \N{EN DASH}1.8.", 1.8, False),
        ("0.5\N{EN DASH}1.8", 1.8, True),
        ("Quito\N{EN DASH}34.3 °C", 34.3, True),
        ("0.5 °C\N{EN DASH}1.8 °C", 1.8, True),
        ("1.8", -1.8, False),
        ("134.3", 34.3, False),
        ("34.31.2", 34.3, False),
        ("20 degrees", 20.0, True),
    ],
)
def test_number_is_found_when_it_is_stated_as_a_number(text: str, expected: float, stated: bool) -> None:
    assert contains_number(text, expected) is stated


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["task_id"])
async def test_gold_solution_is_rewarded(stack: Stack, row: dict[str, Any]) -> None:
    _, seeded = await seed(stack, row)
    solution = await stack.servers[ENV].gold_solution(row)  # type: ignore[attr-defined]
    assert (await verdict(stack, row, seeded, text_message(solution["text"])))["reward"] == 1.0
