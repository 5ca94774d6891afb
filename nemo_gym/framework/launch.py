"""Starts the framework's own gateways, and stops them with the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nemo_gym.contract.errors import ConfigError
from nemo_gym.framework.gateways import GatewayPool
from nemo_gym.stack.background import BackgroundStack
from nemo_gym.stack.endpoints import StackEntry
from nemo_gym.stack.stack import pipeline_client


@dataclass(frozen=True, slots=True)
class GatewaysConfig:
    """The configuration of the gateways to start."""

    count: int
    engines: Sequence[Mapping[str, Any]]
    """The ``engines`` of each gateway's block: ``type``, ``base_url``, ``model``, ``api_key``…"""
    policy_path: str
    """The policy's local directory: tokenizer and chat template."""
    model: str = "policy"
    max_context_tokens: int | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the gateway's ``policy``."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the gateway."""
    name: str = "gateway"
    """The prefix of the gateways' names."""

    @property
    def names(self) -> list[str]:
        return [f"{self.name}_{number + 1}" for number in range(self.count)]

    def blocks(self) -> dict[str, Any]:
        """Return the configuration blocks of the gateways. Raises `ConfigError`."""
        if not Path(self.policy_path).is_dir():
            raise ConfigError(
                f"policy '{self.policy_path}' is no local directory: gateways read the tokenizer and the chat template"
                " there, and download nothing",
                key="policy.path",
            )
        policy = {"path": self.policy_path, **self.policy}
        if self.max_context_tokens is not None:
            policy["max_context_tokens"] = self.max_context_tokens
        block = {
            "entrypoint": "app.py",
            "model": self.model,
            "engines": [dict(engine) for engine in self.engines],
            "policy": policy,
            "path_tokens": True,
            **self.gateway,
        }
        return {name: {"responses_api_models": {"gateway": block}} for name in self.names}


class OwnGateways:
    """Running gateways. With ``entry``, other processes on this host can reach them."""

    def __init__(self, config: GatewaysConfig, *, run_dir: Path | None = None) -> None:
        self.config = config
        self._stack = BackgroundStack(values=config.blocks(), run_dir=run_dir)
        self.entry: StackEntry = self._stack.start()

    def pool(self, **options: Any) -> GatewayPool:
        """Return a pool of these gateways for one event loop."""
        return GatewayPool(pipeline_client(self.entry), self.config.names, **options)

    def stop(self) -> None:
        self._stack.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
