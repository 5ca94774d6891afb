"""Types of configuration blocks, under the names that NeMo Gym plugins import.

A server instance is ``<instance>: {<server type>: {<implementation>: {...}}}``; a block refers to another instance
with ``{type: <server type>, name: <instance>}``. Validation of whole compositions lives in `nemo_gym.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_gym._util.files import from_command
from nemo_gym.contract.errors import ConfigError

__all__ = [
    "ROLLOUT_PATH_PREFIX",
    "AgentServerRef",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseRunServerConfig",
    "BaseRunServerInstanceConfig",
    "BaseServerConfig",
    "CommandPath",
    "ConfigError",
    "DatasetConfig",
    "Domain",
    "ModelServerRef",
    "ResourcesServerRef",
    "ServerRef",
    "is_server_ref",
]

ROLLOUT_PATH_PREFIX = "ng-rollout"
"""First segment of ``/ng-rollout/<rollout id>/…``, for clients that take a base URL but no header."""

CommandPath = Annotated[Path, AfterValidator(from_command)]
"""A file or directory on this host; a relative path is resolved from the directory where the command was started."""


class ModelServerRef(BaseModel):
    """Names a model server instance."""

    type: Literal["responses_api_models"]
    name: str


class ResourcesServerRef(BaseModel):
    """Names an environment's server instance."""

    type: Literal["resources_servers"]
    name: str


class AgentServerRef(BaseModel):
    """Names an agent server instance."""

    type: Literal["responses_api_agents"]
    name: str


ServerRef = ModelServerRef | ResourcesServerRef | AgentServerRef
_SERVER_REF: TypeAdapter[ServerRef] = TypeAdapter(ServerRef)


def is_server_ref(config_dict: object) -> ServerRef | None:
    """Return the typed reference if ``config_dict`` is one, else ``None``."""
    if not isinstance(config_dict, Mapping):
        return None
    try:
        return _SERVER_REF.validate_python(dict(config_dict))
    except ValidationError:
        return None


class Domain(StrEnum):
    """The subject of an environment. Informative."""

    AGENT = "agent"
    CODING = "coding"
    E2E = "e2e"
    GAMES = "games"
    INSTRUCTION_FOLLOWING = "instruction_following"
    KNOWLEDGE = "knowledge"
    LONG_CONTEXT = "long_context"
    MATH = "math"
    RLHF = "rlhf"
    SAFETY = "safety"
    TRANSLATION = "translation"
    OTHER = "other"


class DatasetConfig(BaseModel):
    """A dataset of a server: where its rows are and how often each is repeated."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str
    """``train``, ``validation``, ``example``, …"""
    jsonl_fpath: str
    num_repeats: int = Field(1, ge=1)


class BaseServerConfig(BaseModel):
    """Where a server listens. Filled in at start if the configuration does not set it."""

    host: str
    port: int
    num_workers: int | None = None
    """How many processes, each a replica with a port of its own; ``None`` means 1."""


class BaseRunServerConfig(BaseServerConfig):
    """A server that a run starts: ``entrypoint`` is a Python file in the implementation's folder."""

    entrypoint: str
    domain: Domain | None = None


class BaseRunServerInstanceConfig(BaseRunServerConfig):
    """A started server; ``name`` is its instance name, unique in the run."""

    name: str
    max_body_bytes: int = Field(1 << 30, gt=0)
    """The size limit of a request's body; a larger one gets status 413."""
    max_agent_body_bytes: int = Field(32 << 20, gt=0)
    """The same limit for requests from agent servers, which run third-party code."""
    max_agent_body_values: int = Field(1_000_000, gt=0)
    """The limit of JSON values in a request from an agent server, also with status 413: numbers and strings count
    once, lists and objects four times. Parsing the default number blocks the event loop for about 0.1 s."""
    slow_request_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a connection with a stalled request is closed: its head is still incomplete, or less than
    1 KiB arrived of a body that the server is reading."""


class AggregateMetricsRequest(BaseModel):
    """All verify responses of one agent, for metrics over the whole run."""

    verify_responses: list[dict[str, Any]]


class AggregateMetrics(BaseModel):
    """Metrics per task (``group_level_metrics``), over all tasks (``agent_metrics``), and the most important ones."""

    model_config = ConfigDict(extra="allow")

    group_level_metrics: list[dict[str, Any]] = Field(default_factory=list)
    repeat_level_metrics: list[dict[str, Any]] = Field(default_factory=list)
    """The metrics of each repeat over its tasks, if the environment computes such metrics."""
    agent_metrics: dict[str, Any] = Field(default_factory=dict)
    key_metrics: dict[str, Any] = Field(default_factory=dict)


def __getattr__(name: str) -> Any:
    if name in ("DictConfig", "OmegaConf"):  # NeMo Gym's plugins import them from here; loaded on first use
        import omegaconf

        return getattr(omegaconf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
