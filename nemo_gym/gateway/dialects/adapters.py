"""The adapter of each dialect, a whole reply as its stream, and the list of models."""

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


# A whole reply as the server-sent events its dialect would have streamed.


def stream_of(dialect: Dialect, reply: Mapping[str, Any], *, include_usage: bool = True) -> Iterator[bytes]:
    """The events of ``reply``, which is a body of ``dialect``."""
    if dialect is Dialect.CHAT:
        return chat_events(reply, usage=include_usage)
    return responses_events(reply) if dialect is Dialect.RESPONSES else messages_events(reply)


# A request of Responses that is answered whole by a NeMo Gym model server, whatever it asks for.

_OF_STREAMS = ("stream", "stream_options")


def sanitize_streaming_responses_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """``body`` as a request for a whole reply, with the tools of namespaces beside the others, and the namespace of
    each of them by its name. Raises ``ValueError`` for a name that two namespaces have."""
    cleaned = {key: value for key, value in body.items() if key not in _OF_STREAMS}
    namespaces: dict[str, str] = {}
    tools: list[Any] = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            tools.append(tool)
            continue
        for inner in tool.get("tools") or ():
            if inner["name"] in namespaces:
                raise ValueError(f"tools: {inner['name']!r} stands in two namespaces; give them different names")
            namespaces[inner["name"]] = tool["name"]
            tools.append(inner)
    return ({**cleaned, "tools": tools} if tools else cleaned), namespaces


def with_namespaces(response: dict[str, Any], namespaces: Mapping[str, str]) -> dict[str, Any]:
    """``response`` with the namespace of each function that it calls."""
    output = [
        {**item, "namespace": namespaces[item["name"]]}
        if item.get("type") == "function_call" and item.get("name") in namespaces
        else item
        for item in response["output"]
    ]
    return {**response, "output": output}


# The adapter of each dialect, between its bodies and the lowered request and answer.


class DialectAdapter(Protocol):
    """One dialect. Stateless; what a body makes up is derived from the answer, so raising it again gives the same."""

    def lower(self, body: Mapping[str, Any], cache: ConversationCache | None = None) -> PolicyRequest:
        """The request in a body (JSON data). ``cache``: of the session, where its conversation is a long one. Raises
        `InvalidBodyError`, whose ``param`` names the field, for whatever cannot be served, and nothing else."""

    def reply(self, answer: Answer, request: PolicyRequest, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body that answers ``body``, which lowered to ``request``."""

    def events(self, reply: Mapping[str, Any], request: PolicyRequest) -> Iterator[bytes]:
        """A reply as whole server-sent events."""

    def opening(
        self, answer_id: str, created_at: float, model: str, request: PolicyRequest, body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What the stream of an answer begins with before the answer is known: Responses' response object, as `Pings`
        needs it; nothing in the other dialects."""

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        """The status and the body that tell a harness of an error."""


ADAPTERS: Mapping[Dialect, DialectAdapter] = {
    Dialect.CHAT: ChatAdapter(),
    Dialect.RESPONSES: ResponsesAdapter(),
    Dialect.MESSAGES: MessagesAdapter(),
}
