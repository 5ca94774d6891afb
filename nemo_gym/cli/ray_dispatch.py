"""``dispatch=ray``: run the servers on the nodes of a Ray cluster, and the pipeline here or as services on nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.tasks import Backoff, until_failure
from nemo_gym.config.composition import Composition
from nemo_gym.config.hosts import PIPELINE, Hosts, NodePart, RayConfig, RayNode, hosts_block, name_of
from nemo_gym.config.keys import HOST, HOSTS
from nemo_gym.contract.credentials import is_loopback
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import url_host
from nemo_gym.service.client import ADDRESS_FILE
from nemo_gym.service.routes import ServiceRole, ServiceTokens, variable_of
from nemo_gym.service.service import write_address
from nemo_gym.stack.endpoints import http_answer
from nemo_gym.stack.ports import wait_for_others
from nemo_gym.stack.ray_nodes import RayNodes
from nemo_gym.stack.stack import run_directory

if TYPE_CHECKING:
    from nemo_gym.stack.supervisor import Supervisor

VARIABLES = "NEMO_GYM_"
"""Prefix of the environment variables that this command passes to its nodes."""
Work = Callable[["Supervisor"], Awaitable[int]]


class RayRun:
    """The parts that the cluster's nodes run, and this command's own composition, which starts no server."""

    def __init__(
        self, composition: Composition, config: RayConfig, words: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._say, self._words = say, list(words)
        self._cluster = RayNodes(config, say)
        nodes = self._cluster.nodes()
        if config.pipelines > len(nodes):
            raise ConfigError(
                f"ray.pipelines={config.pipelines}: the cluster has {len(nodes)} nodes", key="ray.pipelines"
            )
        run_id, run_dir = run_directory(composition)
        block = hosts_block(composition, config, nodes, self._cluster.own_address)
        composition.values.update({HOSTS: block, HOST: PIPELINE, "run_id": run_id, "run_dir": str(run_dir)})
        self._composition = composition
        self._run_dir = run_dir
        self._services: dict[str, dict[str, Any]] = {
            name_of(node): self._service(config, node) for node in nodes[: config.pipelines]
        }
        self._parts = [(node, self._part(node, block, run_id)) for node in nodes]
        self._variables = {key: value for key, value in os.environ.items() if key.startswith(VARIABLES)}

    def _part(self, node: RayNode, block: dict[str, Any], run_id: str) -> NodePart:
        name = name_of(node)
        return NodePart(name, block, run_id, str(self._run_dir / "nodes" / name), serve=self._services.get(name))

    def _service(self, config: RayConfig, node: RayNode) -> dict[str, Any]:
        if not is_loopback(node.address) and not config.plain_http:
            raise ConfigError(
                "ray.pipelines: services speak plain HTTP; say ray.plain_http: true where the nodes' network is"
                " private, or leave ray.pipelines out",
                key="ray.plain_http",
            )
        place = {"host": node.address, "port": node.service_port, "pipeline": name_of(node), "plain_http": True}
        return {**self._composition.serve_values(), **place}

    def around(self, work: Work) -> Work:
        """Wrap ``work``: start the nodes' servers, do the work when they are ready, then stop them."""

        async def on_nodes(supervisor: Supervisor) -> int:
            hosts = Hosts.of(self._composition)
            assert hosts is not None
            if self._services:
                await self._publish_address()
            failure = self._cluster.start(self._parts, self._words, Path.cwd(), self._variables)
            try:
                return await until_failure(self._when_ready(work, supervisor, hosts), failure)
            finally:
                await self._cluster.stop()

        return on_nodes

    async def _when_ready(self, work: Work, supervisor: Supervisor, hosts: Hosts) -> int:
        await wait_for_others(hosts, supervisor.settings.startup_timeout_s, self._say)
        if not self._services:
            return await work(supervisor)
        for url in self._urls():
            backoff = Backoff(first_s=0.05, longest_s=1.0)
            while (answer := await http_answer(url, "/health", timeout_s=5.0)) is None or answer[0] != 200:
                await backoff.again()
        urls = " and ".join(self._urls())
        print(f"rollouts are served at {urls}; tokens in {self._run_dir / ADDRESS_FILE}", flush=True)
        await asyncio.Event().wait()
        return 0

    def _urls(self) -> list[str]:
        return [f"http://{url_host(each['host'])}:{each['port']}" for each in self._services.values()]

    async def _publish_address(self) -> None:
        """Make one set of tokens for all services; write the first one's address for commands of the same user."""
        tokens_file = next(iter(self._services.values())).get("tokens")
        tokens = ServiceTokens.load(Path(tokens_file) if tokens_file else None)
        role_tokens = {role: tokens.one_of(role) for role in ServiceRole}
        if not tokens_file:
            self._variables |= {variable_of(role): token for role, token in role_tokens.items() if token}
        path = self._run_dir / ADDRESS_FILE
        await asyncio.to_thread(
            write_address, path, self._urls()[0], {role.value: token for role, token in role_tokens.items()}, ""
        )
