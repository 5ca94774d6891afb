"""A whole reply as the server-sent events its dialect would have streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat_reply import chat_events
from nemo_gym.gateway.dialects.messages_reply import messages_events
from nemo_gym.gateway.dialects.responses_events import responses_events


def stream_of(dialect: Dialect, reply: Mapping[str, Any], *, include_usage: bool = True) -> Iterator[bytes]:
    """The events of ``reply``, which is a body of ``dialect``."""
    if dialect is Dialect.CHAT:
        return chat_events(reply, usage=include_usage)
    return responses_events(reply) if dialect is Dialect.RESPONSES else messages_events(reply)
