"""The session contract: what an environment tells an agent about one attempt, as plain data.

``POST /seed_session`` answers with a `SessionDescriptor` and a control token. The descriptor goes to the agent server;
the control token stays with the pipeline. Nothing in a descriptor can be turned into a reward, and nothing in it is
private to the environment. The JSON Schema of every model here is exported to ``fern/`` by ``scripts/export-schema``.

Writers forbid unknown keys. Readers take them from the versioned ``extensions`` map only, so that a newer environment
can speak to an older agent.
"""

from __future__ import annotations

import base64
import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, ContractError
from nemo_gym.contract.sandbox import AllowedHosts, Mount, NetworkPolicy, SandboxResources, SandboxSpec

DESCRIPTOR_VERSION: Literal[1] = 1
MAX_DESCRIPTOR_BYTES = 16 * 1024
"""Largest descriptor as JSON, without the files of an inline sandbox spec."""

IDENTIFIER = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
MAX_ATTEMPT = 1_000_000
"""More than any rollout is tried. A newer attempt fences the older ones: one without a bound would fence for good."""
MODEL_DOOR = "model"
"""Name of the door behind which the policy model is."""
DEFAULT_MODEL_DOOR_PORT = 8000
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
"""Of one call to a model; see `ChosenLimits`."""
WAIT_BEYOND_S = 30.0
"""How much longer than a model server's own limit its caller waits for the answer that the call has ended."""


