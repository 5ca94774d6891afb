"""Server processes on a Ray cluster: one actor per node, which runs ``ng_run`` with that node's part.

An actor reserves no CPU in Ray: servers mostly wait for models and boxes, and the node itself limits what they use.
The servers are those of a composition on several hosts: they share one secret, and listen only at their node's
address. The pipeline distributes jobs among them, and moves the jobs of a lost node to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_gym._util.files import write_all
from nemo_gym._util.tasks import BackgroundTasks, pause_after
from nemo_gym.config.hosts import NODE_FD, NodePart, RayConfig, RayNode
from nemo_gym.contract.errors import ConfigError, ServerError

EXIT_CONFIG = 2
STOP_WITHIN_S = 60.0
CONNECT_WITHIN_S = 10.0
PORTS = 64
"""Number of free ports requested from each node. Nodes with the same address share their ports."""
TAIL_BYTES = 4000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
CODE = (
    "import json, sys; from nemo_gym.cli import command, run;"
    " command.run(run.NAME, run.run_command, json.load(sys.stdin))"
)
"""Reads its settings from standard input, because they may contain keys, which must not appear in an argv."""


class NodeActor:
    """The actor that runs in a Ray worker on its node."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    def free_ports(self, address: str, count: int) -> list[int]:
        """Return ``count`` distinct ports that are free at the same time."""
        with contextlib.ExitStack() as probes:
            sockets = [probes.enter_context(socket.create_server((address, 0))) for _ in range(count)]
            return [int(probe.getsockname()[1]) for probe in sockets]

    async def run(
        self, words: Sequence[str], directory: str, variables: Mapping[str, str], part: NodePart
    ) -> tuple[int, str]:
        """Run the node's ``ng_run`` until it ends; return its exit code and the end of its log."""
        Path(part.run_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        log = Path(part.run_dir, "ng_run.log")
        lines = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        part_fd = os.memfd_create("nemo-gym-ray-node", 0)
        try:
            write_all(part_fd, replace(part, parent_pid=os.getpid()).to_json())
            os.lseek(part_fd, 0, os.SEEK_SET)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", CODE),
                stdin=asyncio.subprocess.PIPE,
                stdout=lines,
                stderr=lines,
                cwd=directory,
                env={**os.environ, **variables, NODE_FD: str(part_fd)},
                pass_fds=[part_fd],
            )
        finally:
            os.close(part_fd)
            os.close(lines)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(words)).encode())
        self._process.stdin.close()
        code = await self._process.wait()
        return code, await asyncio.to_thread(_log_tail, log)

    async def stop(self) -> None:
        """Send SIGTERM to ``ng_run`` and wait for its end; idempotent."""
        if (process := self._process) is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@dataclass(slots=True)
class _Running:
    part: NodePart
    node: RayNode
    actor: Any = None
    is_lost: bool = False


