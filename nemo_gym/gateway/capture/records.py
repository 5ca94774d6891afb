"""One record per inference call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Moment = Literal["queued", "sampled", "committed", "sent"]


@dataclass(slots=True)
class CallRecord:
    """What is known of one call; its fields are the keys of its line. ``None`` means not known, or not that far."""

    call_id: str
    dialect: str
    route: str
    """Without session id and tokens: ``/v1/messages``."""
    session_id: str | None = None
    rollout: Mapping[str, Any] | None = None
    """The `RolloutIdentity` as data."""
    received_at: float = field(default_factory=time.time)
    """Unix seconds."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Since it was received: ``queued`` (an engine was found), ``sampled``, ``committed``, ``sent``."""
    stream: bool = False
    status: int | None = None
    """The HTTP status of the answer."""
    code: str | None = None
    """The code of the error that ended it."""
    error: str | None = None
    finish: str | None = None
    usage: Mapping[str, int] | None = None
    engines: tuple[str, ...] = ()
    """Who sampled it, in order; several where an answer was continued elsewhere."""
    weights_version: str | None = None
    repeated: bool = False
    """The answer was one that had been sampled before, for an equal request."""
    retry_count: int | None = None
    """As the caller's SDK counts (``x-stainless-retry-count``)."""
    user_agent: str | None = None
    turn: int | None = None
    """The token turn's id within its session."""
    split_reason: str | None = None
    client_gone: bool = False
    request_bytes: int = 0
    request: Any = None
    """The body as data, or its bytes."""
    answer: Any = None
    """The reply as data (also where it was streamed), or its bytes."""
    began: float = field(default_factory=time.monotonic, repr=False)
    """Monotonic; not written."""

    def mark(self, moment: Moment) -> None:
        """``moment`` is now. The last mark of a moment counts."""
        self.milliseconds[moment] = round((time.monotonic() - self.began) * 1000, 3)
