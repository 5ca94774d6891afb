"""Bodies of the environment's routes as NeMo Gym plugins subclass them.

Apart from `nemo_gym.environment.server`, which exports these names lazily: they need OpenAI's types, whose import
takes longer than everything else an environment server loads.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.openai_types.responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

__all__ = [
    "BaseMultiRewardVerifyResponse",
    "BaseRunRequest",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "MCPServerMetadata",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
]


class BaseRunRequest(BaseModel):
    """A dataset row: subclasses name the fields they read."""

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming


class BaseVerifyRequest(BaseRunRequest):
    """A row with the response to grade."""

    response: NeMoGymResponse


class BaseVerifyResponse(BaseVerifyRequest):
    """What ``verify`` returns: the request and its reward."""

    reward: float


class BaseMultiRewardVerifyResponse(BaseVerifyResponse):
    """A reward that is made of several; ``reward`` is what they add up to, or what the environment makes of them."""

    reward_components: dict[str, float]


class BaseSeedSessionRequest(BaseModel):
    """A row, of which a subclass names the fields it reads; the others are kept for it to look at."""

    model_config = ConfigDict(extra="allow")


class BaseSeedSessionResponse(BaseModel):
    pass


class MCPServerMetadata(BaseModel):
    """Where an environment's MCP server is, in a seed's reply under `NEMO_GYM_MCP_METADATA_KEY`."""

    server_name: str
    url_path: str = "/mcp"
    transport: str = "http"
    headers: dict[str, str] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _path_is_absolute(self) -> MCPServerMetadata:
        if not self.url_path.startswith("/"):
            raise ValueError(f"url_path must start with '/', got '{self.url_path}'")
        return self
