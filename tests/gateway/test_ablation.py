"""Every mechanism that the ablation switches off can be: a gateway without it answers its calls.

The ablation patches attributes of the product, so that a change of the product can break it unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.bench.ablation import without
from campaigns.bench.gateway_parts.conversations import Load
from campaigns.bench.gateway_parts.doors import GatewayDoor, gateway, text_kind, token_kind
from campaigns.bench.gateway_parts.mechanisms import MECHANISMS
from campaigns.bench.gateway_parts.processes import on_socket
from campaigns.bench.gateway_parts.wire import Connection
from nemo_gym_testing.gateway.tiny.policies import make_policy

TURNS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), "chatml_think")


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with on_socket("engine.py") as running:
        yield running.url


@pytest.mark.parametrize("name", MECHANISMS)
def test_gateway_without_a_mechanism_answers(name: str, policy: Path, engine: str) -> None:
    load = Load(policy)
    kind = token_kind(engine, policy) if MECHANISMS[name].kind == "token" else text_kind(engine)

    async def converse(door: GatewayDoor) -> list[int]:
        to_engine, to_gateway = Connection(engine), Connection(door.url)
        turns = []
        for answer in (load.tool_answer(), load.long_answer(20_000)):
            (await to_engine.post("/scenario", answer.to_json())).json()
            talk = await door.open(to_gateway, 0)
            for _ in range(TURNS):
                await talk.turn()
            summary = await talk.close()
            assert summary is not None
            turns.append(summary["turns"])
        to_engine.close()
        to_gateway.close()
        await asyncio.sleep(0)
        return turns

    with without(name), gateway(kind) as door:
        assert asyncio.run(converse(door)) == [TURNS, TURNS]
