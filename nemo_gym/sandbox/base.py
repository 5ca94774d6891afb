"""The sandbox interface: what a provider must do to create a box from a `SandboxSpec` and run commands in it.

A provider is one module (or small package) under ``providers/``. It implements `SandboxProvider`, and as many of the
small protocols here as its backend allows. Its callers (`AsyncSandbox`, agents, environments, the broker) use only the
names defined here.

Every provider guarantees the following, and ``nemo_gym.sandbox.conformance`` checks it:

- A box dies with its lease: after ``ttl_s`` seconds without a renewal, even if every process of this suite was killed.
- ``create`` either returns a box or leaves nothing behind, even when it is cancelled.
- An exec ends in exactly one `ExecOutcome`. ``LOST`` means that the result is unknown, and is never an exit code.
- Output is streamed and capped, and bytes that are not UTF-8 survive.
- ``close`` is idempotent, and succeeds for a box that is already gone.
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
    """Names of the labels that this suite writes on every box, so that it can find and reap a box by labels alone."""

    RUN = "nemo_gym.run"
    ROLLOUT = "nemo_gym.rollout"
    ATTEMPT = "nemo_gym.attempt"
    ROLE = "nemo_gym.role"
    EXPIRES_AT = "nemo_gym.lease_expires_at"
    """Unix seconds when the lease ends; written by providers whose backend has no leases."""
    MANAGED = "nemo_gym.managed"
    """``true`` on every box that this suite creates."""


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
    """The state of a box as its backend reports it."""

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
    """The provider's own object, opaque to callers."""


class ExecOutcome(StrEnum):
    """How an exec ended: exactly one of these."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"


@dataclass(frozen=True)
class SandboxExecResult:
    """The result of one command. ``stdout`` and ``stderr`` are decoded as UTF-8 with ``surrogateescape``, so that
    ``stdout_bytes`` returns exactly the bytes written; encode with ``errors="replace"`` before sending as JSON."""

    stdout: str | None = None
    stderr: str | None = None
    return_code: int | None = None
    """The exit code; ``None`` when the process did not exit by itself or the code is unknown."""
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
    """A string runs in ``/bin/sh -c``; a sequence is an argv and runs without a shell."""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the spec's environment."""
    timeout_s: float | None = None
    """Seconds until the command and its whole process tree are killed; ``None`` is no limit but the box's lifetime."""
    user: str | None = None
    stdin: bytes | None = None
    """Bytes written to the command's standard input, which is then closed; ``None`` is an empty standard input."""
    merge_stderr: bool = False
    """Send stderr into stdout, in the order written."""
    max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES
    """Bytes kept per stream. Further output is read and dropped, and the result marks the stream as truncated."""


@dataclass(frozen=True)
class ExecOutput:
    """One chunk of output."""

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
    """Unix seconds when the lease ends; ``None`` when the backend does not report it."""
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
    """What a provider can do on this machine. A spec is checked against it before ``create``, and a composition before
    any task runs, so that a missing capability fails early and not half-way through a run."""

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
    """Whether a box has its own count or a bounded share of what the kernel counts per user (inotify instances and
    watches, queued signals, message queues), so that it cannot exhaust them for the host and for other boxes."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Capability name → why it is missing on this machine and what would provide it."""
    default_limits: SandboxResources = field(default_factory=SandboxResources)
    """Limits for whatever a box's spec leaves unset; see `with_default_limits`."""

    def with_default_limits(self, configured: SandboxResources, *, host_memory_mib: int | None) -> SandboxCapabilities:
        """Return these capabilities with the ``configured`` limits. A limit that is not configured gets the suite's
        default if the provider can enforce it. A configured limit that it cannot enforce stays, for `check` to refuse.
        """
        suite = default_limits(host_memory_mib)
        enforceable = {name: getattr(suite, name) for name, able in _LIMIT_CAPABILITIES.items() if getattr(self, able)}
        return replace(self, default_limits=configured.filled(SandboxResources(**enforceable)))

    def limits(self, wanted: SandboxResources) -> SandboxResources:
        """Return the limits of a box whose spec has the resources ``wanted``."""
        return wanted.filled(self.default_limits)

    def missing(self, spec: SandboxSpec) -> list[str]:
        """Return one sentence per capability that the spec needs and the provider lacks; empty if it lacks none."""
        required = {
            "loopback_door": bool(spec.doors),
            **{able: getattr(spec.resources, name) is not None for name, able in _LIMIT_CAPABILITIES.items()},
            "gpu": bool(spec.resources.gpu),
            "endpoint": bool(spec.ports),
            **dict.fromkeys(spec.requires, True),
        }
        problems = [
            f"{name}: {self.reasons.get(name, 'not supported by this provider')}"
            for name, is_required in required.items()
            if is_required and not getattr(self, name, False)
        ]
        if spec.network not in self.network_policies:
            reason = self.reasons.get(f"network_{spec.network}", "not supported by this provider")
            problems.append(f"network={spec.network}: {reason}")
        return problems

    def check(self, spec: SandboxSpec, provider_name: str) -> None:
        """Raise one `SandboxCapabilityError` that names every missing capability."""
        problems = self.missing(spec)
        if problems:
            raise SandboxCapabilityError(
                f"sandbox provider '{provider_name}' cannot serve this spec: " + "; ".join(problems),
                provider=provider_name,
                missing=problems,
            )


