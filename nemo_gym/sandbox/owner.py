"""The sandbox provider an agent server or environment owns its boxes through, made from its configuration on use."""

from __future__ import annotations

from typing import Any

from nemo_gym.sandbox.base import SandboxProvider


class SandboxOwner:
    """Holds the one provider of a server process; ``sandbox_provider`` is a block name or ``{provider: settings}``."""

    def __init__(self, sandbox_provider: str | dict[str, Any], server_client: Any) -> None:
        self._configured, self._server_client = sandbox_provider, server_client
        self._provider: SandboxProvider | None = None

    def provider(self) -> SandboxProvider:
        """The provider; raises `ConfigError` when it is unknown or cannot be configured so."""
        if self._provider is None:
            from nemo_gym.config.sandbox_blocks import resolve_provider_config
            from nemo_gym.sandbox.registry import create_provider

            configured = resolve_provider_config(self._configured, self._server_client.global_config_dict)
            self._provider = create_provider(configured)
        return self._provider

    async def aclose(self) -> None:
        if self._provider is not None:
            provider, self._provider = self._provider, None
            await provider.aclose()
