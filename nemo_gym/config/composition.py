"""What composing results in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nemo_gym.config.layers import Merged
from nemo_gym.config.servers import ServerBlock

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
    """The same before interpolation, for knowing who uses what."""
    servers: dict[str, ServerBlock]
    chosen: dict[str, str]
    """``agent``, ``environment``, ``model``: instance names; ``sandbox``: the block's name; ``topology``."""
    roots: tuple[Path, ...]
    sources: Merged = field(repr=False)
    warnings: list[str] = field(default_factory=list)
    """What files written for NeMo Gym say that would be refused in others."""

    @property
    def config(self) -> DictConfig:
        """The values as OmegaConf, the type that NeMo Gym's code expects."""
        from omegaconf import DictConfig, OmegaConf

        config = OmegaConf.create(self.values)
        assert isinstance(config, DictConfig)
        return config

    @property
    def has_run(self) -> bool:
        """Whether rollouts are asked for."""
        run = self.run_values()
        return "input" in run or "input_jsonl_fpath" in run

    def run_values(self) -> dict[str, Any]:
        """The keys that configure a rollout run."""
        from nemo_gym.config.run import RUN_KEYS

        return {key: value for key, value in self.values.items() if key in RUN_KEYS and value is not None}
