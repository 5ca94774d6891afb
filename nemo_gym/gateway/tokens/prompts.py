"""A prompt that is not copied: the tokens of the turn it continues, and what is new behind them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import overload

from nemo_gym.gateway.tokens.turns import Turn, numbers


class Prompt(Sequence[int]):
    """Token ids of a whole prompt. Stays as it is when the conversation goes on."""

    __slots__ = ("_begun", "_context", "_new", "_parent")

    def __init__(self, parent: Turn | None, context: array[int]) -> None:
        self._parent = parent
        self._context = context
        self._begun = parent.end if parent is not None else 0
        self._new: bytes | None = None

    def ids(self) -> array[int]:
        """A copy, int32."""
        if self._parent is None:
            return self._context[:]
        prompt = self._parent.tokens[: self._begun]
        prompt.extend(self._context)
        return prompt

    @property
    def new(self) -> bytes:
        """The tokens behind the turn that it continues, as decimal numbers with commas between them."""
        if self._new is None:
            self._new = numbers(self._context)
        return self._new

    def json(self) -> bytes:
        """As a JSON array. Only the new tokens are formatted; the others were when they came."""
        new = self.new
        if self._parent is None or not self._begun:
            return b"[%b]" % new
        with memoryview(self._parent.text) as text, text[: self._parent.text_end] as kept:
            return b"".join((b"[", kept, b"," if new else b"", new, b"]"))

    def tail(self, count: int) -> array[int]:
        """The last ``count`` tokens, or all of a shorter prompt."""
        new = len(self._context)
        if self._parent is None or count <= new:
            return self._context[max(0, new - count) :]
        return self._parent.tokens[max(0, self._begun + new - count) : self._begun] + self._context

    def __len__(self) -> int:
        return self._begun + len(self._context)

    def __iter__(self) -> Iterator[int]:
        earlier = self._parent.tokens if self._parent is not None else ()
        return chain(islice(earlier, self._begun), self._context)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        if isinstance(at, slice):
            return self.ids()[at]
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"token {at} of {len(self)}")
        if self._parent is not None and place < self._begun:
            return self._parent.tokens[place]
        return self._context[place - self._begun]