class _Contract(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(StrEnum):
    """Where the harness runs and where the world is."""

    NONE = "none"
    """A: there is no world."""
    ENV_SANDBOXED = "env_sandboxed"
    """B: harness outside, world in the environment's box, reached by tools."""
    AGENT_IN_ENV = "agent_in_env"
    """C: harness in (or acting through exec in) the world's box."""
    WHOLE_INTERACTION = "whole_interaction"
    """D: harness, tools and world in one outer box of the agent's."""

    @classmethod
    def parse(cls, value: str) -> Topology:
        """Accepts the value, or the letter A–D; anything else raises `ConfigError` with the choices."""
        letters = dict(zip("ABCD", cls, strict=True))
        if value.upper() in letters:
            return letters[value.upper()]
        try:
            return cls(value.lower())
        except ValueError:
            hint = nearest(value, [*cls])
            choices = ", ".join(f"{letter} ({topology})" for letter, topology in letters.items())
            raise ConfigError(
                f"unknown topology '{value}'{hint}; choose one of: {choices}",
                key="topology",
            ) from None


class RolloutIdentity(_Contract):
    """One attempt at one sample of one task. Cookies, tokens, box labels, gateway sessions, logs, results and the
    reaper all derive from it."""

    rollout_id: str = Field(pattern=IDENTIFIER.pattern, max_length=128)
    """Stable over attempts, chosen by the caller."""
    task_id: str = Field(max_length=256)
    group_id: str = Field(max_length=256)
    """Samples of one task in one run share it."""
    sample_index: int = Field(0, ge=0)
    attempt: int = Field(1, ge=1, le=MAX_ATTEMPT)
    """Grows with every retry of RUN; a newer attempt fences the older one."""
    run_id: str = Field("run", max_length=128)

    @property
    def attempt_id(self) -> str:
        """``<rollout_id>-a<attempt>``: unique per attempt."""
        return f"{self.rollout_id}-a{self.attempt}"

    def next_attempt(self) -> RolloutIdentity:
        return self.model_copy(update={"attempt": self.attempt + 1})


class Placement(_Contract):
    """How the harness and the world are arranged, and what the sandbox must be able to do for it."""

    topology: Topology = Topology.NONE
    """The environment's default; a composition may choose another of ``supported``."""
    supported: tuple[Topology, ...] = ()
    """Empty means: only ``topology``."""
    requires: tuple[str, ...] = ()
    """Sandbox capabilities the task needs, by name (``nested_containers``, ``gpu``, …)."""

    @property
    def choices(self) -> tuple[Topology, ...]:
        return self.supported or (self.topology,)

    @model_validator(mode="after")
    def _topology_is_supported(self) -> Self:
        if self.supported and self.topology not in self.supported:
            raise ValueError(f"topology '{self.topology}' is not among supported {[*map(str, self.supported)]}")
        return self


class ResourcesModel(_Contract):
    """The wire form of `SandboxResources`."""

    cpu: float | None = Field(None, gt=0)
    memory_mib: int | None = Field(None, gt=0)
    disk_gib: float | None = Field(None, gt=0)
    gpu: int | None = Field(None, ge=0)
    gpu_type: str | None = None
    pids: int | None = Field(None, gt=0)
    unlimited: tuple[Literal["cpu", "memory_mib", "disk_gib", "pids"], ...] = ()


class MountModel(_Contract):
    """The wire form of `Mount`: a host path that the box sees read-only."""

    source: str
    target: str


class SandboxSpecModel(_Contract):
    """The wire form of a world's `SandboxSpec`. Doors are not in it: they are opened by whoever owns the box, from
    `Egress`, and may carry credentials that no descriptor holds."""

    image: str | None = None
    ttl_s: float | None = Field(None, gt=0)
    ready_timeout_s: float | None = Field(None, gt=0)
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    resources: ResourcesModel = Field(default_factory=ResourcesModel)
    entrypoint: tuple[str, ...] | None = None
    provider_options: dict[str, Any] = Field(default_factory=dict)
    ports: tuple[int, ...] = ()
    mounts: tuple[MountModel, ...] = ()
    user: str | None = None
    requires: tuple[str, ...] = ()

    def to_spec(self) -> SandboxSpec:
        """The in-process form, with no network and no doors."""
        return SandboxSpec(
            image=self.image,
            ttl_s=self.ttl_s,
            ready_timeout_s=self.ready_timeout_s,
            workdir=self.workdir,
            env=dict(self.env),
            files=dict(self.files),
            resources=SandboxResources(**self.resources.model_dump()),
            entrypoint=self.entrypoint,
            provider_options=dict(self.provider_options),
            ports=self.ports,
            network=NetworkPolicy.NONE,
            mounts=tuple(Mount(source=mount.source, target=mount.target) for mount in self.mounts),
            user=self.user,
            requires=self.requires,
        )


class LeaseScope(StrEnum):
    OWNER = "owner"
    OPERATE = "operate"
    READ = "read"


class SandboxRef(_Contract):
    """A box that somebody else's broker holds."""

    broker_url: str
    sandbox_id: str
    lease_token: str = Field(repr=False)
    scope: LeaseScope = LeaseScope.OPERATE
    expires_at: float
    """Unix seconds."""
    workdir: str | None = None
    """Directory commands start in by default; the box's owner knows it."""


class SandboxClause(_Contract):
    """Exactly one of: a spec (the agent side acquires and owns the box) or a reference (the environment owns it)."""

    spec: SandboxSpecModel | None = None
    ref: SandboxRef | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.spec is None) == (self.ref is None):
            raise ValueError("sandbox needs exactly one of 'spec' (the agent acquires it) and 'ref' (it is lent)")
        return self


class McpServer(_Contract):
    """An MCP server the agent may use. Its headers hold a token whose only audience is MCP for this attempt."""

    name: str = Field(pattern=IDENTIFIER.pattern)
    url: str
    """Routable from the box's host; the binding rewrites it to an in-box door."""
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class EgressPolicy(StrEnum):
    NONE = "none"
    MODEL_ONLY = "model_only"
    ALLOWLIST = "allowlist"
    OPEN = "open"


class DoorRequest(_Contract):
    """A door the world wants: the name says what is behind it (`MODEL_DOOR` or an MCP server's name)."""

    name: str
    port: int = Field(ge=1, le=65535)


