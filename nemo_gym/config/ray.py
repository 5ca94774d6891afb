"""``dispatch: ray``: a composition's servers on the nodes of a Ray cluster, and the part that each node receives."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_network
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, IPvAnyNetwork, ValidationError

from nemo_gym._util.suggest import nearest, validation_problems
from nemo_gym.config.composition import Composition
from nemo_gym.config.hosts import Tls
from nemo_gym.config.keys import DISPATCH, HOST, HOSTS, RAY, SERVE
from nemo_gym.config.service import ServiceConfig
from nemo_gym.contract.credentials import ROOT_KEY_BYTES
from nemo_gym.contract.errors import ConfigError

NODE_FD = "NEMO_GYM_RAY_NODE_FD"
PIPELINE = "pipeline"
"""The name of the command's own host, which runs the pipeline and no server."""
LOOPBACK = "127.0.0.0/8"
RUN_FILES = ("input", "output", "input_jsonl_fpath", "output_jsonl_fpath", "dataset", "split")


class RayConfig(BaseModel):
    """The ``ray`` block."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = "auto"
    """The cluster's address; ``auto`` finds the cluster that runs on this machine."""
    network: IPvAnyNetwork | None = None
    """The range that every node's address is in, as in a ``hosts`` block; not needed if all addresses are loopback."""
    tls: Tls | None = None
    plain_http: bool = False
    nodes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Server instance → on how many nodes it runs; on every node by default."""
    pipelines: int = Field(0, ge=0)
    """How many nodes run a rollout service; with 0 the command itself runs the pipeline."""

    @classmethod
    def of(cls, composition: Composition) -> RayConfig | None:
        """``None`` for a composition that Ray does not dispatch. Raises `ConfigError`."""
        values = composition.values
        dispatch, block = values.get(DISPATCH), values.get(RAY)
        if dispatch not in (None, "processes", "ray"):
            raise ConfigError(f"{DISPATCH} must be processes (this host's) or ray, got {dispatch!r}", key=DISPATCH)
        if dispatch != "ray":
            if block is not None:
                raise ConfigError(f"the block '{RAY}' says how Ray dispatches; add {DISPATCH}=ray", key=RAY)
            return None
        if values.get(HOSTS) is not None or values.get(HOST) is not None:
            raise ConfigError(
                f"with {DISPATCH}=ray the hosts come from the cluster; leave out {HOSTS} and {HOST}=", key=HOSTS
            )
        try:
            config = cls.model_validate(block or {})
        except ValidationError as error:
            raise ConfigError(validation_problems(error, cls.model_fields, where=RAY), key=RAY) from None
        for instance in config.nodes:
            if instance not in composition.servers:
                raise ConfigError(
                    f"{RAY}.nodes: no server instance '{instance}'{nearest(instance, composition.servers)}; there are:"
                    f" {', '.join(composition.servers)}",
                    key=f"{RAY}.nodes",
                )
        config._check_pipelines(composition)
        return config

    def _check_pipelines(self, composition: Composition) -> None:
        if not self.pipelines:
            return
        if not composition.serves:
            raise ConfigError(
                f"{RAY}.pipelines are rollout services: use ng_serve_rollouts, or leave it out", key=f"{RAY}.pipelines"
            )
        if not ServiceConfig.parse(composition.serve_values()).is_postgres:
            raise ConfigError(
                f"{RAY}.pipelines: services on nodes keep their jobs in PostgreSQL, so that a lost node loses none;"
                " give serve.store=postgresql://user@host/database",
                key="serve.store",
            )


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster, with ports that are free there."""

    node_id: str
    address: str
    ports: Sequence[int]
    """The last one is kept for a rollout service; see `service_port`."""

    @property
    def service_port(self) -> int:
        return self.ports[-1]


@dataclass(frozen=True, slots=True)
class NodePart:
    """The part of one node, which it reads from the descriptor that ``NEMO_GYM_RAY_NODE_FD`` names."""

    host: str
    hosts: Mapping[str, Any] = field(repr=False)
    run_id: str
    run_dir: str
    parent_pid: int | None = None
    serve: Mapping[str, Any] | None = None
    """The ``serve`` block of the service that the node runs, if any."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_parent(cls) -> NodePart | None:
        """Read this process's part, once; ``None`` if this process is not started for a node."""
        if (number := os.environ.pop(NODE_FD, None)) is None:
            return None
        with os.fdopen(int(number), "rb") as file:
            return cls(**json.load(file))

    def take(self, composition: Composition) -> None:
        """Reduce the whole composition to this node's part: its servers, and a service if the node runs one."""
        for key in (*RUN_FILES, SERVE, DISPATCH, RAY, "join"):
            composition.values.pop(key, None)
        composition.values.update({HOSTS: dict(self.hosts), HOST: self.host})
        composition.values.update(run_id=self.run_id, run_dir=self.run_dir)
        if self.serve is not None:
            composition.values[SERVE] = dict(self.serve)


def hosts_block(
    composition: Composition, config: RayConfig, nodes: Sequence[RayNode], own_address: str
) -> dict[str, Any]:
    """Return the cluster as a ``hosts`` block: every server on every node, or round-robin on as many nodes as
    ``ray.nodes`` says. Raises `ConfigError`."""
    machines: dict[str, Any] = {PIPELINE: {"address": own_address}}
    taken: set[tuple[str, int]] = set()
    for node in nodes:
        machines[name_of(node)] = {"address": node.address, "servers": {}}
    turn = 0
    for instance in composition.servers:
        count = config.nodes.get(instance, len(nodes))
        if count > len(nodes):
            raise ConfigError(
                f"{RAY}.nodes.{instance}: {count} nodes are asked for, and the cluster has {len(nodes)}",
                key=f"{RAY}.nodes.{instance}",
            )
        for _ in range(count):
            node = nodes[turn % len(nodes)]
            turn += 1
            port = next((each for each in node.ports[:-1] if (node.address, each) not in taken), None)
            if port is None:
                raise ConfigError(
                    f"{RAY}.nodes.{instance}: node {name_of(node)} has no port left for it, as other servers have all"
                    f" {len(node.ports) - 1}; let servers run on fewer nodes (as {RAY}.nodes.{instance}=1 does)",
                    key=f"{RAY}.nodes.{instance}",
                )
            taken.add((node.address, port))
            machines[name_of(node)]["servers"][instance] = port
        if count == len(nodes):
            turn = 0
    addresses = [ip_address(own_address), *(ip_address(node.address) for node in nodes)]
    is_loopback = all(address.is_loopback for address in addresses)
    if config.network is None and not is_loopback:
        raise ConfigError(
            f"{RAY}.network is missing: the range that the nodes' addresses are in, as in"
            f" {RAY}.network={ip_network(f'{own_address}/24', strict=False)}",
            key=f"{RAY}.network",
        )
    block: dict[str, Any] = {"network": str(config.network or LOOPBACK), "machines": machines}
    block["stack_secret"] = secrets.token_hex(ROOT_KEY_BYTES)
    if config.tls is not None:
        block["tls"] = {key: str(path) for key, path in config.tls.model_dump().items()}
    if config.plain_http:
        block["plain_http"] = True
    return block


def name_of(node: RayNode) -> str:
    return f"ray-{node.node_id[:8]}"
