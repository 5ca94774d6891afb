"""Every error that this suite raises on purpose, one type per boundary that can fail.

    NemoGymError
    ├── ConfigError              a YAML file, an override or a composition (also a ValueError)
    ├── RowError                 a dataset row that cannot be read (also a ValueError)
    ├── InvalidBodyError         a request body that the route does not accept (also a ValueError)
    ├── ContractError            a caller broke the session contract
    │   ├── CredentialError      no credential, a wrong one, or one for another audience
    │   └── FencedError          an attempt, lease or verdict that a newer one has replaced
    ├── SandboxError             a box or its backend
    │   ├── SandboxCreateError → SandboxCreateVerificationError, SandboxImageMissingError
    │   ├── SandboxCapabilityError   the provider cannot do what the spec asks
    │   ├── SandboxLostError     the box is gone, so what happened in it is unknown
    │   └── SandboxArchiveError  a tar stream that escapes, is damaged or is too large
    ├── ModelError               the policy endpoint
    ├── AgentError               the harness
    ├── VerifierError            the grader itself, never the graded work
    └── ServerError              an HTTP peer of this suite returned an error, or no response

Each carries what a scheduler needs to act: ``code`` (a stable identifier for programs), ``retryable``, and
``details`` (plain data: ids, fields, limits; never a secret and never private row fields).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from nemo_gym._util.suggest import nearest


class NemoGymError(Exception):
    """The base class. ``str(error)`` is one or two clear sentences: what is wrong, and what to do about it."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    """The HTTP status of the response when this error leaves a route."""

    def __init__(self, message: str, *, retryable: bool = False, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = retryable
        self.details = details

    def as_problem(self) -> dict[str, Any]:
        """The error as an RFC 9457 problem body: ``code``, ``detail``, ``retryable`` and the details."""
        return {
            "type": "about:blank",
            "title": type(self).__name__,
            "status": self.status,
            "code": self.code,
            "detail": self.message,
            "retryable": self.retryable,
            **{key: value for key, value in self.details.items() if value is not None},
        }


class ConfigError(NemoGymError, ValueError):
    """A configuration that cannot be used. The message names the key, the file and the fix."""

    code = "config"
    status = 400


def require_whole(key: str, value: object, least: int) -> int:
    """Return ``value`` if it is an integer from ``least``. Raises `ConfigError`, which names ``key``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} must be a whole number from {least}, got {value!r}", key=key)
    return value


class RowError(NemoGymError, ValueError):
    """A dataset row that cannot be used. ``details`` hold ``path`` and ``line``."""

    code = "row"
    status = 422


class InvalidBodyError(NemoGymError, ValueError):
    """A request body that the route does not accept."""

    code = "body"
    status = 422


_UNWRITABLE = {
    "Recursion limit reached": "is nested too deeply; 200 levels can be passed on",
    "Integer exceeds 64-bit range": "holds an integer beyond 64 bits; send it as text",
}


def not_json(error: TypeError) -> TypeError | InvalidBodyError:
    """Return the error to raise for orjson's ``error``: `InvalidBodyError` for received data that cannot be encoded
    again, else ``error`` itself, which is a bug in the program."""
    problem = _UNWRITABLE.get(str(error))
    return error if problem is None else InvalidBodyError(f"a value {problem}")


class ContractError(NemoGymError):
    """A request that the session contract forbids."""

    code = "contract"
    status = 409


class CredentialError(ContractError):
    """No credential, a wrong one, or one for another audience."""

    code = "credential"
    status = 401


class FencedError(ContractError):
    """A newer attempt, lease epoch or verdict has replaced the one that this request belongs to."""

    code = "fenced"
    status = 409


class SandboxError(NemoGymError):
    """A box or its backend failed."""

    code = "sandbox"
    status = 502


class SandboxCreateError(SandboxError):
    """A box could not be created; no part of it is left behind."""

    code = "sandbox_create"


class SandboxImageMissingError(SandboxCreateError):
    """The image that a box needs was never built; a retry does not help."""

    code = "sandbox_image_missing"
    status = 424


class SandboxCreateVerificationError(SandboxCreateError):
    """A box was created but does not match its spec; it has been removed again."""

    code = "sandbox_create_verification"


class SandboxCapabilityError(SandboxError):
    """The provider cannot do or enforce what the spec requires. Raised before anything is created."""

    code = "sandbox_capability"
    status = 400


class SandboxLostError(SandboxError):
    """The box is gone or cannot be reached, so what ran in it is unknown."""

    code = "sandbox_lost"


class SandboxArchiveError(SandboxError):
    """A tar stream whose members escape the target, or that is damaged."""

    code = "sandbox_archive"
    status = 400


class SandboxArchiveTooLargeError(SandboxArchiveError):
    """A tar stream larger than the caller's ``max_bytes``."""

    code = "sandbox_archive_too_large"


class ModelError(NemoGymError):
    """The policy endpoint refused, failed or could not be reached."""

    code = "model"
    status = 502


class AgentError(NemoGymError):
    """The agent harness failed as a program. Wrong work is not an `AgentError`."""

    code = "agent"
    status = 502


class VerifierError(NemoGymError):
    """The grader failed as a program, so the work has no verdict yet."""

    code = "verifier"
    status = 502


class ServerError(NemoGymError):
    """Another server of this suite returned an error, or no response."""

    code = "server"
    status = 502


def reject_unknown_keys(given: Iterable[str], known: Collection[str], *, where: str) -> None:
    """Raise `ConfigError` naming every key of ``given`` that is not ``known``, with suggestions."""
    unknown = [key for key in given if key not in known]
    if unknown:
        listed = ", ".join(f"'{key}'{nearest(key, known)}" for key in unknown)
        raise ConfigError(f"{where}: unknown key {listed}; known keys are {', '.join(sorted(known))}", keys=unknown)
