"""What all replies are made of: the parts of an answer's message, and server-sent events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.gateway.policy_request import Answer

# Server-sent events, and text cut into pieces for them.

PIECE_CHARS = 256
"""Small enough that a harness shows progress, large enough that 65,536 tokens are about a thousand events."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + dumped(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """An event named by its ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # lone surrogates or deep nesting, which a relayed reply may hold
        return json.dumps(value, default=list).encode()


def pieces(text: str) -> Iterator[str]:
    """``text`` in pieces. A piece ends between code points, so each is Unicode of its own."""
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def unicode_of(text: str) -> str:
    """``text`` as UTF-8, and so JSON on the wire, can hold it: surrogate pairs joined, lone surrogates replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# What replies read of an answer's message.


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
