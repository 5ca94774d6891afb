"""The result of composing, and where its sandbox's boxes run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import SERVE
from nemo_gym.config.servers import ServerBlock, references
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SANDBOX: Final = "sandbox"
"""The block that ``sandbox=<name>`` chooses."""


@dataclass(frozen=True)
class Composition:
    """A complete configuration: what runs, and where each value came from."""

    values: dict[str, Any] = field(repr=False)
    """Resolved plain data. Holds secrets: show it through `nemo_gym._util.secrets.redact` only."""
    unresolved: dict[str, Any] = field(repr=False)
    """The same before interpolation; tells which server uses which key."""
    servers: dict[str, ServerBlock]
    chosen: dict[str, str]
    """``agent``, ``environment``, ``model``: instance names; ``sandbox``: the block's name; ``topology``."""
    roots: tuple[Path, ...]
    warnings: list[str] = field(default_factory=list)
    """Problems in files written for NeMo Gym that would be errors in other files."""
    files: tuple[Path, ...] = ()
    """The files that it was read from."""
    groups: frozenset[str] = frozenset()
    """The groups that the user chose by name, on the command line, in a file or in ``env.yaml``."""

    @property
    def config(self) -> DictConfig:
        """The values as OmegaConf, the type that NeMo Gym's code expects."""
        from omegaconf import DictConfig, OmegaConf

        config = OmegaConf.create(self.values)
        assert isinstance(config, DictConfig)
        return config

    @property
    def has_run(self) -> bool:
        """Whether the configuration asks for a rollout run."""
        run = self.run_values()
        return "input" in run or "input_jsonl_fpath" in run

    @property
    def serves(self) -> bool:
        """Whether the configuration asks for a rollout service."""
        return self.values.get(SERVE) is not None

    def serve_values(self) -> dict[str, Any]:
        """The keys of the service. Those of its pipeline may also be at the top level, as for a run."""
        from nemo_gym.config.pipeline import PipelineConfig

        shared = {key: value for key, value in self.run_values().items() if key in PipelineConfig.spellings()}
        return {**shared, **(self.values.get(SERVE) or {})}

    def run_values(self) -> dict[str, Any]:
        """The keys that configure a rollout run."""
        from nemo_gym.config.run import RUN_KEYS

        return {key: value for key, value in self.values.items() if key in RUN_KEYS and value is not None}


def boxes_at(composition: Composition, server: ServerBlock) -> str:
    """Return the instance on whose host the boxes of ``server`` run: its broker, or itself."""
    from nemo_gym.config.sandbox_blocks import resolve_provider_config

    configured = resolve_provider_config(server.values["sandbox_provider"], composition.values)
    behind = next(references(configured), None)
    return behind.name if behind is not None else server.instance


def backend_of(
    composition: Composition, sandbox_provider: str | Mapping[str, Any], *, where: str = "sandbox"
) -> dict[str, dict[str, Any]]:
    """Return the ``{provider: settings}`` that makes the boxes, also behind a broker, while no server runs yet. For a
    broker outside of this composition (``remote`` with a ``url``), that is ``remote`` itself.

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
            f"{where} leads to '{behind.name}', which is not a broker of this composition"
            f"{nearest(behind.name, composition.servers)}; compose with sandbox=broker_local or sandbox=broker_docker",
            key="sandbox",
        )
    return resolve_provider_config(broker.values["sandbox_provider"], composition.values)
