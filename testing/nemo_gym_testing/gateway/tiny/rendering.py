"""The tokens that a policy would have to sample for a given answer, and what a prompt tells about its conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens import PolicyTokenizer, TemplateRefusedError

Message = Mapping[str, Any]
_ASK: Message = {"role": "user", "content": "ask"}
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CALLED: Sequence[Message] = (
    _ASK,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "content": "out"},
)
_FUNCTION = re.compile(r'"function":\s*(?=\{)')
_NOW = datetime(2026, 1, 1)


class AnswerRenderer:
    """Writes answers in a policy's own format. Immutable."""

    def __init__(self, policy: PolicyTokenizer) -> None:
        self._policy = policy
        self._opening = policy.render([_ASK], now=_NOW)
        self._marker, self._markers_ahead = self._answer_marker()
        self._openings = [self._opening_ids(messages) for messages in ([_ASK], _CALLED)]

    def ids(self, answer: Message | str) -> list[int]:
        """Return the token ids of an assistant message (``content``, ``tool_calls``, ``reasoning_content``) as the
        chat template writes it, or of unchanged text; in both cases followed by the token that ends a turn.

        Raises `ConfigError` for a message that the template refuses.
        """
        if isinstance(answer, str):
            end = self._policy.turn_end or next(iter(self._policy.stops))
            return [*self._policy.encode(answer), self._policy.stops[end]]
        answer = {"role": "assistant", "content": "", **answer, "tool_calls": _whole_calls(answer)}
        calls = answer["tool_calls"]
        follows: Sequence[Message] = [{"role": "user", "content": "next"}]
        if calls:
            follows = [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "out"}]
        try:
            # In some families, the next message ends an answer; others write the last answer differently.
            alone = self._policy.render([_ASK, answer], add_generation_prompt=False, now=_NOW)
            if self._policy.turn_end is None:
                alone = self._policy.render([_ASK, answer, *follows], now=_NOW)
        except TemplateRefusedError as error:
            raise ConfigError(f"script: {error.message}") from error
        if not alone.startswith(self._opening):
            raise ConfigError("script: this policy's chat template rewrites the prompt when it is answered")
        at = self._policy.find_stop(alone, len(self._opening))
        if at is None:
            raise ConfigError("script: the chat template writes no token behind the answer that ends it")
        stop = max((token for token in self._policy.stops if alone.startswith(token, at)), key=len)
        return [*self._policy.encode(alone[len(self._opening) : at]), self._policy.stops[stop]]

    def answers_in(self, prompt: str) -> int:
        """Return the number of answers that the conversation of ``prompt`` already holds."""
        return max(0, prompt.count(self._marker) - self._markers_ahead)

    def split(self, prompt_ids: Sequence[int]) -> int:
        """Return where in a prompt the answer begins: at its end, or before it if the prompt ends with part of an
        answer that broke off on another engine."""
        places = [self._last(prompt_ids, opening) for opening in self._openings]
        return max((place for place in places if place is not None), default=len(prompt_ids))

    def _opening_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the last special token of a prompt and what follows it."""
        ids = self._policy.encode(self._policy.render(messages, now=_NOW))
        at = max(
            (at for at, token in enumerate(ids) if not self._policy.decode([token], skip_special_tokens=True)),
            default=len(ids) - 1,
        )
        return ids[at:]

    @staticmethod
    def _last(ids: Sequence[int], opening: Sequence[int]) -> int | None:
        size = len(opening)
        for at in range(len(ids) - size, -1, -1):
            if ids[at] == opening[0]:
                return at + size if [*ids[at : at + size]] == opening else None
        return None

    def _answer_marker(self) -> tuple[str, int]:
        """Return a text that occurs once per answer, and how often it occurs in a prompt besides."""
        bare = self._policy.render([_ASK], add_generation_prompt=False, now=_NOW)
        header = self._opening.removeprefix(bare)
        reply = {"role": "assistant", "content": "said"}
        probes = [([_ASK], 0), ([_ASK, reply, _ASK], 1), (_CALLED, 1), ([*_CALLED, reply, _ASK], 2)]
        for marker in filter(None, (header, self._policy.turn_end)):
            surplus = {self._policy.render(messages, now=_NOW).count(marker) - count for messages, count in probes}
            if len(surplus) == 1:
                return marker, surplus.pop()
        raise ConfigError("policy: its chat template has nothing by which answers can be counted; scripts need that")


def tools_in(prompt: str) -> tuple[str, ...]:
    """Return the names of the function tools that ``prompt`` defines as JSON, in order."""
    found: dict[str, None] = {}
    decoder = json.JSONDecoder()
    for match in _FUNCTION.finditer(prompt):
        try:
            function, _ = decoder.raw_decode(prompt, match.end())
        except json.JSONDecodeError:
            continue
        if isinstance(function.get("name"), str) and "arguments" not in function:
            found[function["name"]] = None
    return tuple(found)


def _whole_calls(answer: Message) -> list[dict[str, Any]]:
    """Return calls in the form of Chat Completions; scripts may shorten a call to ``{name, arguments}``."""
    calls = []
    for number, call in enumerate(answer.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {
                "id": call.get("id") or f"call{number:05d}",
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    return calls
