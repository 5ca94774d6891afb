"""The ``remote`` provider: boxes that a broker (``resources_servers/sandbox``) holds, used over HTTP."""

from nemo_gym.sandbox.providers.remote.provider import RemoteProvider

__all__ = ["RemoteProvider"]