@runtime_checkable
class SandboxProvider(Protocol):
    """What every provider implements. The protocols below are optional."""

    name: str

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What this provider can do on this machine, determined by probing the machine."""
        ...

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Create a box that is ready for ``exec``.

        Raises:
            SandboxCapabilityError: the spec needs a capability that this provider lacks here; nothing was created.
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
        """Run one command to its end. Never raises for what the command does; a lost box yields ``LOST``. Processes
        that it leaves in the background live on, and may go on writing to its output, which nobody reads any more,
        unless ``capabilities.reasons`` has ``background_output``."""
        ...

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> ExecProcess:
        """Start a command and stream it."""
        ...

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        """Unpack a tar stream below ``path`` (created when missing). Files and links replace each other, but never a
        directory, nor a directory them. Raises `SandboxArchiveError` for a member that leaves ``path`` by name or
        through a link, and whatever the box has put in the way; nothing outside ``path`` changes."""
        ...

    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the file or directory at ``path`` as a tar stream whose first member is named by the path's last
        component. The provider packs it without running any program of the box. It follows a link at ``path`` itself,
        inside the box; links below it are packed as links. ``exclude`` holds paths relative to ``path``, or
        ``**/name`` to exclude a name at every depth; with ``/`` at the end, only directories. Raises
        `SandboxArchiveTooLargeError` beyond ``max_bytes``; set it whenever the box's contents are untrusted. Raises
        `SandboxArchiveError` if nothing can be packed at ``path``, whatever the box has put in its way."""
        ...

    async def upload_file(self, handle: SandboxHandle, source: Path, target: str) -> None: ...

    async def download_file(self, handle: SandboxHandle, source: str, target: Path) -> None: ...

    async def status(self, handle: SandboxHandle) -> SandboxStatus: ...

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        """Extend the lease to ``ttl_s`` seconds from now. Raises `SandboxLostError` when the box is gone."""
        ...

    async def close(self, handle: SandboxHandle) -> None:
        """Destroy the box, its processes and its files. Idempotent."""
        ...

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Return the boxes of this backend that carry all the given labels, no matter which process created them."""
        ...

    async def reap(self, labels: Mapping[str, str]) -> builtins.list[str]:
        """Destroy every box that carries all the given labels (at least one is required); return their ids."""
        ...

    async def aclose(self) -> None:
        """Release the provider's own resources (connections, threads). Boxes live on until their leases end."""
        ...


# -- Optional abilities of a provider ------------------------------------------------------------------------------


@runtime_checkable
class SupportsLoopbackDoor(Protocol):
    """The provider can open doors on a running box. The doors of the spec are already open when ``create`` returns."""

    async def open_door(self, handle: SandboxHandle, door: Door) -> None: ...

    async def close_door(self, handle: SandboxHandle, name: str) -> None: ...


@runtime_checkable
class SupportsDoorStatistics(Protocol):
    """The provider serves its boxes' doors itself, and counts the exchanges that pass through them."""

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        """Return door name → statistics; the objects keep counting until the door closes."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """The provider can make an image from a box's files."""

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        """Store the box's files as ``image``, atomically: the image either is complete or does not exist."""
        ...

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        """Return the labels with which the image was committed; ``None`` when there is no such image."""
        ...

    async def remove_image(self, image: str) -> None:
        """Delete an image; idempotent."""
        ...


@runtime_checkable
class SupportsEndpoint(Protocol):
    async def endpoint(self, handle: SandboxHandle, port: int) -> str:
        """Return a URL on this host that reaches ``port`` of the box."""
        ...


class SandboxEndpoint(str):
    """A URL that reaches a port of a box; NeMo Gym's plugins read ``endpoint`` and ``headers``."""

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
    """The provider can describe a box as plain data, from which another process connects to it."""

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]: ...

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle: ...


@runtime_checkable
class TellsOverrun(Protocol):
    """The provider ends boxes that exceed a limit, and knows which ones it ended for that."""

    async def overrun(self, handle: SandboxHandle) -> str | None:
        """Return what a box exceeded so that it was ended; ``None`` if that is not why it is gone."""
        ...


async def overrun_of(provider: SandboxProvider, handle: SandboxHandle) -> str | None:
    """Return what a box exceeded so that its provider ended it; ``None`` if that is not known to be why it is gone."""
    return await provider.overrun(handle) if isinstance(provider, TellsOverrun) else None


@runtime_checkable
class SupportsFencing(Protocol):
    """The provider can revoke other processes' access to a box while the box lives."""

    async def fence(self, handle: SandboxHandle) -> None:
        """Revoke every descriptor that ``serialize_handle`` made of this handle, also for connected processes."""
        ...


CAPABILITY_PROTOCOLS: Mapping[str, type] = {
    "loopback_door": SupportsLoopbackDoor,
    "snapshot": SupportsSnapshot,
    "endpoint": SupportsEndpoint,
    "connect": Connectable,
}
"""Capability → the protocol that a provider with it must implement. The conformance suite checks this, and also that a
provider which implements the protocol without declaring the capability gives a reason."""


def require(provider: SandboxProvider, protocol: type, *, why: str) -> None:
    """Raise `SandboxCapabilityError` unless the provider implements ``protocol``; ``why`` ends the error message."""
    if not isinstance(provider, protocol):
        raise SandboxCapabilityError(
            f"sandbox provider '{provider.name}' does not implement {protocol.__name__}, which is needed {why}",
            provider=provider.name,
        )


def absolute(path: str) -> str:
    """Collapse repeated slashes in ``path`` and strip trailing ones. Raises `SandboxArchiveError` unless ``path`` is
    absolute and has no zero byte."""
    if not path.startswith("/") or "\0" in path:
        raise SandboxArchiveError(f"'{path}' must be an absolute path in the box")
    return re.sub(r"/+", "/", path.rstrip("/")) or "/"
