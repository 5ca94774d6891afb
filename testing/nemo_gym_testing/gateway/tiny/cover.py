"""Find the calls of an engine's log that sampled a given run of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nemo_gym_testing.gateway.tiny.log import EngineCall


@dataclass(frozen=True, slots=True)
class Piece:
    """The first ``count`` tokens of a call, at position ``start`` of a trajectory's tokens."""

    call: EngineCall
    start: int
    count: int

    @property
    def broken(self) -> bool:
        """Whether the call ended before its answer was complete."""
        return not self.call.answered


class Covering:
    """Finds the calls that cover tokens, and uses each call only once."""

    def __init__(self, calls: Iterable[EngineCall]) -> None:
        self._by_length: dict[int, list[EngineCall]] = {}
        for call in calls:
            if call.token_ids:
                self._by_length.setdefault(len(call.prompt_ids), []).append(call)
        self.used: set[str] = set()
        """Keys of the calls that already cover tokens."""

    def cover(self, tokens: array[int], start: int, end: int) -> tuple[list[Piece], str | None]:
        """Return the calls that ``tokens[start:end]`` consist of, and mark them as used; or return what is wrong."""
        found = self._search(tokens, start, end, self.used)
        if found is not None:
            self.used.update(piece.call.key for piece in found)
            return found, None
        if self._search(tokens, start, end, set()) is not None:
            return [], "sampled tokens that another place holds already"
        candidates = self._calls_after(tokens, start, set())
        if not candidates:
            return [], "no engine was asked with the tokens before it as its prompt"
        longest = max((_matching_count(call, tokens, start, end) for call in candidates), default=0)
        return [], f"the engine sampled something else behind this prompt, from token {start + longest} on"

    def _search(self, tokens: array[int], start: int, end: int, used: set[str]) -> list[Piece] | None:
        if start == end:
            return []
        # Complete answers first: most runs are exactly one of them.
        for call in sorted(self._calls_after(tokens, start, used), key=lambda call: not call.answered):
            count = len(call.token_ids)
            agreeing = _matching_count(call, tokens, start, end)
            if agreeing == count and _may_end(call, count):
                remainder = self._search(tokens, start + count, end, used | {call.key})
                if remainder is not None:
                    return [Piece(call, start, count), *remainder]
            if call.answered:
                continue
            visible = min(agreeing, count if call.sent is None else call.sent)
            for length in range(visible, 0, -1):
                if start + length == end:
                    if _may_end(call, length):
                        return [Piece(call, start, length)]
                    continue
                if start + length in self._by_length:
                    remainder = self._search(tokens, start + length, end, used | {call.key})
                    if remainder is not None:
                        return [Piece(call, start, length), *remainder]
        return None

    def _calls_after(self, tokens: array[int], start: int, used: set[str]) -> list[EngineCall]:
        calls = [call for call in self._by_length.get(start, ()) if call.key not in used]
        return [call for call in calls if call.prompt_ids == tokens[:start]] if calls else []


def spans(mask: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, end)`` of each run of ones, counted from ``offset``."""
    start: int | None = None
    for at, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = at
        elif not bit and start is not None:
            yield offset + start, offset + at
            start = None


def _matching_count(call: EngineCall, tokens: array[int], start: int, end: int) -> int:
    """Return how many of the call's first tokens equal those at ``start``."""
    count = min(len(call.token_ids), end - start)
    if tokens[start : start + count] == call.token_ids[:count]:
        return count
    return next(at for at in range(count) if tokens[start + at] != call.token_ids[at])


def _may_end(call: EngineCall, count: int) -> bool:
    """Whether an answer may end with the first ``count`` tokens of this call: the engine told the client that it is
    complete, or the client could infer it."""
    if call.answered:
        return count == len(call.token_ids)
    whole = count == len(call.token_ids) and (call.sent is None or call.sent >= count)
    return (whole and call.finish is not None) or count == call.max_tokens
