"""The configuration of the opensandbox provider."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxResources

LIMITS = ("cpu", "memory")
ARCHITECTURES = ("amd64", "arm64")


@dataclass(frozen=True)
class OpenSandboxConfig:
    """Options of `OpenSandboxProvider`; all have defaults."""

    url: str = "http://127.0.0.1:8080"
    """The server's root, ``http://`` or ``https://``."""
    api_key: str | None = field(default=None, repr=False)
    """The server's key; ``None`` takes ``OPEN_SANDBOX_API_KEY``. Never sent into a box."""
    use_server_proxy: bool = False
    """Access boxes through the server. Needed if this process cannot reach the addresses that the server returns."""
    default_image: str | None = None
    """Image of specs that name none. ``None`` means ``host`` if ``engine`` is set; else such specs are refused."""
    engine: str | None = None
    """The Docker Engine behind the server, if this process can reach it (``unix:///path``, ``tcp://host:port``). It
    stores committed boxes as images with the docker provider's names and labels, and it has the ``host`` image."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    limits: Sequence[str] = LIMITS
    """The limits (``cpu``, ``memory``) that the server really enforces. The server offers no way to ask it."""
    egress_policy: bool = False
    """Whether the server puts an egress sidecar beside its boxes, which ``network: none`` requires. After each create
    with that policy, the provider checks that the sidecar denies everything, and otherwise destroys the box."""
    exec_user: bool = True
    """Whether commands can run as other users than the one that the server's daemon runs as in the boxes."""
    request_timeout_s: float = 60.0
    """Longest time that the server may send nothing during one request that does not wait for a box."""
    silence_s: float = 45.0
    """A command counts as lost after this time without any message. The helper sends a heartbeat every 10 seconds."""
    box_directory: str = "/.nemo-gym"
    """Directory in each box of this suite's helper program. The users of commands must be able to run programs there,
    and the server's own daemon must be able to write there."""
    box_architecture: str | None = None
    """``amd64`` or ``arm64``; ``None`` selects this machine's architecture."""

    def __post_init__(self) -> None:
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise ConfigError(f"opensandbox: url '{self.url}' must be http(s)://host:port without a path", key="url")
        for name in self.limits:
            if name not in LIMITS:
                raise ConfigError(f"opensandbox: limits holds '{name}'; known are {', '.join(LIMITS)}", key="limits")
        if self.box_architecture not in (None, *ARCHITECTURES):
            raise ConfigError(
                f"opensandbox: box_architecture must be {' or '.join(ARCHITECTURES)}, not '{self.box_architecture}'"
                f"{nearest(str(self.box_architecture), ARCHITECTURES)}"
            )
        if not self.box_directory.startswith("/") or len(self.box_directory.rstrip("/")) < 2:
            raise ConfigError("opensandbox: box_directory must be an absolute path other than /", key="box_directory")
        for name in ("request_timeout_s", "silence_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"opensandbox: {name} must be a positive number of seconds, not {value!r}", key=name)

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get("OPEN_SANDBOX_API_KEY") or None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> OpenSandboxConfig:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="opensandbox sandbox")
        options = dict(values)
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        return cls(**options)
