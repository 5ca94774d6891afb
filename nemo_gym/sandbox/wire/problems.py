"""Errors on the wire: RFC 9457 problem bodies, and their conversion from and to the suite's errors.

``started`` tells a client, before it retries, whether the request may have had an effect. ``no``: it had none;
``yes``: it had one; ``unknown``: either is possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym.contract import errors
from nemo_gym.contract.errors import NemoGymError

Started = Literal["no", "yes", "unknown"]
MAX_DETAIL_CHARS = 2000
"""Longest ``detail`` of a problem. The text may quote names that the client chose, so its length needs a bound."""


@dataclass(frozen=True)
class ProblemCode:
    """The meaning of one of the broker's own error codes."""

    status: int
    raises: type[NemoGymError]
    """The error that a client of the broker raises."""
    started: Started = "no"
    retryable: bool = False


CODES: dict[str, ProblemCode] = {
    # identity and rights of the client
    "unauthenticated": ProblemCode(401, errors.CredentialError),
    "lease_expired": ProblemCode(401, errors.SandboxLostError),
    "scope": ProblemCode(403, errors.ContractError),
    "fenced": ProblemCode(409, errors.FencedError),
    "mount_refused": ProblemCode(403, errors.SandboxCreateError),
    "not_permitted": ProblemCode(403, errors.SandboxCreateError),
    "image_owned": ProblemCode(403, errors.SandboxError),
    # the requested resource
    "sandbox_not_found": ProblemCode(404, errors.SandboxLostError),
    "sandbox_gone": ProblemCode(410, errors.SandboxLostError),
    "sandbox_not_ready": ProblemCode(409, errors.SandboxError, retryable=True),
    "exec_not_found": ProblemCode(404, errors.SandboxError),
    "lease_not_found": ProblemCode(404, errors.SandboxError),
    "image_not_found": ProblemCode(404, errors.SandboxError),
    "backend_refused": ProblemCode(422, errors.SandboxError),
    "path_not_found": ProblemCode(404, errors.SandboxError),
    "route_not_found": ProblemCode(404, errors.SandboxError),
    "method_not_allowed": ProblemCode(405, errors.SandboxError),
    "unsupported_media_type": ProblemCode(415, errors.SandboxError),
    # the form of the request
    "idempotency_key_missing": ProblemCode(400, errors.InvalidBodyError),
    "idempotency_key_reused": ProblemCode(422, errors.InvalidBodyError),
    "create_in_progress": ProblemCode(409, errors.SandboxCreateError, started="yes", retryable=True),
    "exec_conflict": ProblemCode(409, errors.SandboxError),
    "door_exists": ProblemCode(409, errors.SandboxError),
    "stdin_not_expected": ProblemCode(409, errors.SandboxError),
    "offset_out_of_range": ProblemCode(416, errors.SandboxError),
    "output_gone": ProblemCode(410, errors.SandboxLostError),
    "ttl_too_long": ProblemCode(422, errors.InvalidBodyError),
    "body_too_large": ProblemCode(413, errors.InvalidBodyError),
    "body_too_many_values": ProblemCode(413, errors.InvalidBodyError),
    "archive_too_large": ProblemCode(413, errors.SandboxArchiveError),
    # capacity
    "quota": ProblemCode(429, errors.SandboxCreateError, retryable=True),
    "too_many_of_box": ProblemCode(429, errors.SandboxError),
    "no_room": ProblemCode(503, errors.SandboxCreateError, retryable=True),
    "draining": ProblemCode(503, errors.SandboxError, retryable=True),
    # failures of the broker or its backend
    "backend_unreachable": ProblemCode(503, errors.SandboxError, started="unknown", retryable=True),
}
"""The broker's own codes. The codes of `nemo_gym.contract.errors` stand for the same errors on both sides."""


class Problem(BaseModel):
    """A problem body. Additional members are details such as ids, limits and fields; never a secret."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "about:blank"
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    code: str
    retryable: bool = False
    started: Started = "unknown"
    request_id: str | None = None


class BrokerError(NemoGymError):
    """An error of the broker itself, identified by its code in `CODES`.

    Args:
        code: determines the status, ``retryable``, and the default of ``started``.
        retry_after_s: sent as the header ``Retry-After``, rounded up.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        started: Started | None = None,
        retry_after_s: float | None = None,
        **details: Any,
    ) -> None:
        meaning = CODES[code]
        super().__init__(message, retryable=meaning.retryable, **details)
        self.code = code  # type: ignore[misc]  # one class for all codes of the broker
        self.status = meaning.status  # type: ignore[misc]
        self.started: Started = started or meaning.started
        self.retry_after_s = retry_after_s


def problem_of(error: NemoGymError, *, request_id: str) -> Problem:
    """Build the body of any of the suite's errors. ``started`` is ``unknown`` unless the error implies a value."""
    started = getattr(error, "started", None) or error.details.get("started") or _STARTED.get(error.code, "unknown")
    details = {key: value for key, value in error.details.items() if key not in Problem.model_fields}
    return Problem(
        title=error.code.replace("_", " ").capitalize(),
        status=error.status,
        detail=error.message if len(error.message) <= MAX_DETAIL_CHARS else f"{error.message[:MAX_DETAIL_CHARS]}…",
        code=error.code,
        retryable=error.retryable,
        started=started,
        request_id=request_id,
        **{key: value for key, value in details.items() if value is not None},
    )


def error_of(problem: Problem) -> NemoGymError:
    """Return the error that the broker raised, or the client's equivalent of it, with all details of the problem."""
    details = {**(problem.model_extra or {}), "started": problem.started, "request_id": problem.request_id}
    details.pop("message", None)
    if (error_type := _BY_CODE.get(problem.code)) is not None:
        return error_type(problem.detail, retryable=problem.retryable, **details)
    meaning = CODES.get(problem.code)
    kind = meaning.raises if meaning is not None else errors.SandboxError
    return kind(
        problem.detail, retryable=problem.retryable, problem=problem.code, http_status=problem.status, **details
    )


def parse_problem(status: int, body: bytes) -> Problem:
    """Parse the problem in a response; make a substitute if the body is not a problem (a proxy's response, say)."""
    try:
        return Problem.model_validate_json(body)
    except ValidationError:
        text = body[:300].decode("utf-8", "replace").strip()
        return Problem(
            title="Not a problem body",
            status=status if status >= 400 else 502,
            detail=f"the broker's response (status {status}) is not a problem body: {text or 'it is empty'}",
            code="not_a_problem",
            retryable=status in (429, 502, 503, 504),
            started="unknown",
        )


def _subclasses(root: type[NemoGymError]) -> Iterator[type[NemoGymError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _subclasses(child)


_BY_CODE: dict[str, type[NemoGymError]] = {kind.code: kind for kind in _subclasses(NemoGymError)}
_STARTED: dict[str, Started] = {
    "sandbox_capability": "no",
    "sandbox_image_missing": "no",
    "sandbox_create": "no",
    "sandbox_create_verification": "no",
    "body": "no",
    "config": "no",
    "credential": "no",
    "fenced": "no",
}
"""Error code → ``started``, for errors that by themselves imply that the request had no effect."""
