"""A pool of gateways: each session goes to the least busy gateway that answers, and stays there.

A session is counted before its request is awaited, so sessions that open together spread evenly. A gateway that does
not answer gets no more sessions until it is ready again; the sessions that were open there are aborted then.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from nemo_gym._util.tasks import BackgroundTasks, finish
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.framework.runners import SessionHandle
from nemo_gym.gateway.tokens.trajectories import Trajectory, from_row
from nemo_gym.http.client import ServerClient
from nemo_gym.http.peers import PeerError, Peers

PROBE_INTERVAL_S = 1.0
ABORT_TIMEOUT_S = 30.0
FINALIZE_TIMEOUT_S = 300.0
log = structlog.get_logger(__name__)


class SessionLostError(ServerError):
    """No gateway answers, or the session's gateway does not. The session can be run again as a new attempt."""

    code = "gateway_lost"


@dataclass(slots=True, eq=False)
class Gateway:
    """The pool's record of one gateway."""

    name: str
    peers: Peers = field(repr=False)
    active: int = 0
    """The number of sessions that are open or being opened."""
    alive: bool = True
    orphans: list[tuple[str, str]] = field(default_factory=list, repr=False)
    """The sessions, with their control tokens, that are to be aborted when the gateway is back."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """One open session. ``rollout.attempt`` counts the tries of the same sample."""

    gateway: Gateway
    rollout: RolloutIdentity
    handle: SessionHandle
    base_url: str
    """The base URL without a token, for callers that send the token as a header."""
    inference_token: str = field(repr=False)
    control_token: str = field(repr=False)

    @property
    def session_id(self) -> str:
        return self.handle.session_id


class GatewayPool:
    """The gateways of one framework.

    Args:
        names: the gateways' instance names among ``client``'s servers.
        patience_s: how many seconds a new session waits while no gateway answers.
        observe: receives the number of sessions by gateway after each opening.
    """

    def __init__(
        self,
        client: ServerClient,
        names: Sequence[str],
        *,
        patience_s: float = 60.0,
        observe: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        if not names:
            raise ConfigError("gateways: the framework needs at least one", key="gateway_count")
        # Do not wait for a gateway that cannot be reached, because another one takes the session.
        self.gateways = [Gateway(name, Peers(client, connect_patience_s=0.0, max_tries=2)) for name in names]
        self._patience_s = patience_s
        self._observe = observe
        self._turn = itertools.count()
        self._probing = BackgroundTasks()

    @property
    def counts(self) -> dict[str, int]:
        """The number of sessions by gateway, for gateways that answer."""
        return {gateway.name: gateway.active for gateway in self.gateways if gateway.alive}

    async def open(
        self, rollout: RolloutIdentity, sampling: Mapping[str, Any], *, ttl_s: float | None = None
    ) -> OpenSession:
        """Open a session with the least busy gateway. Raises `SessionLostError` if no gateway answers in time, and
        `PeerError` if a gateway refuses the session."""
        give_up = time.monotonic() + self._patience_s
        while True:
            gateway = self._least_busy()
            if gateway is None:
                if time.monotonic() >= give_up:
                    names = ", ".join(each.name for each in self.gateways)
                    raise SessionLostError(f"no gateway answers ({names})", retryable=True)
                await asyncio.sleep(PROBE_INTERVAL_S / 4)
                continue
            gateway.active += 1
            try:
                opened = await self._request_session(gateway, rollout, sampling, ttl_s)
            except PeerError as error:
                gateway.active -= 1
                if not _is_gateway_failure(error):
                    raise
                self._mark_lost(gateway, error)
                continue
            except BaseException:
                # A session may have been opened. Its tokens are lost, so it stays open until its deadline.
                gateway.active -= 1
                raise
            if self._observe is not None:
                self._observe(self.counts)
            return opened

    async def finalize(
        self, session: OpenSession, *, reward: float | None = None, reward_info: Mapping[str, Any] | None = None
    ) -> list[Trajectory]:
        """Close a session and return its trajectories. Raises `SessionLostError`, or `PeerError` if it was aborted."""
        body: dict[str, Any] = {"reward": reward, "reward_info": dict(reward_info or {})}
        try:
            async with asyncio.timeout(FINALIZE_TIMEOUT_S):
                rows = (await self._control(session, "finalize", body))["trajectories"]
        except (PeerError, TimeoutError) as error:
            if not _is_gateway_failure(error):
                raise
            self._mark_lost(session.gateway, error)
            raise SessionLostError(
                f"gateway '{session.gateway.name}' was lost with session '{session.session_id}': {error}",
                retryable=True,
            ) from error
        if any(not row["prompt_ids"] for row in rows):
            raise ConfigError(
                f"gateway '{session.gateway.name}' keeps text and no tokens: a trainer needs one before engines that"
                " take token ids, with policy.path",
                key="policy.path",
            )
        trajectories = [from_row(row) for row in rows]
        session.gateway.active -= 1
        return trajectories

    async def abort(self, session: OpenSession) -> None:
        """Close a session and discard its trajectories, even if the caller is cancelled meanwhile; if its gateway is
        lost, close it later. Call this once, and only for a session that was not finalized."""
        try:
            if not session.gateway.alive:
                session.gateway.orphans.append((session.session_id, session.control_token))
                return
            await finish(self._control(session, "abort", {}), timeout_s=ABORT_TIMEOUT_S)
        except (PeerError, TimeoutError) as error:
            if _is_gateway_failure(error):
                session.gateway.orphans.append((session.session_id, session.control_token))
                self._mark_lost(session.gateway, error)
            else:
                log.warning("session not aborted", session_id=session.session_id, error=str(error))
        finally:
            session.gateway.active -= 1

    async def answers(self, gateway: Gateway) -> bool:
        """Return whether a gateway answers now. If it does not, mark it as lost."""
        if not gateway.alive:
            return False
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await gateway.peers.get(gateway.name, "/health")
        except (PeerError, TimeoutError) as error:
            self._mark_lost(gateway, error)
        return gateway.alive

    async def aclose(self) -> None:
        await self._probing.cancel()

    def _least_busy(self) -> Gateway | None:
        alive = [gateway for gateway in self.gateways if gateway.alive]
        if not alive:
            return None
        first = next(self._turn) % len(alive)
        return min([*alive[first:], *alive[:first]], key=lambda gateway: gateway.active)

    async def _request_session(
        self, gateway: Gateway, rollout: RolloutIdentity, sampling: Mapping[str, Any], ttl_s: float | None
    ) -> OpenSession:
        body: dict[str, Any] = {
            "rollout": rollout.model_dump(mode="json"),
            "sampling": dict(sampling),
            "reward_source": "runner",
        }
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        facts = (await gateway.peers.post(gateway.name, "/sessions", body)).json()
        if "path_token_complete_url" not in facts:
            raise ConfigError(
                f"gateway '{gateway.name}' takes no tokens in paths, and runners set no headers: start it with"
                " path_tokens: true",
                key="path_tokens",
            )
        handle = SessionHandle(
            facts["session_id"], facts["path_token_base_url"], facts["path_token_complete_url"], facts["model"]
        )
        return OpenSession(
            gateway, rollout, handle, facts["base_url"], facts["inference_token"], facts["control_token"]
        )

    async def _control(self, session: OpenSession, action: str, body: Mapping[str, Any]) -> Any:
        path = f"/sessions/{session.session_id}/{action}"
        gateway = session.gateway
        reply = await gateway.peers.post(
            gateway.name, path, body, control_token=session.control_token, idempotent=True
        )
        return reply.json()

    def _mark_lost(self, gateway: Gateway, error: PeerError | TimeoutError) -> None:
        if gateway.alive:
            gateway.alive = False
            reason = str(error) or "timed out"
            log.warning("gateway lost", gateway=gateway.name, reason=reason, sessions=gateway.active)
            self._probing.start(self._until_ready(gateway), name=f"probe {gateway.name}")

    async def _until_ready(self, gateway: Gateway) -> None:
        while not gateway.alive:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                async with asyncio.timeout(PROBE_INTERVAL_S * 10):
                    await gateway.peers.get(gateway.name, "/ready")
                    while gateway.orphans:
                        await self._abort_orphan(gateway)
            except (PeerError, TimeoutError):
                continue
            gateway.alive = True
            log.info("gateway is back", gateway=gateway.name)

    async def _abort_orphan(self, gateway: Gateway) -> None:
        orphan = gateway.orphans.pop()  # before the wait, during which others may be added
        try:
            path = f"/sessions/{orphan[0]}/abort"
            await gateway.peers.post(gateway.name, path, {}, control_token=orphan[1], idempotent=True)
        except BaseException as error:  # also the time limit
            if not isinstance(error, PeerError) or _is_gateway_failure(error):
                gateway.orphans.append(orphan)
                raise


def _is_gateway_failure(error: PeerError | TimeoutError) -> bool:
    """Return whether the gateway itself failed, rather than refused the request."""
    return isinstance(error, TimeoutError) or error.status == 0 or error.status >= 500
