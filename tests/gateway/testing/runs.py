"""Sessions against tiny engines, as the gateway runs them: forest, token engine, forest, trajectories."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    Generation,
    Sampling,
    SglangEngine,
    TokenEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.tokens import (
    History,
    IncrementalEncoder,
    PolicyTokenizer,
    Sampled,
    TokenForest,
    Trajectory,
    Turn,
    trajectories_of,
)
from nemo_gym_testing.gateway.tiny import ENGINES, Script, TinyEngine, make_policy
from nemo_gym_testing.gateway.tiny.engine import Wire

NOW = datetime(2026, 3, 1, 12)
_KEPT = tempfile.TemporaryDirectory()
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "runs", "parameters": {"type": "object"}}}]


@functools.cache
def policy_dir(family: str) -> Path:
    return make_policy(Path(_KEPT.name) / family, family)


@functools.cache
def policy(family: str) -> PolicyTokenizer:
    return PolicyTokenizer.load(policy_dir(family))


@functools.cache
def encoder(family: str) -> IncrementalEncoder:
    return IncrementalEncoder(policy(family))


@asynccontextmanager
async def served(
    family: str, wire: Wire, http: EngineConnections, script: Script | None = None, name: str = "e0", **given: Any
) -> AsyncIterator[tuple[TinyEngine, TokenEngine]]:
    async with ENGINES[wire](policy_dir(family), script, **given) as engine:
        yield engine, client(wire, engine.url, http, name)


def client(wire: Wire, url: str, http: EngineConnections, name: str = "e0") -> TokenEngine:
    endpoint = EngineEndpoint(name, url)
    return VllmEngine(endpoint, http) if wire == "vllm" else SglangEngine(endpoint, http)


class Session:
    """Asks with growing histories; ``generate`` is an engine's, or that of `TokenCalls`."""

    def __init__(self, family: str, generate: Any, name: str = "s") -> None:
        self.policy = policy(family)
        self.forest = TokenForest(encoder(family), self.policy, History.VERBATIM, NOW)
        self._generate = generate
        self._name = name
        self.asked = 0

    async def ask(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, max_tokens: int = 48, **sampling: Any
    ) -> Turn:
        prepared = self.forest.prepare(messages, tools)
        self.asked += 1
        request = TokenRequest(f"{self._name}-{self.asked}", prepared.prompt.ids(), Sampling(max_tokens, **sampling))
        answer: Generation = await self._generate(request)
        sampled = Sampled(answer.token_ids, answer.logprobs, str(answer.finish_reason))
        return self.forest.commit(prepared, sampled, self.message(answer.token_ids))

    def message(self, ids: Sequence[int]) -> dict[str, Any]:
        ended = bool(ids) and ids[-1] in self.policy.stop_ids
        return {"role": "assistant", "content": self.policy.decode(ids[:-1] if ended else ids)}

    def trajectories(self) -> list[Trajectory]:
        return trajectories_of(self.forest.turns, self._name)


async def conversation(session: Session, turns: int, tools: Any = TOOLS, **given: Any) -> list[dict[str, Any]]:
    """A conversation with tool results after every other answer."""
    history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, user("start")]
    for number in range(turns):
        turn = await session.ask(history, tools, **given)
        history.append(dict(turn.message))
        history.append(user(f"go on, {number} of {turns}: " + "x = 1\n" * number))
    return history


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
