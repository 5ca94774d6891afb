"""A session against an engine that answers as told, and remembers what it was asked and what it sampled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from nemo_gym.gateway.tokens import (
    History,
    IncrementalEncoder,
    Sampled,
    TokenForest,
    Trajectory,
    Turn,
    trajectories_of,
)
from tests.gateway.tokens.policies import policy

NOW = datetime(2026, 3, 1, 12)


@dataclass
class Call:
    """The engine's own log of one call."""

    prompt: array[int]
    ids: list[int]
    logprobs: list[float]


class Session:
    def __init__(self, family: str = "chatml_think", history: History = History.VERBATIM) -> None:
        self.policy = policy(family)
        self.encoder = IncrementalEncoder(self.policy)
        self.forest = TokenForest(self.encoder, self.policy, history, NOW)
        self.log: list[Call] = []

    def ask(
        self, messages: Sequence[dict[str, Any]], answer: dict[str, Any], tools: Any = None, raw: str | None = None
    ) -> Turn:
        """One successful call. ``raw``: the text sampled, where it is not just the answer's own."""
        prepared = self.forest.prepare(messages, tools)
        sampled = self.sample(answer, raw)
        self.log.append(Call(prepared.prompt.ids(), list(sampled.ids), list(sampled.logprobs or ())))
        return self.forest.commit(prepared, sampled, answer)

    def sample(self, answer: dict[str, Any], raw: str | None = None) -> Sampled:
        text = answer["content"] if raw is None else raw
        text += "".join(f"<tool_call>{call['function']}" for call in answer.get("tool_calls") or ())
        ids = self.policy.encode(text)
        if self.policy.turn_end is not None:
            ids = [*ids, self.policy.stops[self.policy.turn_end]]
        # Every logprob is one of a kind, so that a token that moved is found.
        logprobs = [-(len(self.log) + 1) - at / 1024 for at in range(len(ids))]
        return Sampled(ids, logprobs, "stop", weights_version=str(len(self.log) // 4))

    def trajectories(self) -> list[Trajectory]:
        return trajectories_of(self.forest.turns, "s1", reward=1.0)

    def check(self) -> list[Trajectory]:
        """Every sampled token is in exactly one trajectory, at its place, and none is invented."""
        calls = {call.logprobs[0]: call for call in self.log if call.logprobs}
        found = self.trajectories()
        for trajectory in found:
            assert trajectory.logprobs is not None
            everything = trajectory.prompt_ids + trajectory.response_ids
            covered = bytearray(len(trajectory.response_mask))
            for turn in trajectory.turns:
                call = calls.pop(trajectory.logprobs[turn.start])
                assert trajectory.response_ids[turn.start : turn.end].tolist() == call.ids
                assert trajectory.logprobs[turn.start : turn.end].tolist() == call.logprobs
                assert everything[: len(trajectory.prompt_ids) + turn.start] == call.prompt
                covered[turn.start : turn.end] = b"\1" * len(call.ids)
            assert bytes(covered) == trajectory.response_mask
        assert not calls
        return found
