"""Text of messages never becomes a control token, whatever it spells.

A file that an agent reads may contain ``<|im_end|>``. Encoded as the token, it would end the message for the policy,
and let whoever wrote the file go on as ``system``. Only what the chat template writes itself are control tokens; the
same letters from a message are encoded as the ordinary text they are.

Templates know nothing of this. So a mark is put into each such spelling before rendering, which the template carries
along. A text without marks is encoded as it is. In one with marks, the template's own control tokens are given names
that no text can hold, the marks are taken out, and a tokenizer that knows the control tokens by those names only
encodes it in one piece, so that the spelling merges with its neighbours as ordinary text does.

Control tokens are the added tokens marked special, and those that end a turn. Other added tokens (whitespace runs;
``<think>`` where it is not special) are words that any text may use. An assistant's message may also hold the special
tokens that the template writes into answers (reasoning and tool calls): it is the policy's own text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARK = "\ufdd0"
"""A code point that Unicode keeps free for uses like this; where a message holds it, it is replaced."""
_REPLACED = "\ufffd"


class SpecialText:
    """Marks spellings of control tokens in messages, and encodes rendered text with such marks."""

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str], answers: Iterable[str]) -> None:
        """``control``: texts of the control tokens. ``answers``: those that an assistant's message may hold."""
        self._tokenizer = tokenizer
        self._control = frozenset(token for token in control if token)
        self._everywhere = _Marker(self._control)
        self._in_answers = _Marker(self._control - frozenset(answers))

    def marked(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages, shaped for the template, with marks."""
        mark = self._everywhere.marked
        found = []
        for message in messages:
            spoken = self._in_answers.marked if message.get("role") == "assistant" else mark
            found.append(
                {
                    key: (spoken if key in ("content", "reasoning_content") else mark)(value)
                    for key, value in message.items()
                }
            )
        return found

    def marked_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
        """Tools with marks in their names, descriptions and schemas."""
        return [self._everywhere.marked(tool) for tool in tools] if tools else tools

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text that has marks."""
        named = self._added.sub(lambda found: self._names.get(found[0], found[0]), text).replace(MARK, "")
        ids: list[int] = self._named.encode_batch_fast([named], add_special_tokens=False)[0].ids
        return [known if (known := self._ids.get(one)) is not None else one for one in ids]

    @cached_property
    def _names(self) -> dict[str, str]:
        word = secrets.token_hex(8)  # or a message could spell a name
        return {token: f"\ufdd1{word}{number}\ufdd1" for number, token in enumerate(sorted(self._control))}

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Added tokens as the tokenizer finds them: the leftmost, and of those the longest."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()} | self._control
        return re.compile(f"(?:{_any_of(added)})(?!{MARK})")

    @cached_property
    def _named(self) -> Tokenizer:
        """The tokenizer with its control tokens under their names."""
        from tokenizers import Tokenizer

        data = json.loads(self._tokenizer.to_str())
        for token in data["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        data["post_processor"] = None  # writes no tokens here, but may name some
        model = data["model"]
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        if isinstance(vocabulary := model.get("vocab"), dict):
            # Merges that spell a control token lead nowhere without it: they go as well.
            model["vocab"] = {self._names.get(piece, piece): number for piece, number in vocabulary.items()}
            if "merges" in model:
                model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in self._control]
        elif isinstance(vocabulary, list):
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in vocabulary]
        return Tokenizer.from_str(json.dumps(data))

    @cached_property
    def _ids(self) -> dict[int | None, int | None]:
        """Id of a name → id of its control token; they differ where a token had no fixed place."""
        find, named = self._tokenizer.token_to_id, self._named.token_to_id
        return {named(name): find(token) for token, name in self._names.items()}


class _Marker:
    def __init__(self, tokens: frozenset[str]) -> None:
        # Every place where a token starts, so that what overlaps cannot come together behind a mark.
        self._starts = re.compile(f"(?=(?:{_any_of(tokens)}))(.)", re.DOTALL) if tokens else None
        self._hints = {token[:2] for token in tokens}

    def marked(self, value: Any) -> Any:
        """JSON data with a mark behind the first character of each spelling in it."""
        if isinstance(value, str):
            if MARK in value:
                value = value.replace(MARK, _REPLACED)
            if self._starts is None or not any(hint in value for hint in self._hints):
                return value
            return self._starts.sub(rf"\1{MARK}", value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return value


def _any_of(tokens: Iterable[str]) -> str:
    return "|".join(re.escape(token) for token in sorted(tokens, key=lambda token: (-len(token), token)))


def _merged(pair: Any) -> str:
    return "".join(pair) if isinstance(pair, list) else str(pair).replace(" ", "", 1)
