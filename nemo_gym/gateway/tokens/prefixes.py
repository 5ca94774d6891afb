"""Beginnings of lists that grow: what requests of one conversation have in common exists once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, islice
from operator import ne
from typing import Generic, TypeVar, overload

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

    def common(self, others: Sequence[object]) -> int:
        """How many first items equal those of ``others``."""
        differing = map(ne, islice(self._items, self._length), others)
        return next(compress(count(), differing), min(self._length, len(others)))

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
