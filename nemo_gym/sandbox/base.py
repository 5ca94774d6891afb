"""The sandbox seam: what a box is asked to be (`SandboxSpec`), and what a provider must do with it.

A provider is one module (or small package) under ``providers/``. It implements `SandboxProvider`, and as many of the
small protocols in `nemo_gym.sandbox.capabilities` as its backend allows. Anything above this seam (`AsyncSandbox`,
agents, environments, the broker) uses only these names.

What every provider owes its callers, and what ``nemo_gym.sandbox.conformance`` checks:

- A box dies with its lease: when ``ttl_s`` seconds pass without a renewal, also if every process of ours was killed.
- ``create`` either returns a box or leaves nothing behind, cancellation included.
- An exec ends in exactly one `ExecOutcome`. ``LOST`` means we do not know, and is never an exit code.
- Output is streamed, capped, and bytes that are not UTF-8 survive.
- ``close`` is idempotent, and gone is as good as closed.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.sandbox.capabilities import SandboxCapabilities

DEFAULT_TTL_S = 3600.0
DEFAULT_READY_TIMEOUT_S = 120.0
DEFAULT_MAX_OUTPUT_BYTES = 16 * 1024 * 1024


class SandboxStatus(StrEnum):
    """The life of a box as its backend reports it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ERROR = "error"
    UNKNOWN = "unknown"


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
        from nemo_gym._util.suggest import nearest

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
        from nemo_gym._util.suggest import reject_unknown_keys

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


@dataclass(frozen=True)
class SandboxHandle:
    """A live box in this process. Never crosses HTTP; a `SandboxRef` does."""

    sandbox_id: str
    provider_name: str
    raw: Any = None
    """The provider's own object; nobody else looks inside."""


class ExecOutcome(StrEnum):
    """How an exec ended: exactly one of these."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"


@dataclass(frozen=True)
class SandboxExecResult:
    """What one command did. ``stdout`` and ``stderr`` decode as UTF-8 with ``surrogateescape``, so that
    ``stdout_bytes`` gives back exactly what was written; encode with ``errors="replace"`` before sending as JSON."""

    stdout: str | None = None
    stderr: str | None = None
    return_code: int | None = None
    """The exit code; ``None`` when the process did not exit by itself or we do not know."""
    error_type: str | None = None
    """``None``, ``timeout``, ``oom``, ``signal`` or ``lost`` (NeMo Gym's spelling of ``outcome``)."""
    outcome: ExecOutcome = ExecOutcome.EXITED
    signal: int | None = None
    duration_s: float = 0.0
    stdout_truncated: bool = False
    stderr_truncated: bool = False

    @property
    def stdout_bytes(self) -> bytes:
        return (self.stdout or "").encode("utf-8", "surrogateescape")

    @property
    def stderr_bytes(self) -> bytes:
        return (self.stderr or "").encode("utf-8", "surrogateescape")

    @property
    def ok(self) -> bool:
        """Whether the command exited by itself with 0."""
        return self.outcome is ExecOutcome.EXITED and self.return_code == 0


@dataclass(frozen=True)
class ExecRequest:
    """One command to run in a box."""

    command: str | Sequence[str]
    """A string is run by ``/bin/sh -c``; a sequence is run as it is."""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the spec's environment."""
    timeout_s: float | None = None
    """Seconds until the command and its whole process tree are killed; ``None`` waits for as long as the box lives."""
    user: str | None = None
    stdin: bytes | None = None
    """Fed to the command, then closed; ``None`` is an empty standard input."""
    merge_stderr: bool = False
    """Send stderr into stdout, in the order written."""
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES
    """Kept per stream; more is read and dropped, and the result says so."""


@dataclass(frozen=True)
class ExecOutput:
    """A piece of output as it arrived."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class ExecEnd:
    """The one terminal event of an exec."""

    outcome: ExecOutcome
    return_code: int | None = None
    signal: int | None = None
    duration_s: float = 0.0


class ExecProcess(Protocol):
    """A running command. ``events`` yields output in order and then exactly one `ExecEnd`."""

    exec_id: str

    def events(self) -> AsyncIterator[ExecOutput | ExecEnd]: ...

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        ...

    async def kill(self) -> None:
        """Kill the whole process tree; idempotent."""
        ...


@dataclass(frozen=True)
class SandboxInfo:
    """A box as the backend lists it, for whoever holds only labels."""

    sandbox_id: str
    status: SandboxStatus
    labels: Mapping[str, str]
    expires_at: float | None
    """Unix seconds when the lease ends; ``None`` when the backend does not say."""
    created_at: float | None = None
    termination_reason: str | None = None


@runtime_checkable
class SandboxProvider(Protocol):
    """What every backend does. Optional abilities are the protocols of `nemo_gym.sandbox.capabilities`."""

    name: str

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What this provider can do on this machine, found out by asking the machine, not assumed."""
        ...

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Create a box that is ready for ``exec``.

        Raises:
            SandboxCapabilityError: the spec asks for what this provider cannot do here; nothing was created.
            SandboxCreateError: the backend failed (missing image or binary, full disk); nothing is left behind.
        """
        ...

    async def exec(
        self,
        handle: SandboxHandle,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> SandboxExecResult:
        """Run one command to its end. Never raises for what the command does; a box that is gone is ``LOST``."""
        ...

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> ExecProcess:
        """Start a command and stream it."""
        ...

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        """Unpack a tar stream below ``path`` (created when missing). A member that leaves ``path``, by name or by
        link, raises `SandboxArchiveError` and nothing outside ``path`` changes."""
        ...

    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        """The file or directory at ``path`` as a tar stream whose first member is named by the path's last part.
        Made by the provider, with no program of the box. ``exclude`` are paths relative to ``path``, or a bare name
        preceded by ``**/`` for every depth. More than ``max_bytes`` raises `SandboxArchiveError`."""
        ...

    async def upload_file(self, handle: SandboxHandle, source: Path, target: str) -> None: ...

    async def download_file(self, handle: SandboxHandle, source: str, target: Path) -> None: ...

    async def status(self, handle: SandboxHandle) -> SandboxStatus: ...

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        """Let the box live ``ttl_s`` seconds from now. Raises `SandboxLostError` when it is gone."""
        ...

    async def close(self, handle: SandboxHandle) -> None:
        """Destroy the box, its processes and its files. Idempotent."""
        ...

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Boxes of this backend that carry all the given labels, whoever created them."""
        ...

    async def reap(self, labels: Mapping[str, str]) -> builtins.list[str]:
        """Destroy every box that carries all the given labels (at least one is required); ids of those destroyed."""
        ...

    async def aclose(self) -> None:
        """Release the provider's own resources (connections, threads). Boxes stay until their lease ends."""
        ...
