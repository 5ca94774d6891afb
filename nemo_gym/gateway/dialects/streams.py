"""A whole reply as the server-sent events its dialect would have streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.gateway.dialects import Dialect, chat_reply, messages_reply, responses_events


def stream_of(dialect: Dialect, reply: Mapping[str, Any], *, include_usage: bool = True) -> Iterator[bytes]:
    """The events of ``reply``, which is a body of ``dialect``."""
    if dialect is Dialect.CHAT:
        return chat_reply.events_of(reply, usage=include_usage)
    return responses_events.events_of(reply) if dialect is Dialect.RESPONSES else messages_reply.events_of(reply)
