"""Which provider a server uses: ``sandbox_provider`` is a block's name, or a block itself.

    sandbox:                    # a block, at the top level of the configuration
      docker: {socket: unix:///run/docker.sock}
      default_metadata: {team: a}
    my_agent:
      responses_api_agents:
        mini_swe_agent: {sandbox_provider: sandbox}

Swapping the block's file swaps the backend of every server that names it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError

DEFAULT_METADATA = "default_metadata"
ENTRY_POINT_GROUP = "nemo_gym.sandbox_providers"

registered_providers: dict[str, Callable[..., Any]] = {}
"""Providers that this program registered itself, see `nemo_gym.sandbox.facade.register_provider`."""


def installed_providers() -> Mapping[str, EntryPoint]:
    """Providers of installed packages."""
    return _installed_in(tuple(sys.path))


@functools.cache
def _installed_in(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    # Reading every installed package's file takes 3 ms, and one composition needs the result a dozen times.
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def list_providers() -> list[str]:
    """Return the names of all providers, sorted."""
    return sorted({*registered_providers, *installed_providers()})


def resolve_provider_config(
    sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the one ``{provider: settings}`` that ``sandbox_provider`` selects.

    Args:
        sandbox_provider: name of a block, a block, or the name of a provider that needs no settings.
        named_configs: the global configuration, where blocks are looked up.

    Raises:
        ConfigError: there is no such block or provider, or a block does not name exactly one provider.
    """
    where, block = _block(sandbox_provider, named_configs)
    providers = [key for key in block if key != DEFAULT_METADATA]
    if len(providers) != 1:
        found = ", ".join(f"'{key}'" for key in providers) or "none"
        raise ConfigError(
            f"{where} must name one provider, as {{<provider>: {{settings}}, {DEFAULT_METADATA}: {{}}}};"
            f" it names {found}"
        )
    name = providers[0]
    settings = block[name]
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"{where}.{name} must be a mapping of settings, not {type(settings).__name__}")
    return {name: _plain(settings or {})}


def resolve_provider_metadata(
    sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the block's ``default_metadata``: labels for every box made with it; the spec's own take precedence.

    Raises:
        ConfigError: as `resolve_provider_config`; also when the metadata is not a flat mapping.
    """
    where, block = _block(sandbox_provider, named_configs)
    metadata = block.get(DEFAULT_METADATA) or {}
    if not isinstance(metadata, Mapping) or any(isinstance(v, Mapping | list) for v in metadata.values()):
        raise ConfigError(f"{where}.{DEFAULT_METADATA} must be a flat mapping of strings")
    return {str(key): str(value) for key, value in metadata.items()}


def _block(
    sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None
) -> tuple[str, Mapping[str, Any]]:
    if isinstance(sandbox_provider, Mapping):
        return "sandbox_provider", sandbox_provider
    if not isinstance(sandbox_provider, str):
        raise ConfigError(
            f"sandbox_provider must be the name of a block or of a provider, or a block, got {sandbox_provider!r}"
        )
    named = named_configs or {}
    block = named.get(sandbox_provider)
    if isinstance(block, Mapping):
        return sandbox_provider, block
    providers = list_providers()
    if block is None and sandbox_provider in providers:
        return "sandbox_provider", {sandbox_provider: {}}
    blocks = [str(key) for key, value in named.items() if isinstance(value, Mapping) and set(value) & set(providers)]
    raise ConfigError(
        f"sandbox_provider '{sandbox_provider}' is neither a block of the configuration nor a provider"
        f"{nearest(sandbox_provider, [*blocks, *providers])}; blocks are {', '.join(blocks) or 'none'},"
        f" providers are {', '.join(providers) or 'none'}"
    )


def _plain(value: Any) -> Any:
    """Return a copy in built-in types; configuration libraries use their own mappings and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, str | bytes) and hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return value
