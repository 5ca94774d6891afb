"""What opening a session takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.model_limits import NONE_CHOSEN, ChosenLimits
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.gateway.engines import pinned_sampling
from nemo_gym.gateway.service.sessions import RewardSource, checked_depth

MAX_SAMPLING_BYTES = 64 * 1024
"""Of a session's ``sampling``, which is kept in the journal and read with every call."""
MAX_TTL_S = 30 * 24 * 3600.0


class OpenSession(BaseModel):
    """The body of ``POST /sessions``."""

    model_config = ConfigDict(extra="forbid")

    rollout: RolloutIdentity
    sampling: dict[str, Any] | None = None
    """Parameters that every call of the session gets, whatever its harness asks for; ``max_output_tokens`` is a bound
    instead."""
    limits: ChosenLimits = NONE_CHOSEN
    """How long its calls may take."""
    ttl_s: float | None = Field(None, gt=0, le=MAX_TTL_S)
    """Until the session is aborted; default, and the longest that it gets: the gateway's own."""
    reward_source: RewardSource = "environment"

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> OpenSession:
        """Raises `InvalidBodyError` naming what is wrong."""
        try:
            asked = cls.model_validate(body)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
            raise InvalidBodyError(f"/sessions: {wrong}") from None
        checked_depth(asked.sampling, "sampling")
        if (size := len(orjson.dumps(asked.sampling))) > MAX_SAMPLING_BYTES:
            raise InvalidBodyError(
                f"/sessions: sampling: {size} bytes of JSON, and {MAX_SAMPLING_BYTES} are taken; it holds sampling"
                " parameters alone",
                param="sampling",
            )
        pinned_sampling({}, asked.sampling or {}, room_tokens=1)
        return asked
