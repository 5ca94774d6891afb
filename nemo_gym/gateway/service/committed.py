"""An answer that is durable, as the journal holds it beside its turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from nemo_gym.errors import RowError
from nemo_gym.gateway.lowered import Answer, AnswerEnd, AnswerUsage


@dataclass(frozen=True, slots=True)
class Committed:
    """One answer and its turn. ``answer`` carries no tokens: they are the turn's."""

    answer: Answer
    turn_id: int
    index: int = 0
    """The turn's place in the journal; 0 as well for a call without a session."""


def encode_committed(answer: Answer, turn: Mapping[str, Any]) -> bytes:
    """The journal's body of a turn."""
    said = {
        "id": answer.answer_id,
        "created_at": answer.created_at,
        "model": answer.model,
        "message": answer.message,
        "end": answer.end,
        "usage": asdict(answer.usage),
        "stop": answer.stop,
    }
    return orjson.dumps({"answer": said, "turn": turn}, option=orjson.OPT_NON_STR_KEYS)


def decode_committed(body: bytes, index: int) -> tuple[Committed, Mapping[str, Any]]:
    """The answer and its turn's record. Raises `RowError` for a body of another version."""
    try:
        data = orjson.loads(body)
        said, turn = data["answer"], data["turn"]
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
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the journal holds a turn that this version cannot read ({error})") from error
