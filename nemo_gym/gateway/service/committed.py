"""An answer that is durable, as the journal holds it beside its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import msgspec

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.journal import KeptBody
from nemo_gym.gateway.lowered import Answer, AnswerEnd, AnswerUsage
from nemo_gym.gateway.relayed import Buffer, JsonText, written


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

    def let_go(self, body: KeptBody) -> None:
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
