"""Beginnings of lists that grow: what requests of one conversation have in common exists once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, islice
from operator import is_not, ne
from typing import Generic, TypeVar, overload

_ADOPTED = 8
T = TypeVar("T", covariant=True)


class Prefix(Sequence[T], Generic[T]):
    """The first items of a list that others may have grown since; never the items behind them."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._length = len(self._items)

    def grown(self, kept: int, new: Sequence[T]) -> Prefix[T]:
        """The first ``kept`` items with ``new`` behind them. Copies nothing when nobody has grown the list before."""
        if kept == self._length == len(self._items):
            self._items.extend(new)
            items = self._items
        elif kept == self._length and not new:
            return self
        else:
            items = [*islice(self._items, kept), *new]
        made: Prefix[T] = Prefix.__new__(Prefix)
        made._items, made._length = items, kept + len(new)
        return made

    def common(self, others: Sequence[T]) -> int:
        """How many first items equal those of ``others``. Those that are the very same objects are not looked into, so
        where few are not, they are kept in place of their equals for the next time."""
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
        return isinstance(other, Sequence) and len(other) == self._length and all(map(_same, self, other))

    __hash__ = None  # type: ignore[assignment]  # as lists


def _same(first: object, second: object) -> bool:
    return first == second
