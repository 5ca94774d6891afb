"""One session as the running gateway holds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic

from nemo_gym.gateway.dialects.memo import LoweringMemo
from nemo_gym.gateway.journal import SessionRecord, SessionState
from nemo_gym.gateway.retries import SessionAnswers
from nemo_gym.gateway.retries.fingerprint import FingerprintMemo
from nemo_gym.gateway.service.backend import C
from nemo_gym.gateway.service.bodies import BodyMemo
from nemo_gym.gateway.service.committed import Committed
from nemo_gym.gateway.service.limits import SessionShare
from nemo_gym.gateway.sessions import GatewaySession
from nemo_gym.http.delivery import Connection

_REMEMBERED_CONNECTIONS = 64


@dataclass(slots=True)
class LiveSession(Generic[C]):
    """``session`` is what routes see of it."""

    record: SessionRecord
    session: GatewaySession
    conversations: C
    state: SessionState = SessionState.OPEN
    reason: str | None = None
    """Why it was aborted."""
    closed_at: float | None = None
    """Unix seconds; set when the end is durable."""
    reward_info: dict[str, Any] = field(default_factory=dict)
    """What was said about the reward, ``reward`` itself among it."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session changes its state."""
    answers: SessionAnswers[Committed] = field(default_factory=SessionAnswers)
    bodies: BodyMemo = field(default_factory=BodyMemo)
    lowering: LoweringMemo = field(default_factory=LoweringMemo)
    fingerprints: FingerprintMemo = field(default_factory=FingerprintMemo)
    in_flight: int = 0
    share: SessionShare = field(default_factory=SessionShare)
    _answered_on: dict[str, Connection] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        return self.record.session_id

    def answered_on(self, fingerprint: str) -> Connection | None:
        """The connection on which the last answer to an equal request was sent, where that is still known."""
        return self._answered_on.get(fingerprint)

    def sent_on(self, fingerprint: str, connection: Connection | None) -> None:
        self._answered_on.pop(fingerprint, None)
        if connection is not None:
            self._answered_on[fingerprint] = connection
            if len(self._answered_on) > _REMEMBERED_CONNECTIONS:
                del self._answered_on[next(iter(self._answered_on))]

    def forget_requests(self) -> None:
        """Let go of what only makes further calls cheaper."""
        self.bodies, self.lowering, self.fingerprints = BodyMemo(), LoweringMemo(), FingerprintMemo()
        self.conversations.forget_requests()
