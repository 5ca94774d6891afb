"""Boxes of an OpenSandbox server, through its own SDK. The `opensandbox` package is imported on first use."""

from nemo_gym.sandbox.providers.opensandbox.provider import OpenSandboxProvider

__all__ = ["OpenSandboxProvider"]
