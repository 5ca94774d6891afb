"""Gateway sessions: one per attempt, opened by the pipeline, used by a harness, finalized for its trajectories.

A session has two tokens. The *inference token* opens the inference routes and nothing else; it may enter a box. The
*control token* finalizes or aborts, and stays with who opened the session.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.errors import ContractError, CredentialError, FencedError
from nemo_gym.contract.model_limits import NONE_CHOSEN, ChosenLimits
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.gateway.policy_request import Usage

INFERENCE_TOKEN_PREFIX = "ngi1_"
SESSION_TTL_S = 6 * 3600.0
KEEP_CLOSED_S = 600.0
"""How long a closed session still answers a repeated finalize, unless so many have been closed after it:"""
KEEP_CLOSED_SESSIONS = 1024
"""Their tokens and conversations are memory: at 400 rollouts a second, ten minutes are 240,000 sessions."""
KEEP_CLOSED_BYTES = 256 << 20
"""Of their conversations. A finalize is repeated soon, so the last few answer however long theirs are."""
KEEP_CLOSED_AT_LEAST = 16


PIPELINE = ""
"""As opener: the pipeline, whoever runs it."""
SessionKey = tuple[str, str, str]
"""Opener, run and rollout. Of one key, one session is open."""


def opener_of(caller: Caller | None) -> str:
    """Among whose sessions a caller's rollouts are. An agent server runs what others wrote and names any rollout it
    likes, so its sessions are its own: they replace and fence no one else's."""
    return PIPELINE if caller is None or caller.role is Role.PIPELINE else f"{caller.role}:{caller.name}"


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """What the opener gets, once."""

    session_id: str
    inference_token: str = field(repr=False)
    control_token: str = field(repr=False)
    expires_at: float = 0.0
    """Unix seconds."""


@dataclass(slots=True)
class GatewaySession:
    """One attempt's session, as inference sees it."""

    session_id: str
    rollout: RolloutIdentity
    sampling: Mapping[str, Any]
    """Parameters that every request of this attempt gets, whatever the harness asks for."""
    expires_at: float
    limits: ChosenLimits = NONE_CHOSEN
    """How long its calls may take, as far as the run says so."""
    turns: int = 0
    usage: Usage = field(default_factory=Usage)


