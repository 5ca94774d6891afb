"""Bodies of the broker's API, and the bounds of their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from nemo_gym.contract.sandbox import Door, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.session import IDENTIFIER, LeaseScope, MountModel, ResourcesModel, SandboxSpecModel
from nemo_gym.sandbox.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    ExecEnd,
    ExecOutcome,
    ExecRequest,
    SandboxCapabilities,
    SandboxInfo,
    SandboxStatus,
)
from nemo_gym.sandbox.door_statistics import DoorStatistics

# -- Bounds --------------------------------------------------------------------------------------------------------

MAX_TTL_S = 30 * 24 * 3600.0
"""Longest lease the wire can express; a broker's own limit may be shorter."""
MAX_LABELS = 64
MAX_DOORS = 64
"""Of one box; each is a listener of the process that serves it."""
MAX_STDIN_BYTES = 256 * 1024 * 1024
MAX_OUTPUT_BYTES = 2**40

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER.pattern, max_length=128)]
"""An id that is a path segment: of execs (chosen by the client), boxes and leases (by the broker)."""
Text = Annotated[str, StringConstraints(max_length=8192)]
"""A path, a name, a value: never a document."""
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Labels = Annotated[dict[LabelKey, Text], Field(max_length=MAX_LABELS)]
TtlS = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WireModel(BaseModel):
    """Immutable; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are, not copied and not turned into dictionaries."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


# -- Doors ---------------------------------------------------------------------------------------------------------
# Doors on the wire, and what went through them.
#
# Headers hold credentials: they are hidden in ``repr`` and answered by no route.


class DoorModel(WireModel):
    """The wire form of `Door`."""

    name: str = Field(min_length=1, max_length=256)
    port: int = Field(ge=1, le=65535)
    target: Text
    allow: tuple[Text, ...]
    headers: dict[Text, Text] = Field(default_factory=dict, repr=False)
    counted: tuple[Text, ...] = ()
    kind: Literal["routes", "proxy"] = "routes"
    max_answers: int | None = Field(None, ge=1)

    @classmethod
    def of(cls, door: Door) -> Self:
        return cls(**fields_of(door))

    def to_door(self) -> Door:
        return Door(**{**self.__dict__, "headers": dict(self.headers)})


class DoorsView(WireModel):
    """What went through each open door of a box; ``None`` where the backend does not count."""

    doors: dict[str, DoorStatistics | None]


# -- Boxes ---------------------------------------------------------------------------------------------------------


class BoxSpec(SandboxSpecModel):
    """The wire form of a `SandboxSpec`. Its lease, labels and idempotency key are the request's."""

    ttl_s: None = None
    """Of the request (`CreateSandbox.ttl_s`), never of the spec."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: tuple[DoorModel, ...] = Field((), max_length=MAX_DOORS)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        return cls(
            image=spec.image,
            ready_timeout_s=spec.ready_timeout_s,
            workdir=spec.workdir,
            env=dict(spec.env),
            files=dict(spec.files),
            resources=ResourcesModel(**dataclasses.asdict(spec.resources)),
            entrypoint=None if spec.entrypoint is None else tuple(spec.entrypoint),
            provider_options=dict(spec.provider_options),
            ports=tuple(spec.ports),
            mounts=tuple(MountModel(source=mount.source, target=mount.target) for mount in spec.mounts),
            user=spec.user,
            requires=tuple(spec.requires),
            network=spec.network,
            doors=tuple(DoorModel.of(door) for door in spec.doors),
        )

    def to_spec(self) -> SandboxSpec:
        return super().to_spec().replace(network=self.network, doors=tuple(door.to_door() for door in self.doors))


class CreateSandbox(WireModel):
    """``POST /v1/sandboxes``; the header ``Idempotency-Key`` makes it safe to repeat."""

    spec: BoxSpec
    ttl_s: TtlS | None = None
    """Seconds of the first lease; ``None`` is the broker's default."""
    labels: Labels = Field(default_factory=dict)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        """The request for a box of ``spec``; its idempotency key goes into the header."""
        return cls(spec=BoxSpec.of(spec), ttl_s=spec.ttl_s, labels=dict(spec.metadata))

    def to_spec(self, idempotency_key: str | None = None) -> SandboxSpec:
        return self.spec.to_spec().replace(
            ttl_s=self.ttl_s, metadata=dict(self.labels), idempotency_key=idempotency_key
        )


