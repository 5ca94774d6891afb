"""The request and response bodies of the broker's API, and the bounds of their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from nemo_gym.contract.sandbox import Door, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.session import IDENTIFIER, LeaseScope, ResourcesModel, SandboxSpecModel
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
"""Maximum number of doors of one box. Each door is a listener of the process that serves the box."""
MAX_STDIN_BYTES = 256 * 1024 * 1024
MAX_OUTPUT_BYTES = 2**40

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER.pattern, max_length=128)]
"""An id used as a path segment. The client chooses the ids of execs; the broker those of boxes and leases."""
Text = Annotated[str, StringConstraints(max_length=8192)]
"""A short text such as a path, a name or a value; never a document."""
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Labels = Annotated[dict[LabelKey, Text], Field(max_length=MAX_LABELS)]
TtlS = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WireModel(BaseModel):
    """Base of all bodies: immutable, and rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def fields_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name, without copying values or turning them into dictionaries."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


# -- Doors ---------------------------------------------------------------------------------------------------------
# Doors on the wire, and the statistics of their traffic.
#
# A door's headers hold credentials: ``repr`` hides them and no route returns them.


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
    """The traffic statistics of each open door of a box; ``None`` where the backend keeps no statistics."""

    doors: dict[str, DoorStatistics | None]


# -- Boxes ---------------------------------------------------------------------------------------------------------


class BoxSpec(SandboxSpecModel):
    """The wire form of a `SandboxSpec`. The lease, labels and idempotency key belong to the request instead."""

    ttl_s: None = None
    """Always ``None``: the request carries the lease's duration (`CreateSandbox.ttl_s`)."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: tuple[DoorModel, ...] = Field((), max_length=MAX_DOORS)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        values = {name: getattr(spec, name) for name in cls.model_fields if name != "ttl_s"}
        return cls.model_validate(values, from_attributes=True)

    def to_spec(self) -> SandboxSpec:
        return super().to_spec().replace(network=self.network, doors=tuple(door.to_door() for door in self.doors))


class CreateSandbox(WireModel):
    """``POST /v1/sandboxes``; the header ``Idempotency-Key`` makes it safe to repeat."""

    spec: BoxSpec
    ttl_s: TtlS | None = None
    """Duration of the first lease in seconds; ``None`` selects the broker's default."""
    labels: Labels = Field(default_factory=dict)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        """Build the request for a box of ``spec``, except its idempotency key, which goes into the header."""
        return cls(spec=BoxSpec.of(spec), ttl_s=spec.ttl_s, labels=dict(spec.metadata))

    def to_spec(self) -> SandboxSpec:
        return self.spec.to_spec().replace(ttl_s=self.ttl_s, metadata=dict(self.labels))


TerminationReason = Literal[
    "closed", "reaped", "expired", "exited", "out_of_memory", "overrun", "create_failed", "lost"
]


class SandboxView(WireModel):
    """The public state of one box."""

    sandbox_id: Identifier
    state: SandboxStatus
    ready: bool
    """Whether the box accepts execs now."""
    termination_reason: TerminationReason | None = None
    overrun: str | None = None
    """What the box exceeded so that its backend ended it; set if and only if `termination_reason` is ``overrun``."""
    labels: dict[str, str] = Field(default_factory=dict)
    provider: str
    image: str | None = None
    epoch: int = Field(ge=1)
    """Epoch of the box's lease; a token of an older epoch is fenced."""
    created_at: float
    """Unix seconds by the broker's clock, like `expires_at`."""
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
    """Cursor of the next page; ``None`` on the last page."""


class ReapedView(WireModel):
    """``DELETE /v1/sandboxes?label=…``: the ids of the boxes that this request destroyed."""

    reaped: tuple[str, ...]


class LeaseView(WireModel):
    """A lease: the right to use a box. Only the response that creates the lease contains its token."""

    lease_id: Identifier
    sandbox_id: Identifier
    scope: LeaseScope
    epoch: int = Field(ge=1)
    expires_at: float
    """Unix seconds by the broker's clock. For a lease without an end of its own, the end of the box's lease."""
    ttl_s: float
    """Seconds left when the response was made, for clients whose clock differs from the broker's."""
    token: str | None = Field(None, repr=False)


class CreatedSandbox(WireModel):
    """The body of a 201 (box created) or a 200 (box created earlier with the same idempotency key)."""

    sandbox: SandboxView
    lease: LeaseView


