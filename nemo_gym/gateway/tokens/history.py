"""Reads a request's history into keys that identify the conversation it continues, and parts of messages.

Every dialect is lowered to chat messages before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice
from operator import eq, is_not, ne
from typing import Any, Generic, TypeVar, overload

import orjson

from nemo_gym.gateway.policy_request import nests_too_deeply

Message = Mapping[str, Any]
"""A Chat Completions message: ``role``, ``content`` (text, parts or nothing), ``tool_calls``, ``tool_call_id``."""

_MANY_DIGITS = re.compile(r"[0-9]{19}")
_LONG_CHARS = 64 << 10
_MESSAGE_CHARS = 512
"""The fixed cost of a message, expressed in characters."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def role_of(message: Message) -> str:
    """Return ``system``, ``user``, ``assistant`` or ``tool``, also for newer and older names of these roles."""
    role = str(message.get("role") or "")
    return {"developer": "system", "function": "tool"}.get(role, role)


def text_of(content: Any) -> str:
    """Return the text of a message's content; parts are joined without a separator."""
    if isinstance(content, str):
        return content
    return "".join(
        str(part.get("text") or part.get("refusal") or "") if isinstance(part, Mapping) else str(part)
        for part in content or ()
    )


def media_parts(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(kind, source)`` of each image, audio or video part, in order; the kind has no prefix (``image``)."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return
    for part in content:
        if not isinstance(part, Mapping):
            continue
        name = str(part.get("type") or "text")
        if name in (*_TEXT_PARTS, "refusal"):
            continue
        source = part.get(name, part.get("source", part.get("image_url")))
        if isinstance(source, Mapping) and "url" in source:
            source = source["url"]
        yield name.removeprefix("input_").removesuffix("_url"), source


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of an assistant message."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return calls


def is_long(messages: Sequence[Message]) -> bool:
    """Return whether reading, rendering and encoding these messages may take more than some milliseconds."""
    weight = 0
    for message in messages:
        content = message.get("content")
        parts = (content,) if isinstance(content, str) else content or ()
        weight += _MESSAGE_CHARS + sum(len(part) if isinstance(part, str) else _part_chars(part) for part in parts)
        weight += sum(len(str(call)) for call in calls_of(message))
        if weight > _LONG_CHARS:
            return True
    return False


def _part_chars(part: Any) -> int:
    text = part.get("text") if isinstance(part, Mapping) else None
    return _MESSAGE_CHARS + (len(text) if isinstance(text, str) else 0)


def continues_answer(messages: Sequence[Message]) -> bool:
    """Return whether a request asks to continue the text of its last message, an assistant's (a prefill)."""
    last = messages[-1]
    return role_of(last) == "assistant" and not calls_of(last) and bool(text_of(last.get("content")))


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many first items, or characters, of two sequences are equal."""
    differing = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return a call's arguments as data. Text that is not JSON, or nested too deeply to be written again, is returned
    unchanged."""
    arguments = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        data = _parsed(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if nests_too_deeply(arguments, data) else data


def _parsed(text: str) -> Any:
    if not _MANY_DIGITS.search(text):  # orjson converts integers beyond 64 bits to doubles
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(text)
    return json.loads(text)  # accepts escaped lone surrogates, which JavaScript writes


_ADOPTED = 8
T = TypeVar("T", covariant=True)


class Prefix(Sequence[T], Generic[T]):
    """The first items of a list that other prefixes may have extended since; the items after them are hidden."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._length = len(self._items)

    def grown(self, kept: int, new: Sequence[T]) -> Prefix[T]:
        """Return the first ``kept`` items followed by ``new``. Copies nothing if no other prefix extended the list."""
        if kept == self._length == len(self._items):
            self._items.extend(new)
            items = self._items
        elif kept == self._length and not new:
            return self
        else:
            items = [*islice(self._items, kept), *new]
        prefix: Prefix[T] = Prefix.__new__(Prefix)
        prefix._items, prefix._length = items, kept + len(new)
        return prefix

    def common(self, others: Sequence[T]) -> int:
        """Return how many first items equal those of ``others``. Identical objects are not compared by value, so the
        first few items that are only equal are replaced by those of ``others``, for the next comparison."""
        items, length = self._items, min(self._length, len(others))
        changed = compress(count(), map(is_not, items, islice(others, length)))
        for at in islice(changed, _ADOPTED):
            if items[at] != others[at]:
                return at
            items[at] = others[at]
        if (start := next(changed, length)) == length:
            return length
        differing = map(ne, islice(items, start, length), islice(others, start, length))
        return next(compress(count(start), differing), length)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return self._items[slice(*at.indices(self._length))]
        place = at + self._length if at < 0 else at
        if not 0 <= place < self._length:
            raise IndexError(f"item {at} of {self._length}")
        return self._items[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self._length and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as lists


# When two spellings of a message are the same message. Harmless changes of history must not split the trajectory.
#
# A harness sends its whole history with every request, but rarely unchanged. Messages are compared by a digest of
# their canonical form; the tokens that the policy was given and wrote stay the same, whatever the later spelling.
#
# | what differs | same? | because |
# |---|---|---|
# | whitespace in an assistant's text (stripped, re-wrapped, lost where it was joined) | yes | known by token |
# | an assistant's reasoning: replayed, dropped, in ``<think>`` | yes | harnesses drop it at will |
# | ``content``: absent, null, empty | yes | nothing was said |
# | text as one string, or split over parts | yes | dialects differ |
# | tool arguments: key order, spacing, escapes, 1.0 for 1, integers as doubles | yes | JavaScript re-serialises JSON |
# | an argument that is false or null: left out, or put in | yes | Claude Code writes defaults into history |
# | whitespace at the ends of an argument's lines; ``\u00e9`` for é | yes | Claude Code cleans what it writes |
# | arguments that are no JSON, or wrapped as ``{"arguments": text}`` | yes | the Messages dialect must wrap them |
# | ids of tool calls and results | yes | renamed by harnesses; results belong to calls by order |
# | order of the results of parallel calls | yes | each result goes to its call |
# | the stop string that ended an answer, put back at its end | yes | the policy has written it |
# | one answer sent as several assistant messages | yes | text and calls arrive as separate events |
# | ``cache_control``, annotations, null fields | yes | never shown to the policy |
# | ``developer`` for ``system``, ``function`` for ``tool`` | yes | two names |
# | the billing header line of a system prompt | yes | varies by request, means nothing |
# | whitespace around a user's, system's or tool's text; CRLF | yes | trimmed |
# | a ``<system-reminder>`` removed from history, or moved to newer messages | yes | the policy has seen it |
# | a ``<system-reminder>`` added to history, or changed | **no** | the policy has not seen it |
# | tools in another order; their keys in another order; ``strict: null`` | yes | the same tools |
# | a tool added, removed or described otherwise | **no** | another prompt |
# | any other change of a user's, system's or tool's text; an image | **no** | another conversation |

# Group 2 is empty for a reminder without an end, which is no reminder. Without it the search would restart after each.
_REMINDER = re.compile(r"<system-reminder>(.*?)(</system-reminder>|\Z)", re.DOTALL)
_THINKING = re.compile(r"\A\s*+(?:<think>)?(?:(?!<think>).)*?</think>", re.DOTALL)
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_ESCAPED = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_SPACES = bytes(ord(char) for char in map(chr, range(128)) if char.isspace())
_EXACT_INTEGER = 2**53
NO_REMINDERS: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a conversation in canonical form: a message, or a run of assistant messages or of tool results."""

    end: int
    """Number of messages up to and including this entry."""
    digest: bytes | None
    """The digest of the canonical form; ``None`` for messages with only reminders."""
    reminders: frozenset[bytes]
    role: str


def digest_of(value: Any) -> bytes:
    """Return a digest of JSON data in canonical form."""
    data = _number_safe(value)
    try:
        text = orjson.dumps(data, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except (orjson.JSONEncodeError, TypeError):  # lone surrogates, which only JSON's own escapes can hold
        text = json.dumps(data, sort_keys=True, default=repr).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def tools_digest(tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """Return a digest of the tools that a request offers, whatever their order."""
    listed = [_without_nulls(tool.get("function") or tool) for tool in tools or ()]
    return digest_of(sorted((str(tool.get("name")), digest_of(tool).hex()) for tool in listed))


def entries_of(messages: Sequence[Message]) -> list[Entry]:
    """Return the canonical entries of a conversation."""
    entries: list[Entry] = []
    while (at := entries[-1].end if entries else 0) < len(messages):
        entries.append(entry_at(messages, at))
    return entries


def entry_at(messages: Sequence[Message], at: int) -> Entry:
    """Return the canonical entry that starts with message ``at``."""
    role = role_of(messages[at])
    end = at + 1
    while role in ("assistant", "tool") and end < len(messages) and role_of(messages[end]) == role:
        end += 1
    run = messages[at:end]
    if role == "assistant":
        return Entry(end, digest_of(_answer(run)), NO_REMINDERS, role)
    if role == "tool":
        calls = _calls_before(messages, at)
        run = sorted(run, key=lambda result: calls.get(str(result.get("tool_call_id")), len(calls)))
    canonical: list[Any] = []
    reminders: set[bytes] = set()
    for message in run:
        content = message.get("content")
        text = text_of(content).replace("\r\n", "\n")
        if role == "system":
            text = _BILLING.sub("", text)
        if "<system-reminder>" in text:
            reminders.update(digest_of(" ".join(said.split())) for said, end in _REMINDER.findall(text) if end)
            text = _REMINDER.sub(lambda found: "" if found[2] else found[0], text)
        media = [[kind, digest_of(source).hex()] for kind, source in media_parts(content)]
        canonical.append([text.strip(), *media])
    if role == "user" and reminders and canonical == [[""]]:
        return Entry(end, None, frozenset(reminders), role)
    return Entry(end, digest_of([role, canonical]), frozenset(reminders) if reminders else NO_REMINDERS, role)


def _answer(run: Sequence[Message]) -> Any:
    said = " ".join(_without_thinking(text_of(message.get("content"))) for message in run)
    calls = []
    for call in (call for message in run for call in calls_of(message)):
        arguments = arguments_of(call)
        if isinstance(arguments, Mapping) and len(arguments) == 1 and isinstance(arguments.get("arguments"), str):
            text = arguments["arguments"]
            arguments = text if text.strip() else {}  # as `arguments_of` reads it
        calls.append([str((call.get("function") or {}).get("name")), _argument(arguments)])
    return ["assistant", _without_spaces(said), calls]


def _without_spaces(text: str) -> str:
    # ASCII spaces first, in one call: a long answer has tens of thousands of words.
    text = text.encode("utf-8", "surrogatepass").translate(None, _SPACES).decode("utf-8", "surrogatepass")
    return text if text.isascii() else "".join(text.split())


def _without_thinking(text: str) -> str:
    return _THINKING.sub("", text) if ends_thinking(text) else text


def ends_thinking(text: str) -> bool:
    # Searching for a single letter takes a tenth of the time of a word, and few long texts have this one.
    return "<" in text and "</think>" in text


def _argument(value: Any) -> Any:
    """Return arguments without the details that harnesses change after they have run a call."""
    if isinstance(value, str):
        text = _ESCAPED.sub(_unescaped, value) if "\\u" in value else value
        return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()
    if isinstance(value, Mapping):
        return {key: _argument(item) for key, item in value.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [_argument(item) for item in value]
    return value


def _unescaped(escapes: re.Match[str]) -> str:
    return bytes.fromhex(escapes[0].replace("\\u", "")).decode("utf-16-be", "surrogatepass")


def _calls_before(messages: Sequence[Message], at: int) -> dict[str, int]:
    """Return id → index of the calls in the answer to which the results at ``at`` belong."""
    ids: list[str] = []
    while at > 0 and role_of(messages[at - 1]) == "assistant":
        at -= 1
        ids[:0] = [str(call.get("id")) for call in calls_of(messages[at])]
    return {call_id: place for place, call_id in enumerate(ids)}


def _number_safe(value: Any) -> Any:
    """Return data with numbers rounded to doubles: JavaScript harnesses write 1.0 as 1, and round large integers."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(key): _number_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number_safe(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT_INTEGER else repr(float(value)) if abs(value) < 10**308 else repr(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value) if abs(value) < _EXACT_INTEGER else repr(value)
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _number_safe(item) for key, item in value.items()}
    return repr(value)


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {key: value for key, value in tool.items() if value is not None and key not in ("cache_control", "type")}
    if not cleaned.get("description"):
        cleaned.pop("description", None)
    return cleaned


# Reading a request's history into keys, at a cost that hardly grows with the messages that were read before.
#
# Requests of one conversation repeat each other. The messages of the latest requests are kept and compared by value,
# which is the only work on old messages. Only new or changed messages are converted to canonical form and appended to
# the kept ones. A key identifies a conversation up to a message, so that finding the turn to continue is a dictionary
# lookup.

_ROOT = b"\0" * 16
_VIEWS = 8
"""Requests remembered per session: of its main conversation and of sub-agents that run at the same time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One request's history in canonical form."""

    messages: Prefix[Message]
    entries: Prefix[Entry]
    keys: Prefix[bytes]
    """``keys[i]`` identifies the first ``i`` entries; one longer than ``entries``."""
    seen: Prefix[frozenset[bytes]]
    """``seen[i]``: digests of the reminders within the first ``i`` entries."""
    tools: bytes
    """Digest of the offered tools."""
    offered: Sequence[Mapping[str, Any]]

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    def start_of(self, entry: int) -> int:
        """Return the index of the first message of an entry."""
        return self.entries[entry - 1].end if entry else 0

    def answered(self, answer: Message) -> tuple[bytes, bytes]:
        """Return the key of this conversation followed by ``answer``, and the digest of the answer's entry.

        An answer to a history that ends in an assistant message continues that message.
        """
        entries = len(self.entries)
        if entries and self.entries[-1].role == "assistant":
            entries -= 1
        run = self.messages[self.start_of(entries) :]
        if run and continues_answer(self.messages):
            answer = {**answer, "content": text_of(run.pop().get("content")) + text_of(answer.get("content"))}
        (entry,) = entries_of([*run, answer])
        assert entry.digest is not None  # only user messages can consist of reminders alone
        return roll(self.keys[entries], entry.digest), entry.digest


class HistoryReader:
    """Reads the requests of one session."""

    def __init__(self) -> None:
        self._views: list[Reading] = []

    def nearest(self, messages: Sequence[Message]) -> tuple[Reading | None, int]:
        """Return the remembered request that shares the most first messages with this one, and their number."""
        nearest: Reading | None = None
        most = -1
        for view in self._views:
            common = view.messages.common(messages)
            if common == len(view.messages):
                return view, common
            if common > most and (common or view.messages[1:2] == messages[1:2] != []):
                nearest, most = view, common
        return nearest, max(most, 0)

    def read(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        found: tuple[Reading | None, int] | None = None,
    ) -> Reading:
        """Read a request's history. ``messages`` and ``tools`` are kept and must not be changed afterwards. ``found``:
        what `nearest` returned for these messages, if it was called since the last request."""
        nearest, common = found or self.nearest(messages)
        offered = tools or ()
        same_tools = next((view.tools for view in self._views if view.offered == offered), None)
        base = nearest or Reading(Prefix(), Prefix(), Prefix([_ROOT]), Prefix([NO_REMINDERS]), b"", ())
        kept_entries = len(base.entries)
        while kept_entries and not (
            base.entries[kept_entries - 1].end <= common
            and _run_ends_at_entry(base.entries[kept_entries - 1], messages)
        ):
            kept_entries -= 1
        starts = {base.start_of(at): at for at in range(kept_entries, len(base.entries))}
        first = at = base.start_of(kept_entries)
        key, seen = base.keys[kept_entries], base.seen[kept_entries]
        entries: list[Entry] = []
        keys: list[bytes] = []
        reminders: list[frozenset[bytes]] = []
        while at < len(messages):
            again = starts.get(at)
            if again is not None and _same_entry(base, messages, again):
                entry = base.entries[again]
            else:
                entry = entry_at(messages, at)
            key, seen, at = roll(key, entry.digest), seen | entry.reminders if entry.reminders else seen, entry.end
            entries.append(entry)
            keys.append(key)
            reminders.append(seen)
        reading = Reading(
            base.messages.grown(first, messages[first:]),
            base.entries.grown(kept_entries, entries),
            base.keys.grown(kept_entries + 1, keys),
            base.seen.grown(kept_entries + 1, reminders),
            same_tools or tools_digest(offered),
            offered,
        )
        # The view that this request extends is no longer needed.
        self._views = [reading, *(view for view in self._views if view is not nearest)][:_VIEWS]
        return reading


def roll(key: bytes, digest: bytes | None) -> bytes:
    """Return the key of a conversation with one more entry; an entry without a digest does not change the key."""
    return key if digest is None else hashlib.blake2b(key + digest, digest_size=16).digest()


def _same_entry(reading: Reading, messages: Sequence[Message], entry: int) -> bool:
    start, end = reading.start_of(entry), reading.entries[entry].end
    if reading.entries[entry].role == "tool":
        return False  # the order of results depends on the calls before them, which may differ
    return reading.messages[start:end] == messages[start:end] and _run_ends_at_entry(reading.entries[entry], messages)


def _run_ends_at_entry(entry: Entry, messages: Sequence[Message]) -> bool:
    """Return whether the entry's run of messages ends in ``messages`` where it did before."""
    return (
        entry.role not in ("assistant", "tool")
        or entry.end >= len(messages)
        or role_of(messages[entry.end]) != entry.role
    )
