"""Check that the chosen sandbox supports, on this machine, what the composition needs.

The check queries the provider itself, which takes time, so ``ng_run`` runs it while its servers start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from nemo_gym._util.suggest import nearest
from nemo_gym.config.compatibility import sandbox_provider, side_of
from nemo_gym.config.composition import Composition, backend_of, boxes_at
from nemo_gym.config.files import available
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.keys import AGENT_TYPE, MODEL_TYPE
from nemo_gym.config.servers import ServerBlock, references
from nemo_gym.contract.errors import ConfigError, SandboxError
from nemo_gym.contract.session import Topology


def check_sandbox(composition: Composition, topology: Topology | None) -> None:
    """Raise `ConfigError` with the capabilities that a provider lacks here, and its own reasons and remedies."""
    hosts = Hosts.of(composition)
    for server in composition.servers.values():
        name = sandbox_provider(composition, server)
        if name is None or (hosts is not None and boxes_at(composition, server) not in hosts.local):
            continue  # it has no boxes, or they are on another host, which checks them
        if server.server_type == AGENT_TYPE and topology not in side_of(server, composition.roots).box_topologies:
            continue  # it makes no box of its own
        wanted = list(dict.fromkeys(_required_capabilities(composition, server, topology)))
        lacking = _missing_capabilities(composition, server, name, wanted)
        if lacking:
            raise ConfigError(
                f"sandbox provider '{name}' cannot serve '{server.instance}' on this machine: {'; '.join(lacking)}"
                f"{_other_providers(name, composition.roots)}",
                key="sandbox",
                missing=lacking,
            )


def _required_capabilities(composition: Composition, server: ServerBlock, topology: Topology | None) -> Iterator[str]:
    """Yield names of fields of `SandboxCapabilities`, and ``network_none`` for a box without a network."""
    yield "network_none"
    yield from side_of(server, composition.roots).requires
    for reference in references(server.values):
        target = composition.servers[reference.name]
        if server.server_type == AGENT_TYPE:
            if target.server_type == MODEL_TYPE:
                yield "loopback_door"  # the model, from inside the box
            yield from side_of(target, composition.roots).requires


def _missing_capabilities(composition: Composition, server: ServerBlock, name: str, wanted: list[str]) -> list[str]:
    from nemo_gym.contract.sandbox import NetworkPolicy
    from nemo_gym.sandbox.base import SandboxCapabilities
    from nemo_gym.sandbox.facade import create_provider

    backend = backend_of(composition, server.values["sandbox_provider"], where=server.where)
    try:
        provider = create_provider(backend)
    except ConfigError as error:
        named = server.values["sandbox_provider"]
        block = named if isinstance(named, str) else f"{server.where}.sandbox_provider"
        raise ConfigError(f"{block}.{next(iter(backend))}: {error.message}", key=block) from error
    try:
        capabilities = provider.capabilities
    except SandboxError as error:
        return [error.message]
    if not isinstance(capabilities, SandboxCapabilities):
        raise ConfigError(
            f"sandbox provider '{name}': 'capabilities' must be a property that returns SandboxCapabilities, not"
            f" {type(capabilities).__name__}",
            key="sandbox",
        )
    lacking: dict[str, str] = {}
    for capability in wanted:
        if capability == "network_none":
            has = NetworkPolicy.NONE in capabilities.network_policies
        else:
            has = bool(getattr(capabilities, capability, False))
        if not has:
            reason = capabilities.reasons.get(capability) or _not_offered(capability)
            # One cause (a missing program) may disable several capabilities; it is reported once.
            lacking[reason] = f"{lacking[reason]}, {capability}" if reason in lacking else capability
    return [f"{names}: {reason}" for reason, names in lacking.items()]


def _not_offered(capability: str) -> str:
    from nemo_gym.sandbox.base import SandboxCapabilities

    names = [field.name for field in fields(SandboxCapabilities) if field.type == "bool"]
    if capability in (*names, "network_none"):
        return "not offered by this provider"
    return f"there is no such capability{nearest(capability, names)}; there are {', '.join(names)}"


def _other_providers(name: str, roots: Sequence[Path]) -> str:
    from nemo_gym.config.sandbox_blocks import list_providers

    choices = available("sandbox", roots)
    alternatives = [other for other in list_providers() if other != name and other in choices]
    return f". Others: {', '.join(f'sandbox={other}' for other in alternatives)}" if alternatives else ""
