"""Bodies of the environment's routes, which NeMo Gym plugins subclass.

`nemo_gym.environment.server` exports these names lazily: they need OpenAI's types, whose import takes longer than
everything else an environment server loads.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from nemo_gym.contract.episodes import EpisodeId, SandboxAccess, StrictModel, TaskId, validate_failure_kind
from nemo_gym.contract.verdict import ROLLOUT_ID_KEY
from nemo_gym.openai_types.responses import NeMoGymResponse as NeMoGymResponse
from nemo_gym.openai_types.responses import (
    NeMoGymResponseCreateParamsNonStreaming as NeMoGymResponseCreateParamsNonStreaming,
)

InputT = TypeVar("InputT")


class BaseRunRequest(BaseModel):
    """A dataset row. Subclasses declare the fields they read."""

    model_config = ConfigDict(populate_by_name=True)

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    capture_rollout_id: str | None = Field(None, alias=ROLLOUT_ID_KEY, exclude=True)
    """The rollout's id; dumps leave it out."""


class BaseVerifyRequest(BaseRunRequest):
    """A row with the response to grade."""

    response: NeMoGymResponse


class BaseVerifyResponse(BaseVerifyRequest):
    """What ``verify`` returns: the request and its reward."""

    reward: float
    mask_sample: bool = False
    """Whether to leave the sample out of every score."""
    failure_kind: str | None = None
    failure_reason: str | None = None

    @field_validator("failure_kind")
    @classmethod
    def _known_kind(cls, value: str | None) -> str | None:
        return validate_failure_kind(value)


class BaseMultiRewardVerifyResponse(BaseVerifyResponse):
    """A verdict with several rewards; ``reward`` is their sum, or what the environment computes from them."""

    reward_components: dict[str, float]


class BaseSeedSessionRequest(BaseModel):
    """A dataset row. A subclass declares the fields it reads; other fields are kept as extra attributes."""

    model_config = ConfigDict(extra="allow")


class BaseSeedSessionResponse(BaseModel):
    pass


class ResourcesSeedSessionRequest(StrictModel):
    """Opens a session under the caller's id; a repeated request gets the same response."""

    resources_session_id: str = Field(min_length=1)
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, JsonValue]


class ResourcesCloseSessionRequest(StrictModel):
    """Ends a session. If the id was never seeded, a later seed of it must be refused."""

    resources_session_id: str
    episode_id: EpisodeId


class ResourcesCloseSessionResponse(StrictModel):
    resources_session_id: str


class ResourcesVerifyRequest(StrictModel, Generic[InputT]):
    """An episode's result to verify, in the environment's own type."""

    episode_id: EpisodeId
    task_id: TaskId
    verification_input: InputT


class MCPServerMetadata(BaseModel):
    """The address of an environment's MCP server, in a seed's reply under `NEMO_GYM_MCP_METADATA_KEY`."""

    server_name: str
    url_path: str = "/mcp"
    transport: str = "http"
    headers: dict[str, str] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _path_is_absolute(self) -> MCPServerMetadata:
        if not self.url_path.startswith("/"):
            raise ValueError(f"url_path must start with '/', got '{self.url_path}'")
        return self


class ResourcesSeedSessionResponse(StrictModel):
    """Confirms a session, and lists the tools and the sandbox that its agent may use."""

    resources_session_id: str
    resources_tools: MCPServerMetadata | None = None
    sandbox_access: SandboxAccess | None = None
