"""What can be configured about the opensandbox provider."""

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
    """Reach boxes through the server instead of at the addresses it gives. Needed where those cannot be reached."""
    default_image: str | None = None
    """Image of specs that name none; ``None`` is ``host`` where an ``engine`` is given, and else refuses them."""
    engine: str | None = None
    """The Docker Engine behind the server, where this process can reach it (``unix:///path``, ``tcp://host:port``):
    boxes become images there, those of the docker provider's names and labels, and ``host`` is one."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec leaves them open; what is open here too is the suite's default."""
    limits: Sequence[str] = LIMITS
    """Which of ``cpu`` and ``memory`` the server's boxes really have enforced. Nobody can ask the server for it."""
    egress_policy: bool = False
    """The server puts an egress sidecar beside its boxes, so that ``network: none`` can be kept. It is asked after
    each create whether it denies everything; a box where it does not is destroyed."""
    exec_user: bool = True
    """Commands can run as other users than the one the server's daemon runs as in the boxes."""
    request_timeout_s: float = 60.0
    """Longest silence of the server within one request that does not wait for a box."""
    silence_s: float = 45.0
    """A command that is silent for this long is lost; the helper sends a heartbeat every 10 seconds."""
    box_directory: str = "/.nemo-gym"
    """Where in each box this suite's helper program lies. Whoever commands run as must be able to run programs
    there, and the server's own daemon to write there."""
    box_architecture: str | None = None
    """``amd64`` or ``arm64``; ``None`` is this machine's."""

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
        known = dict(values)
        if isinstance(known.get("default_resources"), Mapping):
            known["default_resources"] = SandboxResources.from_mapping(known["default_resources"])
        return cls(**known)