class Egress(_Contract):
    """What a process in the box may reach."""

    policy: EgressPolicy = EgressPolicy.MODEL_ONLY
    allow: tuple[str, ...] = ()
    """With ``allowlist`` only: names (``pypi.org``), all names below one (``*.pypi.org``) or networks
    (``10.0.0.0/8``), with ``:port`` where it is not 80 and 443. Processes find a proxy to them in ``HTTPS_PROXY`` and
    ``HTTP_PROXY``. A name that leads to an address that is not public needs that address in the list too."""
    doors: tuple[DoorRequest, ...] = (DoorRequest(name=MODEL_DOOR, port=DEFAULT_MODEL_DOOR_PORT),)
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every process in the box."""

    @model_validator(mode="after")
    def _list_fits_policy(self) -> Self:
        if (self.policy is EgressPolicy.ALLOWLIST) is not bool(self.allow):
            raise ValueError(
                f"egress.allow goes with egress.policy 'allowlist' and with no other; policy is '{self.policy}' and"
                f" allow has {len(self.allow)} entries"
            )
        try:
            AllowedHosts(self.allow)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return self


class GitDiffHarvest(_Contract):
    """A patch of everything that differs between a repository in the box and the same repository in the box's
    pristine image: staged, unstaged, new, deleted, renamed, binary. Computed outside the box."""

    kind: Literal["git_diff"] = "git_diff"
    name: str = "patch"
    path: str
    """Absolute path of the repository's work tree in the box."""
    base_commit: str | None = None
    """Checked to be the pristine repository's HEAD ancestor; ``None`` is its HEAD."""
    max_bytes: int = 64 * 1024 * 1024
    """Cap of the patch; more is an artifact marked ``truncated`` with no content, never a cut patch."""


class FilesHarvest(_Contract):
    """Files of the box as a tar stream."""

    kind: Literal["files"] = "files"
    name: str = "files"
    paths: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    max_bytes: int = 64 * 1024 * 1024


class CommandHarvest(_Contract):
    """What a command prints in the box. For state that is no file; what it says is the box's word."""

    kind: Literal["command"] = "command"
    name: str = "output"
    command: str | tuple[str, ...]
    cwd: str | None = None
    timeout_s: float = 120.0
    max_bytes: int = 16 * 1024 * 1024


HarvestItem = Annotated[GitDiffHarvest | FilesHarvest | CommandHarvest, Field(discriminator="kind")]


class Limits(_Contract):
    """Bounds of the attempt; the binding enforces them, whatever the harness does."""

    wall_clock_s: float | None = Field(None, gt=0)
    """Of the harness's work, without what it takes to make the box and to harvest it."""
    max_turns: int | None = Field(None, gt=0)
    """Answers of the model."""
    max_output_bytes: int | None = Field(None, gt=0)
    """What the processes that the harness starts in the box write to standard output and error, all together; for a
    harness without a box, what its tools answer. Passing it ends the attempt as ``max_output``."""
    memory_mib: int | None = Field(None, gt=0)
    """Of the attempt's box, in place of what its spec says."""
    cpu: float | None = Field(None, gt=0)
    """Cores of the attempt's box, in place of what its spec says."""

    def over(self, others: Limits) -> Limits:
        """These limits, and those of ``others`` that are not given here."""
        return self.model_copy(
            update={name: getattr(others, name) for name in type(self).model_fields if getattr(self, name) is None}
        )


class ChosenLimits(_Contract):
    """How long one call to a model may take, as a run chose; what it leaves open is the model server's configuration.

        key                    default   bounds
        connect_timeout_s        10 s    the connection to an endpoint or engine
        idle_timeout_s          120 s    silence between two pieces of an answer that has begun
        request_timeout_s       600 s    the whole call, its retries included

    The model server ends a call at its limits and says that another try is no use, so the attempt ends there: as a
    failure of the model, in a masked row.
    """

    connect_timeout_s: float | None = Field(None, gt=0)
    idle_timeout_s: float | None = Field(None, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)

    def given(self) -> dict[str, float]:
        """The limits that were chosen."""
        return self.model_dump(exclude_none=True)


NONE_CHOSEN = ChosenLimits()


