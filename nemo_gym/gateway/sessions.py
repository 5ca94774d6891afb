"""Gateway sessions: one per attempt, opened by the pipeline, used by a harness, finalized for its trajectories.

A session has two tokens. The *inference token* opens the inference routes and nothing else; it may enter a sandbox.
The *control token* finalizes or aborts the session, and stays with its opener. A *completion token*, derived from the
control token, is for a runner that reports by itself that it is done (see `completion_token`).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from starlette.requests import Request

from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.errors import ContractError, CredentialError, FencedError
from nemo_gym.contract.session import NONE_CHOSEN, SESSION_TTL_S, ChosenLimits, RolloutIdentity
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.policy_request import Usage

INFERENCE_TOKEN_PREFIX = "ngi1_"
COMPLETION_TOKEN_PREFIX = "ngd1_"
KEEP_CLOSED_S = 600.0
"""How long a closed session still answers a repeated finalize, unless one of the next limits drops it earlier."""
KEEP_CLOSED_SESSIONS = 1024
"""Closed sessions take memory (tokens, conversations): at 400 rollouts a second, ten minutes are 240,000 sessions."""
KEEP_CLOSED_BYTES = 256 << 20
"""Limit of the conversations of closed sessions."""
KEEP_CLOSED_AT_LEAST = 16
"""So many are kept even above `KEEP_CLOSED_BYTES`: a finalize is repeated soon, and these still answer it."""

PIPELINE = ""
"""The opener of the pipeline's sessions, whoever runs the pipeline."""
SessionKey = tuple[str, str, str]
"""Opener, run id and rollout id. At most one session of a key is open."""


def opener_of(caller: Caller | None) -> str:
    """Return the opener under which a caller's sessions are kept. An agent server runs code that others wrote and can
    name any rollout, so its sessions are kept apart: they replace and fence no one else's."""
    return PIPELINE if caller is None or caller.role is Role.PIPELINE else f"{caller.role}:{caller.name}"


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """The id and tokens of a new session. Only its opener gets them, and only once."""

    session_id: str
    inference_token: str = field(repr=False)
    control_token: str = field(repr=False)
    expires_at: float = 0.0
    """Unix seconds."""


@dataclass(slots=True)
class GatewaySession:
    """One attempt's session, as the inference routes use it."""

    session_id: str
    rollout: RolloutIdentity
    sampling: Mapping[str, Any]
    """Parameters that every request of this attempt gets, whatever the harness asks for."""
    expires_at: float
    limits: ChosenLimits = NONE_CHOSEN
    """Time limits of its calls, where the run chose any."""
    turns: int = 0
    usage: Usage = field(default_factory=Usage)

    def count(self, usage: Usage) -> None:
        """Record one successful, delivered call."""
        self.turns += 1
        self.usage += usage


