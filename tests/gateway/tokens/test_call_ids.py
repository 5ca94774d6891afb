from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from nemo_gym.gateway.backend import CallContext
from nemo_gym.gateway.engines import FinishReason, Generation
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.live_session import encode_committed
from nemo_gym.gateway.parsing import answer_parser
from nemo_gym.gateway.policy_request import PolicyRequest
from nemo_gym.gateway.token_backend import TokenBackend, TokenConversations, TokenSample
from tests.gateway.parsing.policies import policy
from tests.gateway.tokens.conversations import TOOLS, result, user


def written(number: int) -> str:
    return f"<|tool_call_begin|>functions.shell:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


@pytest.mark.parametrize("first", [0, 3])
async def test_results_name_calls_as_the_policy_did_while_the_harness_gets_ids_of_its_own(first: int) -> None:
    used = policy("kimi_k2")
    async with EnginePool(kind="token") as pool:
        backend = TokenBackend(used, answer_parser(used), pool, model="m", max_context_tokens=9999)
        conversations: TokenConversations = backend.conversations(datetime(2026, 3, 1))
        messages: list[dict[str, Any]] = [user("look")]
        given: set[str] = set()
        for turn in range(2):
            prepared = conversations.forest.prepare(messages, TOOLS)
            text = f"<|tool_calls_section_begin|>{written(first)}{written(first + 1)}<|tool_calls_section_end|>"
            ids = used.encode(text + "<|im_end|>")
            generation = Generation(ids, [-1.0] * len(ids), FinishReason.STOP, "e")
            sample = TokenSample(prepared, generation, CallContext("s", f"{turn:032x}"[::-1]), 0.1)
            answer, _, _ = backend.commit(conversations, PolicyRequest(messages, TOOLS), sample)
            calls = [call["id"] for call in answer.message["tool_calls"]]
            results = [{**result(0, f"r{number}"), "tool_call_id": each} for number, each in enumerate(calls)]
            messages = [*messages, dict(answer.message), *results[::-1]]
            given.update(calls)
            shown = used.decode(conversations.forest.prepare(messages, TOOLS).context)
            assert f"Return of functions.shell:{first}\nr0" in shown
            assert f"Return of functions.shell:{first + 1}\nr1" in shown
        assert len(given) == 4


@pytest.mark.parametrize(
    "sampled",
    [
        '[TOOL_CALLS][{"name": "shell", "arguments": {}, "id": "AbCdEf123"}]',
        "[TOOL_CALLS]shell[CALL_ID]AbCdEf123[ARGS]{}",
    ],
)
async def test_result_names_the_call_by_the_id_that_the_policy_wrote_beside_it(sampled: str) -> None:
    used = policy("inst_strict")
    async with EnginePool(kind="token") as pool:
        backend = TokenBackend(used, answer_parser(used), pool, model="m", max_context_tokens=9999)
        conversations: TokenConversations = backend.conversations(datetime(2026, 3, 1))
        messages: list[dict[str, Any]] = [user("look")]
        prepared = conversations.forest.prepare(messages, TOOLS)
        ids = [*used.encode(sampled), *used.stop_ids]
        sample = TokenSample(
            prepared, Generation(ids, [-1.0] * len(ids), FinishReason.STOP, "e"), CallContext("s", "0" * 32), 0.1
        )
        answer, _, _ = backend.commit(conversations, PolicyRequest(messages, TOOLS), sample)
        (call,) = answer.message["tool_calls"]
        assert call["id"] != "AbCdEf123"
        messages = [*messages, dict(answer.message), {**result(0, "r"), "tool_call_id": call["id"]}]
        shown = used.decode(conversations.forest.prepare(messages, TOOLS).context)
        assert '"call_id": "AbCdEf123"' in shown


@pytest.mark.parametrize("restarted", [False, True])
async def test_history_that_is_encoded_anew_names_calls_as_the_policy_did(restarted: bool) -> None:
    used = policy("kimi_k2")
    async with EnginePool(kind="token") as pool:
        backend = TokenBackend(used, answer_parser(used), pool, model="m", max_context_tokens=9999)
        conversations: TokenConversations = backend.conversations(datetime(2026, 3, 1))
        messages: list[dict[str, Any]] = [user("look")]
        prepared = conversations.forest.prepare(messages, TOOLS)
        ids = used.encode(f"<|tool_calls_section_begin|>{written(0)}<|tool_calls_section_end|><|im_end|>")
        sample = TokenSample(
            prepared, Generation(ids, [-1.0] * len(ids), FinishReason.STOP, "e"), CallContext("s", "0" * 32), 0.1
        )
        answer, record, _ = backend.commit(conversations, PolicyRequest(messages, TOOLS), sample)
        if restarted:
            conversations = backend.conversations(datetime(2026, 3, 1))
            conversations.restore([record])
        (call,) = answer.message["tool_calls"]
        compacted = [user("go on"), dict(answer.message), {**result(0, "r0"), "tool_call_id": call["id"]}]
        prepared = conversations.forest.prepare(compacted, TOOLS)
        shown = used.decode(prepared.context)
        assert prepared.parent is None
        assert "<|tool_call_begin|>functions.shell:0<" in shown and "Return of functions.shell:0\nr0" in shown
        assert call["id"] not in shown


async def test_answer_without_ids_of_the_policys_own_is_in_the_journal_once() -> None:
    used = policy("chatml_think")
    async with EnginePool(kind="token") as pool:
        backend = TokenBackend(used, answer_parser(used), pool, model="m", max_context_tokens=9999)
        conversations: TokenConversations = backend.conversations(datetime(2026, 3, 1))
        messages = [user("look")]
        ids = used.encode('Onlyonce.<tool_call>{"name": "shell", "arguments": {}}</tool_call><|im_end|>')
        generation = Generation(ids, [-1.0] * len(ids), FinishReason.STOP, "e")
        sample = TokenSample(
            conversations.forest.prepare(messages, TOOLS), generation, CallContext("s", "0" * 32), 0.1
        )
        answer, record, _ = backend.commit(conversations, PolicyRequest(messages, TOOLS), sample)
        body = b"".join(bytes(piece) for piece in encode_committed(answer, record))
        assert body.count(b"Onlyonce") == 1
