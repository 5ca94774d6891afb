"""A session's conversations as a forest of turns: sampled tokens stay, whatever a harness sends next.

    prepared = forest.prepare(messages, tools)      # pure: token ids for the engine, and the place of the answer
    sampled = await engine(prepared.prompt)
    turn = forest.commit(prepared, sampled, message)   # only this changes the forest

A request continues the deepest turn whose conversation it repeats; a request that repeats none starts a new tree. An
answer that is sampled again is a sibling of the first, after the same tokens. A request that ends in an assistant's
text (a prefill, or an answer cut off at its token limit) continues that text, and only the tokens sampled after it are
delivered and marked. Not thread-safe: one session's calls run on one event loop, and neither step awaits.

Only new messages are rendered and encoded; the tokens before them stay exactly as they were sampled.

A continuation is the template's text between the last sampled token and the next answer: the end of the turn, the new
messages, the generation prompt. It is rendered after a short stand-in for the history, cut at the token that ends the
turn, and encoded. That is correct only for templates that append. So each *shape* of continuation (roles of the new
messages, calls in the last answer, tools and system prompt or not) is proven once per policy, on histories of several
depths: the cut text must be the same after each, the text rendered before it must not change, and the encodings of the
pieces must join to the encoding of the whole. A conversation whose continuation is not proven is encoded in full.

Some templates look for words in texts, as for ``/no_think``, and write other prompts after them. Such *switches* are
found by rendering each of the template's constants in a system and a user text. The stand-in has those of the history,
in their places, and a shape with switches has its own proof.
"""

from __future__ import annotations

import math
import re
import secrets
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

from nemo_gym.contract.errors import InvalidBodyError, ModelError
from nemo_gym.gateway.policy_request import LARGE, packed
from nemo_gym.gateway.tokens.history import (
    HistoryReader,
    Message,
    Reading,
    calls_of,
    continues_answer,
    ends_thinking,
    is_long,
    media_parts,
    role_of,
    text_of,
)
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError, shape
from nemo_gym.gateway.tokens.turns import (
    Prompt,
    Sampled,
    SplitReason,
    Turn,
    continuation_reason,
    extended,
    start_reason,
)

_DEPTHS = (0, 1, 3)
_MAX_PROOFS = 1024
"""Shapes are few in practice; a client that invents new ones must not fill the memory."""


SwitchMessages = tuple[tuple[str, str, bool], ...]
"""Role, text and whether it has an image, of each system and user message in which the template finds a switch; the
rest of the text is replaced. ``""`` is the text of any number of messages without a switch."""
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "f", "content": "r"}


class UnprovenError(Exception):
    """A continuation that is not proven; the message is what the template does instead of appending."""


@dataclass(frozen=True, slots=True)
class _Shape:
    system: bool
    tools: bool
    calls: int
    roles: tuple[tuple[str, int], ...]
    prefill: bool
    media: bool
    switch_messages: SwitchMessages = ()
    new_switch_messages: SwitchMessages = ()


def _without_switches(new: Sequence[Message], continued: _Shape) -> Sequence[Message]:
    if not continued.new_switch_messages:
        return new
    roles = ("system", "user")
    is_text = [role_of(message) in roles and isinstance(message.get("content"), str) for message in new]
    return [{**message, "content": "q"} if plain else message for message, plain in zip(new, is_text, strict=True)]


