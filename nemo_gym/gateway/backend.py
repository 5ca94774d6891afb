"""What gives answers: the seam between sessions and the two kinds of engine."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from nemo_gym.gateway.engines.types import TokenizerProbe
from nemo_gym.gateway.limits import SMALL_BYTES, LoopTurns, SessionShare, apart, step_begins
from nemo_gym.gateway.policy_request import Answer, AnswerTokens, PolicyRequest
from nemo_gym.gateway.tokens.forest import Prepared, TokenForest
from nemo_gym.gateway.tokens.turns import SplitReason


class Conversations(Protocol):
    """What one session has said: a forest of turns."""

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put back recorded turns, in the order they were committed."""
        ...

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Its trajectories as JSON data, one per conversation."""
        ...

    def tokens_of(self, turn_id: int, *, texts: bool = True, relayed: bool = False) -> AnswerTokens | None:
        """The exact tokens of one answer, where the engine gave them; the text of each only where ``texts`` are
        wanted. With ``relayed`` those that were kept as they came need not be parsed."""
        ...

    def forget_requests(self) -> None:
        """Let go of what only makes further answers cheaper."""
        ...


class Preparing:
    """Prepares the requests of one session, one at a time: long ones without holding the event loop."""

    def __init__(self, forest: TokenForest) -> None:
        self._forest = forest
        self._lock = asyncio.Lock()

    async def prepared(self, request: PolicyRequest, context: CallContext) -> Prepared:
        """See `TokenForest.prepare`."""
        async with self._lock:
            if context.body_bytes <= SMALL_BYTES:
                return self._forest.prepare(request.messages, request.tools)
            working = step_begins(context.body_bytes)
            step = partial(_next, self._forest.preparing(request.messages, request.tools))
            reached = step()
            while not isinstance(reached, Prepared):
                if reached:
                    context.share.worked(working)
                    reached = await apart(step)
                    working = step_begins(context.body_bytes)
                else:
                    reached = step()
            context.share.worked(working)
            return reached


def _next(steps: Generator[bool, None, Prepared]) -> bool | Prepared:
    try:
        return next(steps)
    except StopIteration as done:
        prepared: Prepared = done.value
        return prepared


C = TypeVar("C", bound=Conversations)
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known about a call beside its request."""

    session_id: str | None
    """Of the session, for stickiness; nothing for a call without one."""
    call_id: str
    """32 hexadecimal digits, unique: the answer's id, and the beginning of the engine's request ids."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """The session's sampling parameters, which win over the request's."""
    body_bytes: int = 0
    """Of the request; 0 where that is not known."""
    share: SessionShare = field(default_factory=SessionShare)
    """Of the session; told of steps that held the event loop."""
    turns: LoopTurns = field(default_factory=LoopTurns)
    """Waited for before such a step."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What observers want to know about a committed turn."""

    turn_id: int
    engines: tuple[str, ...]
    """Who sampled it, in order."""
    weights_version: str | None
    split_reason: SplitReason | None


class Backend(Protocol[C, D]):
    """Samples answers. ``sample`` may be cancelled at any await and then has changed nothing; ``commit`` does not
    await, and is called once for what ``sample`` returned."""

    @property
    def context_tokens(self) -> int | None:
        """Prompt and answer together, as configured; nothing where the engines alone know."""
        ...

    @property
    def tokenizer_probe(self) -> TokenizerProbe | None:
        """For engines that take token ids: what shows whether they serve this policy."""
        ...

    def conversations(self, now: datetime) -> C:
        """For a new session. ``now`` is the session's own time, for templates that print the date."""
        ...

    async def sample(self, conversations: C, request: PolicyRequest, context: CallContext) -> D:
        """Raises `EngineError`, `ContextOverflowError`, `InvalidBodyError`."""
        ...

    def commit(
        self, conversations: C, request: PolicyRequest, sampled: D
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        """Keep what was sampled: the answer, the turn as the journal records it, and facts about it."""
        ...

    def take_back(self, conversations: C, turn_id: int) -> None:
        """Undo the latest ``commit``: its turn could not be made durable."""
        ...

    async def count_tokens(self, request: PolicyRequest) -> int | None:
        """Tokens of the request as a prompt; nothing where that cannot be known."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...
