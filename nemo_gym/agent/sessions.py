"""Agent sessions of NeMo Gym's protocol: seeded and closed under an id that the caller chose.

An agent overrides `AgentSessions._seed_agent_session_state` and `_close_agent_session_state`. A repeated seed gets the
same session. If an id is closed before it was seeded, a later seed of it is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from pydantic import Field, field_validator
from starlette.requests import Request

from nemo_gym.contract.episodes import EpisodeId, SandboxAccess, StrictModel, TaskId, ToolAccess, unique_tool_names
from nemo_gym.rollout_observability import AgentObservationBundle

if TYPE_CHECKING:
    from fastapi import FastAPI

AGENT_SESSION_COOKIE_KEY = "agent_session_id"


class AgentSeedSessionRequest(StrictModel):
    """Opens a session under the caller's id."""

    agent_session_id: str = Field(min_length=1)
    task_id: TaskId
    episode_id: EpisodeId
    sandbox_access: SandboxAccess | None = None
    tool_accesses: list[ToolAccess] = Field(default_factory=list)

    @field_validator("tool_accesses")
    @classmethod
    def _unique(cls, accesses: list[ToolAccess]) -> list[ToolAccess]:
        return unique_tool_names(accesses)


class AgentSeedSessionResponse(StrictModel):
    agent_session_id: str


class AgentCloseSessionRequest(StrictModel):
    agent_session_id: str
    episode_id: EpisodeId


class AgentCloseSessionResponse(StrictModel):
    """The session's results: the agent's observations, and the latest cookies it got from the environment."""

    agent_session_id: str
    agent_observations: AgentObservationBundle | None = None
    resources_cookies: dict[str, str] | None = None


@dataclass
class AgentSessionState:
    """An agent's state for a session; subclasses add fields."""

    request: AgentSeedSessionRequest


class AgentSessionSetupError(Exception):
    """A seed failed half-way, and so did its cleanup. ``state`` is kept so that a close can retry the cleanup."""

    def __init__(self, state: AgentSessionState, *, error: BaseException) -> None:
        super().__init__(str(error))
        self.state = state
        self.error = error


@dataclass
class _AgentSessionRecord:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: AgentSessionState | None = None
    closing: bool = False
    """Whether the session accepts no more work, because a close began or a seed failed half-way."""
    episode_id: EpisodeId | None = None
    close_response: AgentCloseSessionResponse | None = None
    expires_at: float = float("inf")


class AgentSessions:
    """The part of `nemo_gym.agent.server.SimpleResponsesAPIAgent` that manages sessions."""

    config: Any
    _session_records: dict[str, _AgentSessionRecord]

    def effective_tool_accesses(self, request: AgentSeedSessionRequest) -> list[ToolAccess]:
        """The configured tools and the session's tools; the session's replace configured ones of the same name."""
        granted = {access.name: access for access in request.tool_accesses}
        configured = [granted.pop(access.name, access) for access in self.config.tool_accesses]
        return [*configured, *granted.values()]

    async def seed_agent_session(self, request: Request, body: AgentSeedSessionRequest) -> AgentSeedSessionResponse:
        """Open the session; a repeated request gets the same response. A closed session is a conflict (409), which no
        caller retries."""
        if (self.config.num_workers or 1) > 1:
            raise ValueError(
                f"sessions require num_workers=1: they live in one process, and '{self.config.name}' has"
                f" {self.config.num_workers}"
            )
        async with self._locked_agent_session(body.agent_session_id) as record:
            if record.closing or record.close_response is not None:
                raise HTTPException(409, f"agent session '{body.agent_session_id}' is closed")
            if record.state is None:
                try:
                    record.state = await self._seed_agent_session_state(body)
                except AgentSessionSetupError as error:
                    record.state, record.closing = error.state, True
                    raise error.error from error
                finally:
                    if record.state is None:
                        self._session_records.pop(body.agent_session_id, None)
                record.episode_id = body.episode_id
            elif record.state.request != body:
                raise ValueError(f"agent session '{body.agent_session_id}' was seeded with another request")
        request.session[AGENT_SESSION_COOKIE_KEY] = body.agent_session_id
        return AgentSeedSessionResponse(agent_session_id=body.agent_session_id)

    async def close_agent_session(self, request: Request, body: AgentCloseSessionRequest) -> AgentCloseSessionResponse:
        """End the session. A repeated close gets the same reply for ``session_close_retry_window_seconds``. If the
        cleanup fails, the session is kept and can be closed again."""
        async with self._locked_agent_session(body.agent_session_id) as record:
            seeded_episode = record.state.request.episode_id if record.state is not None else record.episode_id
            if seeded_episode is not None and seeded_episode != body.episode_id:
                raise ValueError(f"agent session '{body.agent_session_id}' belongs to another episode")
            if record.close_response is None:
                record.closing = True
                if record.state is None:
                    record.close_response = AgentCloseSessionResponse(agent_session_id=body.agent_session_id)
                else:
                    record.close_response = await self._close_agent_session_state(record.state)
                record.state, record.episode_id = None, body.episode_id
                record.expires_at = time.monotonic() + self.config.session_close_retry_window_seconds
            return record.close_response

    @asynccontextmanager
    async def _locked_agent_session(self, session_id: str) -> AsyncIterator[_AgentSessionRecord]:
        now = time.monotonic()
        for expired_id in [key for key, record in self._session_records.items() if record.expires_at <= now]:
            del self._session_records[expired_id]
        record = self._session_records.setdefault(session_id, _AgentSessionRecord())
        async with record.lock:
            yield record

    @staticmethod
    def _agent_session_id_from_request(request: Request | None) -> str | None:
        scope = getattr(request, "scope", None)
        if request is None or (isinstance(scope, dict) and "session" not in scope):
            return None
        session = getattr(request, "session", None)
        session_id = session.get(AGENT_SESSION_COOKIE_KEY) if isinstance(session, Mapping) else None
        return session_id if isinstance(session_id, str) else None

    def _require_agent_session(self, agent_session_id: str) -> AgentSessionState:
        record = self._session_records.get(agent_session_id)
        if record is None or record.state is None or record.closing:
            raise ValueError(f"agent session '{agent_session_id}' is not open")
        return record.state

    async def _seed_agent_session_state(self, body: AgentSeedSessionRequest) -> AgentSessionState:
        """Check the granted access, and prepare the harness. If the cleanup of a failed seed fails too, raise
        `AgentSessionSetupError`."""
        raise NotImplementedError(f"{type(self).__name__} keeps no agent sessions")

    async def _close_agent_session_state(self, state: AgentSessionState) -> AgentCloseSessionResponse:
        """Release what the session holds. If that fails, raise and keep ``state`` fit for another close."""
        return AgentCloseSessionResponse(agent_session_id=state.request.agent_session_id)

    def _add_session_routes(self, app: FastAPI) -> None:
        app.post("/v1/agent_sessions")(self.seed_agent_session)
        app.post("/v1/agent_sessions/close")(self.close_agent_session)
