"""Configuration of the broker."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from nemo_gym.config_types import BaseRunServerInstanceConfig, CommandPath
from nemo_gym.contract.sandbox import DEFAULT_TTL_S
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.sandbox.wire.models import MAX_STDIN_BYTES, MAX_TTL_S, BoxSpec

MIB = 1024 * 1024
GIB = 1024 * MIB
CallerName = Annotated[str, StringConstraints(pattern=IDENTIFIER.pattern, max_length=128)]


class WarmPool(BaseModel):
    """Boxes created in advance for create requests with the same spec."""

    model_config = ConfigDict(extra="forbid")

    size: int = Field(ge=1)
    """Boxes kept ready."""
    spec: BoxSpec = Field(default_factory=BoxSpec)
    """Spec of the boxes. A create gets a box of the pool if its spec is equal, apart from ``doors`` and
    ``ready_timeout_s``."""


class BrokerConfig(BaseRunServerInstanceConfig):
    """Configuration of a broker. Times are in seconds, sizes in bytes."""

    sandbox_provider: str | dict[str, Any]
    """The backend: name of a ``sandbox`` block, or a block itself; any provider but ``remote``."""
    database_url: str | None = None
    """``sqlite:////path`` or ``postgresql://user@host/name``; ``None`` is a SQLite file in the state directory."""
    state_dir: CommandPath | None = None
    """Directory of the registry, the spool and the broker's identity, for one process at a time; ``None`` is a
    directory of the run."""
    identity: str | None = Field(None, min_length=1, max_length=128)
    """Name that this broker's boxes carry as a label, unique among brokers of one backend or database; ``None`` is a
    random name, stored in the state directory."""

    caller_tokens: dict[CallerName, str] = Field(default_factory=dict, repr=False)
    """Callers that are not servers of this stack: name → bearer token. They see only the boxes that they created, and
    have the rights of an agent."""
    trusted_callers: list[str] = Field(default_factory=list)
    """Names of ``caller_tokens`` that prepare images. They have the rights of an environment, within ``mount_roots``.
    """

    mount_roots: list[str] | None = None
    """Directories of the backend's host that boxes may mount from; ``None`` allows every path to environments and the
    pipeline, and no path to agents and the callers in ``caller_tokens``."""
    agent_packages: bool = False
    """Whether boxes may also mount the programs of agents: the CLIs that ``ng_prepare agents`` put into the cache of
    this host, and the folders of agent plugins."""
    agent_provider_options: dict[str, Any] = Field(default_factory=dict)
    """The ``provider_options`` that agents and ``caller_tokens`` may set, each with its only permitted value."""
    door_targets: list[str] | None = None
    """Base URLs that doors of agents and ``caller_tokens`` may lead to, only on the routes of a model or MCP server.
    ``None`` allows the model servers and environments of this broker's run (nothing, if the broker runs alone)."""

    default_ttl_s: float = Field(DEFAULT_TTL_S, gt=0, le=MAX_TTL_S)
    max_ttl_s: float = Field(24 * 3600.0, gt=0, le=MAX_TTL_S)
    max_boxes: int | None = Field(None, ge=1)
    max_boxes_per_owner: int | None = Field(None, ge=1)
    max_waiting: int = Field(4096, ge=0)
    """Maximum number of create requests that wait in the queue for a place."""
    queue_timeout_s: float = Field(300.0, gt=0)
    """How long a create waits for a place before it is refused."""

    max_body_bytes: int = Field(16 * MIB, ge=1024)
    """Maximum size of a JSON body, including the files of a spec."""
    max_body_values: int = Field(20_000, ge=100)
    """Maximum number of JSON values in a body (variables, arguments, files), counted before the body is parsed."""
    max_archive_bytes: int = Field(16 * GIB, ge=1024)
    max_stdin_bytes: int = Field(MAX_STDIN_BYTES, ge=0, le=MAX_STDIN_BYTES)
    max_output_bytes: int = Field(256 * MIB, ge=1)
    """Output kept per stream of one exec, even if the submission requests more."""
    spool_bytes: int = Field(8 * GIB, ge=MIB)
    """Output kept in total; beyond it, the output of the execs that ended first is dropped."""

    exec_durability: Literal["process", "machine"] = "process"
    """Which crash the records of a command's submission and end survive: that of the broker's process, or also that of
    its database's machine, which costs two syncs to disk per command. All other records always survive both."""
    reconcile_interval_s: float = Field(30.0, gt=0)
    retention_s: float = Field(48 * 3600.0, gt=0)
    """How long a box's record and its idempotency key are kept after the box is gone."""
    output_retention_s: float = Field(3600.0, gt=0)
    """How long the output of a box's commands is kept after the box is gone."""
    on_stop: Literal["keep", "destroy"] = "keep"
    """What happens to boxes when the broker is told to stop: ``keep`` leaves them until their leases end, for the next
    broker on the same state directory; ``destroy`` destroys them. A broker that is killed always keeps them."""
    warm: list[WarmPool] = Field(default_factory=list)
    prefetch: list[str] = Field(default_factory=list)
    """Images that the backend fetches at the start, before the first create needs them."""

    @field_validator("door_targets")
    @classmethod
    def _targets_are_urls(cls, targets: list[str] | None) -> list[str] | None:
        for target in targets or ():
            if not target.startswith(("http://", "https://")):
                raise ValueError(f"'{target}' is not an http:// or https:// URL")
        return targets

    @model_validator(mode="after")
    def _trusted_callers_have_tokens(self) -> Self:
        for name in self.trusted_callers:
            if name not in self.caller_tokens:
                raise ValueError(f"trusted_callers: '{name}' is not in caller_tokens; give it a token there")
        return self
