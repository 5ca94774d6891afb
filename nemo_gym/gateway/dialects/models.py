"""The list of models, as ``GET /v1/models`` answers it in either vendor's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.gateway.dialects import Dialect

_LONG_AGO = "1970-01-01T00:00:00Z"


def models_reply(asked_by: Dialect | Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    """``asked_by``: a dialect, or the headers of a request, since the route is the same for all: Anthropic's clients
    send ``anthropic-version``."""
    if isinstance(asked_by, Dialect):
        anthropic = asked_by is Dialect.MESSAGES
    else:
        anthropic = any(name.lower() == "anthropic-version" for name in asked_by)
    if anthropic:
        listed = [{"type": "model", "id": name, "display_name": name, "created_at": _LONG_AGO} for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return {"data": listed, **ends, "has_more": False}
    owned = [{"id": name, "object": "model", "created": 0, "owned_by": "policy"} for name in names]
    return {"object": "list", "data": owned}
