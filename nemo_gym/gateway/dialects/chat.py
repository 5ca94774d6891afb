"""Chat Completions (``/v1/chat/completions``) and the lowered request.

| field | what becomes of it |
|---|---|
| ``messages`` | lowered: ``developer`` is ``system``; leading system messages are one; parts of text are one text |
| ``messages[].content`` | ``text``, ``refusal``, ``image_url`` (``input_image``), as data URLs unless the gateway has ``remote_images``; audio, video and files are refused |
| ``messages[].reasoning_content``, ``reasoning`` | the assistant's reasoning |
| ``messages[].tool_calls`` | ``function`` and ``custom`` calls |
| ``tools``, ``tool_choice`` | ``function`` and ``custom`` tools; other types, which OpenAI would run, are not shown |
| ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``, ``stop``, ``presence_penalty``, ``frequency_penalty``, ``repetition_penalty`` | sampling |
| ``max_completion_tokens``, ``max_tokens``, ``max_output_tokens``, ``max_new_tokens``, ``n_predict`` | token budget; the first of these names wins |
| ``stream``, ``stream_options.include_usage`` | the stream |
| ``response_format`` | passed on |
| ``logprobs`` | of the sampled tokens; ``top_logprobs`` gives no alternatives |
| ``return_token_ids``, ``return_token_id_information`` | token ids and logprobs in the message; where an endpoint's ``logprobs`` are relayed beside them, they are only there: reading them would cost more than the rest of a long call |
| ``n`` other than 1, ``best_of`` above 1 | refused |
| ``kv_transfer_params``, ``bootstrap_host``, ``logit_bias``, ``functions``, ``function_call``, ``audio``, ``modalities`` with more than text, ``echo``, ``suffix``, ``prompt``, ``background``, ``previous_response_id``, ``conversation`` | refused where they ask for something |
| ``web_search_options``, ``store``, ``metadata``, ``model`` | ignored; the session has its model |
| anything else (``user``, ``reasoning_effort``, ``parallel_tool_calls``, ``chat_template_kwargs``, unknown fields) | ``extra``; where the session pins sampling, without fields that change it or the length (`OVERRIDING`) |

Unknown types of content, of messages and of tool choices are refused by name; other unknown fields are accepted.

All dialects share a cache of a session's latest requests (`ConversationCache`), so that the next request costs only
what is new in it. A harness sends its whole history with every request, and most of it is the same as before, byte for
byte. For each of the latest histories the cache keeps a view, whose parts are parallel to the history's elements:

    bytes of the body  ──▶  elements  ──▶  digests (the request's fingerprint)
                                      └──▶  chat messages (the lowered request)

A request that begins like a view reuses the view's parts for the shared elements; only the rest is parsed, digested
and lowered. "Ablation" in fern/pages/figures.md measures what this saves on the 200th turn of a conversation.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count, islice
from operator import eq, is_, is_not
from typing import Any, TypeVar

import orjson

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.verdict import MODEL_METADATA_KEYS
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.content import (
    AnswerCall,
    Body,
    ToolTable,
    answer_text,
    called,
    calls_in,
    chosen,
    custom_arguments,
    custom_input,
    data,
    flag_at,
    is_refusal,
    json_at,
    kind_of,
    lead_system,
    number_at,
    object_at,
    objects_in,
    openai_content,
    pieces,
    reasoning_in,
    reasoning_of,
    refuse,
    refuse_set,
    sampling_at,
    system_text,
    text_at,
    text_in,
)
from nemo_gym.gateway.policy_request import TOKEN_BUDGETS, Answer, AnswerTokens, PolicyRequest
from nemo_gym.gateway.tokens.history import Prefix

T = TypeVar("T")
Lowered = list[dict[str, Any]]
LowerFrom = Callable[[int], Iterator[tuple[int, Lowered]]]
"""Lowers a history from a given element on. Yields, for each group of elements that are lowered together, the index of
its end and its messages. The end of a group may depend on the element after it, but on no later one."""

HISTORY_KEYS = ("messages", "input")
_VIEWS = 4
"""How many views are kept: of the main conversation and of sub-agents that run at the same time."""
_REWRITTEN = 4
"""A history that drops at most so many last elements of a view replaces it: harnesses rewrite the end of a history."""
_BODY_BYTES = 256 << 10
"""Limit of all bodies kept, unless the latest is larger by itself."""
_SCANNED_MARKS = 20_000
"""Limit of strings, brackets and commas scanned in one body, a few milliseconds. A body with more is not kept."""
_SCANNED_BYTES = 4 << 20
"""The same limit in bytes, for strings that are long or full of escapes."""
_LARGEST_BODY_BYTES = 8 << 20
"""Larger bodies are not kept: with large images in it, a body is parsed faster than its elements are located."""
_CANDIDATES = 4
_BLANKS = b" \t\n\r"
# Group 1 is empty for an unterminated string. Without it the search would restart inside the string, again and again.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{},]', re.DOTALL)
_STARTS = {key: re.compile(rb'"%b"[ \t\n\r]*+:[ \t\n\r]*+\[' % key.encode()) for key in HISTORY_KEYS}
_BRACKET = ord("]")
_QUOTE, _OPEN, _CLOSE = ord('"'), frozenset(b"[{"), frozenset(b"]}")
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
# Fields that only concern the delivery of the answer, or describe the caller. If a stream breaks off, Claude Code
# repeats the turn with `stream` turned off: that is the same request.
_NOT_THE_REQUEST = frozenset(
    {
        "stream",
        "stream_options",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "store",
    }
)


@dataclass(slots=True)
class _Body:
    """A body's bytes, and the offsets of its history's elements in them."""

    raw: bytes
    key: str
    """The key of the history."""
    before: dict[str, Any]
    """The object's members up to the history's own, which has the placeholder 0 as its value."""
    ends: Prefix[int]
    """Offsets in ``raw`` of the comma or bracket after each of the first elements. The other offsets are computed only
    if a request does not extend the history; most do."""
    close: int
    """The offset of the history's closing bracket, which is the end of the last element."""
    rest: bytes
    """The bytes after the bracket."""
    after: dict[str, Any]
    """The members in ``rest``."""

    def shared(self, raw: bytes, elements: int) -> int:
        """Return how many of the first ``elements`` elements are in the common beginning of this body and ``raw``."""
        with memoryview(self.raw) as view:
            if raw.startswith(view[: self.close]):
                return elements
            if not self._find_ends(elements):
                return 0
            low, high, same = 0, elements - 1, 0
            while low < high:
                middle = (low + high) // 2
                if raw.startswith(view[same : self.ends[middle]], same):
                    low, same = middle + 1, self.ends[middle]
                else:
                    high = middle
        return low

    def _find_ends(self, elements: int) -> bool:
        """Compute the missing ends. Returns whether every element's end is known now."""
        missing = elements - len(self.ends)
        if not missing:
            return True
        scanned = _element_ends(self.raw, self.ends[-1] + 1)
        if scanned is None or len(scanned) != missing + 1:
            return False
        self.ends = self.ends.grown(len(self.ends), scanned[:-1])
        return True


