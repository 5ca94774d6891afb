"""The base class of every environment.

A new environment implements ``open_session`` (what an agent may know), ``grade`` (the verdict) and perhaps
``gold_solution``. A NeMo Gym plugin implements ``verify`` and perhaps ``seed_session``, and has tools as plain POST
routes; it works unmodified. Either way the routes of `nemo_gym.environment.routes` enforce the session contract.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.environment.attempts import AttemptStore
from nemo_gym.environment.hooks import (
    BaseResourcesServer,
    BaseResourcesServerConfig,
    EnvironmentHooks,
    ReverifyMode,
    normalize_tool_name,
)
from nemo_gym.environment.mcp.answers import plain_name
from nemo_gym.environment.routes import EnvironmentRoutes
from nemo_gym.http.middleware import Application

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from nemo_gym.http.environment_bodies import (
        BaseMultiRewardVerifyResponse,
        BaseRunRequest,
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        BaseVerifyRequest,
        BaseVerifyResponse,
        MCPServerMetadata,
        NeMoGymResponse,
        NeMoGymResponseCreateParamsNonStreaming,
        ResourcesCloseSessionRequest,
        ResourcesCloseSessionResponse,
        ResourcesSeedSessionRequest,
        ResourcesSeedSessionResponse,
        ResourcesVerifyRequest,
    )

__all__ = [
    "NEMO_GYM_MCP_METADATA_KEY",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseMultiRewardVerifyResponse",
    "BaseResourcesServer",
    "BaseResourcesServerConfig",
    "BaseRunRequest",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "MCPServerMetadata",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "ResourcesCloseSessionRequest",
    "ResourcesCloseSessionResponse",
    "ResourcesSeedSessionRequest",
    "ResourcesSeedSessionResponse",
    "ResourcesVerifyRequest",
    "ReverifyMode",
    "SimpleResourcesServer",
    "normalize_tool_name",
]

NEMO_GYM_MCP_METADATA_KEY = "mcp"
NEMO_GYM_MCP_SESSION_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"


class SimpleResourcesServer(EnvironmentHooks):
    """An environment. Override hooks; the routes are fixed."""

    _environment: EnvironmentRoutes | None = PrivateAttr(default=None)

    def contract_app(self) -> Application:
        environment = self._environment = EnvironmentRoutes(self, self._attempt_store())
        app = self.base_app(session_guard=environment.guard, authenticates_itself=environment.authenticates_itself)
        environment.install(app)
        return app

    def application(self) -> FastAPI:
        app = super().application()
        assert self._environment is not None
        self._environment.complete(app)
        return app

    def around(self, app: FastAPI) -> ASGIApp:
        assert self._environment is not None
        return self._environment.around(app)

    def normalize_tool_name(self, name: str) -> str:
        tools = () if self._environment is None else self._environment.mcp_tool_names()
        return plain_name(name, self.config.name, tools) or super().normalize_tool_name(name)

    def facts(self) -> dict[str, Any]:
        return {
            "words_prompts": self.overrides("public_row"),
            **({} if self.owned_boxes() is None else {"owns_boxes": True}),
        }

    def _attempt_store(self) -> AttemptStore:
        directory = self.config.state_dir or (self._launch.state_dir if self._launch is not None else None)
        return AttemptStore(Path(directory) / f"{self.config.name}.attempts.sqlite" if directory else None)

    async def shutdown(self) -> None:
        if self._environment is not None:
            await self._environment.finish()
        try:
            if (boxes := self.owned_boxes()) is not None:
                await boxes.aclose()
        finally:
            if self._box_owner is not None:
                await self._box_owner.aclose()


def __getattr__(name: str) -> Any:
    """Import the rest of ``__all__`` when a plugin uses it, because it needs OpenAI's types."""
    if name in __all__:
        from nemo_gym.http import environment_bodies as wire

        return getattr(wire, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