class RayNodes:
    """The nodes of a cluster, used by the command that dispatches to them."""

    def __init__(self, config: RayConfig, say: Callable[[str], None]) -> None:
        """Join the cluster. Raises `ConfigError` if no cluster responds, or Ray is not installed."""
        try:
            import ray
        except ImportError:
            raise ConfigError("dispatch=ray needs Ray: pip install 'nemo-gym-suite[ray]'", key="dispatch") from None
        self._ray = ray
        self._say = say
        self._tasks = BackgroundTasks()
        self._running: list[_Running] = []
        self._stopping = False
        try:
            if not ray.is_initialized():
                _require_listener(config.address)  # Ray itself would try for minutes
                ray.init(address=config.address, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise ConfigError(
                f"ray.address: no cluster answers at '{config.address}' ({type(error).__name__}); start one with"
                " 'ray start', give ray.address=HOST:PORT, or set RAY_AUTH_MODE=token if the cluster wants a token",
                key="ray.address",
            ) from error
        self.own_address = str(ray.util.get_node_ip_address())

    def nodes(self) -> list[RayNode]:
        """Return the nodes that are alive, each with its own free ports. Raises `ConfigError` if there is none."""
        nodes: list[RayNode] = []
        used: set[tuple[str, int]] = set()
        for node in sorted(self._ray.nodes(), key=lambda node: str(node["NodeManagerAddress"])):
            if not node["Alive"]:
                continue
            node_id, address = str(node["NodeID"]), str(node["NodeManagerAddress"])
            actor = self._actor(node_id)
            free_ports = self._ray.get(actor.free_ports.remote(address, PORTS), timeout=STOP_WITHIN_S)
            self._ray.kill(actor)
            ports = [port for port in free_ports if (address, port) not in used]
            used |= {(address, port) for port in ports}
            nodes.append(RayNode(node_id, address, ports))
        if not nodes:
            raise ConfigError("ray.address: the cluster has no node that is alive", key="ray.address")
        return nodes

    def _actor(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 8, "scheduling_strategy": here}
        return self._ray.remote(NodeActor).options(**options).remote()

    def start(
        self,
        parts: Sequence[tuple[RayNode, NodePart]],
        words: Sequence[str],
        directory: Path,
        variables: Mapping[str, str],
    ) -> asyncio.Future[ServerError | ConfigError]:
        """Start every node's part. The future resolves with an error if the run cannot go on."""
        failure: asyncio.Future[ServerError | ConfigError] = asyncio.get_running_loop().create_future()
        self._running = [_Running(part, node) for node, part in parts]
        for running in self._running:
            self._tasks.start(self._keep(running, words, str(directory), variables, failure))
        return failure

    async def _keep(
        self,
        running: _Running,
        argv: Sequence[str],
        directory: str,
        variables: Mapping[str, str],
        failure: asyncio.Future[ServerError | ConfigError],
    ) -> None:
        """Run one node's part, and restart it after each failure as long as the node is alive."""
        name, tries = running.part.host, 0
        while not self._stopping and not failure.done():
            running.actor = self._actor(running.node.node_id)
            try:
                code, tail = await running.actor.run.remote(argv, directory, dict(variables), running.part)
            except self._ray.exceptions.RayError as error:
                if not await asyncio.to_thread(self._is_alive, running.node):
                    running.is_lost = True
                    self._say(f"node {name} ({running.node.address}) is lost; its jobs go to others")
                    if all(other.is_lost for other in self._running):
                        failure.set_result(ServerError("every Ray node is lost"))
                    return
                code, tail = 1, f"{type(error).__name__}"
            if self._stopping or failure.done():
                return
            # Later starts can find that the servers of the last one, whose actor was killed, are still stopping.
            if code == EXIT_CONFIG and tries == 0:
                failure.set_result(ConfigError(f"node {name}: {tail.strip()}"))
                return
            tries += 1
            pause_s = pause_after(tries, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            self._say(f"node {name} ended with exit code {code}; started again in {pause_s:g} s\n{tail}")
            await asyncio.sleep(pause_s)

    def _is_alive(self, node: RayNode) -> bool:
        return any(entry["Alive"] and entry["NodeID"] == node.node_id for entry in self._ray.nodes())

    async def stop(self) -> None:
        """Stop every node's servers in an orderly way, then end the actors."""
        self._stopping = True
        alive = [running.actor for running in self._running if running.actor is not None and not running.is_lost]
        stops = [asyncio.ensure_future(_await_ignoring_errors(actor.stop.remote())) for actor in alive]
        if stops:
            await asyncio.wait(stops, timeout=STOP_WITHIN_S)
        await self._tasks.cancel()
        for actor in alive:
            self._ray.kill(actor)
        await asyncio.to_thread(self._ray.shutdown)


def _log_tail(log: Path) -> str:
    with log.open("rb") as lines:
        lines.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return lines.read(TAIL_BYTES).decode(errors="replace")


def _require_listener(address: str) -> None:
    """Raise `OSError` unless a process listens at ``HOST:PORT``. Leave other forms of addresses to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_WITHIN_S).close()


async def _await_ignoring_errors(reference: Any) -> None:
    with contextlib.suppress(Exception):  # the actor or its node may already be gone
        await reference
