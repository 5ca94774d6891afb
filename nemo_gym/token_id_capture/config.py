"""The block ``token_id_capture`` of a configuration, as NeMo Gym's model servers read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

TOKEN_ID_CAPTURE_BLOCK = "token_id_capture"


class TokenIdCapture(BaseModel):
    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    all_agents: bool = False
    external_staging: bool = False
    external_staging_backend: str | None = None


class TokenIdCaptureConfig(BaseModel):
    token_id_capture: TokenIdCapture


def token_id_capture_config(global_config: Mapping[str, Any]) -> TokenIdCaptureConfig | None:
    """The validated block, or ``None`` if the configuration has none."""
    block = global_config.get(TOKEN_ID_CAPTURE_BLOCK) if isinstance(global_config, Mapping) else None
    if not isinstance(block, Mapping):
        return None
    return TokenIdCaptureConfig(token_id_capture=TokenIdCapture.model_validate(dict(block)))