@runtime_checkable
class GatewaySessions(Protocol):
    """The sessions of one model server. Replaced as a whole by a gateway that keeps tokens; callers stay."""

    async def open(
        self,
        rollout: RolloutIdentity,
        sampling: Mapping[str, Any] | None = None,
        *,
        opener: str = PIPELINE,
        limits: ChosenLimits = NONE_CHOSEN,
    ) -> OpenedSession:
        """A session for this attempt. Fences the opener's sessions of older attempts, and replaces one of the same
        attempt (whose opener never saw the answer). Raises `FencedError` when a newer attempt of the opener's has
        one. Sessions of other openers (see `opener_of`) are not touched, whatever rollout they name."""
        ...

    def authorize(self, inference_token: str) -> GatewaySession:
        """The session a token belongs to. Raises `CredentialError` for an unknown or expired token, `FencedError` for
        a session that was closed or replaced."""
        ...

    def committed(self, session: GatewaySession, usage: Usage) -> None:
        """Record one successful, delivered call."""
        ...

    async def finalize(
        self,
        session_id: str,
        control_token: str,
        *,
        reward: float | None = None,
        reward_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Close the session; ``{session_id, turns, usage, trajectories}``. Repeating it answers the same, whatever
        reward it comes with.

        ``reward`` is the verdict's, ``None`` where there is none to train on; ``reward_info`` is plain data beside
        it. Sessions that keep trajectories write both into them.
        """
        ...

    async def abort(self, session_id: str, control_token: str) -> None:
        """Close the session and keep nothing."""
        ...


@dataclass(slots=True)
class _Entry:
    session: GatewaySession
    key: SessionKey
    token_digest: str
    control_digest: bytes
    closed_at: float | None = None
    summary: dict[str, Any] | None = None


class InMemoryGatewaySessions:
    """Sessions of one process, counting turns and tokens. A restart forgets them: their attempts are retried."""

    def __init__(self, ttl_s: float = SESSION_TTL_S) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, _Entry] = {}
        self._by_token: dict[str, str] = {}
        self._current: dict[SessionKey, str] = {}
        self._closed: deque[str] = deque()

    async def open(
        self,
        rollout: RolloutIdentity,
        sampling: Mapping[str, Any] | None = None,
        *,
        opener: str = PIPELINE,
        limits: ChosenLimits = NONE_CHOSEN,
    ) -> OpenedSession:
        self._sweep()
        key = (opener, rollout.run_id, rollout.rollout_id)
        if (current := self._entries.get(self._current.get(key, ""))) is not None:
            if current.session.rollout.attempt > rollout.attempt:
                raise FencedError(
                    f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was replaced by attempt"
                    f" {current.session.rollout.attempt}",
                    rollout_id=rollout.rollout_id,
                )
            self._close(current)
        opened = OpenedSession(
            session_id=secrets.token_hex(12),
            inference_token=INFERENCE_TOKEN_PREFIX + secrets.token_urlsafe(32),
            control_token=secrets.token_urlsafe(32),
            expires_at=time.time() + self._ttl_s,
        )
        session = GatewaySession(opened.session_id, rollout, dict(sampling or {}), opened.expires_at, limits)
        digest = _digest(opened.inference_token)
        self._entries[opened.session_id] = _Entry(session, key, digest, _digest(opened.control_token).encode())
        self._by_token[digest] = opened.session_id
        self._current[key] = opened.session_id
        return opened

    def authorize(self, inference_token: str) -> GatewaySession:
        entry = self._entries.get(self._by_token.get(_digest(inference_token), ""))
        if entry is None:
            raise CredentialError("the inference token is unknown here: its session expired, or the server restarted")
        if entry.closed_at is not None:
            raise FencedError("the session of this inference token was closed, or replaced by a newer attempt")
        if entry.session.expires_at < time.time():
            self._close(entry)
            raise CredentialError("the inference token has expired")
        return entry.session

    def committed(self, session: GatewaySession, usage: Usage) -> None:
        session.turns += 1
        session.usage = session.usage + usage

    async def finalize(
        self,
        session_id: str,
        control_token: str,
        *,
        reward: float | None = None,
        reward_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        entry = self._controlled(session_id, control_token)
        if entry.summary is None:
            if entry.closed_at is not None:
                raise FencedError(f"session '{session_id}' was aborted or replaced", session_id=session_id)
            session = entry.session
            entry.summary = {
                "session_id": session_id,
                "turns": session.turns,
                "usage": session.usage.as_dict(),
                "trajectories": [],
            }
            self._close(entry)
        return entry.summary

    async def abort(self, session_id: str, control_token: str) -> None:
        self._close(self._controlled(session_id, control_token))

    def _controlled(self, session_id: str, control_token: str) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None:
            raise ContractError(f"session '{session_id}' is not known here", session_id=session_id)
        if not hmac.compare_digest(entry.control_digest, _digest(control_token).encode()):
            raise CredentialError("the control token is not this session's", session_id=session_id)
        return entry

    def _close(self, entry: _Entry) -> None:
        if entry.closed_at is None:
            entry.closed_at = time.time()
            self._closed.append(entry.session.session_id)

    def _sweep(self) -> None:
        """Forget what has been closed or expired for long enough, and the oldest of too many closed ones."""
        while len(self._closed) > KEEP_CLOSED_SESSIONS:
            self._forget(self._closed.popleft())
        before = time.time() - KEEP_CLOSED_S
        # Sessions are in order of opening, and live about equally long: looking at the oldest few is enough.
        for session_id in [*itertools.islice(self._entries, 8)]:
            entry = self._entries[session_id]
            ended = entry.closed_at if entry.closed_at is not None else entry.session.expires_at
            if ended < before:
                self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        if (entry := self._entries.pop(session_id, None)) is not None:
            self._by_token.pop(entry.token_digest, None)
            if self._current.get(entry.key) == session_id:
                del self._current[entry.key]


def token_in(headers: Mapping[str, str]) -> str | None:
    """The inference token of a request, a bearer's or in ``x-api-key``; nothing for another credential."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    token = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return token if token.startswith(INFERENCE_TOKEN_PREFIX) else None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
