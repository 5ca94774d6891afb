"""Bodies that no honest client sends: numbers beyond 64 bits, deep nesting, wrong types: the client's fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, ClassVar
from uuid import uuid4

import aiohttp
import orjson
import pytest

from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role
from tests.servers.plugins import CounterEnvironment, LegacyAgent, PhraseEnvironment, WaitingAgent
from tests.servers.stack import Stack, response, rollout, running_stack

WHO = rollout().model_dump()
PARAMS = {"input": "at once"}
ROW = {"responses_create_params": PARAMS}
BIG = "9" * 40
DEEP = "[" * 500 + "]" * 500
NEARLY = "[" * 250 + "]" * 250
"""Can be read and written, but not within a body that holds it."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Stack]:
    stack = Stack()
    refs = {"resources_server": {"type": "resources_servers", "name": "counter"}}
    stack.add("counter", CounterEnvironment, Role.ENVIRONMENT)
    stack.add("phrase", PhraseEnvironment, Role.ENVIRONMENT)
    stack.add("agent", WaitingAgent, Role.AGENT, ("counter",), **refs)
    stack.add("legacy", LegacyAgent, Role.AGENT, ("counter",), **refs)
    yield stack
    stack.close()


async def sent(stack: Stack, server: str, path: str, body: str, role: Role = Role.PIPELINE) -> tuple[int, Any]:
    headers = {CREDENTIAL_HEADER: stack.keys.caller(role, "x", server), "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        async with session.post(stack.url(server) + path, data=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)


def row(value: str, **more: Any) -> str:
    text = orjson.dumps({"responses_create_params": PARAMS, **more}).decode()
    return f'{text[:-1]},"odd":{value}}}'


@pytest.mark.parametrize("value", [DEEP, NEARLY])
@pytest.mark.parametrize(
    ("server", "path", "role"),
    [
        ("phrase", "/seed_session", Role.PIPELINE),
        ("phrase", "/verify", Role.PIPELINE),
        ("counter", "/rows", Role.PIPELINE),
        ("counter", "/aggregate_metrics", Role.PIPELINE),
        ("agent", "/run", Role.OPERATOR),
        ("agent", "/act", Role.PIPELINE),
        ("agent", "/aggregate_metrics", Role.PIPELINE),
        ("legacy", "/run", Role.PIPELINE),
    ],
)
async def test_body_that_is_nested_too_deeply_is_refused(
    servers: Stack, server: str, path: str, role: Role, value: str
) -> None:
    body = row(value, _ng_session={"rollout": WHO}, response=response())
    status, problem = await sent(servers, server, path, body, role)
    assert status == 422 and "nested" in problem["detail"], problem


@pytest.mark.parametrize("value", [BIG, "-" + BIG, "NaN", "1e999", f"[{BIG}]"])
@pytest.mark.parametrize(
    ("server", "path"), [("counter", "/rows"), ("agent", "/run"), ("legacy", "/run"), ("phrase", "/seed_session")]
)
async def test_number_that_is_none_of_ours_fails_nobody(servers: Stack, server: str, path: str, value: str) -> None:
    who = rollout(uuid4().hex).model_dump()
    more: dict[str, Any] = {"rollout": who}
    if path == "/run":
        status, kept = await sent(servers, "counter", "/rows", row("1", rollout=who, row={"expected": 0, **ROW}))
        more = {"_ng_session": {"rollout": who, "row_ref": kept["row_ref"]}}
    elif path == "/rows":
        more["row"] = {}
    status, problem = await sent(servers, server, path, row(value, **more))
    assert status < 500, problem


@pytest.mark.parametrize("server", ["counter", "agent"])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"reward":1e308},{"reward":1e308}', "reward"),
        ("1", "verify_responses"),
        ("null", "verify_responses"),
        ('{"_ng_task_index":{}}', "_ng_task_index"),
        ("{" + ",".join(f'"k{at}":1' for at in range(10_001)) + "}", "numeric fields"),
        ('{"_ng_task_index":1},{"_ng_task_index":"a"}', "_ng_task_index"),
    ],
)
async def test_results_without_a_mean_are_refused_with_their_field(
    servers: Stack, server: str, rows: str, said: str
) -> None:
    status, problem = await sent(servers, server, "/aggregate_metrics", f'{{"verify_responses":[{rows}]}}')
    assert status == 422 and said in problem["detail"], problem