class RenewLease(WireModel):
    """``PUT …/lease``: end the lease ``ttl_s`` seconds from now, whether that is later or earlier than before."""

    ttl_s: TtlS


class MintLease(WireModel):
    """``POST …/leases``: create a lease with a narrower scope."""

    scope: LeaseScope
    ttl_s: TtlS | None = None
    """Seconds until the lease ends. ``None``: it ends with the box, however often the box's lease is renewed."""


class CommitImage(WireModel):
    """``POST …/images``: store the box's files as an image of the backend."""

    image: Text = Field(min_length=1)
    labels: dict[str, str] = Field(default_factory=dict)


class ImageView(WireModel):
    image: str
    labels: dict[str, str] = Field(default_factory=dict)


# -- Execs ---------------------------------------------------------------------------------------------------------


class ExecSubmission(WireModel):
    """``PUT …/execs/{exec_id}``: has exactly one of ``command`` (run by a shell) and ``argv``."""

    command: str | None = None
    argv: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: Text | None = None
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: Seconds | None = None
    user: Text | None = None
    merge_stderr: bool = False
    max_output_bytes: int = Field(DEFAULT_MAX_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    """Maximum bytes kept per stream; the broker's own limit may be lower. The exec's end names truncated streams."""
    stdin: Literal["none", "attached"] = "none"
    """``attached``: the command waits for ``PUT …/stdin`` before it starts."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("an exec needs exactly one of 'command' (run by a shell) and 'argv' (run as it is)")
        return self

    @classmethod
    def of(cls, request: ExecRequest) -> Self:
        """Build the submission of ``request``, without the bytes of its standard input."""
        values = fields_of(request) | {"stdin": "none" if request.stdin is None else "attached"}
        if request.timeout_s is not None:  # of a caller's remaining time nothing may be left
            values["timeout_s"] = max(request.timeout_s, 0.001)
        if not isinstance(request.command, str):
            values["argv"] = tuple(values.pop("command"))
        return cls(**values)

    def to_request(self, stdin: bytes | None = None) -> ExecRequest:
        values = {**self.__dict__, "env": dict(self.env), "stdin": stdin}
        if (argv := values.pop("argv")) is not None:
            values["command"] = argv
        return ExecRequest(**values)


class ExecEndModel(WireModel):
    """The end of an exec: the payload of the exit frame, and part of `ExecView`. An exec has exactly one end."""

    outcome: ExecOutcome
    return_code: int | None = None
    signal: int | None = None
    duration_s: float = 0.0
    output_bytes: int = Field(ge=0)
    """Total bytes of both streams; a reader that has fewer bytes missed some."""
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
    """An exec's state. ``end`` is set if and only if the exec has ended."""

    exec_id: Identifier
    state: Literal["awaiting_stdin", "running", "ended"]
    output_bytes: int = Field(0, ge=0)
    """Bytes of output in the broker's spool so far."""
    submitted_at: float
    end: ExecEndModel | None = None

    @model_validator(mode="after")
    def _ended_has_an_end(self) -> Self:
        if (self.end is not None) != (self.state == "ended"):
            raise ValueError(f"an exec that is '{self.state}' has {'an' if self.end else 'no'} end")
        return self


class SignalExec(WireModel):
    """``POST …/signal``: signal the command's whole process tree. The response is 204 even if it has ended."""

    signal: int = Field(ge=1, le=64)


# -- Capabilities --------------------------------------------------------------------------------------------------

_NOT_FLAGS = ("network_policies", "reasons", "default_limits")
_ABILITIES = tuple(field.name for field in dataclasses.fields(SandboxCapabilities) if field.name not in _NOT_FLAGS)


class BrokerLimits(WireModel):
    """The broker's limits, so that clients can check them before a request is refused."""

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
    """The boolean fields of `SandboxCapabilities` by name. A reader ignores names that it does not know."""
    reasons: dict[str, str] = Field(default_factory=dict)
    default_limits: ResourcesModel = Field(default_factory=ResourcesModel)
    """Limits of the backend's boxes where the spec sets none."""
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
        """Return the abilities that the backend has and that the wire protocol supports.

        Args:
            carried: overrides the backend's abilities. Maps an ability to ``None`` if clients of the broker always
                have it, or to the reason why they never have it.
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
