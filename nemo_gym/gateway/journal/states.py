"""The life of a gateway session.

    OPEN ──complete──▶ COMPLETE ──finalize──▶ FINALIZED
      │ └───────────────finalize──────────────▲
      └──abort──▶ ABORTED ◀──abort── COMPLETE

Each step may be repeated and then changes nothing. A finalized session cannot be aborted, nor an aborted one
finalized: the first end is final.
"""

from __future__ import annotations

from enum import StrEnum

from nemo_gym.contract.errors import FencedError


class SessionState(StrEnum):
    OPEN = "open"
    """Takes inference."""
    COMPLETE = "complete"
    """Its runner has said that it is done; takes no inference, and waits for its owner."""
    FINALIZED = "finalized"
    ABORTED = "aborted"


_STEPS = {
    SessionState.OPEN: frozenset({SessionState.COMPLETE, SessionState.FINALIZED, SessionState.ABORTED}),
    SessionState.COMPLETE: frozenset({SessionState.FINALIZED, SessionState.ABORTED}),
    SessionState.FINALIZED: frozenset[SessionState](),
    SessionState.ABORTED: frozenset[SessionState](),
}


def step(session_id: str, now: SessionState, then: SessionState) -> bool:
    """Whether going from ``now`` to ``then`` changes anything; raises `FencedError` where it is not allowed."""
    if now is then:
        return False
    if then not in _STEPS[now]:
        raise FencedError(f"session '{session_id}' is {now}; it cannot become {then}", session_id=session_id)
    return True
