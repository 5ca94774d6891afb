"""Reads a request's history into keys, at a cost that hardly grows with what was read before.

Requests of one conversation repeat each other. The messages of the latest requests are kept, and compared as they
came (a memory comparison, the only work on what is old); only what is new, or spelled anew, is brought into canonical
form and put behind what is kept. A key stands for a conversation up to a message, so that finding the turn to
continue is a dictionary lookup.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym.gateway.tokens.canonical import NO_REMINDERS, Entry, entries_of, entry_at, tools_digest
from nemo_gym.gateway.tokens.messages import Message, continues_answer, is_long, role_of, text_of
from nemo_gym.gateway.tokens.prefixes import Prefix

_ROOT = b"\0" * 16
_VIEWS = 8
"""Requests remembered per session: its main conversation and the sub-agents that run at the same time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One request's history in canonical form."""

    messages: Prefix[Message]
    entries: Prefix[Entry]
    keys: Prefix[bytes]
    """``keys[i]`` stands for the first ``i`` entries; one longer than ``entries``."""
    seen: Prefix[frozenset[bytes]]
    """``seen[i]``: digests of the reminders within the first ``i`` entries."""
    tools: bytes
    """Digest of the tools offered."""
    offered: Sequence[Mapping[str, Any]]
    said: deque[tuple[Message, bytes]]
    """The latest answers of the session, with the digests of their entries; shared by its readings."""

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    def start_of(self, entry: int) -> int:
        """The index of the first message of an entry."""
        return self.entries[entry - 1].end if entry else 0

    def answered(self, answer: Message) -> tuple[bytes, bytes]:
        """The key of this conversation with ``answer`` behind it, and the digest of the answer's entry.

        An answer to a history that ends in an assistant message continues that message.
        """
        entries = len(self.entries)
        if entries and self.entries[-1].role == "assistant":
            entries -= 1
        begun = self.messages[self.start_of(entries) :]
        if begun and continues_answer(self.messages):
            said, added = begun.pop(), answer
            answer = {**added, "content": text_of(said.get("content")) + text_of(added.get("content"))}
        (entry,) = entries_of([*begun, answer])
        assert entry.digest is not None  # only user messages can be nothing but reminders
        if not begun:
            self.said.append((answer, entry.digest))
        return roll(self.keys[entries], entry.digest), entry.digest


class HistoryReader:
    """Reads the requests of one session."""

    def __init__(self) -> None:
        self._views: list[Reading] = []
        self._said: deque[tuple[Message, bytes]] = deque(maxlen=_VIEWS)

    def reads_long(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether `read` may take more than some milliseconds."""
        known, common = self._nearest(messages)
        return known is None or known.offered != (tools or ()) or is_long(messages[common:])

    def read(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Reading:
        """``messages`` and ``tools`` are kept and must not be changed afterwards."""
        known, common = self._nearest(messages)
        offered = tools or ()
        same_tools = next((view.tools for view in self._views if view.offered == offered), None)
        digest = same_tools if same_tools is not None else tools_digest(offered)
        kept = 0
        if known is not None:
            kept = len(known.entries)
            while kept and not (known.entries[kept - 1].end <= common and _ends(known.entries[kept - 1], messages)):
                kept -= 1
        begun = known if known is not None else _nothing(self._said)
        said = tuple(reversed(self._said))  # at once: a turn may be committed meanwhile
        starts = {begun.start_of(at): at for at in range(kept, len(begun.entries))}
        first = at = begun.start_of(kept)
        key, seen = begun.keys[kept], begun.seen[kept]
        entries: list[Entry] = []
        keys: list[bytes] = []
        reminders: list[frozenset[bytes]] = []
        while at < len(messages):
            again = starts.get(at)
            if again is not None and _same_entry(begun, messages, again):
                entry = begun.entries[again]
            else:
                entry = _answer_at(messages, at, said) or entry_at(messages, at)
            key, seen, at = roll(key, entry.digest), seen | entry.reminders if entry.reminders else seen, entry.end
            entries.append(entry)
            keys.append(key)
            reminders.append(seen)
        reading = Reading(
            begun.messages.grown(first, messages[first:]),
            begun.entries.grown(kept, entries),
            begun.keys.grown(kept + 1, keys),
            begun.seen.grown(kept + 1, reminders),
            digest,
            offered,
            self._said,
        )
        # What a request extends is not needed any more.
        self._views = [reading, *(view for view in self._views if view is not known)][:_VIEWS]
        return reading

    def _nearest(self, messages: Sequence[Message]) -> tuple[Reading | None, int]:
        """The remembered request that shares the most first messages with this one, and how many."""
        nearest: Reading | None = None
        most = -1
        for view in self._views:
            common = view.messages.common(messages)
            if common == len(view.messages):
                return view, common
            if common > most and (common or view.messages[1:2] == messages[1:2] != []):
                nearest, most = view, common
        return nearest, max(most, 0)


def _answer_at(messages: Sequence[Message], at: int, answers: Sequence[tuple[Message, bytes]]) -> Entry | None:
    """The entry of an answer that comes back as it was delivered, which its digest is known of."""
    message = messages[at]
    if message.get("role") != "assistant" or (at + 1 < len(messages) and role_of(messages[at + 1]) == "assistant"):
        return None
    for said, digest in answers:
        if said == message:
            return Entry(at + 1, digest, NO_REMINDERS, "assistant")
    return None


def roll(key: bytes, digest: bytes | None) -> bytes:
    """The key of a conversation with one more entry; an entry that counts for nothing leaves it."""
    return key if digest is None else hashlib.blake2b(key + digest, digest_size=16).digest()


def _same_entry(known: Reading, messages: Sequence[Message], entry: int) -> bool:
    start, end = known.start_of(entry), known.entries[entry].end
    if known.entries[entry].role == "tool":
        return False  # the order of results depends on the calls before them, which may differ
    return known.messages[start:end] == messages[start:end] and _ends(known.entries[entry], messages)


def _ends(entry: Entry, messages: Sequence[Message]) -> bool:
    """Whether nothing that follows belongs to the same run of messages."""
    return (
        entry.role not in ("assistant", "tool")
        or entry.end >= len(messages)
        or role_of(messages[entry.end]) != entry.role
    )


def _nothing(said: deque[tuple[Message, bytes]]) -> Reading:
    return Reading(Prefix(), Prefix(), Prefix([_ROOT]), Prefix([NO_REMINDERS]), b"", (), said)
