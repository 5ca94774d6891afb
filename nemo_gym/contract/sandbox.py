"""What a box is asked to be: plain, immutable data that environments and agents write and providers read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys

DEFAULT_TTL_S = 3600.0
DEFAULT_READY_TIMEOUT_S = 120.0


class NetworkPolicy(StrEnum):
    """What processes in a box may reach by themselves. Doors are on loopback and exist under every policy."""

    NONE = "none"
    """Loopback only: no route, no DNS."""
    OPEN = "open"
    """Whatever the host reaches. For building images, never for a graded run."""


class SandboxRole(StrEnum):
    """What a box is for; written on it as a label, so that whoever holds only labels can reap."""

    WORK = "work"
    EVAL = "eval"
    HARVEST = "harvest"
    BUILD = "build"


LIMITS = ("cpu", "memory_mib", "disk_gib", "pids")
"""Resources that a box can have a limit of."""


@dataclass(frozen=True)
class SandboxResources:
    """Limits of one box. ``None`` leaves a limit to the provider, which has `default_limits`; one that is given and
    cannot be enforced is refused."""

    cpu: float | None = None
    """CPU cores, fractions allowed."""
    memory_mib: int | None = None
    """Memory of all processes and in-memory files together, in MiB; passing it kills a process (out of memory)."""
    disk_gib: float | None = None
    """Bytes the box may write, in GiB; passing it fails the write, or ends the box where that can only be watched."""
    gpu: int | None = None
    gpu_type: str | None = None
    pids: int | None = None
    """Processes and threads alive at once."""
    unlimited: tuple[str, ...] = ()
    """Those of `LIMITS` that the box shall not have, not by default either."""

    def __post_init__(self) -> None:
        if isinstance(self.unlimited, str):
            raise ConfigError(f"resources: unlimited must be a list of names, not '{self.unlimited}'")
        object.__setattr__(self, "unlimited", tuple(self.unlimited))
        for name in self.unlimited:
            if name not in LIMITS:
                raise ConfigError(
                    f"resources: unlimited holds '{name}'{nearest(str(name), LIMITS)}; known are {', '.join(LIMITS)}"
                )
            if getattr(self, name) is not None:
                raise ConfigError(f"resources: {name} is {getattr(self, name)} and unlimited; remove one of them")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SandboxResources:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="resources")
        return cls(**values)

    def filled(self, defaults: SandboxResources) -> SandboxResources:
        """These limits, and those of ``defaults`` for what is left open here."""
        open_here = [name for name in LIMITS if getattr(self, name) is None and name not in self.unlimited]
        return dataclasses.replace(
            self,
            unlimited=(*self.unlimited, *(name for name in defaults.unlimited if name in open_here)),
            **{name: getattr(defaults, name) for name in open_here},
        )


DEFAULT_MEMORY_MIB = 8 * 1024
DEFAULT_DISK_GIB = 16.0
DEFAULT_PIDS = 2048


def default_limits(host_memory_mib: int | None) -> SandboxResources:
    """Limits of boxes for which neither spec nor configuration says anything: enough for the agents and tests that
    this suite is for, and not enough for one box to take a machine from its neighbours. Cores are not limited: the
    kernel shares them out evenly, and a quota would make tests time out on idle machines.

    Args:
        host_memory_mib: memory of the machine that boxes run on; ``None`` where nobody knows.
    """
    memory_mib = DEFAULT_MEMORY_MIB if host_memory_mib is None else min(DEFAULT_MEMORY_MIB, host_memory_mib * 3 // 4)
    return SandboxResources(memory_mib=memory_mib, disk_gib=DEFAULT_DISK_GIB, pids=DEFAULT_PIDS)


@dataclass(frozen=True)
class Door:
    """A listener on the box's loopback that reaches one target outside, and only the routes it allows.

    The listener belongs to whoever owns the box's host. It dials ``target``, adds ``headers`` (which never enter the
    box) and forwards only requests that match ``allow``. One of kind ``proxy`` has no target: it is a forward proxy to
    the hosts of ``allow`` (see `nemo_gym.sandbox.egress`).
    """

    name: str
    """What is behind it: ``model``, or an MCP server's name."""
    port: int
    """The TCP port on the box's 127.0.0.1."""
    target: str
    """Base URL outside the box; the request's path is appended to it."""
    allow: tuple[str, ...]
    """``METHOD /path`` patterns; ``*`` stands for one path segment, a final ``/**`` for any rest. Of a proxy: names,
    ``*.name`` or networks, with ``:port`` where it is not 80 and 443."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers set on every forwarded request, over what the box sent. Credentials belong here."""
    counted: tuple[str, ...] = ()
    """Patterns as in ``allow``: routes whose answers are counted (a model's answers). Where there are any, the door's
    statistics judge by them alone whether the target serves."""
    kind: Literal["routes", "proxy"] = "routes"
    max_answers: int | None = None
    """Answers of ``counted`` routes that it forwards; whoever asks for another gets 403. ``None``: any number."""


@dataclass(frozen=True)
class Mount:
    """A host directory or file that a box sees read-only (for example the shared cache of agent CLIs)."""

    source: str
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """Everything needed to create one box. Immutable and plain, apart from door headers free of secrets."""

    image: str | None = None
    """The provider's name for a root filesystem; ``None`` is the provider's default image."""
    ttl_s: float | None = None
    """Seconds the box lives without a renewal; ``None`` is `DEFAULT_TTL_S`."""
    ready_timeout_s: float | None = None
    """Seconds ``create`` may take; ``None`` is `DEFAULT_READY_TIMEOUT_S`."""
    workdir: str | None = None
    """Directory commands start in by default."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every process in the box. Nothing of the host's environment is inherited."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path in the box → text, written before ``create`` returns."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Labels of the box; see `nemo_gym.sandbox.labels` for the names this suite writes and reaps by."""
    resources: SandboxResources = field(default_factory=SandboxResources)
    entrypoint: Sequence[str] | None = None
    """Replaces the image's own entry point; ``None`` keeps the box idle, waiting for execs."""
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    """Options only one provider understands; unknown ones are refused by it."""
    ports: Sequence[int] = ()
    """Ports of the box that `SupportsEndpoint.endpoint` will be asked for."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: Sequence[Door] = ()
    mounts: Sequence[Mount] = ()
    user: str | None = None
    """User commands run as by default; ``None`` is the image's."""
    requires: Sequence[str] = ()
    """Names of capabilities the box must have beyond what the other fields imply."""
    idempotency_key: str | None = None
    """Two creates with one key give one box, where the backend allows it."""

    def replace(self, **changes: Any) -> SandboxSpec:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)
