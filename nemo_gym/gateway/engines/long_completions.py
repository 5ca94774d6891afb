"""A long completion of vLLM's, read at the cost of its ids and logprobs.

Most of such a body is what nobody here needs: the texts of all tokens, their offsets, and each logprob once more under
its token's text. All of that is left out before anything is parsed:

    …,"logprobs":{"text_offset":[…],"token_logprobs":[…],"tokens":[…],"top_logprobs":[…]},"finish_reason":…,"token_ids":…
                 └─ left out ──────┘                └────┘└─ left out ──────────────────┘

What is found this way in a body that the whole decoder takes is what that finds, for these reasons. A quote behind a
comma begins a string, since one within a string would be escaped; so a name found there is a key. An array without
strings and braces ends at its first bracket. With a mark in place of what was left out, the text is only JSON if that
began and ended outside of strings and at one depth; and only if the mark is where the choice has its logprobs, they
were what was left out. It was within one choice: every choice says how it was finished, and the place where this one
does is the first of all. Nothing else that is looked for was within it, for all of it is found elsewhere. (Names are
taken to be spelled without escapes, and not to come twice in one object.)

Whatever is not as it is written here is left to the whole decoder.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import orjson

from nemo_gym.gateway.packed import packed

WORTH_IT_BYTES = 64 << 10
_LOGPROBS, _OFFSETS, _SAMPLED = b',"logprobs":{', b'"text_offset":[', b'"token_logprobs":['
_COMMA, _FINISH, _IDS = ord(","), b'"finish_reason"', b',"token_ids":['
_RARE = b"_"
_RARE_PLACE = _FINISH.index(_RARE)
_RARE_AT_MOST = 1000
_MARK = f"left-out-{uuid4().hex}"  # of this process, and never told to anybody
_QUOTED_MARK = f'"{_MARK}"'.encode()
_NUMBERS = msgspec.json.Decoder(list[float])


class _Choice(msgspec.Struct):
    finish_reason: str
    stop_reason: str | int | None
    logprobs: str
    token_ids: str
    prompt_token_ids: msgspec.Raw


class _Rest(msgspec.Struct):
    choices: tuple[_Choice]
    usage: dict[str, Any] | None = None


_RESTS = msgspec.json.Decoder(_Rest)


@dataclass(frozen=True, slots=True)
class LongCompletion:
    """Of one choice; fields as vLLM has them."""

    finish_reason: str
    stop_reason: str | int | None
    token_ids: array[int]
    """int32."""
    ids_json: bytes
    """The same as a JSON array without spaces."""
    logprobs: array[float]
    """float32."""
    prompt_token_ids: msgspec.Raw
    usage: dict[str, Any] | None


def long_completion(raw: bytes | bytearray) -> LongCompletion | None:
    """Nothing for a body that is not long, or that the whole decoder has to read."""
    if len(raw) < WORTH_IT_BYTES or (start := raw.find(_LOGPROBS)) < 0:
        return None
    at = start + len(_LOGPROBS)
    if raw.startswith(_OFFSETS, at):
        end = raw.find(b"]", at)
        if end < 0 or raw.find(b"{", at, end) >= 0 or raw[end + 1 : end + 2] != b",":
            return None
        at = end + 2
    if not raw.startswith(_SAMPLED, at):
        return None
    at += len(_SAMPLED) - 1
    end = raw.find(b"]", at) + 1
    finish = _finish_in(raw, end) - 1
    ids = raw.find(_IDS, finish) + len(_IDS) - 1
    ids_end = raw.find(b"]", ids) + 1
    if not (0 < end < finish < ids < ids_end) or raw[finish] != _COMMA or raw.find(_FINISH, 0, start) >= 0:
        return None
    with memoryview(raw) as view:
        before, between, behind = view[: start + len(_LOGPROBS) - 1], view[finish:ids], view[ids_end:]
        try:
            rest = _RESTS.decode(b"".join((before, _QUOTED_MARK, between, _QUOTED_MARK, behind)))
            logprobs = packed("f", _NUMBERS.decode(view[at:end]))
        except (msgspec.DecodeError, RecursionError, OverflowError):
            return None
    (choice,) = rest.choices
    ids_json = bytes(raw[ids:ids_end])
    token_ids = _ids_in(ids_json)
    if token_ids is None or choice.logprobs != _MARK or choice.token_ids != _MARK:
        return None
    return LongCompletion(
        choice.finish_reason,
        choice.stop_reason,
        token_ids,
        ids_json,
        logprobs,
        choice.prompt_token_ids,
        rest.usage,
    )


def _finish_in(raw: bytes | bytearray, start: int) -> int:
    """``raw.find(_FINISH, start)``: a single letter is found in a tenth of the time, where it is rare."""
    at = start
    for _ in range(_RARE_AT_MOST):
        if (at := raw.find(_RARE, at)) < 0:
            return -1
        begin = at - _RARE_PLACE
        if begin >= start and raw.startswith(_FINISH, begin):
            return begin
        at += 1
    return raw.find(_FINISH, max(start, at - _RARE_PLACE))


def _ids_in(text: bytes) -> array[int] | None:
    """Of a JSON array without spaces; nothing for what is something else."""
    import numpy as np

    try:
        found = np.fromstring(text[1:-1], dtype=np.int32, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    # That reads much that is no JSON, and large numbers wrongly: only what can be written again was understood.
    return array("i", found.tobytes()) if orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY) == text else None
