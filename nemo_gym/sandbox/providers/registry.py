"""NeMo Gym's module name for the registry; new code imports from `nemo_gym.sandbox`."""

from nemo_gym.config.sandbox_blocks import list_providers
from nemo_gym.sandbox.facade import create_provider, get_provider_class, register_provider

__all__ = ["create_provider", "get_provider_class", "list_providers", "register_provider"]
