"""The adapter of each dialect, and bodies around them: the list of models, streaming requests of Responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import ChatAdapter, DialectAdapter
from nemo_gym.gateway.dialects.messages import MessagesAdapter
from nemo_gym.gateway.dialects.responses import ResponsesAdapter

ADAPTERS: Mapping[Dialect, DialectAdapter] = {
    adapter.dialect: adapter for adapter in (ChatAdapter(), ResponsesAdapter(), MessagesAdapter())
}
EVENT_STREAM = "text/event-stream"
_LONG_AGO = "1970-01-01T00:00:00Z"


def models_reply(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    """Return the list of models. All dialects share its route: Anthropic's clients send ``anthropic-version``."""
    if any(name.lower() == "anthropic-version" for name in headers):
        listed = [{"type": "model", "id": name, "display_name": name, "created_at": _LONG_AGO} for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return {"data": listed, **ends, "has_more": False}
    owned = [{"id": name, "object": "model", "created": 0, "owned_by": "policy"} for name in names]
    return {"object": "list", "data": owned}


# A Responses request for a NeMo Gym model server, which always answers with a whole reply.


def sanitize_streaming_responses_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``body`` as a request for a whole reply, with the tools of namespaces among the others, and a mapping of
    these tools' names to their namespaces. Raises ``ValueError`` if two namespaces have a tool of the same name."""
    cleaned = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    namespaces: dict[str, str] = {}
    tools: list[Any] = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            tools.append(tool)
            continue
        for inner in tool.get("tools") or ():
            if inner["name"] in namespaces:
                raise ValueError(f"tools: {inner['name']!r} is in two namespaces; give them different names")
            namespaces[inner["name"]] = tool["name"]
            tools.append(inner)
    return ({**cleaned, "tools": tools} if tools else cleaned), namespaces


def with_namespaces(response: dict[str, Any], namespaces: Mapping[str, str]) -> dict[str, Any]:
    """Return ``response`` with the namespace added to each function call."""
    output = [
        {**item, "namespace": namespaces[item["name"]]}
        if item.get("type") == "function_call" and item.get("name") in namespaces
        else item
        for item in response["output"]
    ]
    return {**response, "output": output}
