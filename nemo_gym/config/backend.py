"""Which provider has the boxes: the one that is configured, or the one behind the composition's broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.config.composition import Composition
from nemo_gym.config.servers import ServerBlock, references
from nemo_gym.contract.errors import ConfigError


def boxes_at(composition: Composition, server: ServerBlock) -> str:
    """The instance on whose host the boxes of ``server`` are: its broker, or itself."""
    from nemo_gym.config.sandbox_blocks import resolve_provider_config

    configured = resolve_provider_config(server.values["sandbox_provider"], composition.values)
    behind = next(references(configured), None)
    return behind.name if behind is not None else server.instance


def backend_of(
    composition: Composition, sandbox_provider: str | Mapping[str, Any], *, where: str = "sandbox"
) -> dict[str, dict[str, Any]]:
    """The ``{provider: settings}`` whose abilities and images count, while no server runs yet. A broker that is not
    of this composition (``remote`` with a ``url``) is its own provider.

    Raises:
        ConfigError: the block is wrong, or leads to a server that is no broker; ``where`` names it.
    """
    from nemo_gym.config.sandbox_blocks import resolve_provider_config

    configured = resolve_provider_config(sandbox_provider, composition.values)
    behind = next(references(configured), None)
    if behind is None:
        return configured
    broker = composition.servers.get(behind.name)
    if broker is None or broker.values.get("sandbox_provider") is None:
        raise ConfigError(
            f"{where} leads to '{behind.name}', which is no broker of this composition"
            f"{nearest(behind.name, composition.servers)}; compose with sandbox=broker_local or sandbox=broker_docker",
            key="sandbox",
        )
    return resolve_provider_config(broker.values["sandbox_provider"], composition.values)
