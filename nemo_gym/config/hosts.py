"""A composition on several hosts: which servers run where, in how many replicas, and on which network they talk.

Every host composes the same settings and names itself (``host=worlds-1``). Servers listen on and call only addresses
in the network that the block names. Except on loopback, they speak HTTPS, or plain HTTP if the block allows it for a
private network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, IPvAnyNetwork, ValidationError, field_validator

from nemo_gym._util.suggest import nearest, validation_problems
from nemo_gym.config.composition import Composition
from nemo_gym.config.keys import HOST, HOSTS
from nemo_gym.config.visibility import Address
from nemo_gym.contract.credentials import ROOT_KEY_BYTES, StackKeys
from nemo_gym.contract.errors import ConfigError


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