class SessionDescriptor(_Contract):
    """What an agent may know about one attempt."""

    version: Literal[1] = DESCRIPTOR_VERSION
    environment: str
    """The environment's server instance name."""
    task_id: str
    rollout: RolloutIdentity
    placement: Placement = Field(default_factory=Placement)
    sandbox: SandboxClause | None = None
    mcp: tuple[McpServer, ...] = ()
    egress: Egress = Field(default_factory=Egress)
    harvest: tuple[HarvestItem, ...] = ()
    limits: Limits = Field(default_factory=Limits)
    extensions: dict[str, Any] = Field(default_factory=dict)
    """Versioned additions, keyed ``<vendor>/<name>/v<n>``; a reader ignores those it does not know."""

    @field_validator("harvest")
    @classmethod
    def _harvest_names_are_unique(cls, items: tuple[HarvestItem, ...]) -> tuple[HarvestItem, ...]:
        names = [item.name for item in items]
        if len(set(names)) != len(names):
            raise ValueError(f"harvest items must have different names, got {names}")
        return items

    @model_validator(mode="after")
    def _world_fits_topology(self) -> Self:
        topology = self.placement.topology
        if topology is Topology.AGENT_IN_ENV and self.sandbox is None:
            raise ValueError("placement.topology 'agent_in_env' needs 'sandbox': the world the agent is placed in")
        if self.rollout.task_id != self.task_id:
            raise ValueError(f"task_id '{self.task_id}' differs from rollout.task_id '{self.rollout.task_id}'")
        return self

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        size = len(self.model_dump_json(exclude={"sandbox": {"spec": {"files"}}}))
        if size > MAX_DESCRIPTOR_BYTES:
            raise ValueError(
                f"descriptor is {size} bytes of at most {MAX_DESCRIPTOR_BYTES}; large content belongs in"
                " 'sandbox.spec.files' or in the image"
            )
        return self

    def placed(self, topology: str | None) -> SessionDescriptor:
        """With the composition's topology, if it names one, instead of the environment's default.

        Raises:
            ConfigError: the environment does not support it; names those that it does.
        """
        if topology is None or (wanted := Topology.parse(topology)) is self.placement.topology:
            return self
        choices = self.placement.choices
        if wanted not in choices:
            raise ConfigError(
                f"environment '{self.environment}' cannot place an agent as '{wanted}'; it supports"
                f" {', '.join(choices)}",
                key="topology",
            )
        placement = self.placement.model_copy(update={"topology": wanted})
        return SessionDescriptor.model_validate({**self.model_dump(), "placement": placement.model_dump()})


class InferenceEndpoint(_Contract):
    """Where the harness finds the policy model, and the token that opens it for this attempt alone."""

    base_url: str
    """Ends in ``/v1``; the inference routes are below it."""
    token: str = Field(repr=False)
    model: str = "policy"
    """The model's name as requests spell it."""
    request_timeout_s: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """After so many seconds the endpoint itself ends a call, its retries included, and says so."""


class BoxNeeds(_Contract):
    """What a harness needs in the box it is to work in. Whoever owns the box asks for it before the box is made."""

    env: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[MountModel, ...] = ()
    """Paths of the box's host; they are the same on every host that makes boxes for this agent."""
    requires: tuple[str, ...] = ()


