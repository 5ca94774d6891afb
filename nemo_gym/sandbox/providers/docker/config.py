"""The configuration of the docker provider."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxResources

PullPolicy = Literal["never", "missing", "always"]

BUILD_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""The Linux capabilities that package managers need to install packages as root."""


@dataclass(frozen=True)
class DockerConfig:
    """Options of `DockerProvider`; all have defaults."""

    base_url: str | None = None
    """The engine: ``unix:///path``, ``tcp://host:port`` or ``https://host:port``. ``None`` tries ``DOCKER_HOST``, then
    the default socket, then the engine that ``scripts/dockerd`` starts."""
    default_image: str = "host"
    """Image of specs that name none. ``host`` is built from this machine's own packages on first use."""
    pull: PullPolicy = "missing"
    """When to pull an image from a registry."""
    pull_timeout_s: float = 1800.0
    """Longest time of one pull. The default ``ready_timeout_s`` leaves it out. A create whose spec sets one ends then,
    and the pull goes on for later creates, until the provider is closed."""
    request_timeout_s: float = 120.0
    """Longest time that the engine may send nothing during one request."""
    max_concurrent_creates: int = 8
    """Containers created and started at once. Others wait; the wait counts towards their ``ready_timeout_s``.
    As many images are pulled at once."""
    capabilities: Sequence[str] = ()
    """Linux capabilities added to every box; all others are dropped."""
    build_capabilities: Sequence[str] = BUILD_CAPABILITIES
    """Linux capabilities added as well to boxes with ``network: open``, because these install packages."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    runtime: str | None = None
    """The engine's name of a container runtime (for example ``runsc``); ``None`` selects the engine's default."""
    seccomp: Literal["suite", "engine"] = "suite"
    """The system call profile: this suite's, if the engine supports it, or the engine's own."""
    watchdog: bool = True
    """Start the process that removes boxes whose lease ended or which wrote more than their disk limit. Turn this off
    only where something else does so."""

    def __post_init__(self) -> None:
        if self.pull not in get_args(PullPolicy):
            raise ConfigError(
                f"docker sandbox: pull must be one of {', '.join(get_args(PullPolicy))}, not '{self.pull}'"
                f"{nearest(str(self.pull), get_args(PullPolicy))}"
            )
        if self.seccomp not in ("suite", "engine"):
            raise ConfigError(f"docker sandbox: seccomp must be suite or engine, not '{self.seccomp}'")
        if self.base_url is not None and not self.base_url.startswith(("unix://", "tcp://", "http://", "https://")):
            raise ConfigError(
                f"docker sandbox: base_url must begin with unix://, tcp://, http:// or https://, not '{self.base_url}'"
            )
        for name in ("pull_timeout_s", "request_timeout_s", "max_concurrent_creates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"docker sandbox: {name} must be a positive number, not {value!r}")

    @property
    def lets_boxes_nest(self) -> bool:
        """Whether processes in a box may create namespaces and mounts, as container engines do."""
        names = {name.upper().removeprefix("CAP_") for name in self.capabilities}
        return bool(names & {"SYS_ADMIN", "ALL"}) and self.seccomp == "engine"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DockerConfig:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="docker sandbox")
        options = dict(values)
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        return cls(**options)
