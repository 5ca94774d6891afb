"""The policy as tokens see it: its tokenizer, its chat template and the tokens that end a turn."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens.decoding import token_bytes
from nemo_gym.gateway.tokens.messages import Message
from nemo_gym.gateway.tokens.specials import MARK, SpecialText
from nemo_gym.gateway.tokens.template import ChatTemplate, TemplateRefusedError, too_deep
from nemo_gym.gateway.tokens.traits import TemplateTraits, probe, shape
from nemo_gym.gateway.tokens.words import ascii_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ContentSpecials = Literal["text", "control"]
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class PolicyTokenizer:
    """Tokenizer and chat template of one policy, from a local directory. Immutable; shared by all sessions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop_tokens: Iterable[str],
        special_tokens_in_content: ContentSpecials = "text",
    ) -> None:
        """``stop_tokens`` end a turn when sampled; the token with which the template closes an answer is added.
        ``special_tokens_in_content``: what a special token's text is when a message holds it; ``control`` is what
        tokenizers do by themselves, and lets whoever writes a tool's output end the message and start another.

        Raises `ConfigError` for a template that cannot render an exchange, or an unknown stop token.
        """
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)
        self._words = ascii_words(tokenizer)
        self.template = template
        self.traits: TemplateTraits = probe(template)
        self.vocabulary_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._specials: SpecialText | None = None
        self.turn_end: str | None = self._turn_end()
        """The token the template writes after every answer; nothing where the next message's header ends it."""
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
        Raises `ConfigError` naming the file for what is missing or damaged.
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
        # Texts are encoded one at a time here, and waking other threads for that takes longer than it saves.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise plain Exception for whatever the file holds
            raise ConfigError(f"policy: '{file}' is not a tokenizer ({error})") from error
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
        source = chat_template or _template_source(folder, config)
        stops = [*stop_tokens, *_generation_stops(folder, tokenizer)]
        if (eos := special.get("eos_token")) is not None and tokenizer.token_to_id(eos) is not None:
            stops.append(eos)
        template = ChatTemplate(source, special, template_variables)
        return cls(tokenizer, template, stops, special_tokens_in_content)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself, for parsers of other packages that want one."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. Nothing is added: templates write their own special tokens."""
        if not text.isascii():
            # Lone surrogates come in by JSON escapes, and no tokenizer has them.
            text = text.encode("utf-8", "replace").decode() if _SURROGATE.search(text) else text
            if self._specials is not None and MARK in text:
                return self._specials.encode(text)
        if self._words is not None:
            return self._words.encode(text)
        # As `encode` does it, but without the offsets of each token.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._bytes is not None and not skip_special_tokens:
            return self._bytes.text(ids)
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """A whole conversation as text for `encode`, shaped for the template. Raises `TemplateRefusedError`."""
        shaped = shape(messages, self.traits, leading=True)
        return self.render_shaped(shaped, tools=tools, add_generation_prompt=add_generation_prompt, now=now)

    def render_shaped(
        self,
        shaped: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        now: datetime | None,
    ) -> str:
        """Messages as the template takes them as text for `encode`: texts of special tokens in them are marked."""
        if self._specials is not None:
            try:
                shaped, tools = self._specials.marked(shaped), self._specials.marked_tools(tools)
            except RecursionError:
                raise too_deep() from None
        return self.template.render(shaped, tools=tools, add_generation_prompt=add_generation_prompt, now=now)

    def marked(self, shaped: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Messages as the template takes them, with marks at the texts of special tokens in them."""
        try:
            return shaped if self._specials is None else self._specials.marked(shaped)
        except RecursionError:
            raise too_deep() from None

    def find_stop(self, text: str, start: int) -> int | None:
        """Where the first token that ends a turn stands in ``text`` from ``start`` on."""
        return min((at for token in self.stops if (at := text.find(token, start)) >= 0), default=None)

    def _turn_end(self) -> str | None:
        text = self.render([_user("q"), _ANSWER], add_generation_prompt=False)
        return self._first_added(text[text.rindex("answerprobe") :])

    def _headers(self) -> list[str]:
        """The tokens that start the messages which may follow an answer, where answers have no end of their own."""
        found = []
        note = {"role": "system", "content": "s"}
        followed = ([_ANSWER, _user("q")], [_asked(), _RESULT], [_ANSWER, note, _user("q")])
        for conversation in ([_user("q"), *messages] for messages in followed):
            try:
                before = self.render(conversation[:2], add_generation_prompt=False)
                whole = self.render(conversation, add_generation_prompt=False)
            except TemplateRefusedError:
                continue
            header = self._first_added(whole.removeprefix(before))
            if header is not None and whole.startswith(before + header):
                found.append(header)
        return found

    def _answer_tokens(self) -> set[str]:
        """Added tokens that the template writes into answers, or looks for there: of reasoning and of calls."""
        asked = {**_asked(), "reasoning_content": "r"}
        answer = asked if self.traits.tool_use else {**_ANSWER, "reasoning_content": "r"}
        follows = [_RESULT] if self.traits.tool_use else []
        prompt = self.render([_user("q")])
        opened = self.render([_user("q")], add_generation_prompt=False)
        whole = self.render([_user("q"), answer], add_generation_prompt=False)
        within = whole[_common(prompt, whole) :]
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
        found = [(at, -len(token), token) for token in self._added if (at := text.find(token)) >= 0]
        return min(found)[2] if found else None


_ANSWER: Message = {"role": "assistant", "content": "answerprobe"}
_RESULT: Message = {"role": "tool", "tool_call_id": "abcdef123", "name": "f", "content": "r"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def _asked() -> Message:
    function = {"name": "f", "arguments": {"a": "b"}}
    return {**_ANSWER, "tool_calls": [{"id": "abcdef123", "type": "function", "function": function}]}


def _common(first: str, second: str) -> int:
    differing = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


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
    """Special tokens are written as text, or as an object with their content."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name; the one for tools handles conversations without them as well
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"policy: '{folder}' has no chat template; set chat_template to one")
    return template


def _generation_stops(folder: Path, tokenizer: Tokenizer) -> list[str]:
    ids = _json(folder / "generation_config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return [token for one in listed if (token := tokenizer.id_to_token(int(one))) is not None]
