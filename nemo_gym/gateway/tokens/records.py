"""A turn as plain data and back, for a journal: a restarted gateway has every committed turn, sampled once."""

from __future__ import annotations

from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.tokens.forest import TokenForest
from nemo_gym.gateway.tokens.splits import SplitReason
from nemo_gym.gateway.tokens.turns import Turn, extended

_COPIED = (
    "turn_id",
    "finish_reason",
    "weights_version",
    "message",
    "has_tools",
    "has_system",
    "has_reasoning",
    "reason_detail",
    "message_count",
)


def record_of(turn: Turn) -> dict[str, Any]:
    """JSON data that holds this turn's own tokens, not its parents'. Arrays are the base64 of their bytes, as this
    machine has them."""
    return {
        **{name: getattr(turn, name) for name in _COPIED},
        "parent": turn.parent.turn_id if turn.parent is not None else None,
        "context_ids": _text(turn.tokens[turn.start : turn.context_end]),
        "sampled_ids": _text(turn.sampled_ids),
        "logprobs": _text(turn.logprobs) if turn.logprobs is not None else None,
        "details": dict(turn.details),
        "reason": str(turn.reason) if turn.reason is not None else None,
        "media": [dict(item) for item in turn.media],
        "key": turn.key.hex(),
        "request_key": turn.request_key.hex(),
        "tools": turn.tools.hex(),
        "entries": [digest.hex() for digest in turn.entries],
        "reminders": sorted(digest.hex() for digest in turn.reminders),
    }


def restore(forest: TokenForest, records: Iterable[Mapping[str, Any]]) -> None:
    """Put recorded turns into an empty forest, in the order they were committed.

    Raises `RowError` for a record whose parent is missing, or that is out of order.
    """
    for record in records:
        number, parent_id = record["turn_id"], record["parent"]
        if number != len(forest.turns) or (parent_id is not None and parent_id >= number):
            raise RowError(f"turn {number}: recorded out of order; {len(forest.turns)} turns precede it")
        parent = forest.turns[parent_id] if parent_id is not None else None
        placed = extended(parent, _array("i", record["context_ids"]), _array("i", record["sampled_ids"]))
        logprobs = record["logprobs"]
        turn = Turn(
            **{name: record[name] for name in _COPIED},
            parent=parent,
            tokens=placed.tokens,
            start=placed.start,
            context_end=placed.context_end,
            end=placed.end,
            text=placed.text,
            text_context_end=placed.text_context_end,
            text_end=placed.text_end,
            logprobs=_array("f", logprobs) if logprobs is not None else None,
            details=record["details"],
            key=bytes.fromhex(record["key"]),
            request_key=bytes.fromhex(record["request_key"]),
            tools=bytes.fromhex(record["tools"]),
            entries=tuple(map(bytes.fromhex, record["entries"])),
            reminders=frozenset(map(bytes.fromhex, record["reminders"])),
            reason=SplitReason(record["reason"]) if record["reason"] is not None else None,
            media=tuple(record["media"]),
            media_count=len(record["media"]) + (parent.media_count if parent is not None else 0),
        )
        forest.add(turn)


def _text(values: array[Any]) -> str:
    return b2a_base64(values, newline=False).decode("ascii")


def _array(typecode: str, text: str) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(a2b_base64(text))
    return values
