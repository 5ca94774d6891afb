"""A composition on several hosts: which servers run where, in how many replicas, and on which network they talk.

Every host composes the same settings and names itself (``host=worlds-1``). Servers listen on and call only
addresses in the network that the block names. Except on loopback, they speak HTTPS, or plain HTTP if the block
allows it for a private network. With ``dispatch: ray``, the nodes of a Ray cluster are the hosts, and each receives
its part.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, IPvAnyNetwork, ValidationError, field_validator

from nemo_gym._util.suggest import nearest, validation_problems
from nemo_gym.config.composition import Composition
from nemo_gym.config.keys import DISPATCH, HOST, HOSTS, RAY, SERVE
from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.config.visibility import Address
from nemo_gym.contract.credentials import ROOT_KEY_BYTES, StackKeys
from nemo_gym.contract.errors import ConfigError

NODE_FD = "NEMO_GYM_RAY_NODE_FD"
PIPELINE = "pipeline"
"""The name of the command's own host, which runs the pipeline and no server."""
LOOPBACK = "127.0.0.0/8"
RUN_FILES = ("input", "output", "input_jsonl_fpath", "output_jsonl_fpath", "dataset", "split")


class _Machine(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    address: IPvAnyAddress
    servers: dict[str, Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=dict)
    """Instance → port."""


class Tls(BaseModel):
    """A host's own certificate for its address, and its private key: files at the same paths on every host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate_file: Path
    key_file: Path

    @field_validator("certificate_file", "key_file")
    @classmethod
    def _expanded(cls, path: Path) -> Path:
        return path.expanduser().absolute()


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    network: IPvAnyNetwork
    tls: Tls | None = None
    plain_http: bool = False
    """Whether servers of a private network may do without ``tls``."""
    stack_secret: str = Field(pattern=rf"^([0-9a-fA-F]{{2}}){{{ROOT_KEY_BYTES},}}$", repr=False)
    machines: dict[str, _Machine] = Field(min_length=1)


@dataclass(frozen=True)
class Hosts:
    """The checked ``hosts`` block of a composition."""

    here: str | None
    """This host's name; ``None`` if it is not given, which suffices for inspecting a composition."""
    replicas: Mapping[str, tuple[Address, ...]]
    """Where each server runs, in the same order on every host, because replicas are identified by number."""
    local: Mapping[str, Address]
    """The servers of this host."""
    keys: StackKeys
    tls: Tls | None = None

    @classmethod
    def of(cls, composition: Composition) -> Hosts | None:
        """``None`` for a composition on one host. Raises `ConfigError` naming what is wrong with the block."""
        values = composition.values.get(HOSTS)
        here = composition.values.get(HOST)
        if values is None:
            if here is not None:
                raise ConfigError(
                    f"host={here} says which of several hosts this is, and the composition has no '{HOSTS}' block;"
                    " add one, or leave host= out",
                    key=HOST,
                )
            return None
        block = _checked(values)
        scheme = "https" if block.tls is not None else "http"
        replicas: dict[str, list[Address]] = {name: [] for name in composition.servers}
        for name, machine in block.machines.items():
            for instance, port in machine.servers.items():
                if instance not in replicas:
                    hint = nearest(instance, replicas)
                    raise _wrong(
                        f"machines.{name}.servers",
                        f": no server instance '{instance}'{hint}; there are: {', '.join(replicas)}",
                    )
                replicas[instance].append(Address(str(machine.address), port, scheme))
        _check_places(composition, replicas)
        if here is not None and here not in block.machines:
            raise ConfigError(
                f"host={here} is not one of {HOSTS}.machines{nearest(str(here), block.machines)}; there are:"
                f" {', '.join(block.machines)}",
                key=HOST,
            )
        host = block.machines[here] if here is not None else None
        local = {name: Address(str(host.address), port, scheme) for name, port in host.servers.items()} if host else {}
        keys = StackKeys.from_hex(block.stack_secret)
        return cls(here, {name: tuple(places) for name, places in replicas.items()}, local, keys, block.tls)

    def require_here(self) -> None:
        """Raise `ConfigError` unless this host is named and can read the TLS files that its servers need."""
        if self.here is None:
            raise ConfigError(f"the composition has a '{HOSTS}' block: say which host this is with {HOST}=", key=HOST)
        if self.tls is None or not self.local:
            return
        for name, path in (("certificate_file", self.tls.certificate_file), ("key_file", self.tls.key_file)):
            if not os.access(path, os.R_OK):
                raise _wrong(f"tls.{name}", f" {path} cannot be read on this host")


def _wrong(key: str, problem: str) -> ConfigError:
    """The error for a key of the block; ``problem`` continues the sentence that the key's name begins."""
    return ConfigError(f"{HOSTS}.{key}{problem}", key=f"{HOSTS}.{key}")


def _checked(values: Any) -> _Block:
    try:
        block = _Block.model_validate(values)
    except ValidationError as error:
        problems = validation_problems(error, _Block.model_fields, where=HOSTS)
        if any(problem["loc"][:1] == ("stack_secret",) for problem in error.errors(include_input=False)):
            problems += f" (stack_secret is the same on every host: openssl rand -hex {ROOT_KEY_BYTES})"
        raise ConfigError(problems, key=HOSTS) from None
    network = ip_network(str(block.network))
    if block.tls is not None and block.plain_http:
        raise _wrong("plain_http", f" and {HOSTS}.tls exclude each other")
    if block.tls is None and not block.plain_http and not network.is_loopback:
        raise _wrong(
            "tls",
            " is missing: requests carry credentials, so off loopback servers speak HTTPS; give certificate_file and"
            f" key_file, or set {HOSTS}.plain_http: true for a network in which nobody else listens",
        )
    if network.is_global and block.tls is None:
        raise _wrong(
            "network",
            f" {network} is not a private network, and with {HOSTS}.plain_http anyone in it could read credentials;"
            " use private addresses, those of a VPN between the hosts, or TLS",
        )
    taken: dict[tuple[str, int], str] = {}
    for name, machine in block.machines.items():
        if machine.address not in network:
            raise _wrong(
                f"machines.{name}.address",
                f" {machine.address} is not in {HOSTS}.network {network}: it is neither listened on nor called",
            )
        for instance, port in machine.servers.items():
            here = f"{name}.servers.{instance}"
            other = taken.setdefault((str(machine.address), port), here)
            if other != here:
                raise _wrong(f"machines.{here}", f": {machine.address}:{port} is {other}'s; choose another port")
    return block


def _check_places(composition: Composition, replicas: Mapping[str, list[Address]]) -> None:
    missing = [name for name, places in replicas.items() if not places]
    if missing:
        listed = ", ".join(missing)
        raise _wrong("machines", f": no machine runs {listed}; give one 'servers: {{{missing[0]}: <port>}}'")
    for server in composition.servers.values():
        if server.workers > 1:
            raise server.wrong(
                "num_workers",
                f": {HOSTS}.machines sets the number of replicas; remove the key, and name the server on several"
                " machines",
            )
        for key in ("host", "port"):
            if server.values.get(key):
                raise server.wrong(key, f": {HOSTS}.machines sets where servers listen; remove the key")


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
