"""Tracks the free places of servers, so that the pipeline claims only jobs that can start.

Jobs are claimed when an agent server and its environment have a free place, so a faster server gets more jobs. Servers
may be added, drained and removed while jobs run. The jobs of a server that stops answering are queued again.

An attempt holds its place at an agent server from claim to the end of RUN, and its place at an environment to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog

from nemo_gym._util.lazy import lazily
from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE, SERVER_TYPES
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import FailureKind, StageFailure
from nemo_gym.http.client import ServerClient, get_global_aiohttp_client
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.interfaces import JobAttempt, Room, Stop

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

log = structlog.get_logger(__name__)

SPEED_WEIGHT = 0.2
"""The weight of the latest rollout in a server's mean time."""
STRIKES = 3
"""How many rollouts in a row may exceed their deadline at a server before it gets no more."""
LOST_KINDS = {AGENT_TYPE: FailureKind.AGENT_LOST, ENVIRONMENT_TYPE: FailureKind.ENVIRONMENT_LOST}


class NoSuchServerError(ConfigError):
    """No server has this id."""

    code = "no_such_server"
    status = 404


class ServerState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    """The server gets no new rollouts and finishes those it has."""
    LOST = "lost"
    """The server does not answer; when it does, it is used again, unless an operator drained it."""
    REMOVED = "removed"


@dataclass(slots=True)
class PooledServer:
    """One replica of a server instance."""

    instance: str
    kind: str
    url: str
    number: int
    """The number among the instance's replicas; not reused, even if this replica is removed."""
    capacity: int | None = None
    """How many rollouts it takes at once; ``None`` sets no limit."""
    state: ServerState = ServerState.READY
    reason: str | None = None
    """Why the server is not ready."""
    drained: str | None = None
    """Why an operator drained the server; kept while it is lost. ``None`` if none did."""
    busy: int = 0
    done: int = 0
    seconds: float | None = None
    """Moving average of the seconds that a rollout holds a place here; `SPEED_WEIGHT` is the weight of the latest."""
    strikes: int = 0
    answered_at: float = field(default_factory=time.monotonic)

    @property
    def server_id(self) -> str:
        return f"{self.instance}.{self.number}"

    @property
    def is_ready(self) -> bool:
        return self.state is ServerState.READY

    @property
    def free(self) -> int | None:
        """The number of free places; ``None`` if there is no limit."""
        if not self.is_ready:
            return 0
        return None if self.capacity is None else max(0, self.capacity - self.busy)

    def as_dict(self) -> dict[str, Any]:
        """Return the server's status for metrics and status requests."""
        per_minute = None if not self.seconds else round(60 / self.seconds * (self.capacity or max(self.busy, 1)), 2)
        return {
            "server_id": self.server_id,
            "instance": self.instance,
            "kind": self.kind,
            "url": self.url,
            "capacity": self.capacity,
            "busy": self.busy,
            "done": self.done,
            "seconds_per_rollout": None if self.seconds is None else round(self.seconds, 3),
            "rollouts_per_minute": per_minute,
            "health": self.state.value,
            "reason": self.reason,
        }


@dataclass(slots=True)
class _Place:
    server: PooledServer
    since: float


