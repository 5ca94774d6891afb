"""The session contract: the data that an environment passes to an agent for one attempt, as plain data.

``POST /seed_session`` returns a `SessionDescriptor` and a control token. The descriptor goes to the agent server; the
control token stays with the pipeline. Nothing in a descriptor can be turned into a reward or is private to the
environment. ``scripts/export-schema`` exports the JSON Schema of every model here to ``fern/``.

Unknown keys are forbidden. Additions go only into the versioned ``extensions`` map, of which readers ignore unknown
entries, so that a newer environment works with an older agent.
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
"""The largest size of a descriptor as JSON, without the files of an inline sandbox spec."""

IDENTIFIER = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
MAX_ATTEMPT = 1_000_000
"""More attempts than any rollout gets. A newer attempt fences older ones; an unbounded number could fence forever."""
MODEL_DOOR = "model"
"""The name of the door to the policy model."""
DEFAULT_MODEL_DOOR_PORT = 8000
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
"""The defaults for one call to a model; see `ChosenLimits`."""
SESSION_TTL_S = 6 * 3600.0
"""The default of how long a model server knows an attempt."""
WAIT_BEYOND_S = 30.0
"""How long a caller waits beyond a model server's own limit, to receive its report that the call timed out."""


class _Contract(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Topology(StrEnum):
    """Where the harness runs and where the world is."""

    NONE = "none"
    """A: there is no world."""
    ENV_SANDBOXED = "env_sandboxed"
    """B: the harness is outside; the world is in the environment's box and reached through tools."""
    AGENT_IN_ENV = "agent_in_env"
    """C: the harness is in the world's box, or acts in it through exec."""
    WHOLE_INTERACTION = "whole_interaction"
    """D: harness, tools and world are in one outer box that the agent owns."""

    @classmethod
    def parse(cls, value: str) -> Topology:
        """Parse a topology's value, or its letter A–D. Anything else raises `ConfigError`, which lists the choices."""
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
    """The identity of one attempt at one sample of one task. Cookies, tokens, box labels, gateway sessions, logs,
    results and the reaper all use it."""

    rollout_id: str = Field(pattern=IDENTIFIER.pattern, max_length=128)
    """Chosen by the caller, and the same for all attempts."""
    task_id: str = Field(max_length=256)
    group_id: str = Field(max_length=256)
    """Shared by all samples of one task in one run."""
    sample_index: int = Field(0, ge=0)
    attempt: int = Field(1, ge=1, le=MAX_ATTEMPT)
    """Increases with every retry of RUN; a newer attempt fences the older one."""
    run_id: str = Field("run", max_length=128)

    def __str__(self) -> str:
        """As error messages name it: ``attempt 2 of rollout 'r'``."""
        return f"attempt {self.attempt} of rollout '{self.rollout_id}'"

    @property
    def attempt_id(self) -> str:
        """``<rollout_id>-a<attempt>``: unique per attempt."""
        return f"{self.rollout_id}-a{self.attempt}"

    def next_attempt(self) -> RolloutIdentity:
        return self.model_copy(update={"attempt": self.attempt + 1})


class Placement(_Contract):
    """The arrangement of harness and world, and the capabilities that the sandbox needs for it."""

    topology: Topology = Topology.NONE
    """The environment's default; a composition may choose another of ``supported``."""
    supported: tuple[Topology, ...] = ()
    """If empty, only ``topology`` is supported."""
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
    """The wire form of `Mount`: a host path mounted read-only into the box."""

    source: str
    target: str


class SandboxSpecModel(_Contract):
    """The wire form of a world's `SandboxSpec`. It has no doors: the box's owner opens them by `Egress`, and they may
    carry credentials that must not be in a descriptor."""

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
        # Without the fields that a subclass adds, whose wire forms `SandboxSpec` does not take.
        fields = self.model_dump(include=set(SandboxSpecModel.model_fields))
        fields["resources"] = SandboxResources(**fields["resources"])
        fields["mounts"] = tuple(Mount(**mount) for mount in fields["mounts"])
        return SandboxSpec(**fields, network=NetworkPolicy.NONE)


class LeaseScope(StrEnum):
    OWNER = "owner"
    OPERATE = "operate"
    READ = "read"


class SandboxRef(_Contract):
    """A reference to a box that another server's broker holds."""

    broker_url: str
    sandbox_id: str
    lease_token: str = Field(repr=False)
    scope: LeaseScope = LeaseScope.OPERATE
    expires_at: float
    """Unix seconds."""
    workdir: str | None = None
    """The directory in which commands start by default, set by the box's owner."""


class SandboxClause(_Contract):
    """Exactly one of a spec (the agent side acquires and owns the box) and a reference (the environment owns it)."""

    spec: SandboxSpecModel | None = None
    ref: SandboxRef | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.spec is None) == (self.ref is None):
            raise ValueError("sandbox needs exactly one of 'spec' (the agent acquires it) and 'ref' (it is lent)")
        return self


