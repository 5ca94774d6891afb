"""The load: conversations of a coding agent, the same at every door. They are deterministic, so that a benchmark can
send an engine the same requests that a gateway sends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import orjson

from campaigns.bench.gateway_parts.engine import Scenario
from nemo_gym.gateway.tokens import IncrementalEncoder, PolicyTokenizer

_TEXT = "the quick brown fox jumps over lazy dog runs tests again error file line import class return value none"
WORDS = _TEXT.split()
MAX_TOKENS = 100_000
RESULT_CHARS = 1000
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} Its output is cut at 16,000 characters; paths are relative to the repository.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": f"The {key} it works on."} for key in keys},
                "required": list(keys),
            },
        },
    }
    for name, what, keys in (
        ("shell", "Runs a command in the repository's own environment and returns its output.", ("command",)),
        ("read", "Returns lines of a file.", ("path", "first", "last")),
        ("edit", "Replaces one occurrence of a text in a file.", ("path", "old", "new")),
        ("search", "Finds a pattern in all files.", ("pattern", "path")),
    )
]


def text(source: random.Random, size: int) -> str:
    words: list[str] = []
    while size > 0:
        words.append(source.choice(WORDS))
        size -= len(words[-1]) + 1
    return " ".join(words)


@lru_cache(maxsize=1)
def results() -> list[str]:
    """Return the texts that tools return."""
    source = random.Random(3)
    return [text(source, RESULT_CHARS) for _ in range(64)]


class Load:
    """Responses and prompts of one policy."""

    def __init__(self, policy_dir: Path) -> None:
        self.policy = PolicyTokenizer.load(policy_dir)
        assert self.policy.turn_end is not None
        self._end = self.policy.stops[self.policy.turn_end]

    def tool_answer(self, *, delay_s: float = 0.0, jitter: float = 0.0) -> Scenario:
        """A response with a sentence and a tool call, about a hundred tokens."""
        content = "I run the tests of that module first, " + text(random.Random(1), 200)
        arguments = orjson.dumps({"command": "python -m pytest -q tests/" + text(random.Random(2), 60)}).decode()
        answer = f'{content}\n<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'
        calls = [{"name": "shell", "arguments": arguments}]
        return self._scenario(answer, content, calls, self.policy.encode(answer), delay_s, jitter)

    def long_answer(self, tokens: int) -> Scenario:
        """A response with plain text of exactly that many tokens, including the end token."""
        content = text(random.Random(4), 8 * tokens)
        ids = self.policy.encode(content)[: tokens - 1]
        content = self.policy.decode(ids)
        return self._scenario(content, content, [], ids, 0.0, 0.0)

    def _scenario(
        self, answer: str, content: str, calls: list[dict[str, str]], ids: list[int], delay_s: float, jitter: float
    ) -> Scenario:
        source = random.Random(6)
        sampled = [*ids, self._end]
        texts = [self.policy.decode([token]) for token in sampled]
        # With all digits of a double, as engines print their 32-bit floats.
        logprobs = [-source.expovariate(2.0) for _ in sampled]
        return Scenario(answer, content, calls, sampled, texts, logprobs, delay_s, jitter)

    @cached_property
    def prompts(self) -> list[bytes]:
        """The requests that a token engine gets in the turns of a conversation, as bodies in vLLM's format."""
        answer = self.tool_answer()
        chat = Chat(0)
        encoder = IncrementalEncoder(self.policy)
        bodies = []
        for _ in range(8):
            bodies.append(completion_body(encoder.full(chat.messages, tools=TOOLS)))
            call = {"id": "call_0", "type": "function", "function": answer.calls[0]}
            chat.add({"role": "assistant", "content": answer.content, "tool_calls": [call]})
        return bodies


def completion_body(ids: list[int]) -> bytes:
    return orjson.dumps(
        {
            "prompt": ids,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "request_id": "bench",
            "model": "policy",
        }
    )


class Chat:
    """One conversation as a harness keeps it."""

    def __init__(self, number: int, **asked: Any) -> None:
        self._number = number
        self._parameters = {"model": "policy", "max_tokens": MAX_TOKENS, "temperature": 1.0, "tools": TOOLS, **asked}
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You repair software. " + results()[1][:800]},
            {"role": "user", "content": f"Task {number}: " + results()[2]},
        ]

    def body(self) -> bytes:
        return orjson.dumps({**self._parameters, "messages": self.messages})

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a response, and the outputs of its tool calls or else a user message."""
        output = results()[(self._number + len(self.messages)) % 64]
        if calls := message.get("tool_calls"):
            reply = {"role": "assistant", "content": message.get("content"), "tool_calls": calls}
            self.messages.append(reply)
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls]
        else:
            self.messages.append({"role": "assistant", "content": message.get("content")})
            self.messages.append({"role": "user", "content": output})
