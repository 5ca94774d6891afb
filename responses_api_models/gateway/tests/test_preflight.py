"""What an engine says of itself decides how long conversations are, and whether it serves the policy at all."""

from __future__ import annotations

from typing import Any

from nemo_gym.contract.credentials import Role
from nemo_gym.gateway.tokens import PolicyTokenizer
from responses_api_models.gateway.tests.conftest import GatewayStack


async def preflight(gateway: GatewayStack) -> dict[str, Any]:
    reply = await gateway.stack.client(Role.PIPELINE).post("gateway", "/preflight", json={})
    assert reply.status == 200, await reply.text()
    (check,) = (await reply.json())["engines"]
    found: dict[str, Any] = check
    return found


async def test_answers_end_where_the_engines_context_does_although_the_directory_says_more(
    gateway: GatewayStack,
) -> None:
    gateway.engine.max_model_len = 600
    await gateway.restart()
    check = await preflight(gateway)
    session = await gateway.open()
    assert (await session.post("/chat/completions", {"messages": session.messages})).status == 200
    call = gateway.engine.answered[-1]
    assert len(call.body["prompt"]) + call.body["max_tokens"] == 600
    assert check["context_tokens"] == 600 and check["problem"] is None
    assert "takes 600 tokens, the policy's configuration says 100000" in check["warning"]


async def test_conversation_longer_than_the_engines_context_is_refused_before_it_is_sent(
    gateway: GatewayStack,
) -> None:
    gateway.engine.max_model_len = 200
    await gateway.restart()
    await preflight(gateway)
    session = await gateway.open()
    reply = await session.post("/chat/completions", {"messages": [{"role": "user", "content": "word " * 400}]})
    assert reply.status == 400 and "200" in await reply.text()
    assert not gateway.engine.calls


async def test_engine_with_another_tokenizer_is_refused_before_the_first_rollout(gateway: GatewayStack) -> None:
    policy = PolicyTokenizer.load(gateway.folder / "policy")
    gateway.engine.tokenizer = policy.encode
    assert (await preflight(gateway))["problem"] is None
    gateway.engine.tokenizer = lambda text: [number + 1 for number in policy.encode(text)]
    assert "serves another model; set policy_path" in (await preflight(gateway))["problem"]
