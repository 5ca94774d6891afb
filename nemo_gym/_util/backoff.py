"""How long to wait before something is tried again."""

from __future__ import annotations

import datetime
import math
from email.utils import parsedate_to_datetime
from typing import overload

RETRY_AFTER_AT_MOST_S = 60.0
"""Whoever asks for more is asked again after that long: nobody else can tell when they are well again."""


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
    """A time that somebody else asks to wait, as it is kept to."""
    if seconds is None or math.isnan(seconds):
        return None
    return min(max(0.0, seconds), RETRY_AFTER_AT_MOST_S)
