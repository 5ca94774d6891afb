"""Limits on the number of boxes, in total and per owner, and a queue with a deadline that is fair across owners.

A place that becomes free goes to the waiting owner with the fewest boxes, and among equals to the one served longest
ago. So an owner who requests five hundred boxes does not keep another owner from its first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque

from nemo_gym.sandbox.wire.problems import BrokerError


class Admission:
    """Places for boxes. A box holds one from before its create until it is gone.

    Args:
        max_boxes: limit for all owners together; ``None`` is no limit.
        max_per_owner: limit for each owner; ``None`` is no limit.
        max_waiting: requests in the queue; a further request is refused at once.
        timeout_s: seconds in the queue after which a request is refused.
    """

    def __init__(
        self, *, max_boxes: int | None, max_per_owner: int | None, max_waiting: int, timeout_s: float
    ) -> None:
        self._max_boxes, self._max_per_owner = max_boxes, max_per_owner
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self.held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        self._turns = itertools.count()

    @property
    def total(self) -> int:
        return self.held.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def has_place(self) -> bool:
        """Whether the total limit leaves room for one more box."""
        return self._max_boxes is None or self.total < self._max_boxes

    def may_have_more(self, owner: str) -> bool:
        """Return whether the limit per owner leaves room for one more box of this owner."""
        return self._max_per_owner is None or self.held[owner] < self._max_per_owner

    def occupy(self, owner: str) -> None:
        """Count a box without checking the limits, such as one adopted after a restart."""
        self.held[owner] += 1

    def swap(self, before: str, after: str) -> None:
        """Move a place from the owner ``before`` to the owner ``after``."""
        self._release(before)
        self._take(after)

    async def enter(self, owner: str) -> None:
        """Wait for a place. Raises `BrokerError` ``quota`` if the owner is at its own limit, else ``no_room``."""
        may_take = self.has_place and self.may_have_more(owner) and not self._waiting.get(owner)
        if may_take and not any(queue and self.may_have_more(other) for other, queue in self._waiting.items()):
            self._take(owner)
            return
        if self.waiting >= self._max_waiting:
            raise self._refused(owner, "the queue for a box is full")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            async with asyncio.timeout(self._timeout_s):
                await place
        except TimeoutError:
            if place.done() and not place.cancelled():
                return
            raise self._refused(owner, f"no box became free within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(owner)
            raise
        finally:
            self._forget(owner, place)

    def leave(self, owner: str) -> None:
        """Give a place back."""
        self._release(owner)
        self._fill_free_places()

    def _release(self, owner: str) -> None:
        self.held[owner] -= 1
        if self.held[owner] <= 0:
            del self.held[owner]

    def _take(self, owner: str) -> None:
        self.held[owner] += 1
        self._served[owner] = next(self._turns)

    def _fill_free_places(self) -> None:
        while self.has_place:
            ready = [owner for owner, queue in self._waiting.items() if queue and self.may_have_more(owner)]
            if not ready:
                return
            owner = min(ready, key=lambda name: (self.held[name], self._served.get(name, -1)))
            place = self._waiting[owner].popleft()
            if not place.done():
                self._take(owner)
                place.set_result(None)

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None:
            if place in queue:
                queue.remove(place)
            if not queue:
                del self._waiting[owner]
        if owner not in self.held and owner not in self._waiting:
            self._served.pop(owner, None)

    def _refused(self, owner: str, why: str) -> BrokerError:
        retry_after_s = max(1.0, min(self._timeout_s, 10.0))
        if not self.may_have_more(owner):
            return BrokerError(
                "quota",
                f"{why}: '{owner}' has {self.held[owner]} boxes of at most {self._max_per_owner}; close some, or raise"
                " the broker's max_boxes_per_owner",
                retry_after_s=retry_after_s,
            )
        return BrokerError(
            "no_room",
            f"{why}: {self.total} boxes of at most {self._max_boxes}, {self.waiting} requests wait; try again, or"
            " raise the broker's max_boxes",
            retry_after_s=retry_after_s,
        )