class IncrementalEncoder:
    """Encodes continuations for one policy, and remembers which shapes of them are proven. Thread-safe."""

    def __init__(self, policy: PolicyTokenizer) -> None:
        self._policy = policy
        self._proofs: dict[_Shape, str | None] = {}
        """Shape → why it is not proven; ``None`` for a proven one."""
        # Words that cannot be in any conversation, so that each shows where its part of the conversation is rendered.
        word = secrets.token_hex(8)
        names = (f"{part}{word}" for part in ("sys", "usr", "tol", "ans", "end"))
        self._system, self._user, self._tool, self._answer, self._end = names
        parameters = {"type": "object", "properties": {}}
        function = {"name": self._tool, "description": self._tool, "parameters": parameters}
        self._tools = [{"type": "function", "function": function}]

    def full(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, now: datetime | None = None
    ) -> list[int]:
        """Return the token ids of the whole conversation with the generation prompt; if it ends in an assistant's
        text, those up to the end of that text. Raises `TemplateRefusedError`."""
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
        switch_messages: SwitchMessages = (),
    ) -> list[int]:
        """Return the token ids to append to the sampled tokens of ``last`` so that the policy answers ``new``.

        ``system``/``tools``: whether the conversation starts with a system message, and has tools. ``last_id``: the
        last sampled token; if it ends a turn, that token is not repeated. ``now`` must be the conversation's own time.
        ``switch_messages``: what `switch_messages` returns for the messages before ``last``.
        Raises `UnprovenError`, and `TemplateRefusedError` if the template does not accept the new messages.
        """
        roles = tuple((role_of(message), min(len(calls_of(message)), 2)) for message in new)
        prefill = bool(new) and continues_answer(new)
        media = any(True for message in new for _ in media_parts(message.get("content")))
        plain = _Shape(system, tools, min(len(calls_of(last)), 2), roles, prefill, media)
        switch_messages = switch_messages if any(text for _, text, _ in switch_messages) else ()
        continued = replace(
            plain,
            switch_messages=switch_messages,
            new_switch_messages=tuple(one for one in self.switch_messages(new) if one[1]),
        )
        # The plain one too: only its texts are marker words, which show whether the template moves them.
        for one, messages in {plain: _without_switches(new, continued), continued: new}.items():
            if (why := self._why_unproven(last, messages, one, now)) is not None:
                raise UnprovenError(why)
        _, behind = self._text(last, new, continued, 0, now)
        ids = self._policy.encode(behind)
        if last_id not in self._policy.stop_ids or not ids:
            return ids
        # The policy ended its turn itself. If the template closes answers with a token, the sampled stop token takes
        # its place, even if it differs; if the next header's first token ends an answer, only that same token does.
        return ids[1:] if self._policy.turn_end is not None or ids[0] == last_id else ids

    def switch_messages(self, messages: Sequence[Message], before: SwitchMessages = ()) -> SwitchMessages:
        """Return ``before``, and the switches in the texts of ``messages`` after it."""
        found = [*before]
        for message in messages if self.switches else ():
            if (role := role_of(message)) in ("system", "user"):
                text = self._reduced(text_of(content := message.get("content")))
                one = role, text, bool(text) and any(True for _ in media_parts(content))
                if one not in found[-1:] and (text or role == "user" or not found):
                    found.append(one)
        return tuple(found)

    def _reduced(self, text: str) -> str:
        """Return the switches in a text, with marker words for the text between them; ``""`` if there are none."""
        lowered = text.lower()  # templates may do that before they look
        if not any(switch.lower() in lowered for switch in self.switches):
            return ""
        longest_first = sorted(self._kept_whole, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text, flags=re.IGNORECASE)
        parts[::2] = [part.replace(part.strip(), self._user) if part.strip() else part for part in parts[::2]]
        return "".join(parts)

    @cached_property
    def _kept_whole(self) -> frozenset[str]:
        """The switches, and texts that contain one but may not be one to the template: ``</think>`` for ``/think``."""
        compared = self._policy.template.compared
        return self.switches | {word for word in compared if any(one.lower() in word.lower() for one in self.switches)}

    @cached_property
    def switches(self) -> frozenset[str]:
        """The texts that change what the template writes after the next answer if an earlier message has them."""
        plain, compared = self._user, self._policy.template.compared

        def found(beside: str) -> set[str]:
            # The later of two switches may win, so each is tried before and behind the other.
            without = self._outcomes(beside, plain), self._outcomes(plain, beside)
            return {
                word for word in compared if (self._outcomes(beside, word), self._outcomes(word, beside)) != without
            }

        alone = found(plain) if compared else set()
        return frozenset(alone.union(*map(found, alone)))

    def _outcomes(self, first: str, second: str) -> list[str]:
        """Return what the template writes after an answer, for several places of two texts before it."""
        answer, user = {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}
        called = {**answer, "tool_calls": [_CALL]}
        system, both = ("system", first, False), f"{first} {second}"
        places: tuple[SwitchMessages, ...] = (
            (system, ("user", second, False)),
            (("user", first, False), ("user", second, False)),
            (("system", both, False),),
            (("user", both, False),),
        )
        outcomes = []
        for place in places:
            for last, new, tools in ((answer, user, False), (called, _RESULT, True)):
                roles = ((new["role"], 0),)
                leading = place[0][0] == "system"
                continued = _Shape(
                    leading, tools, int(tools), roles, prefill=False, media=False, switch_messages=place
                )
                try:
                    outcomes.append(self._text(last, [new], continued, 0, None)[1])
                except (UnprovenError, TemplateRefusedError) as error:
                    outcomes.append(str(error))
        return outcomes

    @cached_property
    def drops_reasoning(self) -> frozenset[str]:
        """Roles (``user``, ``tool``) after whose messages the template omits the reasoning of earlier answers."""
        answer = {"role": "assistant", "content": f"<think>\n{self._user}\n</think>\n\n{self._answer}"}
        if "reasoning_content" in self._policy.template.source:  # where answers have it
            answer |= {"content": self._answer, "reasoning_content": self._user}
        user = {"role": "user", "content": "q"}
        follows: dict[str, list[Message]] = {
            "user": [answer, user],
            "tool": [{**answer, "tool_calls": [_CALL]}, _RESULT],
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

    def _open(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with a marker word after the last one's text, where the policy continues."""
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
        """Return the last answer with a marker word as content, and with the ids and names of its calls."""
        calls = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"value": self._answer}}}
            for call in calls_of(last)
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": self._answer}
        return {**answer, "tool_calls": calls} if calls else answer

    def _render(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        continued: _Shape,
        now: datetime | None,
        ask: bool,
    ) -> str:
        policy = self._policy
        # Shaped separately, because no messages may be joined across the end of the answer.
        shaped = shape(history, policy.traits, leading=True) + shape(new_messages, policy.traits, leading=False)
        marked, _ = policy.marked(shaped)
        # The tools are this class's own and contain no special token.
        tools = self._tools if continued.tools else None
        return policy.template.render(marked, tools=tools, add_generation_prompt=ask, now=now)

    def _history(self, continued: _Shape, depth: int) -> list[Message]:
        switching = list(continued.switch_messages)
        system = (switching.pop(0)[1] if continued.system and switching else "") or self._system
        start: list[Message] = [{"role": "system", "content": system}] if continued.system else []
        # Some templates number images, so the history has one per message.
        images = [{"type": "image_url", "image_url": {"url": ""}}] if continued.media else []
        # Others number results, or write the first ones differently.
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        called = [calling, _RESULT] if continued.calls else []
        earlier: list[Message] = [
            message
            for turn in range(depth)
            for message in (
                {"role": "user", "content": [{"type": "text", "text": f"{self._user} {turn}"}, *images]},
                *called,
                {"role": "assistant", "content": f"earlier {turn}"},
            )
        ]
        if not switching or switching[-1][0] != "user":
            switching.append(("user", "", False))
        *before, (_, text, media) = switching
        for role, words, shown in before:
            earlier.append({"role": role, "content": self._content(words, shown)})
            if role == "user":
                earlier.append({"role": "assistant", "content": "earlier"})
        return [*start, *earlier, {"role": "user", "content": self._content(text, media)}]

    def _content(self, words: str, media: bool) -> Any:
        text = words or self._user
        image = {"type": "image_url", "image_url": {"url": ""}}
        return [{"type": "text", "text": text}, image] if media else text

    def _text(
        self, last: Message, new: Sequence[Message], continued: _Shape, depth: int, now: datetime | None
    ) -> tuple[str, str]:
        """Return the rendering up to the end of the answer, and the rendering after it."""
        history = [*self._history(continued, depth), self._stand_in(last)]
        text = self._render(
            history, self._open(new) if continued.prefill else new, continued, now, ask=not continued.prefill
        )
        if continued.prefill:
            text = text[: self._open_end(text)]
        if (answer := text.rfind(self._answer)) < 0:
            raise UnprovenError("the chat template does not show the last answer")
        if (cut := self._policy.find_stop(text, answer + len(self._answer))) is None:
            raise UnprovenError("the chat template ends answers without a token that ends a turn")
        for word, part_name in (
            (self._system, "the system message"),
            (self._tool, "the tools"),
            (self._user, "a user text"),
        ):
            if text.find(word, cut) >= 0:
                raise UnprovenError(f"the chat template moves {part_name} behind the last answer")
        return text[:cut], text[cut:]

    def _why_unproven(
        self, last: Message, new: Sequence[Message], continued: _Shape, now: datetime | None
    ) -> str | None:
        if continued not in self._proofs:
            why = None
            try:
                self._prove(last, new, continued, now)
            except UnprovenError as error:
                why = str(error)
            if len(self._proofs) >= _MAX_PROOFS:
                self._proofs.clear()
            self._proofs[continued] = why
            return why
        return self._proofs[continued]

    def _prove(self, last: Message, new: Sequence[Message], continued: _Shape, now: datetime | None) -> None:
        encode = self._policy.encode
        first: str | None = None
        for depth in _DEPTHS:
            before, behind = self._text(last, new, continued, depth, now)
            if not before.startswith(self._render(self._history(continued, depth), (), continued, now, ask=False)):
                raise UnprovenError("the chat template renders earlier messages anew when more follow")
            if first is not None and behind != first:
                raise UnprovenError("the chat template renders new messages differently depending on earlier ones")
            if encode(before + behind) != encode(before) + encode(behind):
                raise UnprovenError("the tokenizer joins text across the token that ends a turn")
            first = behind
        # Each new message's text must be rendered after the answer, and nowhere else.
        marks = {
            index: f"new{index}{self._answer[::-1]}" for index, message in enumerate(new) if message.get("content")
        }
        marked = [
            {**message, "content": marks.get(index, message.get("content"))} for index, message in enumerate(new)
        ]
        before, behind = self._text(last, marked, continued, 0, now)
        for index, mark in marks.items():
            role = role_of(new[index])
            shown = mark in behind or (role == "assistant" and calls_of(new[index]))
            if mark in before or not shown:
                raise UnprovenError(f"the chat template puts a new message ({role}) elsewhere or nowhere")


