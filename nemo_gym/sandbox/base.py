"""The sandbox seam: what a box is asked to be (`SandboxSpec`), and what a provider must do with it.

A provider is one module (or small package) under ``providers/``. It implements `SandboxProvider`, and as many of the
small protocols here as its backend allows. Anything above this seam (`AsyncSandbox`, agents, environments, the broker)
uses only these names.

What every provider owes its callers, and what ``nemo_gym.sandbox.conformance`` checks:

- A box dies with its lease: when ``ttl_s`` seconds pass without a renewal, also if every process of ours was killed.
- ``create`` either returns a box or leaves nothing behind, cancellation included.
- An exec ends in exactly one `ExecOutcome`. ``LOST`` means we do not know, and is never an exit code.
- Output is streamed, capped, and bytes that are not UTF-8 survive.
- ``close`` is idempotent, and gone is as good as closed.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from nemo_gym.contract.errors import SandboxArchiveError, SandboxCapabilityError
from nemo_gym.contract.sandbox import Door, NetworkPolicy, SandboxResources, SandboxSpec, default_limits
from nemo_gym.sandbox.door_statistics import DoorStatistics

# -- Provider ------------------------------------------------------------------------------------------------------

DEFAULT_MAX_OUTPUT_BYTES = 16 * 1024 * 1024


class BoxLabel:
    """Names of the labels this suite writes on every box, so that its labels are enough to find and reap it."""

    RUN = "nemo_gym.run"
    ROLLOUT = "nemo_gym.rollout"
    ATTEMPT = "nemo_gym.attempt"
    ROLE = "nemo_gym.role"
    EXPIRES_AT = "nemo_gym.lease_expires_at"
    """Unix seconds; written by providers whose backend has no lease of its own."""
    MANAGED = "nemo_gym.managed"
    """``true`` on every box of ours."""


def box_labels(*, run: str, rollout: str, attempt: int, role: str) -> Mapping[str, str]:
    """The labels of one box of one attempt."""
    return {
        BoxLabel.MANAGED: "true",
        BoxLabel.RUN: run,
        BoxLabel.ROLLOUT: rollout,
        BoxLabel.ATTEMPT: str(attempt),
        BoxLabel.ROLE: role,
    }


class SandboxStatus(StrEnum):
    """The life of a box as its backend reports it."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    RUNNING = "running"
    ERROR = "error"
    STOPPED = "stopped"


@dataclass(frozen=True)
class SandboxHandle:
    """A live box in this process. Never crosses HTTP; a `SandboxRef` does."""

    sandbox_id: str
    provider_name: str
    raw: Any = None
    """The provider's own object; callers do not look inside."""


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
    """A box as the backend lists it by labels."""

    sandbox_id: str
    status: SandboxStatus
    labels: Mapping[str, str]
    expires_at: float | None
    """Unix seconds when the lease ends; ``None`` when the backend does not say."""
    created_at: float | None = None
    termination_reason: str | None = None


_LIMIT_CAPABILITIES: Mapping[str, str] = {
    "cpu": "cpu_limit",
    "memory_mib": "memory_limit",
    "disk_gib": "disk_limit",
    "pids": "pids_limit",
}