class Artifact(_Contract):
    """One harvested thing: untrusted data from the box, bound to the attempt by its digest."""

    name: str
    kind: Literal["git_diff", "files", "command"]
    encoding: Literal["utf-8", "base64"] = "utf-8"
    data: str = Field("", repr=False)
    sha256: str = ""
    """Of the decoded bytes."""
    size: int = 0
    """Bytes before any cap."""
    truncated: bool = False
    """Over its cap: ``data`` is empty for a patch or files, cut for a command's output."""
    error: str | None = None
    """Why it could not be harvested for a reason that lies in the box's contents; the environment judges it."""
    return_code: int | None = None
    """Of a command."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """What harvesting saw beside the content (for a patch: paths, skipped files, the box's own git oddities)."""

    @classmethod
    def of(cls, name: str, kind: Literal["git_diff", "files", "command"], data: bytes, **fields: Any) -> Artifact:
        """An artifact of ``data``, as text where it is UTF-8."""
        encoding: Literal["utf-8", "base64"] = "utf-8"
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text, encoding = base64.b64encode(data).decode("ascii"), "base64"
        fields.setdefault("size", len(data))
        return cls(
            name=name, kind=kind, encoding=encoding, data=text, sha256=hashlib.sha256(data).hexdigest(), **fields
        )

    def content(self) -> bytes:
        """The decoded bytes, checked against the digest; raises `ContractError` when they differ."""
        try:
            data = base64.b64decode(self.data, validate=True) if self.encoding == "base64" else self.data.encode()
        except ValueError as error:
            raise ContractError(f"artifact '{self.name}' is not valid base64", artifact=self.name) from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ContractError(f"artifact '{self.name}' does not match its sha256", artifact=self.name)
        return data


class AgentOutcome(StrEnum):
    """How the harness ended. Only ``crashed``, ``model_unreachable``, ``model_refused``, ``mcp_failed`` and
    ``sandbox_lost`` may be retried as infrastructure, and those not where the policy could cause them.
    ``context_exceeded`` is no work of the policy either. The others are what it did, and are graded."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_OUTPUT = "max_output"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    CRASHED = "crashed"
    MODEL_UNREACHABLE = "model_unreachable"
    MODEL_REFUSED = "model_refused"
    """The model's server was reached and refused to serve: its key, the model's name, or the request."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The very first request does not fit the model's context. Later on it is ``max_turns``: the policy's doing."""
    MCP_FAILED = "mcp_failed"
    SANDBOX_LOST = "sandbox_lost"


class ActRequest(BaseModel):
    """``POST /act``: everything an agent server gets for one attempt."""

    model_config = ConfigDict(extra="forbid")

    responses_create_params: dict[str, Any]
    """The public part of the row's parameters."""
    descriptor: SessionDescriptor
    inference: InferenceEndpoint
    limits: Limits = Field(default_factory=Limits)
    """Those of them that the run sets. They are in the descriptor already, over the environment's; here is what wins
    over the agent's own configuration."""
    validation: dict[str, Any] | None = None
    """Private row fields, in the explicit validation mode only (see `oracle_agent`); results are labelled so."""

    def turns(self, configured: int | None) -> int | None:
        """How many turns there are: the run's number, else the lower of the environment's and the agent's own."""
        given = [most for most in (configured, self.descriptor.limits.max_turns) if most is not None]
        return self.limits.max_turns or min(given, default=None)

    def wall_clock_s(self, configured: float | None) -> float | None:
        """The run's seconds, else the environment's, else the agent's own."""
        return self.descriptor.limits.wall_clock_s or configured


class ActResponse(BaseModel):
    """What an agent server answers: the response object, how it ended, and what was harvested."""

    model_config = ConfigDict(extra="forbid")

    response: dict[str, Any]
    """An OpenAI Responses object."""
    outcome: AgentOutcome = AgentOutcome.COMPLETED
    outcome_detail: str | None = None
    """One sentence about an outcome other than ``completed``."""
    within_reach: bool = False
    """Whether what the policy did could have brought this outcome about (a harness in the box, which died after the
    model had answered): the work is graded as it is, and no second try is to be had this way."""
    artifacts: list[Artifact] = Field(default_factory=list)
    observations: dict[str, Any] = Field(default_factory=dict)
    """Turns, tool calls, usage, timings: for people and metrics, never for rewards."""
    validation: bool = False
    """Whether the agent saw private fields."""


class SessionEnvelope(BaseModel):
    """``_ng_session`` of a seed or verify body: the attempt, and what belongs to it beside the row."""

    model_config = ConfigDict(extra="forbid")

    rollout: RolloutIdentity
    topology: str | None = None
    limits: Limits = Field(default_factory=Limits)
    """The run's, which win over the environment's."""
    row_ref: str | None = Field(None, repr=False)
    validation: Literal["gold", "nothing"] | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    outcome: AgentOutcome | None = None
    outcome_detail: str | None = None
    reverify: bool = False
    """Grade this work once more, whatever was said of it before: an operator's, whose every verify says so."""
    close: bool = False
    """A valid verdict ends the attempt: a pipeline's, where the seed said ``closes_with_verdict``."""
    box_needs: BoxNeeds | None = None
    """What the agent needs in its box; given by a pipeline that will beat (`/heartbeat`) and ask for the harvest."""
