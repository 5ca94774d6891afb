"""What replies read of an answer's message."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.gateway.dialects.sse import unicode_of
from nemo_gym.gateway.lowered import Answer


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One call of an answer, by its flat name."""

    call_id: str
    name: str
    arguments: str
    data: Any
    """The arguments, parsed; ``None`` where they are no JSON."""


def text_in(answer: Answer) -> str:
    return unicode_of(str(answer.message.get("content") or ""))


def reasoning_in(answer: Answer) -> str:
    return unicode_of(str(answer.message.get("reasoning_content") or ""))


def calls_in(answer: Answer) -> list[AnswerCall]:
    calls = []
    for number, call in enumerate(answer.message.get("tool_calls") or ()):
        function = call["function"]
        arguments = unicode_of(str(function.get("arguments") or ""))
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        # Harnesses refuse a call without an id; one derived from the answer is the same whenever it is raised again.
        call_id = str(call.get("id") or "") or f"call_{answer.answer_id[:20]}_{number}"
        calls.append(AnswerCall(call_id, unicode_of(str(function["name"])), arguments, parsed))
    return calls


def made_up(answer: Answer, what: str) -> str:
    """48 hexadecimal digits that depend on the answer and ``what`` only."""
    return hashlib.blake2b(f"{answer.answer_id}/{what}".encode("utf-8", "replace"), digest_size=24).hexdigest()
