"""One session as the running gateway holds it, and its durable answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic

import msgspec

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.backend import C
from nemo_gym.gateway.dialects.conversation_cache import ConversationCache
from nemo_gym.gateway.journal import JournaledBody, SessionRecord, SessionState
from nemo_gym.gateway.limits import SessionShare
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerUsage
from nemo_gym.gateway.repeated_requests import SessionAnswers
from nemo_gym.gateway.sessions import PIPELINE, GatewaySession, SessionKey
from nemo_gym.gateway.wire_data import Buffer, JsonText, written
from nemo_gym.http.delivery import Connection


@dataclass(frozen=True, slots=True)
class Committed:
    """One answer and its turn. ``answer`` carries no tokens: they are the turn's."""

    answer: Answer
    turn_id: int
    index: int = 0
    """The turn's place in the journal; 0 as well for a call without a session."""


LARGE_BYTES = 64 << 10
"""Reading less again costs more than keeping it."""
_USAGE = tuple(one.name for one in fields(AnswerUsage))


class _Body(msgspec.Struct):
    answer: dict[str, Any]
    turn: dict[str, Any]
    relayed: dict[str, msgspec.Raw] = {}


_BODIES = msgspec.json.Decoder(_Body)


def encode_committed(answer: Answer, turn: Mapping[str, Any]) -> list[Buffer]:
    """The journal's body of a turn, in pieces. What ``turn`` holds as ``relayed``, `JsonText` by name, stays what it
    is."""
    said = {
        "id": answer.answer_id,
        "created_at": answer.created_at,
        "model": answer.model,
        "message": answer.message,
        "end": answer.end,
        "usage": {name: getattr(answer.usage, name) for name in _USAGE},
        "stop": answer.stop,
    }
    own = {name: value for name, value in turn.items() if name != "relayed"}
    return written({"answer": said, "turn": own, "relayed": turn.get("relayed") or {}})


@dataclass(frozen=True, slots=True)
class LargeText:
    """A relayed text that memory need not hold once its answer has left; the journal has it."""

    text: JsonText
    offset: int
    """In the journal's body of its turn, in bytes."""
    length: int

    def let_go(self, body: JournaledBody) -> None:
        self.text.let_go(partial(body.read, self.offset, self.length))


def large_in(turn: Mapping[str, Any]) -> list[JsonText]:
    """The large ones among what a turn relays."""
    return [text for text in (turn.get("relayed") or {}).values() if len(text.data) >= LARGE_BYTES]


def large_texts(turn: Mapping[str, Any], pieces: Sequence[Buffer]) -> list[LargeText]:
    """Those among what ``turn`` relays; ``pieces`` are the journal's body of it."""
    texts = large_in(turn)
    if not texts:
        return []
    starts: dict[int, int] = {}
    at = 0
    for piece in pieces:
        starts[id(piece)] = at
        at += len(piece)
    return [LargeText(text, starts[id(text.data)], len(text.data)) for text in texts]


def decode_committed(body: bytes, index: int) -> tuple[Committed, Mapping[str, Any]]:
    """The answer and its turn's record. Raises `RowError` for a body of another version."""
    try:
        data = _BODIES.decode(body)
        said, turn = data.answer, data.turn
        turn["relayed"] = {name: JsonText(memoryview(raw)) for name, raw in data.relayed.items()}
        answer = Answer(
            said["id"],
            said["created_at"],
            said["model"],
            said["message"],
            AnswerEnd(said["end"]),
            AnswerUsage(**said["usage"]),
            said["stop"],
        )
        return Committed(answer, turn["turn_id"], index), turn
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the journal holds a turn that this version cannot read ({error})") from error


# One session as the running gateway holds it.

_REMEMBERED_CONNECTIONS = 64


@dataclass(slots=True)
class LiveSession(Generic[C]):
    """``session`` is what routes see of it."""

    record: SessionRecord
    session: GatewaySession
    conversations: C
    state: SessionState = SessionState.OPEN
    reason: str | None = None
    """Why it was aborted."""
    closed_at: float | None = None
    """Unix seconds; set when the end is durable."""
    reward_info: dict[str, Any] = field(default_factory=dict)
    """What was said about the reward, ``reward`` itself among it."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session changes its state."""
    answers: SessionAnswers[Committed] = field(default_factory=SessionAnswers)
    cache: ConversationCache = field(default_factory=ConversationCache)
    in_flight: int = 0
    share: SessionShare = field(default_factory=SessionShare)
    _answered_on: dict[str, Connection] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def key(self) -> SessionKey:
        # A journal of a release that kept no openers says nothing: it was the pipeline, or passed for it.
        rollout = self.session.rollout
        return (self.record.extra.get("opener", PIPELINE), rollout.run_id, rollout.rollout_id)

    @property
    def inference_digest(self) -> str:
        return self.record.inference_digest

    @property
    def control_digest(self) -> str:
        return self.record.control_digest

    def answered_on(self, fingerprint: str) -> Connection | None:
        """The connection on which the last answer to an equal request was sent, where that is still known."""
        return self._answered_on.get(fingerprint)

    def sent_on(self, fingerprint: str, connection: Connection | None) -> None:
        self._answered_on.pop(fingerprint, None)
        if connection is not None:
            self._answered_on[fingerprint] = connection
            if len(self._answered_on) > _REMEMBERED_CONNECTIONS:
                del self._answered_on[next(iter(self._answered_on))]

    def forget_requests(self) -> None:
        """Let go of what only makes further calls cheaper."""
        self.cache = ConversationCache()
        self.conversations.forget_requests()