TOOL_UNAVAILABLE = "nemo-gym/unavailable"
"""The key in the ``_meta`` of an MCP tool's result: true if the environment itself could not do its work (503)."""


NO_SESSION = "no_session"
"""The ``code_hint`` of an environment's problem (409) if its process did not seed the caller's attempt: it restarted
since, and the state of the session is lost."""


class McpServer(_Contract):
    """An MCP server that the agent may use. Its headers hold a token that is valid only for this attempt's MCP."""

    name: str = Field(pattern=IDENTIFIER.pattern)
    url: str
    """Reachable from the box's host; the binding replaces it by the URL of a door in the box."""
    transport: Literal["http", "sse"] = "http"
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class EgressPolicy(StrEnum):
    NONE = "none"
    MODEL_ONLY = "model_only"
    ALLOWLIST = "allowlist"
    OPEN = "open"


class DoorRequest(_Contract):
    """A door that the world requests. The name selects its target: `MODEL_DOOR` or an MCP server's name."""

    name: str
    port: int = Field(ge=1, le=65535)


class Egress(_Contract):
    """The network that a process in the box may reach."""

    policy: EgressPolicy = EgressPolicy.MODEL_ONLY
    allow: tuple[str, ...] = ()
    """Only with policy ``allowlist``: names (``pypi.org``), all names below one (``*.pypi.org``) or networks
    (``10.0.0.0/8``), with ``:port`` unless the ports are 80 and 443. Processes find a proxy to them in ``HTTPS_PROXY``
    and ``HTTP_PROXY``. If a name resolves to an address that is not public, the list needs that address too."""
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
    """A patch of all differences between a repository in the box and the same repository in the box's pristine image:
    staged, unstaged, new, deleted, renamed, binary. Computed outside the box."""

    kind: Literal["git_diff"] = "git_diff"
    name: str = "patch"
    path: str
    """Absolute path of the repository's work tree in the box."""
    base_commit: str | None = None
    """Must be an ancestor of the pristine repository's HEAD, which is checked; ``None`` is its HEAD."""
    max_bytes: int = 64 * 1024 * 1024
    """The largest patch. A larger one gives an artifact marked ``truncated`` with no content, never a cut patch."""


class FilesHarvest(_Contract):
    """Files from the box, as a tar stream."""

    kind: Literal["files"] = "files"
    name: str = "files"
    paths: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    max_bytes: int = 64 * 1024 * 1024


class CommandHarvest(_Contract):
    """The output of a command in the box, for state that is not in a file. The box can forge this output."""

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
    """Time for the harness's work, without the time to create and harvest the box."""
    max_turns: int | None = Field(None, gt=0)
    """Answers of the model."""
    max_output_bytes: int | None = Field(None, gt=0)
    """Total standard output and error of the processes that the harness starts in the box; for a harness without a
    box, the output of its tools. Exceeding it ends the attempt as ``max_output``."""
    memory_mib: int | None = Field(None, gt=0)
    """Memory of the attempt's box; overrides its spec."""
    cpu: float | None = Field(None, gt=0)
    """Cores of the attempt's box; overrides its spec."""

    def over(self, others: Limits) -> Limits:
        """Fill limits that are not given here from ``others``."""
        return self.model_copy(
            update={name: getattr(others, name) for name in type(self).model_fields if getattr(self, name) is None}
        )


