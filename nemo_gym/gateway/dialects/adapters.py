"""The adapter of each dialect, whole replies as streams, and the list of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import ChatAdapter, ConversationCache, chat_events
from nemo_gym.gateway.dialects.messages import MessagesAdapter, messages_events
from nemo_gym.gateway.dialects.responses import ResponsesAdapter
from nemo_gym.gateway.dialects.responses_reply import responses_events
from nemo_gym.gateway.policy_request import Answer, PolicyRequest

EVENT_STREAM = "text/event-stream"
_LONG_AGO = "1970-01-01T00:00:00Z"


def models_reply(asked_by: Dialect | Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    """Return the list of models. ``asked_by``: a dialect, or a request's headers, because all dialects share the
    route: Anthropic's clients send ``anthropic-version``."""
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


# A whole reply as the server-sent events of its dialect.


def stream_of(dialect: Dialect, reply: Mapping[str, Any], *, include_usage: bool = True) -> Iterator[bytes]:
    """Return the events of ``reply``, which is a body of ``dialect``."""
    if dialect is Dialect.CHAT:
        return chat_events(reply, usage=include_usage)
    return responses_events(reply) if dialect is Dialect.RESPONSES else messages_events(reply)


# A Responses request for a NeMo Gym model server, which always answers with a whole reply.

_OF_STREAMS = ("stream", "stream_options")


def sanitize_streaming_responses_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``body`` as a request for a whole reply, with the tools of namespaces among the others, and a mapping of
    these tools' names to their namespaces. Raises ``ValueError`` if two namespaces have a tool of the same name."""
    cleaned = {key: value for key, value in body.items() if key not in _OF_STREAMS}
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


# The adapter of each dialect, which converts between its bodies and the lowered request and answer.


class DialectAdapter(Protocol):
    """One dialect. Stateless: generated ids are derived from the answer, so raising it again gives an equal body."""

    def lower(self, body: Mapping[str, Any], cache: ConversationCache | None = None) -> PolicyRequest:
        """Return the lowered request of a body (JSON data). ``cache``: the session's, if there is one. Raises
        `InvalidBodyError`, whose ``param`` names the field, for anything that cannot be served, and no other error."""

    def reply(self, answer: Answer, request: PolicyRequest, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to ``body``, whose lowered form is ``request``."""

    def events(self, reply: Mapping[str, Any], request: PolicyRequest) -> Iterator[bytes]:
        """Yield a reply as whole server-sent events."""

    def opening(
        self, answer_id: str, created_at: float, model: str, request: PolicyRequest, body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the object with which a stream can begin before the answer is known: the response object of
        Responses, for `Pings`; ``None`` in the other dialects."""

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an error."""


ADAPTERS: Mapping[Dialect, DialectAdapter] = {
    Dialect.CHAT: ChatAdapter(),
    Dialect.RESPONSES: ResponsesAdapter(),
    Dialect.MESSAGES: MessagesAdapter(),
}
