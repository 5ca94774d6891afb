"""NeMo Gym's module name for an agent's access to tools; see `nemo_gym.contract.episodes`."""

from nemo_gym.contract.episodes import (
    DirectHTTPToolAccess,
    MCPStreamableHTTPConnection,
    MCPToolAccess,
    ToolAccess,
)

__all__ = [
    "DirectHTTPToolAccess",
    "MCPStreamableHTTPConnection",
    "MCPToolAccess",
    "ToolAccess",
]