@pytest.mark.parametrize(
    "rows", ['{"response":[1],"reward":1}', '{"response":{"usage":7},"reward":1}', f'{{"reward":{BIG}}}']
)
async def test_odd_results_have_metrics_all_the_same(servers: Stack, rows: str) -> None:
    status, metrics = await sent(servers, "counter", "/aggregate_metrics", f'{{"verify_responses":[{rows}]}}')
    assert (status, metrics["agent_metrics"]["invalid/count"]) == (200, 0), metrics


@pytest.mark.parametrize(
    "more",
    [
        {"_ng_attempt_index": "many"},
        {"_ng_attempt_index": [1]},
        {"_ng_attempt_index": 2**62},
        {"_ng_task_index": "no name/ at all"},
        {"_ng_session": 7},
        {"_ng_session": {"rollout": 7}},
        {"responses_create_params": [1]},
    ],
)
async def test_run_names_the_field_that_is_wrong(servers: Stack, more: dict[str, Any]) -> None:
    status, problem = await sent(servers, "agent", "/run", row("1", **more))
    assert (status == 422 and next(iter(more)) in problem["detail"]) or "rollout" in problem["detail"], problem
    assert status == 422


@pytest.mark.parametrize(
    ("server", "path"),
    [
        ("phrase", "/verify"),
        ("phrase", "/close"),
        ("counter", "/aggregate_metrics"),
        ("counter", "/add"),
        ("agent", "/aggregate_metrics"),
        ("legacy", "/v1/responses"),
    ],
)
async def test_agent_servers_send_less_than_others(path: str, server: str) -> None:
    with running_stack() as stack:
        refs = {"resources_server": {"type": "resources_servers", "name": "counter"}}
        small = {"max_agent_body_values": 2000, "max_agent_body_bytes": 100_000}
        for name, cls in (("counter", CounterEnvironment), ("phrase", PhraseEnvironment)):
            await asyncio.to_thread(stack.add, name, cls, Role.ENVIRONMENT, **small)
        for name, agent in (("agent", WaitingAgent), ("legacy", LegacyAgent)):
            await asyncio.to_thread(stack.add, name, agent, Role.AGENT, ("counter",), **refs, **small)
        for body, key in (
            (f'{{"a":[{"[]," * 500}1]}}', "max_agent_body_values"),
            (f'{{"a":[{"7," * 2000}1]}}', "max_agent_body_values"),
            (f'{{"a":"{"[]," * 500}"}}', None),
            (f'{{"a":"{"x" * 100_000}"}}', "max_agent_body_bytes"),
        ):
            status, problem = await sent(stack, server, path, body, Role.AGENT)
            assert (status == 413 and key in problem["detail"]) if key else status != 413, problem
            assert (await sent(stack, server, path, body, Role.PIPELINE))[0] != 413


class HeldMetrics(CounterEnvironment):
    begun: ClassVar[threading.Event] = threading.Event()
    go: ClassVar[threading.Event] = threading.Event()

    def compute_metrics(self, tasks: Any) -> dict[str, Any]:
        self.begun.set()
        assert self.go.wait(20)
        return {}


async def test_others_are_answered_while_metrics_are_computed(stack: Stack) -> None:
    await asyncio.to_thread(stack.add, "held", HeldMetrics, Role.ENVIRONMENT)
    asking = asyncio.create_task(sent(stack, "held", "/aggregate_metrics", '{"verify_responses":[{"reward":1}]}'))
    assert await asyncio.to_thread(HeldMetrics.begun.wait, 20)
    async with aiohttp.ClientSession() as session, session.get(stack.url("held") + "/health") as reply:
        assert reply.status == 200
    HeldMetrics.go.set()
    assert (await asking)[0] == 200
