"""Turns: a sampled answer with the tokens before it, the reason for a sibling, and prompts that continue a turn."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain, islice
from typing import Any, overload

import orjson

from nemo_gym.gateway.policy_request import LARGE
from nemo_gym.gateway.tokens.history import Message, Reading, shared_length


class SplitReason(StrEnum):
    """Recorded on the turn that starts a sibling, and on its trajectory."""

    INITIAL = "initial"
    """The session's first conversation."""
    RESAMPLE = "resample"
    """The same request again, after its first answer was kept."""
    BRANCH = "branch"
    """Another continuation of a shared prefix; no answer was edited."""
    EDITED_HISTORY = "edited_history"
    """The history differs from the sampled answers or earlier messages, at the same length or longer."""
    COMPACTION = "compaction"
    """The conversation starts as before, but the rest was replaced by fewer messages."""
    SUB_AGENT = "sub_agent"
    """A separate conversation: another system prompt, or a start with other tools."""
    TOOLS_CHANGED = "tools_changed"
    """The same history with other tools, which are part of the prompt."""
    TEMPLATE = "template"
    """The chat template cannot be continued here without changing earlier tokens."""
    REASONING_DROPPED = "reasoning_dropped"
    """The chat template leaves out earlier reasoning, and the session follows the template (`History.TEMPLATE`)."""


def continuation_reason(reading: Reading, shared: int, siblings: Set[bytes]) -> SplitReason | None:
    """Return why a turn that continues the first ``shared`` entries is a sibling; ``None`` if it is the first to.

    ``siblings``: the keys of the requests that continued the same turn before.
    """
    if not siblings:
        return None
    if reading.key in siblings:
        return SplitReason.RESAMPLE
    edited = any(entry.role == "assistant" for entry in reading.entries[shared:])
    return SplitReason.EDITED_HISTORY if edited else SplitReason.BRANCH


def start_reason(
    reading: Reading, earlier: Sequence[tuple[bytes, Sequence[bytes]]], asked_before: bool
) -> SplitReason:
    """Return why a conversation starts that continues no other.

    ``earlier``: tools and entry digests of the session's conversations so far. ``asked_before``: the same request was
    answered before.
    """
    if not earlier:
        return SplitReason.INITIAL
    if asked_before:
        return SplitReason.RESAMPLE
    digests = [entry.digest for entry in reading.entries if entry.digest is not None]
    fresh = not any(entry.role == "assistant" for entry in reading.entries)
    alike = [(tools, path) for tools, path in earlier if shared_length(digests, path)]
    if alike:
        if fresh and reading.tools not in {tools for tools, _ in alike}:
            return SplitReason.SUB_AGENT  # a sub-agent that starts with the main agent's instructions
        longer = any(len(path) > len(digests) for _, path in alike)
        return SplitReason.COMPACTION if longer else SplitReason.EDITED_HISTORY
    if not fresh and any(shared_length(digests[1:], path[1:]) > 1 for _, path in earlier):
        return SplitReason.EDITED_HISTORY  # the same conversation under other instructions
    starts_with_system = bool(reading.entries) and reading.entries[0].role == "system"
    if starts_with_system or reading.tools not in {tools for tools, _ in earlier}:
        return SplitReason.SUB_AGENT
    return SplitReason.COMPACTION if any(len(path) > len(digests) for _, path in earlier) else SplitReason.SUB_AGENT


# One sampled answer with the tokens before it: the node of a session's forest.


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of one engine call."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Natural logarithms, one per id; ``None`` if the engine returned none."""
    finish_reason: str = "stop"
    weights_version: str | None = None
    """The version of the weights that sampled this."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for observers (engine, call id, seconds); copied to the turn of the trajectory."""
    ids_json: bytes | None = None
    """``ids`` as a JSON array without spaces, if available."""
    stop: str | None = None
    """The stop string that ended the answer, which is sampled but not delivered."""


