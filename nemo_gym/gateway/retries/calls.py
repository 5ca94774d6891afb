"""One call to whichever engine serves it: routed, guarded, and tried again where that can help.

A call is tried again only while nothing of its answer has been handed on, only for failures that say that another
try may succeed, and only as often as its own bound, its session's budget and that of all calls allow. A session's
budget pays for every failure at an engine in service, also for the one that is handed on: the harness's own
repetitions come out of the same budget, and once it is spent the harness is told not to try again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from nemo_gym._util.backoff import Backoff
from nemo_gym.gateway.engines.errors import EngineError, EngineRateLimitedError
from nemo_gym.gateway.retries.budget import RetryBudget
from nemo_gym.gateway.routing.replica import E
from nemo_gym.gateway.routing.router import Router

T = TypeVar("T")
SESSION_RETRIES = 10.0
"""Saved up by a session, and there at its start."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetryOptions:
    max_tries: int = 3
    first_backoff_s: float = 0.1
    """Before trying the same engine again, doubled each time; another engine is tried at once."""
    max_backoff_s: float = 5.0


class EngineCalls(Generic[E]):
    """Calls through a router. ``operation`` gets the engine and makes one try; each try must use a request id of its
    own."""

    def __init__(
        self,
        router: Router[E],
        *,
        options: RetryOptions | None = None,
        budget: RetryBudget | None = None,
        session_budget: Callable[[], RetryBudget] = lambda: RetryBudget(capacity=SESSION_RETRIES),
    ) -> None:
        self.router = router
        self.options = options or RetryOptions()
        self.budget = budget or RetryBudget()
        self._session_budget = session_budget
        self._sessions: dict[str, RetryBudget] = {}

    def forget(self, session_id: str) -> None:
        """A session has ended."""
        self._sessions.pop(session_id, None)

    def answered(self, session_id: str | None) -> None:
        """A call was answered."""
        if session_id is not None and (budget := self._sessions.get(session_id)) is not None:
            budget.earn()

    def pays(self, session_id: str | None) -> bool:
        """Whether a session's budget has paid for a failure."""
        if session_id is None:
            return True
        if (budget := self._sessions.get(session_id)) is None:
            budget = self._sessions[session_id] = self._session_budget()
        return budget.spend()

    async def call(self, session_id: str | None, operation: Callable[[E], Awaitable[T]]) -> T:
        """The answer of the first try that succeeds; raises the `EngineError` of the last."""
        tries = _Tries(self, session_id)
        while True:
            reservation = await self.router.acquire(session_id, without=tries.without())
            try:
                with reservation:
                    async with reservation.guard():
                        answer = await operation(reservation.engine)
                        self.answered(session_id)
                        return answer
            except EngineError as error:
                await tries.failed(reservation.engine, error)

    async def stream(
        self,
        session_id: str | None,
        operation: Callable[[E], AsyncGenerator[T, None]],
        *,
        avoid: Collection[str] = (),
    ) -> AsyncGenerator[T, None]:
        """The items of the first try that yields one. A failure after that is the caller's: it has handed items on.
        ``avoid`` names engines to ask only when no other is in service. Closing the generator ends the call at the
        engine."""
        tries = _Tries(self, session_id, avoid)
        while True:
            reservation = await self.router.acquire(session_id, without=tries.without())
            handed_on = False
            try:
                with reservation:
                    async with aclosing(operation(reservation.engine)) as items:
                        while True:
                            try:
                                async with reservation.guard():
                                    item = await anext(items)
                            except StopAsyncIteration:
                                self.answered(session_id)
                                return
                            if not handed_on:
                                reservation.answering()
                            handed_on = reservation.replica.heard_from = True
                            yield item
            except EngineError as error:
                if handed_on:
                    raise
                await tries.failed(reservation.engine, error)


class _Tries(Generic[E]):
    """The tries of one call so far."""

    def __init__(self, calls: EngineCalls[E], session_id: str | None, avoid: Collection[str] = ()) -> None:
        self._calls = calls
        self._session_id = session_id
        self._count = 0
        self._failed: set[str] = {*avoid}
        self._refused: set[str] = set()
        self._backoff = Backoff(first_s=calls.options.first_backoff_s, longest_s=calls.options.max_backoff_s)
        calls.budget.earn()

    def without(self) -> set[str]:
        """Engines to pass over: those that failed this call, as long as another one is in service."""
        if not self._failed:
            return set()
        others = {
            replica.name
            for replica in self._calls.router.replicas
            if replica.name not in self._failed and not replica.draining and replica.health.admits(0)
        }
        return self._failed if others else set()

    async def failed(self, engine: E, error: EngineError) -> None:
        """Return when the call is to be tried again; raise ``error`` when it is not."""
        if error.fatal and engine.name not in self._refused:
            self._refused.add(engine.name)  # nothing was begun there; and it is out of service now
        else:
            self._count += 1
        # Moving off an engine that is out of service is free: a killed engine takes many calls with it at the same
        # moment. Where there is no other, the call waits until one is in service, which is no load for any.
        moving_off = not self._calls.router.in_service(engine.name)
        if error.unhealthy and not moving_off and not self._calls.pays(self._session_id):
            log.warning("no retry: the session's budget is spent", engine=engine.name, error=str(error))
            error.details["retries_spent"] = True
            raise error
        if not error.elsewhere or self._count >= self._calls.options.max_tries:
            raise error
        self._failed.add(engine.name)
        another = bool(self.without())
        if not another and (isinstance(error, EngineRateLimitedError) or not error.retryable):
            # The caller can wait as well as we can, and knows better whether it wants to.
            raise error
        if not moving_off and not self._calls.budget.spend():
            log.warning("no retry: the budget is spent", engine=engine.name, error=str(error))
            raise error
        log.info("engine call failed, trying again", engine=engine.name, code=error.code, another_engine=another)
        if not another:
            await self._backoff.again()
