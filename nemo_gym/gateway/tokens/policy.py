"""The policy's tokenizer, its chat template and the tokens that end a turn.

Text of messages never becomes a control token.

A file that an agent reads may contain ``<|im_end|>``. Encoded as the token, it would end the message for the policy,
and its author could continue as ``system``. Therefore only control tokens that the chat template itself writes are
encoded as such; the same letters in a message are encoded as ordinary text.

Templates do not support this. So a mark is inserted into each such spelling before rendering, and the template copies
it. A text without marks is encoded directly. In a text with marks, the template's own control tokens are replaced by
names that no text can contain, and the marks are removed. Then a tokenizer that has the control tokens only under
these names encodes the text in one piece, so that a spelling merges with its neighbours as ordinary text does.

Control tokens are the added tokens marked special, and those that end a turn. Other added tokens (whitespace runs;
``<think>`` if it is not special) are words that any text may use. An assistant's message may also contain the special
tokens that the template writes into answers (reasoning and tool calls), because it is the policy's own text.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens.byte_level import any_of, ascii_encoder, token_bytes
from nemo_gym.gateway.tokens.history import Message, shared_length
from nemo_gym.gateway.tokens.template import ChatTemplate, TemplateRefusedError, TemplateTraits, probe, shape, too_deep

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MARK = "\ufdd0"
"""A code point that Unicode reserves for internal use; in messages it is replaced by U+FFFD."""
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
        """Return messages, already shaped for the template, with marks."""
        mark = self._everywhere.marked
        marked_messages = []
        for message in messages:
            mark_content = self._in_answers.marked if message.get("role") == "assistant" else mark
            marked_messages.append(
                {
                    key: (mark_content if key in ("content", "reasoning_content") else mark)(value)
                    for key, value in message.items()
                }
            )
        return marked_messages

    def marked_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
        """Return tools with marks in their names, descriptions and schemas."""
        return [self._everywhere.marked(tool) for tool in tools] if tools else tools

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text that has marks."""
        renamed = self._added.sub(lambda match: self._control_names.get(match[0], match[0]), text).replace(MARK, "")
        ids: list[int] = self._renamed_tokenizer.encode_batch_fast([renamed], add_special_tokens=False)[0].ids
        return [
            control_id if (control_id := self._control_ids.get(token_id)) is not None else token_id for token_id in ids
        ]

    @cached_property
    def _control_names(self) -> dict[str, str]:
        word = secrets.token_hex(8)  # random, so that no message can contain a name
        return {token: f"\ufdd1{word}{number}\ufdd1" for number, token in enumerate(sorted(self._control))}

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """A pattern that finds added tokens as the tokenizer does: the leftmost, and of those the longest."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()} | self._control
        return re.compile(f"(?:{any_of(added)})(?!{MARK})")

    @cached_property
    def _renamed_tokenizer(self) -> Tokenizer:
        """The tokenizer with its control tokens under their names."""
        from tokenizers import Tokenizer

        data = json.loads(self._tokenizer.to_str())
        for token in data["added_tokens"]:
            token["content"] = self._control_names.get(token["content"], token["content"])
        data["post_processor"] = None  # unused here, but may refer to tokens by their old names
        model = data["model"]
        if model.get("unk_token") in self._control_names:
            model["unk_token"] = self._control_names[model["unk_token"]]
        if isinstance(vocabulary := model.get("vocab"), dict):
            # Merges that result in a control token would refer to a missing piece: they are removed as well.
            model["vocab"] = {self._control_names.get(piece, piece): number for piece, number in vocabulary.items()}
            if "merges" in model:
                model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in self._control]
        elif isinstance(vocabulary, list):
            model["vocab"] = [[self._control_names.get(piece, piece), score] for piece, score in vocabulary]
        return Tokenizer.from_str(json.dumps(data))

    @cached_property
    def _control_ids(self) -> dict[int | None, int | None]:
        """Id of a name → id of its control token; they differ if the token had no fixed id."""
        find, named = self._tokenizer.token_to_id, self._renamed_tokenizer.token_to_id
        return {named(name): find(token) for token, name in self._control_names.items()}


class _Marker:
    def __init__(self, tokens: frozenset[str]) -> None:
        # Matches every place where a token starts, so that overlapping tokens are all broken by a mark.
        self._starts = re.compile(f"(?=(?:{any_of(tokens)}))(.)", re.DOTALL) if tokens else None
        self._hints = {token[:2] for token in tokens}

    def marked(self, value: Any) -> Any:
        """Return JSON data with a mark after the first character of each spelling in it."""
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


def _merged(pair: Any) -> str:
    return "".join(pair) if isinstance(pair, list) else str(pair).replace(" ", "", 1)


# The policy's tokenizer, its chat template and the tokens that end a turn.

ContentSpecials = Literal["text", "control"]
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class PolicyTokenizer:
    """The tokenizer and chat template of one policy, from a local directory. Immutable; shared by all sessions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop_tokens: Iterable[str],
        special_tokens_in_content: ContentSpecials = "text",
    ) -> None:
        """``stop_tokens`` end a turn when sampled; the token with which the template closes an answer is added.
        ``special_tokens_in_content``: how a special token's text in a message is encoded. ``control`` is the default
        of tokenizers, and allows the author of a tool's output to end the message and start another.

        Raises `ConfigError` for a template that cannot render an exchange, or an unknown stop token.
        """
        self.tokenizer = tokenizer
        self._token_bytes = token_bytes(tokenizer)
        self._words = ascii_encoder(tokenizer)
        self.template = template
        self.traits: TemplateTraits = probe(template)
        self.vocabulary_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._specials: SpecialText | None = None
        self.turn_end: str | None = self._turn_end()
        """The token that the template writes after every answer; ``None`` if the next message's header ends it."""
        self.stops: dict[str, int] = {}
        """Text → id of each token that ends a turn."""
        closing = self._headers() if self.turn_end is None else [self.turn_end]
        for token in [*stop_tokens, *closing]:
            if (token_id := tokenizer.token_to_id(token)) is None:
                raise ConfigError(f"stop token '{token}' is not in the policy's tokenizer")
            self.stops[token] = token_id
        self.stop_ids = frozenset(self.stops.values())
        if special_tokens_in_content == "text":
            control = {token.content for token in added.values() if token.special or token.content in self.stops}
            self._specials = SpecialText(tokenizer, control, self._answer_tokens())

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        chat_template: str | None = None,
        stop_tokens: Sequence[str] = (),
        template_variables: Mapping[str, Any] | None = None,
        special_tokens_in_content: ContentSpecials = "text",
    ) -> PolicyTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and ``generation_config.json``.

        ``chat_template`` (a template's text) replaces the directory's own. Nothing is downloaded.
        Raises `ConfigError` that names a missing or damaged file.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "token truth needs the 'gateway' extra: pip install 'nemo-gym-suite[gateway]'"
            ) from error

        folder = Path(directory)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"policy: '{file}' does not exist; give the model's local directory")
        config = _json(folder / "tokenizer_config.json")
        # Texts are encoded one at a time, and waking other threads for that takes longer than it saves.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise a plain Exception for an invalid file
            raise ConfigError(f"policy: '{file}' is not a tokenizer ({error})") from error
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
        source = chat_template or _template_source(folder, config)
        stops = [*stop_tokens, *_generation_stops(folder, tokenizer)]
        if (eos := special.get("eos_token")) is not None and tokenizer.token_to_id(eos) is not None:
            stops.append(eos)
        template = ChatTemplate(source, special, template_variables)
        return cls(tokenizer, template, stops, special_tokens_in_content)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text. No tokens are added: templates write their own special tokens."""
        if not text.isascii():
            # Lone surrogates come from JSON escapes, and no tokenizer can encode them.
            text = text.encode("utf-8", "replace").decode() if _SURROGATE.search(text) else text
            if self._specials is not None and MARK in text:
                return self._specials.encode(text)
        if self._words is not None:
            return self._words.encode(text)
        # The same as the tokenizer's `encode`, but without the offsets of each token.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._token_bytes is not None and not skip_special_tokens:
            return self._token_bytes.text(ids)
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Shape a whole conversation for the template and render it to text for `encode`. Raises
        `TemplateRefusedError`."""
        shaped, tools = self.marked(shape(messages, self.traits, leading=True), tools)
        return self.template.render(shaped, tools=tools, add_generation_prompt=add_generation_prompt, now=now)

    def marked(
        self, shaped: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return messages, already shaped for the template, and tools, with marks in the special tokens that they
        spell."""
        if self._specials is None:
            return shaped, tools
        try:
            return self._specials.marked(shaped), self._specials.marked_tools(tools)
        except RecursionError:
            raise too_deep() from None

    def find_stop(self, text: str, start: int) -> int | None:
        """Return the place of the first token in ``text`` from ``start`` on that ends a turn."""
        return min((at for token in self.stops if (at := text.find(token, start)) >= 0), default=None)

    def _turn_end(self) -> str | None:
        text = self.render([_user("q"), _ANSWER], add_generation_prompt=False)
        return self._first_added(text[text.rindex("answerprobe") :])

    def _headers(self) -> list[str]:
        """Return the tokens that start messages after an answer, for templates without a token that ends an answer."""
        headers = []
        note = {"role": "system", "content": "s"}
        followed = ([_ANSWER, _user("q")], [_calling_message(), _RESULT], [_ANSWER, note, _user("q")])
        for conversation in ([_user("q"), *messages] for messages in followed):
            try:
                before = self.render(conversation[:2], add_generation_prompt=False)
                whole = self.render(conversation, add_generation_prompt=False)
            except TemplateRefusedError:
                continue
            header = self._first_added(whole.removeprefix(before))
            if header is not None and whole.startswith(before + header):
                headers.append(header)
        return headers

    def _answer_tokens(self) -> set[str]:
        """Return the added tokens that the template writes into answers or searches there: of reasoning and calls."""
        calling = {**_calling_message(), "reasoning_content": "r"}
        answer = calling if self.traits.tool_use else {**_ANSWER, "reasoning_content": "r"}
        follows = [_RESULT] if self.traits.tool_use else []
        prompt = self.render([_user("q")])
        opened = self.render([_user("q")], add_generation_prompt=False)
        whole = self.render([_user("q"), answer], add_generation_prompt=False)
        within = whole[shared_length(prompt, whole) :]
        exchange = self.render(
            [{"role": "system", "content": "s"}, _user("q"), answer, *follows],
            tools=[_TOOL],
            add_generation_prompt=False,
        )
        around = exchange.replace(within, "")
        between = {token for token in self._added if token in around} | self.stops.keys()
        if (header := self._first_added(prompt.removeprefix(opened))) is not None:
            between.add(header)
        shown = self.template.source + within
        return {token for token in self._added if token in shown and token not in between}

    def _first_added(self, text: str) -> str | None:
        matches = [(at, -len(token), token) for token in self._added if (at := text.find(token)) >= 0]
        return min(matches)[2] if matches else None


_ANSWER: Message = {"role": "assistant", "content": "answerprobe"}
_RESULT: Message = {"role": "tool", "tool_call_id": "abcdef123", "name": "f", "content": "r"}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}


def _calling_message() -> Message:
    function = {"name": "f", "arguments": {"a": "b"}}
    return {**_ANSWER, "tool_calls": [{"id": "abcdef123", "type": "function", "function": function}]}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        loaded = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"policy: '{file}' is not JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"policy: '{file}' does not hold a JSON object")
    return loaded


def _token_text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name; the one for tools also handles conversations without tools
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"policy: '{folder}' has no chat template; set chat_template to one")
    return template


def _generation_stops(folder: Path, tokenizer: Tokenizer) -> list[str]:
    ids = _json(folder / "generation_config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return [token for one in listed if (token := tokenizer.id_to_token(int(one))) is not None]
