"""The interface that an environment's routes require of its server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.owned_boxes import OwnedBoxes
from nemo_gym.environment.route_tools import CatchAll, RouteTool

if TYPE_CHECKING:
    from nemo_gym.http.client import ServerClient

MCP_PATH = "/mcp"
ALLOWED_TOOLS_SESSION_KEY = "_ng_mcp_tools"
"""The session key for the names of the tools that may be called over MCP; absent if all may."""


class EnvironmentHooks(Protocol):
    """The hooks of `nemo_gym.environment.server.SimpleResourcesServer`, which documents each of them."""

    config: Any

    @property
    def server_client(self) -> ServerClient: ...

    @property
    def own_credential(self) -> Any: ...

    @property
    def seed_session(self) -> Any:
        """A property, because plugins differ in the parameters of this hook and ``verify``."""
        ...

    @property
    def verify(self) -> Any: ...

    @property
    def close_resources_session(self) -> Any: ...

    @classmethod
    def overrides(cls, hook: str) -> bool: ...

    def derive_key(self, purpose: str) -> bytes: ...

    def get_session_middleware_key(self) -> str: ...

    def task_id(self, row: dict[str, Any]) -> str: ...

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]: ...

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor: ...

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict: ...

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None: ...

    def owned_boxes(self) -> OwnedBoxes | None: ...

    async def close_session(self, rollout: RolloutIdentity) -> None: ...

    def mcp_tools(self, harvested: list[RouteTool], catchall: CatchAll | None) -> list[RouteTool] | None: ...

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None: ...

    def exposes_mcp(self) -> bool: ...

    def reverify_mode(self) -> Any: ...

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics: ...
