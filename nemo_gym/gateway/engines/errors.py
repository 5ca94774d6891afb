"""How an engine call can fail, told apart by what may be done about it.

    EngineError
    ├── EngineRefusedError       the request itself is wrong; any engine would say so
    ├── EngineCredentialError    the engine does not accept our key; the operator's to fix
    ├── EngineRateLimitedError   come back later, or ask another engine; the engine is well
    ├── EngineUnreachableError   no connection: nothing was started, the engine is down
    ├── EngineLostError          the connection broke: nothing of the answer was delivered or kept
    ├── EngineTimeoutError       no answer, or no further byte, in time
    ├── EngineFailedError        the engine answered 5xx
    └── EngineAnswerError        an answer that breaks the engine's own protocol
        └── EngineAnswerTooLargeError   more of it than was asked for, or than is taken

Sampling has no side effect here until its answer is committed, so every retryable failure may be tried elsewhere as
long as none of its tokens went to the harness.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nemo_gym._util.backoff import waiting_s
from nemo_gym.contract.errors import ModelError


class EngineError(ModelError):
    """``details`` hold ``engine`` and, for an HTTP answer, ``upstream_status``."""

    code = "engine"

    elsewhere: ClassVar[bool] = False
    """Whether the same request may succeed on another engine."""
    fatal: ClassVar[bool] = False
    """Whether one such failure proves that the engine is down."""
    unhealthy: ClassVar[bool] = False
    """Whether it speaks against the engine's health at all."""


class EngineRefusedError(EngineError):
    """``body`` is what the engine said about the request: it is the harness's to read."""

    code = "engine_refused"
    status = 400

    def __init__(self, message: str, *, body: bytes = b"", **details: Any) -> None:
        super().__init__(message, **details)
        self.body = body


class EngineCredentialError(EngineError):
    code = "engine_credential"
    elsewhere = True
    unhealthy = True


class EngineRateLimitedError(EngineError):
    """``details['retry_after_s']`` is when to come back, if the engine said; see `waiting_s`."""

    code = "model_rate_limited"
    status = 429
    elsewhere = True

    def __init__(self, message: str, *, retry_after_s: float | None = None, **details: Any) -> None:
        self.retry_after_s = waiting_s(retry_after_s)
        super().__init__(message, retryable=True, retry_after_s=self.retry_after_s, **details)


class EngineUnreachableError(EngineError):
    code = "engine_unreachable"
    elsewhere = True
    fatal = True
    unhealthy = True


class EngineLostError(EngineError):
    code = "engine_lost"
    elsewhere = True
    unhealthy = True


class EngineTimeoutError(EngineError):
    code = "engine_timeout"
    status = 504
    elsewhere = True
    unhealthy = True


class EngineFailedError(EngineError):
    code = "engine_failed"
    elsewhere = True
    unhealthy = True


class EngineAnswerError(EngineError):
    code = "engine_answer"
    elsewhere = True
    unhealthy = True


class EngineAnswerTooLargeError(EngineAnswerError):
    """Another try would cost as much again, and the request may be to blame, not the engine."""

    code = "engine_answer_too_large"
    elsewhere = False
    unhealthy = False