@dataclass(slots=True, eq=False)
class Turn:
    """Tokens ``[start:context_end]`` were given (mask 0), ``[context_end:end]`` were sampled (mask 1).

    ``tokens`` holds the whole path from the conversation's start, and may go on after ``end``, because a turn shares
    it with the first turn that continues it. Read only ``tokens[:turn.end]``.
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
    """The parsed answer as it was delivered, but with the ids of calls that the policy wrote, if it wrote any; then
    ``given_id`` is the harness's."""
    key: bytes
    """The key of the conversation up to and including this answer."""
    request_key: bytes
    tools: bytes
    has_tools: bool
    has_system: bool
    has_reasoning: bool
    """Whether reasoning was sampled in this turn or an earlier one on the path."""
    entries: tuple[bytes, ...]
    """Digests of the entries since the parent, the answer's last."""
    reminders: frozenset[bytes]
    reason: SplitReason | None
    """Why this turn is not the plain continuation of its parent; ``None`` if it is."""
    reason_detail: str | None
    media: tuple[Mapping[str, Any], ...]
    """Images and the like in the messages since the parent, in the order of their placeholders."""
    media_count: int
    """Number in the whole conversation, so that conversations without media skip the search."""
    message_count: int
    text: bytearray
    """``tokens`` as decimal numbers with commas between them, shared and grown like ``tokens``."""
    text_context_end: int
    """The length of ``text`` up to ``context_end``."""
    text_end: int
    """The length of ``text`` up to ``end``."""
    stopped_key: bytes | None = None
    """``key`` for an answer with its stop string, which some harnesses put back."""
    children: list[Turn] = field(default_factory=list)

    @property
    def keys(self) -> set[bytes]:
        """The keys of the conversations that a request may continue this answer by."""
        return {self.key} if self.stopped_key is None else {self.key, self.stopped_key}

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
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]


def extended(
    parent: Turn | None,
    context: Sequence[int],
    sampled: Sequence[int],
    sampled_json: bytes | None = None,
    context_numbers: bytes | None = None,
) -> dict[str, Any]:
    """Return the fields of a `Turn` after ``parent`` that depend on its tokens. ``sampled_json`` (`Sampled.ids_json`)
    and ``context_numbers`` (``numbers(context)``) save time if they are available.

    The first turn to continue another appends to its tokens in place, so a conversation's tokens exist only once.
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
    context_text = numbers(context) if context_numbers is None else context_numbers
    for new, added in ((context, context_text), (sampled, written)):
        if text and added:
            text += b","
        text += added
        tokens.extend(new)
        ends.append(len(text))
    return {
        "parent": parent,
        "tokens": tokens,
        "start": start,
        "context_end": start + len(context),
        "end": len(tokens),
        "text": text,
        "text_context_end": ends[0],
        "text_end": ends[1],
    }


def numbers(ids: Sequence[int]) -> bytes:
    """Return token ids as decimal numbers with commas between them."""
    return json_of(ids if isinstance(ids, array) else array("i", ids))[1:-1]


def json_of(values: array[Any]) -> bytes:
    """Return an array of int32 or float32 as JSON. Equal arrays give equal texts, whatever their size."""
    if len(values) < LARGE and values.typecode == "i":
        return orjson.dumps(values.tolist())
    import numpy as np

    # The shortest text of each float32, instead of all digits of the float64 that Python converts it to.
    typed = np.frombuffer(values, dtype=np.int32 if values.typecode == "i" else np.float32)
    return orjson.dumps(typed, option=orjson.OPT_SERIALIZE_NUMPY)


# A prompt without a copy: the tokens of the turn that it continues, and the new ones after them.


class Prompt(Sequence[int]):
    """Token ids of a whole prompt. Does not change when the conversation goes on."""

    def __init__(self, parent: Turn | None, context: array[int]) -> None:
        self._parent = parent
        self._context = context
        self._parent_end = parent.end if parent is not None else 0

    def ids(self) -> array[int]:
        """Return a copy, int32."""
        if self._parent is None:
            return self._context[:]
        prompt = self._parent.tokens[: self._parent_end]
        prompt.extend(self._context)
        return prompt

    @cached_property
    def new(self) -> bytes:
        """The tokens after the turn that it continues, as decimal numbers with commas between them."""
        return numbers(self._context)

    def json(self) -> bytes:
        """Return a JSON array. Only the new tokens are formatted now; the turn has the others as text."""
        new = self.new
        if self._parent is None or not self._parent_end:
            return b"[%b]" % new
        with memoryview(self._parent.text) as text, text[: self._parent.text_end] as earlier:
            return b"".join((b"[", earlier, b"," if new else b"", new, b"]"))

    def tail(self, count: int) -> array[int]:
        """Return the last ``count`` tokens, or all tokens of a shorter prompt."""
        new = len(self._context)
        if self._parent is None or count <= new:
            return self._context[max(0, new - count) :]
        return self._parent.tokens[max(0, self._parent_end + new - count) : self._parent_end] + self._context

    def __len__(self) -> int:
        return self._parent_end + len(self._context)

    def __iter__(self) -> Iterator[int]:
        earlier = self._parent.tokens if self._parent is not None else ()
        return chain(islice(earlier, self._parent_end), self._context)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        if isinstance(at, slice):
            return self.ids()[at]
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"token {at} of {len(self)}")
        if self._parent is not None and place < self._parent_end:
            return self._parent.tokens[place]
        return self._context[place - self._parent_end]
