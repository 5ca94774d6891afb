"""The types of NeMo Gym's session protocol: episodes, tasks, an agent's tools and sandbox, and failures of an episode.

NeMo Gym plugins import them as ``nemo_gym.episode_types``, ``tool_access``, ``failure_kinds`` and ``sandbox.access``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import structlog
from pydantic import (
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

log = structlog.get_logger(__name__)

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""The pattern of names that appear in URL paths and file names."""

# -- failure kinds: each constant is its own name in lower case ------------------------------------------------------

AGENT_COMMAND_NOT_ALLOWED = "agent_command_not_allowed"
AGENT_REQUEST_FAILED = "agent_request_failed"
AGENT_RUN_ERROR = "agent_run_error"
AGENT_TIMEOUT = "agent_timeout"
CANCELLED = "cancelled"
COHORT_INCOMPLETE = "cohort_incomplete"
JUDGE_FAILED = "judge_failed"
JUDGE_UNPARSEABLE = "judge_unparseable"
KILL_SHAPED = "kill_shaped"
PERSISTENCE_FAILED = "persistence_failed"
PROVIDER_OOM_KILLED = "provider_oom_killed"
PROVIDER_QUOTA_EXHAUSTED = "provider_quota_exhausted"
PROVIDER_UNAVAILABLE = "provider_unavailable"
SESSION_EXPIRED = "session_expired"
SESSION_LOST = "session_lost"
SESSION_RELEASE_FAILED = "session_release_failed"
SHUTDOWN = "shutdown"
TRANSPORT_LOCAL_RESOURCE = "transport_local_resource"
TRANSPORT_PEER_DROP = "transport_peer_drop"
TRANSPORT_TIMEOUT = "transport_timeout"
TRANSPORT_UNREACHABLE = "transport_unreachable"
VERIFIER_ERROR = "verifier_error"

FAILURE_KINDS: Final = frozenset(value for name, value in list(globals().items()) if value == name.lower())
"""The kinds that NeMo Gym's components share. An environment may add its own, as ``<server>:<kind>``."""
FailureStage = Literal["admission", "seed", "agent", "verification", "cleanup"]
_OWN_KIND = re.compile(r"[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")
_warned: set[str] = set()


def is_registered(name: str) -> bool:
    """Whether ``name`` is one of `FAILURE_KINDS`."""
    return name in FAILURE_KINDS


def is_namespaced(name: str) -> bool:
    """Whether ``name`` is an environment's own kind, ``<server>:<kind>``."""
    return _OWN_KIND.fullmatch(name) is not None


def validate_failure_kind(name: str | None) -> str | None:
    """Return ``name`` unchanged. A name that is neither shared nor an environment's own is logged once, not refused: a
    failure under a wrong name is better than no failure."""
    if name is not None and not is_registered(name) and not is_namespaced(name) and name not in _warned:
        _warned.add(name)
        log.warning("unknown failure kind; use a shared one, or <server>:<kind>", failure_kind=name)
    return name


# -- who and what ----------------------------------------------------------------------------------------------------


class StrictModel(BaseModel):
    """A body that forbids unknown keys."""

    model_config = ConfigDict(extra="forbid")


class EpisodeId(StrictModel):
    """One attempt of one rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str = Field(min_length=1, pattern=NAME_PATTERN)
    attempt: int = Field(0, ge=0)

    @field_validator("rollout_id")
    @classmethod
    def _keeps_the_suffix_free(cls, rollout_id: str) -> str:
        if re.search(r"-a\d+$", rollout_id):
            raise ValueError(f"rollout_id '{rollout_id}' ends like the name of an attempt (-a<number>); rename it")
        return rollout_id

    @property
    def capture_key(self) -> str:
        """The attempt's name in paths and files: the rollout's, with ``-a<attempt>`` from the second attempt on."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id


class TaskId(StrictModel):
    """One task of a set of tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    taskset: str = Field(min_length=1)
    """The name of the set of tasks, unique in the run."""
    task_id: str = Field(min_length=1)


TaskInputT = TypeVar("TaskInputT", bound=BaseModel)
ResultT = TypeVar("ResultT")


class EpisodeFailure(StrictModel):
    """Why an episode has no result."""

    failure_reason: str = Field(max_length=2000)
    terminal: bool
    """Whether the episode must not be tried again."""
    failure_kind: str | None = None
    stage: FailureStage | None = None

    @field_validator("failure_kind")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return validate_failure_kind(value)

    @model_serializer(mode="wrap")
    def _without_unknowns(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value
            for key, value in handler(self).items()
            if value is not None or key not in ("failure_kind", "stage")
        }


class MaterializedTask(StrictModel, Generic[TaskInputT]):
    """A task's identity with the input of its environment's protocol."""

    task_id: TaskId
    task_input: TaskInputT


class BaseEpisodeRequest(StrictModel, Generic[TaskInputT]):
    """The body of a request to an environment server's ``/run``."""

    episode_id: EpisodeId
    task: MaterializedTask[TaskInputT]


class BaseEpisodeResponse(StrictModel, Generic[ResultT]):
    """The response of ``/run``: either a result or a failure."""

    episode_id: EpisodeId
    task_id: TaskId
    result: ResultT | None = None
    failure: EpisodeFailure | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> BaseEpisodeResponse[ResultT]:
        if (self.result is None) is (self.failure is None):
            raise ValueError("an episode's response holds either 'result' or 'failure'")
        return self


def is_materialized_task_row(row: Mapping[str, object]) -> bool:
    """Whether a row has the keys of a `MaterializedTask`; their values are not checked."""
    return "task_id" in row and "task_input" in row


# -- an agent's tools and sandbox ------------------------------------------------------------------------------------


class DirectHTTPToolAccess(StrictModel):
    """Tools as plain POST routes below a URL."""

    kind: Literal["direct_http"] = "direct_http"
    name: str = Field(min_length=1, pattern=NAME_PATTERN)
    required: bool
    base_url: AnyHttpUrl
    cookies: dict[str, str] = Field(default_factory=dict, repr=False)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class MCPStreamableHTTPConnection(StrictModel):
    """The address of an MCP server."""

    transport: Literal["streamable_http"] = "streamable_http"
    url: AnyHttpUrl
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class MCPToolAccess(StrictModel):
    """Tools of one MCP server. A required one that cannot be reached fails the seed."""

    kind: Literal["mcp"] = "mcp"
    name: str = Field(min_length=1, pattern=NAME_PATTERN)
    required: bool
    connection: MCPStreamableHTTPConnection


ToolAccess = Annotated[DirectHTTPToolAccess | MCPToolAccess, Field(discriminator="kind")]


class DirectSandboxConnection(StrictModel):
    """How a borrower reaches a box: the name of the provider's configuration block, and the argument of `connect`."""

    kind: Literal["direct"] = "direct"
    provider_config_ref: str
    descriptor: dict[str, JsonValue]


class SandboxAccess(StrictModel):
    """A box that another server owns, and the working directory in it."""

    connection: DirectSandboxConnection
    workdir: str


def unique_tool_names(accesses: list[Any]) -> list[Any]:
    """Return ``accesses`` unchanged. Raises ``ValueError`` if two have the same name."""
    names = [access.name for access in accesses]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tool access names must be unique; twice: {', '.join(twice)}")
    return accesses
