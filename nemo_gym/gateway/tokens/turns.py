"""One sampled answer with the tokens that led to it: the node of a session's forest."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from nemo_gym.gateway.packed import LARGE
from nemo_gym.gateway.tokens.messages import Message
from nemo_gym.gateway.tokens.splits import SplitReason


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine returned for one call."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Natural logarithms, one per id; nothing where the engine offers none."""
    finish_reason: str = "stop"
    weights_version: str | None = None
    """Which weights sampled this."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for observers (engine, call id, seconds); goes to the turn of the trajectory."""
    ids_json: bytes | None = None
    """``ids`` as a JSON array without spaces, where somebody has it."""


@dataclass(slots=True, eq=False)
class Turn:
    """Tokens ``[start:context_end]`` were given (mask 0), ``[context_end:end]`` were sampled (mask 1).

    ``tokens`` holds the whole path from the conversation's start, and may go on behind ``end``: a turn and the one
    that continues it share it. Read ``tokens[:turn.end]`` only.
    """

    turn_id: int
    parent: Turn | None
    tokens: array[int]
    start: int
    context_end: int
    end: int
    logprobs: array[float] | None
    finish_reason: str
    weights_version: str | None
    details: Mapping[str, Any]
    message: Message
    """The answer as it was parsed and delivered."""
    key: bytes
    """Stands for the conversation up to and with this answer."""
    request_key: bytes
    tools: bytes
    has_tools: bool
    has_system: bool
    has_reasoning: bool
    """Whether reasoning was sampled in this turn or one before it on the path."""
    entries: tuple[bytes, ...]
    """Digests of the entries since the parent, the answer's last."""
    reminders: frozenset[bytes]
    reason: SplitReason | None
    """Why this turn is not the plain continuation of its parent; nothing where it is."""
    reason_detail: str | None
    media: tuple[Mapping[str, Any], ...]
    """Images and the like in the messages since the parent, in the order of their placeholders."""
    media_count: int
    """Of the whole conversation, so that most never look for any."""
    message_count: int
    text: bytearray
    """``tokens`` as decimal numbers with commas between them, shared and grown like ``tokens``."""
    text_context_end: int
    """The length of ``text`` up to ``context_end``."""
    text_end: int
    """The length of ``text`` up to ``end``."""
    children: list[Turn] = field(default_factory=list)

    @property
    def sampled_ids(self) -> array[int]:
        return self.tokens[self.context_end : self.end]

    def prompt_json(self) -> bytes:
        """All tokens before the sampled ones, as a JSON array."""
        return self._json(0, self.text_context_end)

    def sampled_json(self) -> bytes:
        """The sampled tokens as a JSON array."""
        comma = 1 if self.text_context_end and self.text_end > self.text_context_end else 0
        return self._json(self.text_context_end + comma, self.text_end)

    def _json(self, start: int, end: int) -> bytes:
        with memoryview(self.text) as text, text[start:end] as numbers:
            return b"".join((b"[", numbers, b"]"))

    def path(self) -> list[Turn]:
        """The turns from the conversation's start to this one."""
        return [*self._upwards()][::-1]

    def _upwards(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


@dataclass(frozen=True, slots=True)
class Extended:
    """The token fields of a `Turn`."""

    tokens: array[int]
    start: int
    context_end: int
    end: int
    text: bytearray
    text_context_end: int
    text_end: int


def extended(
    parent: Turn | None,
    context: Sequence[int],
    sampled: Sequence[int],
    sampled_json: bytes | None = None,
    context_numbers: bytes | None = None,
) -> Extended:
    """The tokens of a turn behind ``parent``; ``sampled_json`` as `Sampled.ids_json`, and ``context`` as `numbers`,
    where somebody has it.

    The first turn to continue another appends to its tokens in place, so a conversation's tokens exist once.
    """
    start = parent.end if parent is not None else 0
    if parent is None:
        tokens, text = array("i"), bytearray()
    elif len(parent.tokens) == parent.end:
        tokens, text = parent.tokens, parent.text
    else:
        tokens, text = parent.tokens[: parent.end], parent.text[: parent.text_end]
    ends = []
    written = numbers(sampled) if sampled_json is None else sampled_json[1:-1]
    given = numbers(context) if context_numbers is None else context_numbers
    for new, added in ((context, given), (sampled, written)):
        if text and added:
            text += b","
        text += added
        tokens.extend(new)
        ends.append(len(text))
    return Extended(tokens, start, start + len(context), len(tokens), text, *ends)


def numbers(ids: Sequence[int]) -> bytes:
    """Token ids as decimal numbers with commas between them."""
    return json_of(ids if isinstance(ids, array) else array("i", ids))[1:-1]


def json_of(values: array[Any]) -> bytes:
    """An array of int32 or float32 as JSON; equal arrays give equal texts, whatever their size."""
    if len(values) < LARGE and values.typecode == "i":
        return orjson.dumps(values.tolist())
    import numpy as np

    # Shortest numbers that are these float32, instead of all digits of the float64 that Python makes of them.
    typed = np.frombuffer(values, dtype=np.int32 if values.typecode == "i" else np.float32)
    return orjson.dumps(typed, option=orjson.OPT_SERIALIZE_NUMPY)
