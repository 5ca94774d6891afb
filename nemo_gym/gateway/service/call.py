"""One call on its way through the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Generic

from starlette.types import Receive

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.capture import CallRecord
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import DialectAdapter
from nemo_gym.gateway.dialects.errors import status_of
from nemo_gym.gateway.journal import KeptBody
from nemo_gym.gateway.lowered import LoweredRequest
from nemo_gym.gateway.retries import Delivery
from nemo_gym.gateway.service.backend import C, TurnFacts
from nemo_gym.gateway.service.committed import Committed, LargeText
from nemo_gym.gateway.service.live import LiveSession
from nemo_gym.http.delivery import AnswerWatch, Connection

_NOTHING = LoweredRequest(())


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What is known of the HTTP request beside its body."""

    headers: Mapping[str, str]
    """By their names in lower case."""
    connection: Connection | None
    receive: Receive
    """As in ASGI, with the body read."""
    body_bytes: int = 0


@dataclass(slots=True)
class Call(Generic[C]):
    """What is known of a call, and what becomes of it."""

    dialect: Dialect
    adapter: DialectAdapter
    body: Mapping[str, Any]
    live: LiveSession[C] | None
    """Its session; nothing for a caller of the stack that has none."""
    connection: Connection | None
    watch: AnswerWatch
    record: CallRecord | None
    """For the capture, where there is one."""
    handed_over: Callable[[Call[C], bool], None]
    """Called once the last byte of the answer has left; with whether its caller was still there."""
    body_bytes: int = 0
    call_id: str = field(default_factory=lambda: token_hex(16))
    lowered: LoweredRequest = _NOTHING
    fingerprint: str = ""
    delivery: Delivery[Committed] | None = None
    committed: Committed | None = None
    conversations: C | None = None
    """Of a call without a session."""
    all_yielded: bool = False
    taken_back: Callable[[Call[C]], None] = lambda call: None
    """Called when it turns out that the caller cannot have read the answer that was handed over."""
    noted_as_sent: bool = False
    """In the journal."""
    large: Sequence[LargeText] = ()
    """What memory holds of its turn until its answer has left."""
    kept: KeptBody | None = None
    """Where the journal holds that as well."""

    def sent(self) -> None:
        """The last byte of the reply was handed over."""
        self.handed_over(self, self.delivery is None or self.watch.all_sent(self._undelivered))
        # Its connection may stay open for long, and this with it.
        self.body, self.lowered = {}, _NOTHING

    def _undelivered(self) -> None:
        assert self.delivery is not None
        self.delivery.undelivered()
        self.taken_back(self)

    def is_kept(self, body: KeptBody) -> None:
        """The journal has, or will have once it is durable, the body of this call's turn."""
        self.kept = body

    def let_go(self) -> None:
        """The answer has left, and its turn is durable."""
        if self.kept is not None:
            for one in self.large:
                one.let_go(self.kept)
        self.large, self.kept = (), None

    def answered(self, committed: Committed, *, repeated: bool) -> None:
        self.committed = committed
        if (record := self.record) is not None:
            usage = committed.answer.usage
            record.repeated, record.finish, record.turn = repeated, str(committed.answer.end), committed.turn_id
            record.usage = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}

    def sampled(self, facts: TurnFacts) -> None:
        if (record := self.record) is not None:
            record.mark("committed")
            record.engines, record.weights_version = facts.engines, facts.weights_version
            record.split_reason = str(facts.split_reason) if facts.split_reason is not None else None

    def failed(self, error: BaseException) -> None:
        if (record := self.record) is None:
            return
        if isinstance(error, NemoGymError):
            record.status, record.code, record.error = status_of(error), error.code, error.message
        else:
            record.client_gone = True
