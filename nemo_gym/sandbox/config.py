"""The module name under which NeMo Gym looks for sandbox blocks; see `nemo_gym.config.sandbox_blocks`."""

from nemo_gym.config.sandbox_blocks import (
    resolve_provider_config,
    resolve_provider_metadata,
)

__all__ = [
    "resolve_provider_config",
    "resolve_provider_metadata",
]