_COMPARED = 16
"""How many conversations, newest first, are compared with a new one to find its split reason."""


class History(StrEnum):
    """How to treat sampled reasoning that the chat template would omit from later prompts."""

    VERBATIM = "verbatim"
    """Keep it: the conversation is one trajectory, and the prompt has all that the policy wrote."""
    TEMPLATE = "template"
    """Omit it: the conversation continues as a sibling, with the template's own prompt."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may become a turn."""

    parent: Turn | None
    context: array[int]
    """The new tokens of the prompt after ``parent``, int32; the whole prompt if there is no parent."""
    reading: Reading
    shared: int
    """The number of the history's entries that ``parent`` covers."""
    reason: SplitReason | None
    """The split reason, if it is known before the commit: the template, or changed tools."""
    detail: str | None
    prompt: Prompt = field(init=False, repr=False, compare=False)
    """The whole prompt, without a copy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", Prompt(self.parent, self.context))

    def media(self) -> tuple[Mapping[str, Any], ...]:
        """Return the images and other media in the new messages after ``parent``."""
        start = self.reading.start_of(self.shared)
        return tuple(
            {"kind": kind, "source": source, "message": index}
            for index, message in enumerate(self.reading.messages[start:], start)
            for kind, source in media_parts(message.get("content"))
        )

    def images(self) -> tuple[str, ...]:
        """Return the sources of all images of the prompt, in the order of their placeholders. That is the order in
        which they were first sent, even if a harness has reordered the results of parallel calls since."""
        earlier = self.parent.path() if self.parent is not None and self.parent.media_count else ()
        shown = (*(item for turn in earlier for item in turn.media), *self.media())
        return tuple(str(item["source"]) for item in shown if item["kind"] == "image")


class TokenForest:
    """All turns of one session."""

    def __init__(
        self, encoder: IncrementalEncoder, policy: PolicyTokenizer, history: History, now: datetime | None = None
    ) -> None:
        """``encoder`` is shared by all sessions of a policy. ``now``: the session's own time, for templates that
        print the date; it is fixed for the whole session, because prompts would change at midnight otherwise."""
        self._encoder = encoder
        self._policy = policy
        self._history = history
        self.now = now or datetime.now().astimezone()
        self._reader = HistoryReader()
        self._turns: list[Turn] = []
        self._by_key: dict[bytes, list[Turn]] = {}
        self._switch_messages: dict[bytes, SwitchMessages] = {}
        """By the key of a conversation that was continued."""
        self._own_ids: dict[str, str] = {}
        """By the id that the harness was given: the id that the policy wrote into its call."""

    @property
    def turns(self) -> Sequence[Turn]:
        """All committed turns, in order."""
        return self._turns

    def prepare(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Prepared:
        """Return a request's place in the forest and its exact prompt. Changes nothing.

        Raises `InvalidBodyError` for a request without messages, `TemplateRefusedError` for a request that the
        policy's chat template does not accept.
        """
        steps = self.preparing(messages, tools)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                prepared: Prepared = done.value
                return prepared

    def preparing(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Generator[bool, None, Prepared]:
        """Run `prepare` in steps. Before each step, yields whether it may take long; the caller may then run it in
        another thread, while turns are committed but not while another request of this session is prepared."""
        if not messages:
            raise InvalidBodyError("messages: is empty; a request needs at least one message")
        nearest, common = found = self._reader.nearest(messages)
        yield nearest is None or nearest.offered != (tools or ()) or is_long(messages[common:])
        reading = self._reader.read(messages, tools, found)
        parent, shared, other_tools = self._deepest_turn(reading)
        reason, detail = (SplitReason.TOOLS_CHANGED if other_tools else None), None
        if parent is not None:
            yield is_long(reading.messages[reading.start_of(shared) :])
            context = self._continued(parent, reading, shared)
            if not isinstance(context, Prepared):
                reason, detail = context
            else:
                return context
        yield True
        own = [self._with_own_ids(message) for message in messages] if self._own_ids else messages
        ids = array("i", self._encoder.full(own, tools=tools, now=self.now))
        if parent is not None and reason is SplitReason.TEMPLATE and ids[: parent.end] == parent.tokens[: parent.end]:
            # Not proven in general, but here the template's tokens equal the sampled ones.
            return Prepared(parent, ids[parent.end :], reading, shared, None, None)
        return Prepared(None, ids, reading, 0, reason, detail)

    def commit(self, prepared: Prepared, sampled: Sampled, message: Message) -> Turn:
        """Keep an answer. ``message``: the assistant message as it is delivered; ids of calls may differ.

        Raises `ModelError`, and keeps nothing, if ids and logprobs do not match each other or the policy, or if the
        turn that the request continues was taken back meanwhile.
        """
        ids, logprobs = self._checked(sampled)
        reading, parent = prepared.reading, prepared.parent
        if parent is not None and self._turns[parent.turn_id : parent.turn_id + 1] != [parent]:
            raise ModelError("the turn that this request continues could not be kept; ask again", retryable=True)
        key, digest = reading.answered(message)
        stopped_key = None
        if sampled.stop is not None and not calls_of(message):
            stopped = {**message, "content": text_of(message.get("content")) + sampled.stop}
            stopped_key, _ = reading.answered(stopped)
        new = reading.entries[prepared.shared :]
        entries = [entry.digest for entry in new if entry.digest is not None]
        if new and new[-1].role == "assistant":
            entries.pop()  # the answer continues it, and its digest covers both
        media = prepared.media()
        turn = Turn(
            turn_id=len(self._turns),
            **extended(parent, prepared.context, ids, sampled.ids_json, prepared.prompt.new),
            logprobs=logprobs,
            finish_reason=sampled.finish_reason,
            weights_version=sampled.weights_version,
            details=dict(sampled.details),
            message=message,
            key=key,
            request_key=reading.key,
            tools=reading.tools,
            has_tools=bool(reading.offered),
            has_system=role_of(reading.messages[0]) == "system",
            has_reasoning=_reasons(message) or (parent is not None and parent.has_reasoning),
            entries=(*entries, digest),
            reminders=reading.seen[-1] | (parent.reminders if parent is not None else frozenset()),
            reason=prepared.reason or self._reason(prepared),
            reason_detail=prepared.detail,
            media=media,
            media_count=len(media) + (parent.media_count if parent is not None else 0),
            message_count=len(reading.messages) + 1,
            stopped_key=stopped_key,
        )
        self.add(turn)
        return turn

    def take_back(self, turn_id: int) -> None:
        """Remove the latest turn, whose answer nobody has received yet."""
        turn = self._turns.pop()
        assert turn.turn_id == turn_id
        # The latest turn is the last item of every list that it is in.
        for key in turn.keys:
            self._by_key[key].pop()
        if turn.parent is not None:
            turn.parent.children.pop()

    def add(self, turn: Turn) -> None:
        """Add a turn, a new one or one from a journal; parents first."""
        self._turns.append(turn)
        for key in turn.keys:
            self._by_key.setdefault(key, []).append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        for call in calls_of(turn.message):
            if "given_id" in call:
                self._own_ids[call["given_id"]] = call["id"]

    def _with_own_ids(self, message: Message) -> Message:
        def own(given_id: Any) -> Any:
            return self._own_ids.get(given_id, given_id)

        if calls := calls_of(message):
            return {**message, "tool_calls": [{**call, "id": own(call.get("id"))} for call in calls]}
        return {**message, "tool_call_id": own(message["tool_call_id"])} if "tool_call_id" in message else message

    def _deepest_turn(self, reading: Reading) -> tuple[Turn | None, int, bool]:
        """Return the turn that a request continues, the number of entries it covers, and, if there is none, whether
        one would exist with other tools."""
        other_tools = False
        for shared in range(len(reading.entries), 0, -1):
            if reading.entries[shared - 1].role != "assistant":
                continue
            for turn in reversed(self._by_key.get(reading.keys[shared], ())):
                if not reading.seen[shared] <= turn.reminders:
                    continue
                if turn.tools == reading.tools:
                    return turn, shared, False
                other_tools = True
        return None, 0, other_tools

    def _continued(self, parent: Turn, reading: Reading, shared: int) -> Prepared | tuple[SplitReason, str]:
        new = _with_answer_call_ids(reading, shared, parent.message)
        last_id = parent.tokens[parent.end - 1] if parent.end > parent.context_end else None
        if not new and last_id not in self._policy.stop_ids and continues_answer(reading.messages):
            # The answer reached its token limit before the policy ended it: it continues where it stopped.
            return Prepared(parent, array("i"), reading, shared, None, None)
        if self._history is History.TEMPLATE and parent.has_reasoning:
            dropping = self._encoder.drops_reasoning.intersection(role_of(message) for message in new)
            if dropping:
                return SplitReason.REASONING_DROPPED, f"a {min(dropping)} message follows earlier reasoning"
        try:
            ids = self._encoder.continuation(
                parent.message,
                new,
                system=parent.has_system,
                tools=parent.has_tools,
                last_id=last_id,
                now=self.now,
                switch_messages=self._switch_messages_before(reading, shared),
            )
        except TemplateRefusedError as error:
            return SplitReason.TEMPLATE, error.message
        except UnprovenError as error:
            return SplitReason.TEMPLATE, str(error)
        return Prepared(parent, array("i", ids), reading, shared, None, None)

    def _switch_messages_before(self, reading: Reading, shared: int) -> SwitchMessages:
        if not self._encoder.switches:
            return ()
        known = next((at for at in range(shared, 0, -1) if reading.keys[at] in self._switch_messages), 0)
        new = reading.messages[reading.start_of(known) : reading.start_of(shared)]
        switching = self._encoder.switch_messages(new, self._switch_messages.get(reading.keys[known], ()))
        self._switch_messages[reading.keys[shared]] = switching
        return switching

    def _reason(self, prepared: Prepared) -> SplitReason | None:
        """Return the split reason. Called at the commit, so that turns committed since `prepare` count as well."""
        reading, parent = prepared.reading, prepared.parent
        if parent is not None:
            return continuation_reason(reading, prepared.shared, {child.request_key for child in parent.children})
        leaves = [turn for turn in reversed(self._turns) if not turn.children][:_COMPARED]
        earlier = [(leaf.tools, [digest for turn in leaf.path() for digest in turn.entries]) for leaf in leaves]
        asked_before = any(turn.request_key == reading.key and turn.tools == reading.tools for turn in self._turns)
        return start_reason(reading, earlier, asked_before)

    def _checked(self, sampled: Sampled) -> tuple[array[int], array[float] | None]:
        size = self._policy.vocabulary_size
        try:
            ids: array[int] = packed("i", sampled.ids)
            logprobs: array[float] | None = packed("f", sampled.logprobs) if sampled.logprobs is not None else None
        except (TypeError, OverflowError) as error:
            raise ModelError(f"the engine returned token ids or logprobs that are not numbers ({error})") from error
        if ids and not _within(ids, size):
            raise ModelError(f"the engine returned token ids outside the policy's vocabulary of {size}")
        if logprobs is not None and len(logprobs) != len(ids):
            raise ModelError(f"the engine returned {len(ids)} token ids and {len(logprobs)} logprobs")
        if logprobs is not None and not _finite(logprobs):
            raise ModelError("the engine returned a logprob that is not finite")
        return ids, logprobs


def _within(ids: array[int], size: int) -> bool:
    if len(ids) < LARGE:
        return min(ids) >= 0 and max(ids) < size
    import numpy as np

    numbers = np.frombuffer(ids, dtype=np.int32)
    return bool(np.min(numbers) >= 0 and np.max(numbers) < size)


def _finite(values: array[float]) -> bool:
    if len(values) < LARGE:
        return math.isfinite(sum(values))  # a sum of float32 cannot overflow a float64
    import numpy as np

    return bool(np.isfinite(np.frombuffer(values, dtype=np.float32)).all())


def _with_answer_call_ids(reading: Reading, shared: int, answer: Message) -> list[Message]:
    """Return the messages after the shared entries, with results that refer to calls by the ids of the kept answer
    instead of the harness's."""
    start, end = reading.start_of(shared - 1), reading.entries[shared - 1].end
    sent = [call.get("id") for message in reading.messages[start:end] for call in calls_of(message)]
    kept_ids = dict(zip(sent, (call.get("id") for call in calls_of(answer)), strict=False))
    return [
        {**message, "tool_call_id": kept_ids[message["tool_call_id"]]}
        if message.get("tool_call_id") in kept_ids
        else message
        for message in reading.messages[end:]
    ]


def _reasons(message: Message) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning")) or ends_thinking(
        text_of(message.get("content"))
    )
