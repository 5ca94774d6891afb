"""A place on an engine, taken before anything is awaited and given back exactly once."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

from nemo_gym.gateway.engines.errors import EngineError, EngineLostError
from nemo_gym.gateway.routing.replica import E, Replica

if TYPE_CHECKING:
    from nemo_gym.gateway.routing.router import Router


class Reservation(Generic[E]):
    """``with reservation:`` around one call. How the call ended is reported from what leaves the block: nothing or a
    refusal is good news about the engine, an `EngineError` is judged by its class, anything else (a cancellation)
    says nothing."""

    def __init__(self, replica: Replica[E], router: Router[E], session_id: str | None = None) -> None:
        self.replica = replica
        self._router = router
        self._session_id = session_id
        self._epoch = replica.health.epoch
        self._open = True

    @property
    def engine(self) -> E:
        return self.replica.engine

    def release(self, outcome: EngineError | bool = False) -> None:
        """Give the place back; only the first time counts. ``outcome``: the failure, ``True`` for an answer, ``False``
        for nothing learnt."""
        if self._open:
            self._open = False
            if self._session_id is not None:
                self.replica.calling.discard(self._session_id)
            self._router.ended(self.replica, self._epoch, outcome, self._session_id)

    def answering(self) -> None:
        """Part of the answer is there: the engine samples."""
        self._router.answering(self.replica, self._epoch)

    def guard(self) -> _Guard:
        """Around an await on the engine: raises `EngineLostError` when the router gives the engine up meanwhile, so
        that a machine that vanished without a word does not hold its callers until their deadlines."""
        return _Guard(self.replica)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release(error if isinstance(error, EngineError) else kind is None)


class _Guard:
    """A class, because each call enters one: a generator's context costs several times as much."""

    __slots__ = ("_replica", "_scope")

    def __init__(self, replica: Replica[Any]) -> None:
        self._replica = replica
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        if self._replica.removed:
            self._scope.reschedule(0)
        self._replica.scopes.add(self._scope)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._replica.scopes.discard(self._scope)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as expired:
            name = self._replica.name
            raise EngineLostError(
                f"engine '{name}' was given up while it was answering", retryable=True, engine=name
            ) from expired