class ServerPool:
    """The servers of a stack, including those that registered later.

    Args:
        agents: the agents whose jobs this pipeline runs, with their servers.
        agent_caps, environment_caps: limits by instance, each over all replicas of the instance.
        on_lost: receives each attempt whose server was lost or removed, and why.
    """

    def __init__(
        self,
        client: ServerClient,
        agents: Mapping[str, Servers],
        *,
        agent_caps: Mapping[str, int],
        environment_caps: Mapping[str, int],
        on_lost: Callable[[JobAttempt, Stop], None],
    ) -> None:
        self._client = client
        self._agents = agents
        self._agent_caps, self._environment_caps = agent_caps, environment_caps
        self._on_lost = on_lost
        self._servers: dict[str, list[PooledServer]] = {}
        self._places: dict[int, tuple[JobAttempt, list[_Place]]] = {}

    # Registering

    def register(
        self, instance: str, url: str, *, capacity: int | None = None, credential: str | None = None
    ) -> PooledServer:
        """Add a replica of a configured instance, or reactivate the replica that has this URL. Raises
        `ConfigError`."""
        servers = self.replicas(instance)
        url = url.rstrip("/")
        server = next((each for each in servers if each.url == url), None)
        number = self._client.add_replica(instance, url, credential)
        if server is None:
            server = PooledServer(instance, servers[0].kind, url, number)
            servers.append(server)
        server.capacity, server.state, server.reason, server.strikes = capacity, ServerState.READY, None, 0
        server.drained = None
        server.answered_at = time.monotonic()
        return server

    def replicas(self, instance: str) -> list[PooledServer]:
        """Return the replicas of an instance. Raises `ConfigError` if the instance is not configured."""
        if instance not in self._servers:
            block = self._client.global_config_dict.get(instance)
            kind = next((each for each in SERVER_TYPES if isinstance(block, Mapping) and each in block), None)
            if kind is None:
                names = [
                    str(name)
                    for name, each in self._client.global_config_dict.items()
                    if isinstance(each, Mapping) and any(server_type in each for server_type in SERVER_TYPES)
                ]
                raise ConfigError(
                    f"instance: no server of this composition is named '{instance}'{nearest(instance, names)}; there"
                    f" are: {', '.join(names) or 'none'}",
                    key="instance",
                )
            self._servers[instance] = [
                PooledServer(instance, kind, url, number)
                for number, url in enumerate(self._client.replica_urls(instance))
            ]
        return self._servers[instance]

    def of_id(self, server_id: str) -> PooledServer:
        """Return the server with this id. Raises `NoSuchServerError`."""
        for server in self.all():
            if server.server_id == server_id and server.state is not ServerState.REMOVED:
                return server
        ids = [server.server_id for server in self.all() if server.state is not ServerState.REMOVED]
        raise NoSuchServerError(
            f"no server has the id '{server_id}'{nearest(server_id, ids)}; there are: {', '.join(ids) or 'none'}",
            key="server_id",
        )

    def all(self) -> list[PooledServer]:
        return [server for servers in self._servers.values() for server in servers]

    def drain(self, server: PooledServer, reason: str) -> None:
        """Give the server no new rollouts until it is registered again."""
        server.state, server.reason, server.drained = ServerState.DRAINING, reason, reason

    def remove(self, server: PooledServer, reason: str) -> int:
        """Stop using a server and give its attempts back. Return the number of these attempts."""
        server.state, server.reason = ServerState.REMOVED, reason
        self._client.remove_replica(server.instance, server.url)
        return self._give_back(server, f"server '{server.server_id}' was removed: {reason}")

    # Places

    def room(self) -> Room:
        """Return the free places of all agents and environments."""
        agents: dict[str, int] = {}
        environments: dict[str, int] = {}
        environment_of: dict[str, str] = {}
        for agent, servers in self._agents.items():
            agents[agent] = self._free(agent, self._agent_caps.get(agent))
            if (environment := servers.environment) is not None:
                environment_of[agent] = environment
                if environment not in environments:
                    environments[environment] = self._free(environment, self._environment_caps.get(environment))
        return Room(agents, environment_of, environments)

    def _free(self, instance: str, cap: int | None) -> int:
        unbounded, free, busy = False, 0, 0
        for server in self.replicas(instance):
            places = server.free
            unbounded = unbounded or places is None
            free += places or 0
            busy += server.busy
        free = UNBOUNDED if unbounded else free
        return free if cap is None else min(free, max(0, cap - busy))

    def admit(self, attempt: JobAttempt) -> None:
        """Reserve places for a claimed job's attempt, and record the replicas that it uses."""
        servers = attempt.servers
        places = []
        for instance in (servers.agent, servers.environment, servers.model):
            if instance is None or (not self._has_choice(instance) and instance == servers.model):
                continue
            server = self._chosen(instance, attempt.replicas.get(instance))
            if self._has_choice(instance):
                attempt.replicas[instance] = server.number
            server.busy += 1
            places.append(_Place(server, time.monotonic()))
        self._places[id(attempt)] = (attempt, places)

    def _has_choice(self, instance: str) -> bool:
        return len(self.replicas(instance)) > 1

    def _chosen(self, instance: str, number: int | None) -> PooledServer:
        servers = self.replicas(instance)
        if number is not None and number < len(servers):
            return servers[number]  # the replica that holds the attempt's session
        ready = [server for server in servers if server.is_ready] or servers

        def load(server: PooledServer) -> tuple[bool, float, int]:
            capacity = server.capacity or max((each.capacity or 1) for each in servers)
            return server.free == 0, server.busy / capacity, server.done

        return min(ready, key=load)

    def ran(self, attempt: JobAttempt) -> None:
        """Free the attempt's place at its agent server, because RUN is over."""
        self._finish(attempt, AGENT_TYPE)

    def succeeded(self, attempt: JobAttempt) -> None:
        self._finish(attempt)

    def _finish(self, attempt: JobAttempt, kind: str | None = None) -> None:
        """Free the places at servers of a kind, or all, and count the rollout as done there."""
        _, places = self._places.get(id(attempt), (attempt, []))
        for place in [each for each in places if kind is None or each.server.kind == kind]:
            places.remove(place)
            server, seconds = place.server, time.monotonic() - place.since
            if server.seconds is None:
                server.seconds = seconds
            else:
                server.seconds += SPEED_WEIGHT * (seconds - server.seconds)
            server.busy -= 1
            server.done += 1
            server.strikes = 0

    def failed(self, attempt: JobAttempt, failure: StageFailure) -> None:
        """Count an exceeded deadline against the attempt's servers: a stage's deadline, or the job's own if at least
        half of it passed at that server. Drain a server after `STRIKES` in a row, if another replica is ready."""
        if failure.kind is not FailureKind.DEADLINE:
            return
        _, places = self._places.get(id(attempt), (attempt, []))
        job_deadline_s = 0.0 if attempt.stop is None else (attempt.job.spec.deadline_s or 0.0)
        for place in places:
            server = place.server
            if time.monotonic() - place.since < job_deadline_s / 2:
                continue
            server.strikes += 1
            others = [each for each in self.replicas(server.instance) if each is not server]
            if server.strikes >= STRIKES and any(each.is_ready for each in others):
                # If it is lost and comes back, it was restarted, and is tried again.
                server.state = ServerState.DRAINING
                server.reason = f"{server.strikes} rollouts in a row ran into their deadline"
                log.warning("server drained", server=server.server_id, reason=server.reason)

    def release(self, attempt: JobAttempt) -> None:
        """Free the remaining places of an attempt that is over; idempotent."""
        _, places = self._places.pop(id(attempt), (attempt, []))
        for place in places:
            place.server.busy -= 1

    def _give_back(self, server: PooledServer, reason: str) -> int:
        kind = LOST_KINDS.get(server.kind, FailureKind.MODEL_UNREACHABLE)
        stop = Stop(kind, reason, retryable=True, server_lost=True)
        affected = [each for each, places in self._places.values() if any(place.server is server for place in places)]
        for attempt in affected:
            self._on_lost(attempt, stop)
        return len(affected)

    # Watching

    async def watch(self, *, every_s: float, silent_s: float) -> None:
        """Check every ``every_s`` seconds that each server answers. If a server has been silent for ``silent_s``, give
        its jobs back. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            servers = [each for each in self.all() if each.state is not ServerState.REMOVED]
            await asyncio.gather(*(self._probe(server, silent_s) for server in servers))

    async def _probe(self, server: PooledServer, silent_s: float) -> None:
        try:
            async with asyncio.timeout(silent_s):
                async with get_global_aiohttp_client().get(server.url + "/ready", allow_redirects=False) as reply:
                    await reply.read()
        # ValueError: a URL that no client can use must not end the watch over all other servers.
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            silence_s = time.monotonic() - server.answered_at
            if silence_s >= silent_s and server.state in (ServerState.READY, ServerState.DRAINING):
                reason = f"silent for {silence_s:.0f} s ({type(error).__name__})"
                server.state, server.reason = ServerState.LOST, reason
                given_back = self._give_back(server, f"server '{server.server_id}' is {reason}")
                log.warning("server lost", server=server.server_id, reason=reason, given_back=given_back)
            return
        server.answered_at = time.monotonic()
        if server.state is ServerState.LOST:
            log.info("server is back", server=server.server_id)
            server.state = ServerState.READY if server.drained is None else ServerState.DRAINING
            server.reason = server.drained


UNBOUNDED = 1 << 30
"""The number of free places at servers without a limit."""
