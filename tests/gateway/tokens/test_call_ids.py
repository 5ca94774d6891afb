from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from nemo_gym.gateway.backend import CallContext
from nemo_gym.gateway.engines import FinishReason, Generation
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.live_session import encode_committed
from nemo_gym.gateway.parsing import answer_parser
from nemo_gym.gateway.policy_request import Answer, PolicyRequest
from nemo_gym.gateway.token_backend import TokenBackend, TokenConversations, TokenSample
from nemo_gym.gateway.tokens import PolicyTokenizer
from tests.gateway.parsing.policies import policy
from tests.gateway.tokens.conversations import TOOLS, result, user


@dataclass
class Session:
    policy: PolicyTokenizer
    backend: TokenBackend
    conversations: TokenConversations

    def answer(
        self, messages: list[dict[str, Any]], text: str, call: str = "0" * 32
    ) -> tuple[Answer, Mapping[str, Any]]:
        """Commit ``text`` as what the policy sampled after ``messages``."""
        ids = self.policy.encode(text)
        prepared = self.conversations.forest.prepare(messages, TOOLS)
        generation = Generation(ids, [-1.0] * len(ids), FinishReason.STOP, "e")
        sample = TokenSample(prepared, generation, CallContext("s", call), 0.1)
        answer, record, _ = self.backend.commit(self.conversations, PolicyRequest(messages, TOOLS), sample)
        return answer, record

    def shown(self, messages: list[dict[str, Any]]) -> str:
        """The whole prompt that the policy gets for ``messages``."""
        return self.policy.decode(self.conversations.forest.prepare(messages, TOOLS).context)


@asynccontextmanager
async def session_of(family: str) -> AsyncIterator[Session]:
    used = policy(family)
    async with EnginePool(kind="token") as pool:
        backend = TokenBackend(used, answer_parser(used), pool, model="m", max_context_tokens=9999)
        yield Session(used, backend, backend.conversations(datetime(2026, 3, 1)))


def written(number: int) -> str:
    return f"<|tool_call_begin|>functions.shell:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


@pytest.mark.parametrize("first", [0, 3])
async def test_results_name_calls_as_the_policy_did_while_the_harness_gets_ids_of_its_own(first: int) -> None:
    async with session_of("kimi_k2") as session:
        messages: list[dict[str, Any]] = [user("look")]
        given: set[str] = set()
        for turn in range(2):
            text = f"<|tool_calls_section_begin|>{written(first)}{written(first + 1)}<|tool_calls_section_end|>"
            answer, _ = session.answer(messages, f"{text}<|im_end|>", f"{turn:032x}"[::-1])
            calls = [call["id"] for call in answer.message["tool_calls"]]
            results = [{**result(0, f"r{number}"), "tool_call_id": each} for number, each in enumerate(calls)]
            messages = [*messages, dict(answer.message), *results[::-1]]
            given.update(calls)
            shown = session.shown(messages)
            assert f"Return of functions.shell:{first}\nr0" in shown
            assert f"Return of functions.shell:{first + 1}\nr1" in shown
        assert len(given) == 4


@pytest.mark.parametrize(
    "sampled",
    [
        '[TOOL_CALLS][{"name": "shell", "arguments": {}, "id": "AbCdEf123"}]</s>',
        "[TOOL_CALLS]shell[CALL_ID]AbCdEf123[ARGS]{}</s>",
    ],
)
async def test_result_names_the_call_by_the_id_that_the_policy_wrote_beside_it(sampled: str) -> None:
    async with session_of("inst_strict") as session:
        messages: list[dict[str, Any]] = [user("look")]
        answer, _ = session.answer(messages, sampled)
        (call,) = answer.message["tool_calls"]
        assert call["id"] != "AbCdEf123"
        messages = [*messages, dict(answer.message), {**result(0, "r"), "tool_call_id": call["id"]}]
        assert '"call_id": "AbCdEf123"' in session.shown(messages)


@pytest.mark.parametrize("restarted", [False, True])
async def test_history_that_is_encoded_anew_names_calls_as_the_policy_did(restarted: bool) -> None:
    async with session_of("kimi_k2") as session:
        text = f"<|tool_calls_section_begin|>{written(0)}<|tool_calls_section_end|><|im_end|>"
        answer, record = session.answer([user("look")], text)
        if restarted:
            session.conversations = session.backend.conversations(datetime(2026, 3, 1))
            session.conversations.restore([record])
        (call,) = answer.message["tool_calls"]
        compacted = [user("go on"), dict(answer.message), {**result(0, "r0"), "tool_call_id": call["id"]}]
        assert session.conversations.forest.prepare(compacted, TOOLS).parent is None
        shown = session.shown(compacted)
        assert "<|tool_call_begin|>functions.shell:0<" in shown and "Return of functions.shell:0\nr0" in shown
        assert call["id"] not in shown


async def test_answer_without_ids_of_the_policys_own_is_in_the_journal_once() -> None:
    async with session_of("chatml_think") as session:
        text = 'Onlyonce.<tool_call>{"name": "shell", "arguments": {}}</tool_call><|im_end|>'
        body = b"".join(bytes(piece) for piece in encode_committed(*session.answer([user("look")], text)))
        assert body.count(b"Onlyonce") == 1