@dataclass(frozen=True)
class SandboxCapabilities:
    """What a provider says of itself on this machine. A spec is checked against it before create, a composition before
    any task runs, so that nobody finds out half-way."""

    network_policies: frozenset[NetworkPolicy] = frozenset()
    loopback_door: bool = False
    snapshot: bool = False
    endpoint: bool = False
    connect: bool = False
    nested_containers: bool = False
    gpu: bool = False
    memory_limit: bool = False
    cpu_limit: bool = False
    pids_limit: bool = False
    disk_limit: bool = False
    user_limits: bool = False
    """What the kernel counts per user and one box could use up (inotify instances and watches, queued signals, message
    queues) is a box's own, or it has a share of it: enough is left to the host and to every other box."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Capability name → why it is missing here and what would provide it."""
    default_limits: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec leaves them open; see `with_default_limits`."""

    def with_default_limits(self, configured: SandboxResources, *, host_memory_mib: int | None) -> SandboxCapabilities:
        """These abilities, with the limits that are ``configured``, and the suite's own where nothing is and the
        provider can enforce them. What is configured and cannot be enforced stays, and is refused by `check`."""
        suite = default_limits(host_memory_mib)
        kept = {name: getattr(suite, name) for name, able in _LIMIT_CAPABILITIES.items() if getattr(self, able)}
        return replace(self, default_limits=configured.filled(SandboxResources(**kept)))

    def limits(self, wanted: SandboxResources) -> SandboxResources:
        """The limits of a box whose spec has ``wanted``."""
        return wanted.filled(self.default_limits)

    def missing(self, spec: SandboxSpec) -> list[str]:
        """One sentence for each thing the spec asks for and the provider cannot give; empty when all is well."""
        wanted: dict[str, bool] = {
            "loopback_door": bool(spec.doors),
            **{able: getattr(spec.resources, name) is not None for name, able in _LIMIT_CAPABILITIES.items()},
            "gpu": bool(spec.resources.gpu),
            "endpoint": bool(spec.ports),
        }
        for name in spec.requires:
            wanted[name] = True
        lacking = []
        for name, is_wanted in wanted.items():
            if is_wanted and not getattr(self, name, False):
                lacking.append(f"{name}: {self.reasons.get(name, 'not supported by this provider')}")
        if spec.network not in self.network_policies:
            why = self.reasons.get(f"network_{spec.network}", "not supported by this provider")
            lacking.append(f"network={spec.network}: {why}")
        return lacking

    def check(self, spec: SandboxSpec, provider_name: str) -> None:
        """Raise `SandboxCapabilityError` naming everything that is missing, at once."""
        lacking = self.missing(spec)
        if lacking:
            raise SandboxCapabilityError(
                f"sandbox provider '{provider_name}' cannot serve this spec: " + "; ".join(lacking),
                provider=provider_name,
                missing=lacking,
            )


@runtime_checkable
class SandboxProvider(Protocol):
    """What every backend does. Optional abilities are the protocols below."""

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
        preceded by ``**/`` for every depth. More than ``max_bytes`` raises
        `SandboxArchiveTooLargeError`; give it wherever the box's contents are not yours."""
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


# -- What a provider may be able to do beyond the basics -----------------------------------------------------------


@runtime_checkable
class SupportsLoopbackDoor(Protocol):
    """Doors can also be opened on a running box. Doors of the spec are open when ``create`` returns."""

    async def open_door(self, handle: SandboxHandle, door: Door) -> None: ...

    async def close_door(self, handle: SandboxHandle, name: str) -> None: ...


@runtime_checkable
class SupportsDoorStatistics(Protocol):
    """The provider serves its boxes' doors itself, and counts what went through them."""

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        """By door name; the objects go on counting until the door closes."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """A box's files can become an image."""

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        """Store the box's files as ``image``, atomically: a name either has all of it or does not exist."""
        ...

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        """Labels the image was committed with; ``None`` when there is no such image."""
        ...

    async def remove_image(self, image: str) -> None:
        """Forget an image; idempotent."""
        ...


@runtime_checkable
class SupportsEndpoint(Protocol):
    async def endpoint(self, handle: SandboxHandle, port: int) -> str:
        """A URL on this host that reaches ``port`` of the box."""
        ...


class SandboxEndpoint(str):
    """A URL that reaches a port of a box; NeMo Gym's plugins read its parts."""

    headers: dict[str, str]

    def __new__(cls, endpoint: str, headers: Mapping[str, str] | None = None) -> Self:
        self = super().__new__(cls, endpoint)
        self.headers = dict(headers or {})
        return self

    @property
    def endpoint(self) -> str:
        return str(self)


@runtime_checkable
class Connectable(Protocol):
    """A box can be used from another process, by plain data."""

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]: ...

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle: ...


@runtime_checkable
class SupportsFencing(Protocol):
    """Boxes that were lent can be taken back while they live."""

    async def fence(self, handle: SandboxHandle) -> None:
        """Make every descriptor that ``serialize_handle`` made of this handle useless, also to who is connected."""
        ...


CAPABILITY_PROTOCOLS: Mapping[str, type] = {
    "loopback_door": SupportsLoopbackDoor,
    "snapshot": SupportsSnapshot,
    "endpoint": SupportsEndpoint,
    "connect": Connectable,
}
"""Declared capability → the protocol of a provider that declares it; the conformance suite checks both ways."""


def require(provider: SandboxProvider, protocol: type, *, why: str) -> None:
    """Raise `SandboxCapabilityError` unless the provider implements ``protocol``; ``why`` completes the sentence."""
    if not isinstance(provider, protocol):
        raise SandboxCapabilityError(
            f"sandbox provider '{provider.name}' does not implement {protocol.__name__}, which is needed {why}",
            provider=provider.name,
        )


def absolute(path: str) -> str:
    """``path`` with single slashes and none at its end. Raises `SandboxArchiveError` unless it is absolute."""
    if not path.startswith("/") or "\0" in path:
        raise SandboxArchiveError(f"'{path}' must be an absolute path in the box")
    return re.sub(r"/+", "/", path.rstrip("/")) or "/"
