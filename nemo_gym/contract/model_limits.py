"""How long one call to a model may take: one table for every model server, which a run's keys override.

    key                    default   bounds
    connect_timeout_s        10 s    the connection to an endpoint or engine
    idle_timeout_s          120 s    silence between two pieces of an answer that has begun
    request_timeout_s       600 s    the whole call, its retries included

The model server ends a call at its limits and says that another try is no use, so the attempt ends there: as a failure
of the model, in a masked row. Whoever waits for the model server itself waits a little longer (`WAIT_BEYOND_S`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.contract.errors import ModelError

CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
WAIT_BEYOND_S = 30.0
"""Beyond the model server's own limit, for its answer that the call has ended."""


class ModelTimeoutError(ModelError):
    """A call reached its limit. Another try would have the same end, and its caller has waited long enough."""

    status = 504


class ChosenLimits(BaseModel):
    """What a run chose for the calls of its sessions; what it leaves open is the model server's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connect_timeout_s: float | None = Field(None, gt=0)
    idle_timeout_s: float | None = Field(None, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)

    def given(self) -> dict[str, float]:
        """The limits that were chosen."""
        return self.model_dump(exclude_none=True)


def took_too_long(limit_s: float) -> ModelTimeoutError:
    return ModelTimeoutError(
        f"the model call took longer than {limit_s:g} s (request_timeout_s, or the run's model_request_timeout_s)"
    )


NONE_CHOSEN = ChosenLimits()


def limits_of(given: Mapping[str, float] | None) -> ChosenLimits:
    """What `ChosenLimits.given` said."""
    return ChosenLimits(**given) if given else NONE_CHOSEN


_current: ContextVar[ChosenLimits] = ContextVar("nemo_gym_model_limits", default=NONE_CHOSEN)


def chosen_limits() -> ChosenLimits:
    """Those of the call that is being answered."""
    return _current.get()


@contextlib.asynccontextmanager
async def limited_call(chosen: ChosenLimits, request_timeout_s: float) -> AsyncIterator[None]:
    """One call: inside, `chosen_limits` are ``chosen``, and it ends with `ModelTimeoutError` at its limit, which is
    ``request_timeout_s`` unless the run chose another."""
    limit_s = chosen.request_timeout_s or request_timeout_s
    before = _current.set(chosen)
    try:
        async with asyncio.timeout(limit_s) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise took_too_long(limit_s) from error
    finally:
        _current.reset(before)
