"""NeMo Gym's module name for tools over MCP, which an environment's own application serves already."""

from __future__ import annotations

from typing import Any

from nemo_gym.environment.server import NEMO_GYM_MCP_METADATA_KEY, NEMO_GYM_MCP_SESSION_TOKEN_HEADER

__all__ = [
    "NEMO_GYM_MCP_METADATA_KEY",
    "NEMO_GYM_MCP_SESSION_TOKEN_HEADER",
    "TOKEN_HEADER",
    "maybe_auto_expose",
]

TOKEN_HEADER = NEMO_GYM_MCP_SESSION_TOKEN_HEADER


def maybe_auto_expose(server: Any, app: Any) -> bool:
    """Return whether ``app`` serves the tools of ``server`` at ``/mcp``. Nothing has to be added, because the
    application of ``setup_webserver`` collects its typed routes with the first request."""
    return bool(server.exposes_mcp())