TerminationReason = Literal["closed", "reaped", "expired", "exited", "out_of_memory", "create_failed", "lost"]


class SandboxView(WireModel):
    """One box, as its readers see it."""

    sandbox_id: Identifier
    state: SandboxStatus
    ready: bool
    """Whether it takes execs now."""
    termination_reason: TerminationReason | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    provider: str
    image: str | None = None
    epoch: int = Field(ge=1)
    """Of its lease; a token of an older epoch is fenced."""
    created_at: float
    """Unix seconds, of the broker's clock, as `expires_at`."""
    expires_at: float | None = None

    def to_info(self) -> SandboxInfo:
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            status=self.state,
            labels=dict(self.labels),
            expires_at=self.expires_at,
            created_at=self.created_at,
            termination_reason=self.termination_reason,
        )


class SandboxPage(WireModel):
    """``GET /v1/sandboxes``: boxes that are not gone, oldest first."""

    sandboxes: tuple[SandboxView, ...]
    next_cursor: str | None = None
    """Of the next page; ``None`` on the last."""


class ReapedView(WireModel):
    """``DELETE /v1/sandboxes?label=…``: ids of the boxes that this request destroyed."""

    reaped: tuple[str, ...]


class LeaseView(WireModel):
    """A right to a box. Only the answer that makes the lease contains the token."""

    lease_id: Identifier
    sandbox_id: Identifier
    scope: LeaseScope
    epoch: int = Field(ge=1)
    expires_at: float
    """Unix seconds of the broker's clock; that of the box where the lease has no end of its own."""
    ttl_s: float
    """Seconds left when this was answered, for clients whose clock differs."""
    token: str | None = Field(None, repr=False)


class CreatedSandbox(WireModel):
    """201 (made) or 200 (made before, by the same key)."""

    sandbox: SandboxView
    lease: LeaseView


class RenewLease(WireModel):
    """``PUT …/lease``: let the box live ``ttl_s`` seconds from now, longer or shorter than before."""

    ttl_s: TtlS


class MintLease(WireModel):
    """``POST …/leases``: a lease that may do less."""

    scope: LeaseScope
    ttl_s: TtlS | None = None
    """Seconds until it ends by itself; ``None``: with the box, however often that is renewed."""


class CommitImage(WireModel):
    """``POST …/images``: store the box's files as an image of the backend."""

    image: Text = Field(min_length=1)
    labels: dict[str, str] = Field(default_factory=dict)


class ImageView(WireModel):
    image: str
    labels: dict[str, str] = Field(default_factory=dict)


# -- Execs ---------------------------------------------------------------------------------------------------------


