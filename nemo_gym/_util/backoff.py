"""When a failed operation is tried again: growing pauses, `Retry-After` headers, and when to give up."""

from __future__ import annotations

import asyncio
import datetime
import math
import random
import time
from email.utils import parsedate_to_datetime
from typing import overload

RETRY_AFTER_AT_MOST_S = 60.0
"""A peer that asks for a longer wait is asked again after this one: it cannot know when it will be well again."""
NETWORK_JITTER = 0.25
"""For calls over the network: hundreds of rollouts that one outage failed do not come back in the same millisecond."""


class Backoff:
    """The pauses between the tries of one operation. The caller judges which errors deserve another try::

        backoff = Backoff(first_s=0.5, longest_s=30, tries=5)
        while True:
            try:
                return await ask()
            except ConnectionError:
                if not await backoff.again():
                    raise

    Args:
        first_s: the first pause.
        longest_s: no pause is longer, but one of ``at_least_s``.
        factor: how much longer each pause is than the one before.
        tries: tries in all, the first included; unlimited by default.
        patience_s: seconds from now after which no further try begins; unlimited by default.
        jitter: each pause is longer by a random share of itself, up to this one.
    """

    def __init__(
        self,
        *,
        first_s: float,
        longest_s: float = math.inf,
        factor: float = 2.0,
        tries: int | None = None,
        patience_s: float = math.inf,
        jitter: float = 0.0,
    ) -> None:
        self._pause_s, self._longest_s, self._factor, self._jitter = min(first_s, longest_s), longest_s, factor, jitter
        self._tries_left = math.inf if tries is None else tries - 1
        self._deadline = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """Seconds until patience ends."""
        return self._deadline - time.monotonic()

    def next_pause_s(self, *, at_least_s: float = 0.0, instead_s: float | None = None) -> float | None:
        """How long to wait before the next try; ``None`` when there is none. Each call spends a try.

        Args:
            at_least_s: what the peer asked for, kept to even beyond ``longest_s``.
            instead_s: what the peer asked for, in place of this pause and within ``longest_s``.
        """
        pause_s = self._pause_s if instead_s is None else instead_s
        pause_s = max(min(pause_s * (1 + random.random() * self._jitter), self._longest_s), at_least_s)
        if self._tries_left <= 0 or pause_s >= self.left_s:
            return None
        self._tries_left -= 1
        self._pause_s = min(self._pause_s * self._factor, self._longest_s)
        return pause_s

    async def again(self, *, at_least_s: float = 0.0, instead_s: float | None = None) -> bool:
        """Wait for the next try; ``False`` at once when there is none."""
        pause_s = self.next_pause_s(at_least_s=at_least_s, instead_s=instead_s)
        if pause_s is None:
            return False
        await asyncio.sleep(pause_s)
        return True

    def again_blocking(self) -> bool:
        """As `again`, for threads."""
        pause_s = self.next_pause_s()
        if pause_s is None:
            return False
        time.sleep(pause_s)
        return True


def pause_after(failures: int, *, first_s: float, longest_s: float) -> float:
    """The doubling pause after so many failures, for callers that count them in a record of their own."""
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s)


@overload
def retry_after_s(header: str | None) -> float | None: ...


@overload
def retry_after_s(header: str | None, default: float) -> float: ...


def retry_after_s(header: str | None, default: float | None = None) -> float | None:
    """Seconds from a ``Retry-After`` header in either of its forms, at most `RETRY_AFTER_AT_MOST_S`; ``default`` when
    it says nothing usable."""
    seconds = _seconds(header) if header else None
    return default if seconds is None else seconds


def _seconds(header: str) -> float | None:
    try:
        return waiting_s(float(header))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(header)
        return waiting_s((at - datetime.datetime.now(at.tzinfo)).total_seconds())
    except (ValueError, OverflowError):
        return None


def waiting_s(seconds: float | None) -> float | None:
    """The wait that a peer asks for, within bounds; ``None`` when it asks for none."""
    if seconds is None or math.isnan(seconds):
        return None
    return min(max(0.0, seconds), RETRY_AFTER_AT_MOST_S)