@runtime_checkable
class GatewaySessions(Protocol):
    """The sessions of one model server. A gateway that keeps tokens has another implementation with these methods."""

    async def open(
        self,
        rollout: RolloutIdentity,
        sampling: Mapping[str, Any] | None = None,
        *,
        opener: str = PIPELINE,
        limits: ChosenLimits = NONE_CHOSEN,
    ) -> OpenedSession:
        """Open a session for this attempt. Fences the opener's sessions of older attempts, and replaces its session
        of the same attempt (whose opener never got the response). Raises `FencedError` if the opener has a session of
        a newer attempt. Sessions of other openers (see `opener_of`) are left alone, whatever rollout they name."""
        ...

    def authorize(self, inference_token: str) -> GatewaySession:
        """Return the session that a token belongs to. Raises `CredentialError` for an unknown or expired token,
        `FencedError` for a session that was closed or replaced."""
        ...

    async def finalize(
        self,
        session_id: str,
        control_token: str,
        *,
        reward: float | None = None,
        reward_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Close the session and return ``{session_id, turns, usage, trajectories}``. A repeated call returns the
        same, whatever reward it carries.

        ``reward`` is the verdict's, or ``None`` if there is none to train on; ``reward_info`` is further plain data.
        Sessions that keep trajectories write both into them.
        """
        ...

    async def abort(self, session_id: str, control_token: str) -> None:
        """Close the session and keep nothing."""
        ...


@dataclass(slots=True)
class StoredSession:
    """A session in a `SessionTable`. Its tokens are kept as digests only."""

    session: GatewaySession
    key: SessionKey
    inference_digest: str
    control_digest: str

    @property
    def session_id(self) -> str:
        return self.session.session_id


S = TypeVar("S", bound=StoredSession)


class SessionTable(Generic[S]):
    """Sessions by id, by inference token, and the latest session of each key."""

    def __init__(self) -> None:
        self._by_id: dict[str, S] = {}
        self._by_token: dict[str, S] = {}
        self._current: dict[SessionKey, S] = {}

    def add(self, session: S) -> None:
        """Add a session, which becomes the current one of its key."""
        self._by_id[session.session_id] = session
        self._by_token[session.inference_digest] = session
        self._current[session.key] = session

    def drop(self, session: S) -> None:
        self._by_id.pop(session.session_id, None)
        self._by_token.pop(session.inference_digest, None)
        if self._current.get(session.key) is session:
            del self._current[session.key]

    def current(self, key: SessionKey) -> S | None:
        return self._current.get(key)

    def opened_by(self, inference_token: str) -> S | None:
        """Return the session that an inference token opens, if there is one."""
        return self._by_token.get(token_digest(inference_token))

    def known(self, session_id: str) -> S:
        """Return the session of an id. Raises `ContractError` for an unknown id."""
        if (session := self._by_id.get(session_id)) is None:
            raise ContractError(f"session '{session_id}' is not known here", session_id=session_id)
        return session

    def controlled(self, session_id: str, control_token: str) -> S:
        """Return the session that a control token is for. Raises `ContractError`, `CredentialError`."""
        session = self.known(session_id)
        if not hmac.compare_digest(session.control_digest, token_digest(control_token)):
            raise CredentialError("the control token is not this session's", session_id=session_id)
        return session

    def completable(self, session_id: str, token: str) -> S:
        """Return the session that a control or completion token is for. Raises `ContractError`, `CredentialError`."""
        session = self.known(session_id)
        if hmac.compare_digest(completion_token(session.control_digest), token):
            return session
        return self.controlled(session_id, token)

    def __iter__(self) -> Iterator[S]:
        """Iterate in the order of opening. Sessions may be dropped during the iteration."""
        return iter([*self._by_id.values()])

    def oldest(self, count: int) -> list[S]:
        return [*itertools.islice(self._by_id.values(), count)]


def new_tokens(expires_at: float) -> OpenedSession:
    """A new session's id and tokens."""
    return OpenedSession(
        secrets.token_hex(12),
        INFERENCE_TOKEN_PREFIX + secrets.token_urlsafe(32),
        secrets.token_urlsafe(32),
        expires_at,
    )


def refuse_older(rollout: RolloutIdentity, current_attempt: int) -> None:
    """Raise `FencedError` for an attempt that a newer attempt has replaced."""
    if current_attempt > rollout.attempt:
        raise FencedError(
            f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was replaced by attempt {current_attempt}",
            rollout_id=rollout.rollout_id,
        )


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(slots=True)
class _InMemorySession(StoredSession):
    closed_at: float | None = None
    summary: dict[str, Any] | None = None


class InMemoryGatewaySessions:
    """Sessions in the memory of one process, with counts of turns and tokens. A restart loses them, and their
    attempts are retried."""

    def __init__(self, ttl_s: float = SESSION_TTL_S) -> None:
        self._ttl_s = ttl_s
        self._table: SessionTable[_InMemorySession] = SessionTable()
        self._closed: deque[_InMemorySession] = deque()

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
        if (current := self._table.current(key)) is not None:
            refuse_older(rollout, current.session.rollout.attempt)
            self._close(current)
        opened = new_tokens(time.time() + self._ttl_s)
        session = GatewaySession(opened.session_id, rollout, dict(sampling or {}), opened.expires_at, limits)
        digests = token_digest(opened.inference_token), token_digest(opened.control_token)
        self._table.add(_InMemorySession(session, key, *digests))
        return opened

    def authorize(self, inference_token: str) -> GatewaySession:
        entry = self._table.opened_by(inference_token)
        if entry is None:
            raise CredentialError("unknown inference token: its session expired, or the server restarted")
        if entry.closed_at is not None:
            raise FencedError("the session of this inference token was closed, or replaced by a newer attempt")
        if entry.session.expires_at < time.time():
            self._close(entry)
            raise CredentialError("the inference token has expired")
        return entry.session

    async def finalize(
        self,
        session_id: str,
        control_token: str,
        *,
        reward: float | None = None,
        reward_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        entry = self._table.controlled(session_id, control_token)
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
        self._close(self._table.controlled(session_id, control_token))

    def _close(self, entry: _InMemorySession) -> None:
        if entry.closed_at is None:
            entry.closed_at = time.time()
            self._closed.append(entry)

    def _sweep(self) -> None:
        """Forget sessions that closed or expired long enough ago, and the oldest if too many are closed."""
        while len(self._closed) > KEEP_CLOSED_SESSIONS:
            self._table.drop(self._closed.popleft())
        before = time.time() - KEEP_CLOSED_S
        # Sessions are in order of opening and live about equally long: checking the oldest few is enough.
        for entry in self._table.oldest(8):
            ended = entry.closed_at if entry.closed_at is not None else entry.session.expires_at
            if ended < before:
                self._table.drop(entry)


def completion_token(control_digest: str) -> str:
    """Return a token that can end a session's work and post its reward, and nothing else. It is derived from the
    control token, which cannot be derived from it."""
    return COMPLETION_TOKEN_PREFIX + hmac.new(control_digest.encode(), b"complete", hashlib.sha256).hexdigest()


def token_in(headers: Mapping[str, str], prefix: str = INFERENCE_TOKEN_PREFIX) -> str | None:
    """Return the token with that prefix from a request's bearer or ``x-api-key``; ``None`` for another credential."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    token = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return token if token.startswith(prefix) else None


@dataclass(slots=True)
class InferenceCall:
    """One request for inference, with the session's sampling parameters already in ``body``."""

    dialect: Dialect
    body: dict[str, Any]
    session: GatewaySession | None
    """``None`` for a caller of the stack that has no session: a judge's environment, a legacy agent."""
    request: Request
    usage: Usage | None = None
    """The usage of a reply that is no stream, if ``infer`` knows it; otherwise it is read from the reply."""

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))