class ExecSubmission(WireModel):
    """``PUT …/execs/{exec_id}``: exactly one of ``command`` (a shell's) and ``argv``."""

    command: str | None = None
    argv: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: Text | None = None
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: Seconds | None = None
    user: Text | None = None
    merge_stderr: bool = False
    max_output_bytes: int = Field(DEFAULT_MAX_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    """Kept per stream; the broker's own limit may be lower. The end names the streams that were cut."""
    stdin: Literal["none", "attached"] = "none"
    """``attached``: the command waits for ``PUT …/stdin`` before it starts."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("an exec needs exactly one of 'command' (run by a shell) and 'argv' (run as it is)")
        return self

    @classmethod
    def of(cls, request: ExecRequest) -> Self:
        """The submission of ``request``, without the bytes of its standard input."""
        is_shell = isinstance(request.command, str)
        return cls(
            command=str(request.command) if is_shell else None,
            argv=None if is_shell else tuple(request.command),
            cwd=request.cwd,
            env=dict(request.env),
            timeout_s=request.timeout_s,
            user=request.user,
            merge_stderr=request.merge_stderr,
            max_output_bytes=request.max_output_bytes,
            stdin="none" if request.stdin is None else "attached",
        )

    def to_request(self, stdin: bytes | None = None) -> ExecRequest:
        return ExecRequest(
            command=self.command if self.command is not None else self.argv or (),
            cwd=self.cwd,
            env=dict(self.env),
            timeout_s=self.timeout_s,
            user=self.user,
            stdin=stdin,
            merge_stderr=self.merge_stderr,
            max_output_bytes=self.max_output_bytes,
        )


class ExecEndModel(WireModel):
    """The one end of an exec: payload of the exit frame, and part of the exec's view."""

    outcome: ExecOutcome
    return_code: int | None = None
    signal: int | None = None
    duration_s: float = 0.0
    output_bytes: int = Field(ge=0)
    """Of both streams together: a reader with fewer bytes has missed some."""
    truncated: tuple[Literal["stdout", "stderr"], ...] = ()

    @model_validator(mode="after")
    def _says_what_it_knows(self) -> Self:
        if (self.return_code is not None) != (self.outcome is ExecOutcome.EXITED):
            raise ValueError(f"'{self.outcome}' and return_code={self.return_code} contradict each other")
        return self

    @classmethod
    def of(cls, end: ExecEnd, *, output_bytes: int, truncated: tuple[Literal["stdout", "stderr"], ...] = ()) -> Self:
        return cls(**fields_of(end), output_bytes=output_bytes, truncated=truncated)

    def to_end(self) -> ExecEnd:
        return ExecEnd(self.outcome, self.return_code, self.signal, self.duration_s)


class ExecView(WireModel):
    """An exec's state. ``end`` is there exactly when it is over."""

    exec_id: Identifier
    state: Literal["awaiting_stdin", "running", "ended"]
    output_bytes: int = Field(0, ge=0)
    """In the spool so far."""
    submitted_at: float
    end: ExecEndModel | None = None

    @model_validator(mode="after")
    def _ended_has_an_end(self) -> Self:
        if (self.end is not None) != (self.state == "ended"):
            raise ValueError(f"an exec that is '{self.state}' has {'an' if self.end else 'no'} end")
        return self


class SignalExec(WireModel):
    """``POST …/signal``: to the command's whole process tree; 204, also when it has ended."""

    signal: int = Field(ge=1, le=64)


# -- Capabilities --------------------------------------------------------------------------------------------------

_NOT_FLAGS = ("network_policies", "reasons", "default_limits")
_ABILITIES = tuple(field.name for field in dataclasses.fields(SandboxCapabilities) if field.name not in _NOT_FLAGS)


class BrokerLimits(WireModel):
    """What this broker bounds, for clients that want to know before they are refused."""

    max_ttl_s: float = MAX_TTL_S
    default_ttl_s: float
    max_body_bytes: int
    max_archive_bytes: int
    max_output_bytes: int
    max_stdin_bytes: int = MAX_STDIN_BYTES
    max_boxes: int | None = None


class CapabilitiesView(WireModel):
    """``GET /v1/capabilities``: the backend's abilities on the broker's host, and the broker's limits."""

    provider: str
    network_policies: tuple[NetworkPolicy, ...]
    abilities: dict[str, bool]
    """Every other field of `SandboxCapabilities` by name; a reader ignores those it does not know."""
    reasons: dict[str, str] = Field(default_factory=dict)
    default_limits: ResourcesModel = Field(default_factory=ResourcesModel)
    """Of the backend's boxes whose spec leaves them open."""
    door_statistics: bool = False
    limits: BrokerLimits

    @classmethod
    def of(
        cls, capabilities: SandboxCapabilities, *, provider: str, door_statistics: bool, limits: BrokerLimits
    ) -> Self:
        return cls(
            provider=provider,
            network_policies=tuple(sorted(capabilities.network_policies)),
            abilities={name: bool(getattr(capabilities, name)) for name in _ABILITIES},
            reasons=dict(capabilities.reasons),
            default_limits=ResourcesModel(**dataclasses.asdict(capabilities.default_limits)),
            door_statistics=door_statistics,
            limits=limits,
        )

    def to_capabilities(self, *, carried: Mapping[str, str | None]) -> SandboxCapabilities:
        """What the backend can and the wire carries.

        Args:
            carried: ability → ``None``, where a client of the broker has it whatever the backend does, or why it can
                never have it.
        """
        abilities = {name: self.abilities.get(name, False) for name in _ABILITIES}
        reasons = dict(self.reasons)
        for name, why_not in carried.items():
            if name in abilities:
                abilities[name] = why_not is None
            reasons.pop(name, None)
            if why_not is not None:
                reasons[name] = why_not
        return SandboxCapabilities(
            network_policies=frozenset(self.network_policies),
            reasons=reasons,
            default_limits=SandboxResources(**self.default_limits.model_dump()),
            **abilities,
        )