@dataclass(frozen=True, slots=True)
class _Messages:
    """The messages that a history is lowered to."""

    context: Any
    """The other data of the request that the messages depend on."""
    ends: list[int]
    """The end of each group, as an index of elements."""
    counts: list[int]
    """The number of messages up to the end of each group."""
    messages: Lowered
    elements: int
    """How many of the history's elements these were lowered from."""


@dataclass(slots=True)
class _View:
    """One history and the data derived from it."""

    elements: Prefix[Any] = field(default_factory=Prefix)
    body: _Body | None = None
    digests: Prefix[bytes] = field(default_factory=Prefix)
    """``digests[i]`` is the digest of the first ``i + 1`` elements."""
    lowered: _Messages | None = None

    def followed_by(self, elements: Prefix[Any], shared: int, body: _Body | None) -> _View:
        """Return a view of ``elements``, of which the first ``shared`` equal this view's."""
        lowered = self.lowered
        if lowered is not None:
            lowered = replace(lowered, elements=min(lowered.elements, shared))
        digests = self.digests.grown(min(shared, len(self.digests)), ())
        return _View(elements, body, digests, lowered)

    def shared(self, history: Sequence[Any]) -> int:
        """Return how many first elements equal those of ``history``. Unlike `Prefix.common` it keeps its own elements:
        1 equals 1.0, and a body must not be parsed to the numbers of another."""
        length = min(len(self.elements), len(history))
        differing = compress(count(), map(is_not, self.elements, islice(history, length)))
        return next((at for at in differing if self.elements[at] != history[at]), length)


