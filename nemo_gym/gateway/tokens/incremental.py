"""Only what is new is rendered and encoded; the tokens before it stay exactly as they were sampled.

A continuation is what the template writes between the last sampled token and the next answer: the end of the turn,
the new messages, the generation prompt. It is rendered behind a short stand-in for the history, cut at the token that
ends the turn, and encoded. That is right only for templates that append. So each *shape* of continuation (roles of
the new messages, calls in the last answer, tools and system prompt or not) is proven once per policy, on histories of
several depths: the cut text must be the same behind each, what was rendered before must stay as it was, and the
pieces' encodings must join to the encoding of the whole. What cannot be proven is encoded in full instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from nemo_gym.gateway.tokens.messages import Message, calls_of, continues_answer, media_parts, role_of, text_of
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError, shape

_DEPTHS = (0, 1, 3)
_MAX_PROOFS = 1024
"""Shapes are few in practice; a client that makes up new ones must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """The template cannot be continued here; ``detail`` says what it does instead of appending."""

    detail: str


@dataclass(frozen=True, slots=True)
class _Shape:
    system: bool
    tools: bool
    calls: int
    roles: tuple[tuple[str, int], ...]
    prefill: bool
    media: bool


class IncrementalEncoder:
    """Encodes continuations for one policy, and remembers which shapes of them are proven. Several threads may use it
    at once."""

    def __init__(self, policy: PolicyTokenizer) -> None:
        self._policy = policy
        self._proofs: dict[_Shape, Unproven | None] = {}
        # Words that cannot be in any conversation, so that finding one says where its part of the template ended up.
        word = secrets.token_hex(8)
        names = (f"{part}{word}" for part in ("sys", "usr", "tol", "ans", "end"))
        self._system, self._user, self._tool, self._answer, self._end = names
        parameters = {"type": "object", "properties": {}}
        function = {"name": self._tool, "description": self._tool, "parameters": parameters}
        self._tools = [{"type": "function", "function": function}]

    def full(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, now: datetime | None = None
    ) -> list[int]:
        """Token ids of the whole conversation with the generation prompt; of one that ends in an assistant's text, up
        to the end of that text. Raises `TemplateRefusedError`."""
        if not messages or not continues_answer(messages):
            return self._policy.encode(self._policy.render(messages, tools=tools, now=now))
        text = self._policy.render(self._open(messages), tools=tools, add_generation_prompt=False, now=now)
        return self._policy.encode(text[: self._open_end(text)])

    def continuation(
        self,
        last: Message,
        new: Sequence[Message],
        *,
        system: bool,
        tools: bool,
        last_id: int | None,
        now: datetime | None = None,
    ) -> list[int] | Unproven:
        """Token ids to put behind the sampled tokens of ``last`` so that the policy answers ``new``.

        ``system``/``tools``: whether the conversation starts with a system message, and has tools. ``last_id``: the
        last sampled token; a token that ends a turn is not written again. ``now`` must be the conversation's own.
        Raises `TemplateRefusedError` when the template does not take the new messages.
        """
        roles = tuple((role_of(message), min(len(calls_of(message)), 2)) for message in new)
        prefill = bool(new) and continues_answer(new)
        media = any(True for message in new for _ in media_parts(message.get("content")))
        continued = _Shape(system, tools, min(len(calls_of(last)), 2), roles, prefill, media)
        try:
            refuted = self._proofs[continued]
        except KeyError:
            refuted = self._prove(last, new, continued, now)
            if len(self._proofs) >= _MAX_PROOFS:
                self._proofs.clear()
            self._proofs[continued] = refuted
        if refuted is not None:
            return refuted
        text = self._text(last, new, continued, 0, now)
        return text if isinstance(text, Unproven) else self._behind(last_id, self._policy.encode(text[1]))

    @cached_property
    def drops_reasoning(self) -> frozenset[str]:
        """Roles (``user``, ``tool``) whose messages make the template leave out the reasoning of earlier answers."""
        answer = f"<think>\n{self._user}\n</think>\n\n{self._answer}"
        call = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        user = {"role": "user", "content": "q"}
        follows: dict[str, list[Message]] = {
            "user": [{"role": "assistant", "content": answer}, user],
            "tool": [
                {"role": "assistant", "content": answer, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdef123", "name": "f", "content": "r"},
            ],
        }
        dropped = set()
        for role, messages in follows.items():
            try:
                shown = self._policy.render([user, *messages])
            except TemplateRefusedError:
                continue
            if self._user not in shown and (role == "user" or self._answer in shown):
                dropped.add(role)
        return frozenset(dropped)

    def _behind(self, last_id: int | None, ids: list[int]) -> list[int]:
        policy = self._policy
        if last_id not in policy.stop_ids or not ids:
            return ids
        # The policy ended its turn itself. Where the template closes answers with a token, the sampled one stands for
        # it, even if it is another; where the next header's first token ends an answer, only that very token does.
        return ids[1:] if policy.turn_end is not None or ids[0] == last_id else ids

    def _open(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a word behind the last one's text, where the policy is to go on."""
        last = messages[-1]
        return [*messages[:-1], {**last, "content": text_of(last.get("content")) + self._end}]

    def _open_end(self, text: str) -> int:
        if text.count(self._end) != 1:
            raise TemplateRefusedError(
                "messages: end in an assistant's text, which the policy's chat template does not show as it is;"
                " end them in a user's or a tool's message"
            )
        return text.index(self._end)

    def _stand_in(self, last: Message) -> Message:
        """The last answer with content that can be found, and the ids and names of its calls."""
        calls = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"value": self._answer}}}
            for call in calls_of(last)
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": self._answer}
        return {**answer, "tool_calls": calls} if calls else answer

    def _render(
        self, history: Sequence[Message], rest: Sequence[Message], continued: _Shape, now: datetime | None, ask: bool
    ) -> str:
        policy = self._policy
        # Shaped apart, because nothing may be joined across the end of the answer.
        shaped = shape(history, policy.traits, leading=True) + shape(rest, policy.traits, leading=False)
        # The tools are made up here: no special token is spelled in them.
        tools = self._tools if continued.tools else None
        return policy.template.render(policy.marked(shaped), tools=tools, add_generation_prompt=ask, now=now)

    def _history(self, continued: _Shape, depth: int) -> list[Message]:
        start: list[Message] = [{"role": "system", "content": self._system}] if continued.system else []
        # Some templates count images.
        seen = [{"type": "image_url", "image_url": {"url": ""}}] if continued.media else []
        earlier: list[Message] = [
            message
            for turn in range(depth)
            for message in (
                {"role": "user", "content": [{"type": "text", "text": f"{self._user} {turn}"}, *seen]},
                {"role": "assistant", "content": f"earlier {turn}"},
            )
        ]
        return [*start, *earlier, {"role": "user", "content": self._user}]

    def _text(
        self, last: Message, new: Sequence[Message], continued: _Shape, depth: int, now: datetime | None
    ) -> tuple[str, str] | Unproven:
        """The rendering up to the end of the answer, and from there on."""
        history = [*self._history(continued, depth), self._stand_in(last)]
        text = self._render(
            history, self._open(new) if continued.prefill else new, continued, now, ask=not continued.prefill
        )
        if continued.prefill:
            text = text[: self._open_end(text)]
        if (answer := text.rfind(self._answer)) < 0:
            return Unproven("the chat template does not show the last answer")
        if (cut := self._policy.find_stop(text, answer + len(self._answer))) is None:
            return Unproven("the chat template ends answers without a token that ends a turn")
        for word, what in (
            (self._system, "the system message"),
            (self._tool, "the tools"),
            (self._user, "a user text"),
        ):
            if text.find(word, cut) >= 0:
                return Unproven(f"the chat template moves {what} behind the last answer")
        return text[:cut], text[cut:]

    def _prove(
        self, last: Message, new: Sequence[Message], continued: _Shape, now: datetime | None
    ) -> Unproven | None:
        encode = self._policy.encode
        first: str | None = None
        for depth in _DEPTHS:
            parts = self._text(last, new, continued, depth, now)
            if isinstance(parts, Unproven):
                return parts
            before, behind = parts
            if not before.startswith(self._render(self._history(continued, depth), (), continued, now, ask=False)):
                return Unproven("the chat template renders earlier messages anew when more follow")
            if first is not None and behind != first:
                return Unproven("the chat template renders new messages by what came long before them")
            if encode(before + behind) != encode(before) + encode(behind):
                return Unproven("the tokenizer joins text across the token that ends a turn")
            first = behind
        return self._misplaced(last, new, continued, now)

    def _misplaced(
        self, last: Message, new: Sequence[Message], continued: _Shape, now: datetime | None
    ) -> Unproven | None:
        """Whether a new message's text ends up anywhere but behind the answer."""
        marks = {
            index: f"new{index}{self._answer[::-1]}" for index, message in enumerate(new) if message.get("content")
        }
        marked = [
            {**message, "content": marks.get(index, message.get("content"))} for index, message in enumerate(new)
        ]
        parts = self._text(last, marked, continued, 0, now)
        if isinstance(parts, Unproven):
            return parts
        before, behind = parts
        for index, mark in marks.items():
            shown = mark in behind or (role_of(new[index]) == "assistant" and bool(calls_of(new[index])))
            if mark in before or not shown:
                return Unproven(f"the chat template puts a new message ({role_of(new[index])}) elsewhere or nowhere")
        return None
