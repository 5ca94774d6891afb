"""Lowering a conversation at a cost that hardly grows with what was lowered before.

Requests of one conversation repeat each other. The latest ones are kept as they came, and a new one is compared with
them, which is a comparison of memory; only what follows the part they share is lowered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import eq, is_, is_not
from typing import Any, TypeVar

import orjson

from nemo_gym.gateway.dialects import Dialect

T = TypeVar("T")
Lowered = list[dict[str, Any]]
LowerFrom = Callable[[int], Iterator[tuple[int, Lowered]]]
"""Lowers a history from one of its elements on: yields each group of elements that lower together, as where it ends
and the messages it becomes. Where a group ends may depend on the element after it, and on nothing further."""

_VIEWS = 4
"""Requests remembered: the main conversation's and those of sub-agents that run at the same time."""
_REWRITTEN_GROUPS = 4
"""A harness may change the end of its history (marks for caching) without starting another conversation."""


@dataclass(frozen=True, slots=True)
class _View:
    context: Any
    raw: Sequence[Any]
    ends: list[int]
    """Of each group, in elements of ``raw``."""
    counts: list[int]
    """Messages up to the end of each group."""
    messages: Lowered


class LoweringMemo:
    """The memory of one session, for one dialect after the other or several. Messages that it hands out are shared
    between requests; nobody may change them."""

    def __init__(self) -> None:
        self._views: list[_View] = []
        self._tools: tuple[bytes, Any] = (b"", None)
        self._parameters: tuple[Dialect, dict[str, Any], Any] | None = None

    def parameters(self, dialect: Dialect, given: dict[str, Any], lower: Callable[[], T]) -> T:
        """What the parameters of a request lower to, a body without its history. Most requests have those of the last
        one; whoever parses bodies gives them as the very same objects then."""
        known = self._parameters
        if known is None or known[0] is not dialect or not same_items(known[1], given):
            known = self._parameters = (dialect, given, lower())
        lowered: T = known[2]
        return lowered

    def tools(self, raw: Any, lower: Callable[[], T]) -> T:
        """What the tools of a request lower to: most requests offer those of the last one, to the byte."""
        try:
            spelled = orjson.dumps(raw)
        except TypeError:  # nested too deeply to be written
            return lower()
        if spelled != self._tools[0]:
            self._tools = (spelled, lower())
        known: T = self._tools[1]
        return known

    def lowered(self, context: Any, raw: Sequence[Any], lower_from: LowerFrom) -> Lowered:
        """``raw`` as messages. ``context`` is whatever else of the request the messages depend on."""
        known, groups = self._nearest(context, raw)
        if known is not None and groups and isinstance(raw, list):
            # Equal objects become one: whoever compares the history after this sees that at once.
            raw[: known.ends[groups - 1]] = known.raw[: known.ends[groups - 1]]
        ends = known.ends[:groups] if known is not None else []
        counts = known.counts[:groups] if known is not None else []
        messages = known.messages[: counts[-1]] if known is not None and counts else []
        for end, group in lower_from(ends[-1] if ends else 0):
            messages += group
            ends.append(end)
            counts.append(len(messages))
        if known is not None and groups >= len(known.ends) - _REWRITTEN_GROUPS:
            self._views = [view for view in self._views if view is not known]
        self._views.append(_View(context, raw, ends, counts, messages))
        del self._views[:-_VIEWS]
        return [*messages]

    def _nearest(self, context: Any, raw: Sequence[Any]) -> tuple[_View | None, int]:
        """The view that shares most with ``raw``, and how many of its groups are the same."""
        nearest: _View | None = None
        most = 0
        for view in reversed(self._views):
            if view.context != context:
                continue
            # The element after a group is part of what is shared, since it may decide where the group ends.
            groups = bisect_left(view.ends, _shared(view.raw, raw))
            if groups > most:
                nearest, most = view, groups
                if groups >= len(view.ends) - 1:
                    break
        return nearest, most


def same_items(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two objects have the same keys in the same order, and the very same objects as values: equal ones may
    be of other types."""
    return len(one) == len(other) and all(map(eq, one, other)) and all(map(is_, one.values(), other.values()))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements at the beginning are the same."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    # Most of what is equal is the same object.
    return next(at for at in compress(count(), map(is_not, one, other)) if one[at] != other[at])


def lowered_history(memo: LoweringMemo | None, context: Any, raw: Sequence[Any], lower_from: LowerFrom) -> Lowered:
    """``raw`` as messages, with the help of ``memo`` where there is one."""
    if memo is not None:
        return memo.lowered(context, raw, lower_from)
    return [message for _, group in lower_from(0) for message in group]
