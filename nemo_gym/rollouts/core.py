"""The core that turns jobs into results: it joins a job store, the stages, and the servers of a stack.

Its clients are runs (`nemo_gym.rollouts.collection`), examples, samplers for RL and the service. They differ in where
jobs come from and where results go.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.peers import Peers
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.interfaces import JobAttempt, JobListener
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.routing import agent_instances, checked_servers, environment_instances, preflight
from nemo_gym.rollouts.server_pool import ServerPool
from nemo_gym.rollouts.stages import http_stages
from nemo_gym.rollouts.store import SqlJobStore


class RolloutCore:
    """The checked servers of a stack, and a dispatcher over them.

    Args:
        say: receives one sentence about each engine.
        needs_engines: treat an engine that does not answer as an error; by default, calls to it are tried again.
    """

    def __init__(
        self,
        client: ServerClient,
        config: PipelineConfig,
        *,
        say: Callable[[str], None] = lambda text: None,
        needs_engines: bool = False,
    ) -> None:
        self.client = client
        self.config = config
        self.peers = Peers(client)
        self.routes: dict[str, Servers] = {}
        """The checked agents, with their servers."""
        self.preflighted: set[str] = set()
        """The agents whose model server has checked its engines."""
        self.agents = agent_instances(client.global_config_dict)
        self._say = say
        self._needs_engines = needs_engines
        self._checking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def add_route(self, agent: str, *, preflights: bool = True) -> Servers:
        """Return the servers of an agent, checking them once. Raises `ConfigError` if they do not fit the run. With
        ``preflights``, also have the model server check its engines once."""
        async with self._checking[agent]:
            route = self.routes.get(agent) or await checked_servers(self.client, self.peers, agent, self.config)
            if preflights and agent not in self.preflighted:
                await preflight([route], self.peers, self._say, reachable=self._needs_engines)
                self.preflighted.add(agent)
            self.routes[agent] = route
        return route

    async def preflight(self) -> None:
        """Have the model servers of all routes check their engines once."""
        await preflight(self.routes.values(), self.peers, self._say, reachable=self._needs_engines)

    def dispatcher(
        self,
        store: SqlJobStore,
        *,
        listener: JobListener | None = None,
        logs: Path | None = None,
        several_runs: bool = False,
        on_run: Callable[[JobAttempt], None] | None = None,
        pooled: bool | None = None,
        owner: str | None = None,
        sweeps: bool = False,
        server_logs: Path | None = None,
    ) -> AsyncDispatcher:
        """Return a dispatcher over ``store``; the caller starts and stops it.

        Args:
            logs: the folder for the logs of evaluations.
            several_runs: the jobs may be of several runs.
            server_logs: the folder of the servers' logs, which failure rows name.
            on_run: called when an attempt enters RUN.
            pooled: claim only jobs whose servers have a free place; by default, if the configuration sets caps.
        """
        config = self.config
        topology = (self.client.global_config_dict.get("composition") or {}).get("topology")
        stages = http_stages(
            self.peers, config, None if topology is None else str(topology), logs=logs, several_runs=several_runs
        )
        has_pool = bool(config.agent_caps or config.environment_caps) if pooled is None else pooled
        self.pool = self._pool() if has_pool else None
        self._dispatcher = AsyncDispatcher(
            store,
            stages,
            config,
            self.routes.__getitem__,
            listener=listener,
            pool=self.pool,
            owner=owner,
            sweeps=sweeps,
            server_logs=server_logs,
            on_run=on_run,
            on_restored=stages[0].adopt,
        )
        return self._dispatcher

    def _pool(self) -> ServerPool:
        config = self.config
        config.check_caps(self.agents, environment_instances(self.client.global_config_dict))
        return ServerPool(
            self.client,
            self.routes,
            agent_caps=config.agent_caps,
            environment_caps=config.environment_caps,
            on_lost=lambda attempt, stop: self._dispatcher.interrupt(attempt, stop),
        )