class ChosenLimits(_Contract):
    """Time limits for one call to a model, as chosen by a run; the model server's configuration fills in the others.

        key                    default   bounds
        connect_timeout_s        10 s    the connection to an endpoint or engine
        idle_timeout_s          120 s    silence between two pieces of a response that has begun
        request_timeout_s       600 s    the whole call, its retries included

    The model server ends a call at its limits and reports that a retry is no use. The attempt ends then as a failure
    of the model, in a masked row.
    """

    connect_timeout_s: float | None = Field(None, gt=0)
    idle_timeout_s: float | None = Field(None, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)

    def given(self) -> dict[str, float]:
        """The limits that were chosen."""
        return self.model_dump(exclude_none=True)


NONE_CHOSEN = ChosenLimits()


class SessionDescriptor(_Contract):
    """Everything that an agent may know about one attempt."""

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
    """Versioned additions, keyed ``<vendor>/<name>/v<n>``; a reader ignores unknown ones."""

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
        """The descriptor with the composition's topology, if it names one, instead of the environment's default.

        Raises:
            ConfigError: the environment does not support the topology. The message lists those it supports.
        """
        if topology is None or (requested := Topology.parse(topology)) is self.placement.topology:
            return self
        choices = self.placement.choices
        if requested not in choices:
            raise ConfigError(
                f"environment '{self.environment}' cannot place an agent as '{requested}'; it supports"
                f" {', '.join(choices)}",
                key="topology",
            )
        placement = self.placement.model_copy(update={"topology": requested})
        return SessionDescriptor.model_validate({**self.model_dump(), "placement": placement.model_dump()})


class InferenceEndpoint(_Contract):
    """The address of the policy model, and a token for it that is valid only for this attempt."""

    base_url: str
    """Ends in ``/v1``; the inference routes are below it."""
    token: str = Field(repr=False)
    model: str = "policy"
    """The model's name for use in requests."""
    request_timeout_s: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """The time after which the endpoint itself ends a call, its retries included, and reports the timeout."""


class BoxNeeds(_Contract):
    """What a harness needs in its box. The box's owner requests it before it creates the box."""

    env: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[MountModel, ...] = ()
    """Paths on the box's host; they are the same on every host that creates boxes for this agent."""
    requires: tuple[str, ...] = ()


class Artifact(_Contract):
    """The result of one harvest item: untrusted data from the box, bound to the attempt by its digest."""

    name: str
    kind: Literal["git_diff", "files", "command"]
    encoding: Literal["utf-8", "base64"] = "utf-8"
    data: str = Field("", repr=False)
    sha256: str = ""
    """The digest of the decoded bytes."""
    size: int = 0
    """Bytes before any truncation."""
    truncated: bool = False
    """Whether it exceeded its limit: ``data`` is then empty for a patch or files, cut for a command's output."""
    error: str | None = None
    """Why it could not be harvested, if the reason lies in the box's contents; the environment judges this."""
    return_code: int | None = None
    """The exit status of a command."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Observations beside the content (for a patch: paths, skipped files, peculiarities of the box's git)."""

    @classmethod
    def of(cls, name: str, kind: Literal["git_diff", "files", "command"], data: bytes, **fields: Any) -> Artifact:
        """Create an artifact of ``data``, as text if it is UTF-8, else as base64."""
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
        """The decoded bytes. Raises `ContractError` if they do not match the digest."""
        try:
            data = base64.b64decode(self.data, validate=True) if self.encoding == "base64" else self.data.encode()
        except ValueError as error:
            raise ContractError(f"artifact '{self.name}' is not valid base64", artifact=self.name) from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ContractError(f"artifact '{self.name}' does not match its sha256", artifact=self.name)
        return data


