"""An answer that is durable, as the journal holds it beside its turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from nemo_gym.errors import RowError
from nemo_gym.gateway.lowered import Answer, AnswerEnd, AnswerUsage
from nemo_gym.gateway.relayed import Buffer, JsonText, written


@dataclass(frozen=True, slots=True)
class Committed:
    """One answer and its turn. ``answer`` carries no tokens: they are the turn's."""

    answer: Answer
    turn_id: int
    index: int = 0
    """The turn's place in the journal; 0 as well for a call without a session."""


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
