"""What a request itself tells about being a retry of one whose answer was sent.

A server cannot see what a client has read. But HTTP/1.1 clients send their next request on a connection only after
they have read the whole answer on it, and never on one that broke; and some say outright that they retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_gym.gateway.retries.answers import Repeat
from nemo_gym.http.delivery import Connection

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key")
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""The SDKs of OpenAI and Anthropic count their own retries in it. Claude Code sends 0 always, which says nothing."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """``key`` and ``repeat`` are what `SessionAnswers.once` takes."""

    key: str | None
    repeat: Repeat


def request_hints(
    headers: Mapping[str, str], connection: Connection | None, answered_on: Connection | None
) -> RequestHints:
    """From a request's headers (lower-case names), the connection it came on, and the one on which this session's last
    answer to an equal request was sent, if any."""
    key = next((headers[name].strip() for name in IDEMPOTENCY_HEADERS if headers.get(name)), None)
    count = headers.get(RETRY_COUNT_HEADER, "")
    if count.isdecimal() and count.strip("0"):  # as text: an integer of thousands of digits is an error
        return RequestHints(key or None, Repeat.RETRY)
    if connection is not None and connection == answered_on:
        return RequestHints(key or None, Repeat.RESAMPLE)
    return RequestHints(key or None, Repeat.UNKNOWN)