class AgentOutcome(StrEnum):
    """How the harness ended. Only ``crashed``, ``model_unreachable``, ``model_refused``, ``mcp_failed``,
    ``environment_lost`` and ``sandbox_lost`` may be retried as infrastructure failures, and only if the policy could
    not have caused them. ``context_exceeded`` is not the policy's doing either. Work with any other outcome is
    graded."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_OUTPUT = "max_output"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    CRASHED = "crashed"
    MODEL_UNREACHABLE = "model_unreachable"
    MODEL_REFUSED = "model_refused"
    """The model's server was reached and refused the key, the model's name, or the request."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The very first request does not fit the model's context. A later one is the policy's doing: ``max_turns``."""
    MCP_FAILED = "mcp_failed"
    ENVIRONMENT_LOST = "environment_lost"
    """The environment's server went away while its tools were called as routes."""
    SANDBOX_LOST = "sandbox_lost"


class ActRequest(BaseModel):
    """The body of ``POST /act``: everything that an agent server gets for one attempt."""

    model_config = ConfigDict(extra="forbid")

    responses_create_params: dict[str, Any]
    """The public part of the row's parameters."""
    descriptor: SessionDescriptor
    inference: InferenceEndpoint
    limits: Limits = Field(default_factory=Limits)
    """The limits that the run sets. The descriptor contains them already, merged over the environment's; this copy
    tells which limits override the agent's own configuration."""
    validation: dict[str, Any] | None = None
    """Private row fields, only in the explicit validation mode (see `oracle_agent`), which labels its results."""

    def turns(self, configured: int | None) -> int | None:
        """The limit of turns: the run's, else the lower of the environment's and the agent's own (``configured``)."""
        limits = [limit for limit in (configured, self.descriptor.limits.max_turns) if limit is not None]
        return self.limits.max_turns or min(limits, default=None)

    def wall_clock_s(self, configured: float | None) -> float | None:
        """The limit in seconds: the run's, else the environment's, else the agent's own (``configured``)."""
        return self.descriptor.limits.wall_clock_s or configured


class ActResponse(BaseModel):
    """The response of ``/act``: the response object, the outcome, and the artifacts."""

    model_config = ConfigDict(extra="forbid")

    response: dict[str, Any]
    """An OpenAI Responses object."""
    outcome: AgentOutcome = AgentOutcome.COMPLETED
    outcome_detail: str | None = None
    """One sentence about an outcome other than ``completed``."""
    within_reach: bool = False
    """Whether the policy could have caused this outcome (for example, a harness in the box died after the model had
    answered). The work is then graded as it is, so that a policy cannot force a retry this way."""
    artifacts: list[Artifact] = Field(default_factory=list)
    observations: dict[str, Any] = Field(default_factory=dict)
    """Turns, tool calls, usage and timings; for people and metrics, never for rewards."""
    validation: bool = False
    """Whether the agent saw private fields."""


class SessionEnvelope(BaseModel):
    """``_ng_session`` of a seed or verify body: the attempt, and its data beside the row."""

    model_config = ConfigDict(extra="forbid")

    rollout: RolloutIdentity
    topology: str | None = None
    limits: Limits = Field(default_factory=Limits)
    """The run's limits, which override the environment's."""
    row_ref: str | None = Field(None, repr=False)
    validation: Literal["gold", "nothing"] | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    outcome: AgentOutcome | None = None
    outcome_detail: str | None = None
    reverify: bool = False
    """Grade this work once more, whatever its earlier verdict. Set in every verify of an operator, and in no other."""
    close: bool = False
    """Let a valid verdict end the attempt. A pipeline sets it if the seed's reply has ``closes_with_verdict``."""
    box_needs: BoxNeeds | None = None
    """What the agent needs in its box. Given only by a pipeline that sends heartbeats and requests the harvest."""
