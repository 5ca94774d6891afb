"""The adapter of each dialect, between its bodies and the lowered request and answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import ChatAdapter
from nemo_gym.gateway.dialects.memo import LoweringMemo
from nemo_gym.gateway.dialects.messages import MessagesAdapter
from nemo_gym.gateway.dialects.responses import ResponsesAdapter
from nemo_gym.gateway.lowered import Answer, LoweredRequest


class DialectAdapter(Protocol):
    """One dialect. Stateless; what a body makes up is derived from the answer, so raising it again gives the same."""

    def lower(self, body: Mapping[str, Any], memo: LoweringMemo | None = None) -> LoweredRequest:
        """The request in a body (JSON data). ``memo``: of the session, where its conversation is a long one. Raises
        `InvalidBodyError`, whose ``param`` names the field, for whatever cannot be served, and nothing else."""

    def reply(self, answer: Answer, request: LoweredRequest, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body that answers ``body``, which lowered to ``request``."""

    def events(self, reply: Mapping[str, Any], request: LoweredRequest) -> Iterator[bytes]:
        """A reply as whole server-sent events."""

    def opening(
        self, answer_id: str, created_at: float, model: str, request: LoweredRequest, body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What the stream of an answer begins with before the answer is known: Responses' response object, as `Pings`
        needs it; nothing in the other dialects."""

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        """The status and the body that tell a harness of an error."""


_ADAPTERS: dict[Dialect, DialectAdapter] = {
    Dialect.CHAT: ChatAdapter(),
    Dialect.RESPONSES: ResponsesAdapter(),
    Dialect.MESSAGES: MessagesAdapter(),
}


def adapter_of(dialect: Dialect) -> DialectAdapter:
    return _ADAPTERS[dialect]