class ConversationCache:
    """The cache of one session. Its results are shared between requests and must not be changed, except for the outer
    object of a parsed body and the list of its history."""

    def __init__(self) -> None:
        self._views: list[_View] = []
        """Latest first."""
        self._parameters: dict[str, tuple[str, dict[str, Any], Any]] = {}
        self._tools: tuple[bytes, Any] = (b"", None)

    # -- parsing -------------------------------------------------------------------------------------------------

    def parse(self, raw: bytes) -> Any:
        """Return or raise what ``orjson.loads`` would."""
        nearest, shared = self._nearest_view(raw)
        if nearest is not None and (grown := _grown_body(nearest, shared, raw)) is not None:
            body, new = grown
            view = nearest.followed_by(nearest.elements.grown(shared, new), shared, body)
            # A view that the request extends is no longer needed.
            self._remember(view, instead_of=nearest if shared >= len(nearest.elements) - _REWRITTEN else None)
            return {**body.before, body.key: view.elements[:], **body.after}
        value = orjson.loads(raw)
        if (located := _located_body(raw, value)) is not None:
            self._view_of(value[located.key], located)
        return value

    def _nearest_view(self, raw: bytes) -> tuple[_View | None, int]:
        """Return the view whose body shares most elements with ``raw``, and their number."""
        nearest: _View | None = None
        most = 0
        for view in self._views:
            if view.body is None:
                continue
            shared = view.body.shared(raw, len(view.elements))
            if shared > most:
                nearest, most = view, shared
                if shared == len(view.elements):
                    break
        return nearest, most

    # -- views ---------------------------------------------------------------------------------------------------

    def _view_of(self, history: Sequence[Any], body: _Body | None = None) -> _View:
        """Return the view of this history, mostly the one that `parse` added. Adds one if there is none, and for a
        ``body``, which is a new one."""
        nearest, most = _View(), 0
        for view in self._views:
            shared = view.shared(history)
            if body is None and shared == len(history) == len(view.elements):
                return view
            if shared > most:
                nearest, most = view, shared
        extended = most >= len(nearest.elements) - _REWRITTEN and nearest.body is None
        view = nearest.followed_by(Prefix(history), most, body)
        self._remember(view, instead_of=nearest if extended else None)
        return view

    def _remember(self, view: _View, instead_of: _View | None) -> None:
        """Keep the latest views; of their bodies, the latest, and earlier ones as far as they fit."""
        self._views = [view, *(other for other in self._views if other is not instead_of)][:_VIEWS]
        room = max(_BODY_BYTES, 0 if view.body is None else len(view.body.raw))
        for kept in self._views:
            if kept.body is None:
                continue
            if len(kept.body.raw) > room:
                kept.body = None
            else:
                room -= len(kept.body.raw)

    # -- lowering ------------------------------------------------------------------------------------------------

    def parameters(self, use: str, name: str, given: dict[str, Any], make: Callable[[], T]) -> T:
        """Return ``make()`` for ``given``, a request's body without the history. The result is cached, because most
        requests have the same objects as the one before. ``use``: the kind of result; ``name``: what else it depends
        on."""
        cached = self._parameters.get(use)
        if cached is None or cached[0] != name or not _same_items(cached[1], given):
            cached = self._parameters[use] = (name, given, make())
        result: T = cached[2]
        return result

    def tools(self, raw: Any, lower: Callable[[], T]) -> T:
        """Return a request's tools, lowered. The result is cached: most requests have the same tools, to the byte."""
        try:
            serialized = orjson.dumps(raw)
        except TypeError:  # nested too deeply to be serialized
            return lower()
        if serialized != self._tools[0]:
            self._tools = (serialized, lower())
        result: T = self._tools[1]
        return result

    def lowered(self, context: Any, raw: Sequence[Any], lower_from: LowerFrom) -> Lowered:
        """Return ``raw`` as messages. ``context`` is the other data of the request that the messages depend on."""
        view = self._view_of(raw)
        earlier, groups = self._nearest_lowered(view, context, raw)
        ends, counts = earlier.ends[:groups], earlier.counts[:groups]
        messages = earlier.messages[: counts[-1]] if counts else []
        for end, group in lower_from(ends[-1] if ends else 0):
            messages += group
            ends.append(end)
            counts.append(len(messages))
        view.lowered = _Messages(context, ends, counts, messages, len(raw))
        return [*messages]

    def _nearest_lowered(self, view: _View, context: Any, raw: Sequence[Any]) -> tuple[_Messages, int]:
        """Return messages lowered earlier in the same context, and how many of their groups are those of ``raw``:
        those of its own view, else of the view that shares the most groups."""
        nearest, most = _Messages(context, [], [], [], 0), 0
        for other in (view, *self._views):
            lowered = other.lowered
            if lowered is None or lowered.context != context:
                continue
            shared = lowered.elements if other is view else min(lowered.elements, other.shared(raw))
            # The element after a group must be shared as well, since it may decide where the group ends.
            groups = bisect_left(lowered.ends, shared)
            if groups > most:
                nearest, most = lowered, groups
            if other is view and groups:
                break
        return nearest, most

    # -- fingerprints --------------------------------------------------------------------------------------------

    def digest(self, history: Sequence[Any]) -> bytes:
        """Return a digest of a history, independent of the cache's state. Its elements must not be changed later."""
        view = self._view_of(history)
        cached_count = len(view.digests)
        last = view.digests[-1] if cached_count else b""
        new = [last := _digest(last + _canonical(element)) for element in history[cached_count:]]
        view.digests = view.digests.grown(cached_count, new)
        return last


class DialectAdapter(ABC):
    """One dialect. Stateless: generated ids are derived from the answer, so raising it again gives an equal body."""

    dialect: Dialect
    not_parameters: frozenset[str]
    """The history, and fields that do not change how the rest of the request is lowered."""

    def lower(self, body: Body, cache: ConversationCache | None = None) -> PolicyRequest:
        """Return the lowered request of a body (JSON data). ``cache``: the session's, if there is one. Raises
        `InvalidBodyError`, whose ``param`` names the field, for anything that cannot be served, and no other error."""
        if cache is None:
            tools, request = self._parameters(body, None)
        else:
            given = {key: value for key, value in body.items() if key not in self.not_parameters}
            tools, request = cache.parameters("lowered", self.dialect, given, lambda: self._parameters(body, cache))
        return request.asking(self._messages(body, tools, cache))

    @abstractmethod
    def _parameters(self, body: Body, cache: ConversationCache | None) -> tuple[Any, PolicyRequest]:
        """Return the tools, and the lowered request without its messages."""

    @abstractmethod
    def _messages(self, body: Body, tools: Any, cache: ConversationCache | None) -> Lowered:
        """Return the messages of a request."""

    @abstractmethod
    def reply(self, answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
        """Return the reply to ``body``, whose lowered form is ``request``."""

    @abstractmethod
    def events(self, reply: Mapping[str, Any], *, with_usage: bool = True) -> Iterator[bytes]:
        """Yield a reply, the gateway's or an endpoint's, as whole server-sent events. ``with_usage``: whether the
        stream reports usage, for Chat Completions; the other dialects always do."""

    def opening(self, answer_id: str, created_at: float, model: str, body: Body) -> dict[str, Any] | None:
        """Return the object with which a stream can begin before the answer is known: the response object of
        Responses, for `Pings`; ``None`` in the other dialects."""
        return None


def lowered_history(
    cache: ConversationCache | None, context: Any, raw: Sequence[Any], lower_from: LowerFrom
) -> Lowered:
    """Return ``raw`` as messages, with the help of ``cache`` if there is one."""
    if cache is not None:
        return cache.lowered(context, raw, lower_from)
    return [message for _, group in lower_from(0) for message in group]


def messages_in(body: Body) -> Sequence[Any]:
    value = body.get("messages")
    if not isinstance(value, list | tuple) or not value:
        refuse("messages", "must be a list of at least one message")
    return value


def messages_lowered(body: Body, cache: ConversationCache | None, lower: Callable[[Body, str], Lowered]) -> Lowered:
    """Return ``messages`` of a request; ``lower`` lowers one, given the message and the path of its field."""
    value = messages_in(body)

    def lower_from(start: int) -> Iterator[tuple[int, Lowered]]:
        for end, (where, message) in enumerate(objects_in(value, "messages", start), start + 1):
            yield end, lower(message, where)

    return lowered_history(cache, body.get("tools"), value, lower_from)


def request_fingerprint(route: str, body: Mapping[str, Any], cache: ConversationCache | None = None) -> str:
    """Return a digest of a request, whatever the order of its keys: two requests of a session with one fingerprint are
    the same request. Raises `InvalidBodyError` for a body that is nested too deeply."""
    cache = cache or ConversationCache()
    parameters = {key: value for key, value in body.items() if key not in _NOT_THE_REQUEST}
    if isinstance(metadata := body.get("metadata"), Mapping) and (named := MODEL_METADATA_KEYS & metadata.keys()):
        parameters["metadata"] = {key: metadata[key] for key in named}
    histories = [(key, parameters.pop(key)) for key in HISTORY_KEYS if isinstance(parameters.get(key), list)]
    digests = [cache.parameters("fingerprint", route, parameters, lambda: _digest(_canonical([route, parameters])))]
    for key, history in histories:
        digests += (key.encode(), cache.digest(history))
    return _digest(b"/".join(digests)).hex()


def _canonical(value: Any) -> bytes:
    try:
        # With ten levels around it, because what is accepted here is also written inside records and replies.
        return orjson.dumps([[[[[[[[[[value]]]]]]]]]], option=_CANONICAL)
    except TypeError:  # only for depth: orjson reads 1,024 levels and writes 254
        raise InvalidBodyError("the body is nested too deeply: the limit is 240 levels") from None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _same_items(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two objects have the same keys in the same order, and identical objects as values: equal objects
    may have different types."""
    return len(first) == len(second) and all(map(eq, first, second)) and all(map(is_, first.values(), second.values()))


# -- the bytes of a body ---------------------------------------------------------------------------------------------


def _located_body(raw: bytes, value: Any) -> _Body | None:
    """Return the body of ``raw``, which parses to ``value``; ``None`` if it has no history or is not to be kept."""
    if not isinstance(value, dict) or len(raw) > _LARGEST_BODY_BYTES:
        return None
    for key in HISTORY_KEYS:
        if not isinstance(value.get(key), list) or not value[key]:
            continue
        for _, start in zip(range(_CANDIDATES), _STARTS[key].finditer(raw), strict=False):
            try:
                # This is valid JSON only if the match is a key of the outer object.
                before = orjson.loads(raw[: start.start()] + b'"%b":0}' % key.encode())
            except orjson.JSONDecodeError:
                continue
            if not (isinstance(before, dict) and (scanned := _element_ends(raw, start.end()))):
                return None
            ends, close = scanned[:-1], scanned[-1]
            rest = raw[close + 1 :]
            after = _members_after(rest)
            # If a key is repeated, its last value wins.
            if after is None or key in after or len(ends) != len(value[key]):
                return None
            return _Body(raw, key, before, Prefix(ends), close, rest, after)
    return None


def _grown_body(view: _View, shared: int, raw: bytes) -> tuple[_Body, list[Any]] | None:
    """Return the body of ``raw``, which begins like ``view`` up to the end of element ``shared``, and its further
    elements; ``None`` if it has to be parsed as a whole, because the rest has another structure or is invalid."""
    body = view.body
    assert body is not None
    at = body.close if shared == len(view.elements) else body.ends[shared - 1]
    sign = raw[at : at + 1]
    if sign == b"]":
        new: list[Any] = []
        close = at
    elif sign == b"," and (found := _elements_between(raw, at + 1, body.rest)) is not None:
        new, close = found
    else:
        return None
    rest = raw[close + 1 :]
    after = body.after if rest == body.rest else _members_after(rest)
    if after is None:
        return None
    ends = body.ends.grown(min(shared, len(body.ends)), ())
    return _Body(raw, body.key, body.before, ends, close, rest, after), new


def _elements_between(raw: bytes, start: int, rest: bytes) -> tuple[list[Any], int] | None:
    """Return the elements of an array from ``start`` on, and the offset of its closing bracket: right before ``rest``
    if ``raw`` ends with that. ``None`` if there are no elements or they are invalid."""
    close = len(raw) - len(rest) - 1
    if not (close > start and raw[close] == _BRACKET and raw.endswith(rest)):
        if (scanned := _element_ends(raw, start)) is None:
            return None
        close = scanned[-1]
    try:
        # As deep as in the whole body, since depth has a limit. Two arrays: an earlier bracket closed the first.
        arrays = orjson.loads(b"[[%b]]" % raw[start:close])
    except orjson.JSONDecodeError:
        return None
    return (arrays[0], close) if len(arrays) == 1 and arrays[0] else None


def _element_ends(raw: bytes, start: int) -> list[int] | None:
    """Return the end of each element of an array whose first element begins at ``start``, and then the end of the
    array, which equals the last element's; ``None`` above the limits. The result for invalid JSON is meaningless."""
    ends: list[int] = []
    depth = 0
    for number, mark in enumerate(_MARK.finditer(raw, start, start + _SCANNED_BYTES)):
        if number == _SCANNED_MARKS:
            return None
        at = mark.start()
        sign = raw[at]
        if sign == _QUOTE:
            if not mark[1]:
                return None
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            if not depth:
                return [*ends, at, at]
            depth -= 1
        elif not depth:
            ends.append(at)
    return None


def _members_after(rest: bytes) -> dict[str, Any] | None:
    """Return the members of an object after one of its values; ``None`` if ``rest`` is not the end of an object."""
    rest = rest.strip(_BLANKS)
    if rest == b"}":
        return {}
    if not rest.startswith(b","):
        return None
    try:
        after = orjson.loads(b"{" + rest[1:])
    except orjson.JSONDecodeError:
        return None
    return after or None  # a comma without a member after it is an error


# An answer as a chat completion, whole and streamed.

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
LOGPROBS_PER_CHUNK = 64


def _reply_call(call: AnswerCall, request: PolicyRequest) -> dict[str, Any]:
    call_name = request.names.get(call.name)
    if call_name is not None and call_name.custom:
        call_id, text = custom_input(call)
        return {"id": call_id, "type": "custom", "custom": {"name": call_name.name, "input": text}}
    return called(call.name, call.call_id, call.arguments)


def token_fields(tokens: AnswerTokens) -> dict[str, Any]:
    """Return the token fields of a message or item; empty if the endpoint returned no ids."""
    ids = tokens.ids_json if tokens.ids_json is not None else tokens.ids
    if not ids:
        return {}
    fields: dict[str, Any] = {"prompt_token_ids": tokens.prompt_json or tokens.prompt_ids, "generation_token_ids": ids}
    logprobs = tokens.logprobs_json if tokens.logprobs_json is not None else tokens.logprobs
    return fields | ({} if logprobs is None else {"generation_log_probs": logprobs})


def logprobs_content(tokens: AnswerTokens) -> list[dict[str, Any]]:
    """Return ``logprobs`` entries of OpenAI's dialects: text, logprob and bytes of each sampled token."""
    texts: Sequence[str] = (
        tokens.texts if tokens.texts is not None else [f"token_id:{token_id}" for token_id in tokens.ids]
    )
    # Computed once for each of the few thousand different tokens of an answer; the entries share the lists.
    data = {text: [*text.encode("utf-8", "replace")] for text in {*texts}}
    return [
        {"token": text, "logprob": logprob, "bytes": data[text], "top_logprobs": []}
        for text, logprob in zip(texts, tokens.logprobs or (), strict=False)
    ]


def _choice(head: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[bytes]:
    index, message = choice.get("index", 0), choice["message"]
    entries = (choice.get("logprobs") or {}).get("content") or []
    sent_count = 0

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: int = LOGPROBS_PER_CHUNK) -> bytes:
        nonlocal sent_count
        chunk_choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if sent_count < len(entries) and logprobs:
            chunk_choice["logprobs"] = {"content": entries[sent_count : sent_count + logprobs], "refusal": None}
            sent_count += logprobs
        return data({**head, "choices": [chunk_choice]})

    yield chunk({"role": "assistant", "content": ""}, logprobs=0)
    for delta in _deltas(message):
        yield chunk(delta)
    while sent_count < len(entries):
        yield chunk({})
    tokens = {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    yield chunk(tokens, choice.get("finish_reason") or "stop")


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("reasoning_content", "content", "refusal"):
        for piece in pieces(message.get(key) or ""):
            yield {key: piece}
    for number, call in enumerate(message.get("tool_calls") or ()):
        kind = call.get("type") or "function"
        text_key = "input" if kind == "custom" else "arguments"
        inner = call[kind]
        start = {"index": number, "id": call.get("id"), "type": kind, kind: {"name": inner["name"], text_key: ""}}
        yield {"tool_calls": [start]}
        for piece in pieces(inner.get(text_key) or ""):
            yield {"tool_calls": [{"index": number, kind: {text_key: piece}}]}


# A request of Chat Completions as a lowered request.

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
ONE_ANSWER = "asks for several answers; one request gets one answer here"
NOT_STORED = "refers to a conversation stored elsewhere; nothing is stored here: send the whole conversation"
_CONNECTS = "names a host that the engine would connect to"
_REFUSED = {
    "kv_transfer_params": _CONNECTS,
    "bootstrap_host": _CONNECTS,
    "logit_bias": "changes the policy's distribution; its tokens would no longer be its own",
    "functions": "is the old form of 'tools'; use 'tools'",
    "function_call": "is the old form of 'tool_choice'; use 'tool_choice'",
    "audio": "asks for audio; this model writes text only",
    "echo": "is not possible here",
    "suffix": "is not possible here",
    "prompt": "is not read here; send 'messages'",
    "background": "asks for an answer to be fetched later; nothing is stored here",
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
}
_USED = frozenset(
    {
        *SAMPLING,
        *_REFUSED,
        *TOKEN_BUDGETS,
        *("messages", "tools", "tool_choice", "stop", "stream"),
        *("stream_options", "response_format", "logprobs", "return_token_ids", "return_token_id_information", "n"),
        *("best_of", "modalities", "web_search_options", "store", "metadata", "model"),
    }
)


class ChatAdapter(DialectAdapter):
    """Chat Completions."""

    dialect = Dialect.CHAT
    not_parameters = frozenset({"messages"})

    def _parameters(self, body: Body, cache: ConversationCache | None) -> tuple[ToolTable, PolicyRequest]:
        table = _tools(body) if cache is None else cache.tools(body.get("tools"), lambda: _tools(body))
        one_answer(body)
        refuse_set(body, _REFUSED)
        if body.get("modalities") not in (None, [], ["text"]):
            refuse("modalities", "asks for more than text; this model writes text only")
        budget = next((key for key in TOKEN_BUDGETS if body.get(key) is not None), "max_tokens")
        return table, PolicyRequest(
            messages=(),
            tools=table.tools or None,
            names=table.names,
            asked=sampling_at(body, SAMPLING, budget=budget),
            stream=flag_at(body, "stream"),
            stream_usage=flag_at(object_at(body, "stream_options", ""), "include_usage"),
            tool_choice=chosen(body.get("tool_choice"), table),
            response_format=object_at(body, "response_format", "") or None,
            logprobs=flag_at(body, "logprobs"),
            token_ids=wants_token_ids(body),
            extra={key: value for key, value in body.items() if value is not None and key not in _USED},
        )

    def _messages(self, body: Body, tools: ToolTable, cache: ConversationCache | None) -> Lowered:
        return lead_system(messages_lowered(body, cache, lambda message, at: [_message(message, at, tools)]))

    def reply(self, answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text_in(answer) or None, "refusal": None}
        if is_refusal(answer):
            message |= {"content": None, "refusal": message["content"]}
        if reasoning := reasoning_in(answer):
            message["reasoning_content"] = reasoning
        if calls := calls_in(answer):
            message["tool_calls"] = [_reply_call(call, request) for call in calls]
        elif message["content"] is None and message["refusal"] is None:
            message["content"] = ""
        if request.token_ids and answer.tokens is not None:
            message |= token_fields(answer.tokens)
        logprobs: dict[str, Any] | None = None
        if request.logprobs and (tokens := answer.tokens) is not None:
            if tokens.entries_json is not None:
                logprobs = {"content": tokens.entries_json, "refusal": None}
            elif tokens.logprobs is not None:
                logprobs = {"content": logprobs_content(tokens), "refusal": None}
        counted = answer.usage
        return {
            "id": f"chatcmpl-{answer.answer_id}",
            "object": "chat.completion",
            "created": int(answer.created_at),
            "model": answer.model,
            "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.end.value}],
            "usage": {
                "prompt_tokens": counted.prompt_tokens,
                "completion_tokens": counted.completion_tokens,
                "total_tokens": counted.prompt_tokens + counted.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
            },
        }

    def events(self, reply: Mapping[str, Any], *, with_usage: bool = True) -> Iterator[bytes]:
        head = {key: reply.get(key) for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        if with_usage:
            head["usage"] = None
        for choice in reply.get("choices") or ():
            yield from _choice(head, choice)
        if with_usage and reply.get("usage"):
            yield data({**head, "choices": [], "usage": reply["usage"]})
        yield b"data: [DONE]\n\n"


def one_answer(body: Body) -> None:
    """Refuse a request for several answers, in any dialect."""
    for key in ("n", "best_of"):
        if (number_at(body, key, whole=True) or 1) != 1:
            refuse(key, ONE_ANSWER)


def wants_token_ids(body: Body) -> bool:
    return flag_at(body, "return_token_ids") or flag_at(body, "return_token_id_information")


def _message(message: Body, where: str, table: ToolTable) -> dict[str, Any]:
    role, content, at = message.get("role"), message.get("content"), f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": system_text(content, at)}
    if role == "user":
        return {"role": "user", "content": openai_content(content, at) or ""}
    if role == "tool":
        call_id = text_at(message, "tool_call_id", where, default="")
        return {"role": "tool", "tool_call_id": call_id, "content": openai_content(content, at) or ""}
    if role != "assistant":
        refuse(f"{where}.role", f"is {role!r}; it must be system, developer, user, assistant or tool")
    answer: dict[str, Any] = {"role": "assistant", "content": answer_text(content, at)}
    if not answer["content"] and isinstance(message.get("refusal"), str):
        answer["content"] = message["refusal"]
    if reasoning := reasoning_of(message, where):
        answer["reasoning_content"] = reasoning
    if message.get("function_call"):
        refuse(f"{where}.function_call", "is the old form of 'tool_calls'; use 'tool_calls'")
    if calls := [_call(call, at, table) for at, call in objects_in(message.get("tool_calls"), f"{where}.tool_calls")]:
        answer["tool_calls"] = calls
    return answer


def _call(call: Body, where: str, table: ToolTable) -> dict[str, Any]:
    call_id = text_at(call, "id", where, default="")
    kind = call.get("type") or "function"
    if kind == "custom":
        custom, at = object_at(call, "custom", where), f"{where}.custom"
        text = custom_arguments(text_at(custom, "input", at), call_id, at)
        return called(table.flat_name(text_at(custom, "name", at)), call_id, text)
    if kind != "function":
        refuse(f"{where}.type", f"is {kind!r}; it must be 'function' or 'custom'")
    function, at = object_at(call, "function", where), f"{where}.function"
    return called(table.flat_name(text_at(function, "name", at)), call_id, arguments_at(function, at))


def arguments_at(function: Body, where: str) -> str:
    """Return a call's arguments as JSON text. Some harnesses send parsed data instead of text."""
    value = function.get("arguments")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return json_at(value, f"{where}.arguments")
    refuse(f"{where}.arguments", f"must be JSON text, not {kind_of(value)}")


def _tools(body: Body) -> ToolTable:
    table = ToolTable()
    for where, tool in objects_in(body.get("tools"), "tools"):
        kind = tool.get("type") or "function"
        if kind == "function":
            table.add(object_at(tool, "function", where), f"{where}.function")
        elif kind == "custom":
            table.add_custom(object_at(tool, "custom", where), f"{where}.custom")
        elif not isinstance(kind, str):
            refuse(f"{where}.type", f"must be a string, not {kind_of(kind)}")
    return table
