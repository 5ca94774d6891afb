"""Credentials for calls inside one stack, and control tokens for attempts.

Every server instance has an *audience key*, derived from the stack's root key. A credential names the caller, its role
and the one server it is meant for, and is signed with that server's key: a server can check credentials for itself,
but cannot issue any for another server. A *control token* is signed by an environment (or a model server) for one
attempt and expires; its holder may verify or close that attempt.

    root key ──▶ audience key of S ──▶ credential ``ngc1.<role>.<caller>.<S>.<mac>``
                                  └──▶ control token ``ngt1.<expiry>.<mac>`` bound to (purpose, rollout, attempt)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from nemo_gym.contract.errors import ConfigError, CredentialError
from nemo_gym.contract.session import RolloutIdentity

CREDENTIAL_HEADER = "X-NeMo-Gym-Credential"
CONTROL_TOKEN_HEADER = "X-NeMo-Gym-Control-Token"
ROW_REF_HEADER = "X-NeMo-Gym-Row-Ref"
"""An agent's right to seed and verify one attempt; see `nemo_gym.environment.attempts`."""
INFERENCE_TOKEN_HEADER = "X-NeMo-Gym-Inference-Token"
"""The header that gives an agent with its own ``run()`` the inference token for its calls to the model server."""
CONTROL_TOKEN_TTL_S = 24 * 3600.0
ROOT_KEY_BYTES = 32

_CREDENTIAL = "ngc1"
_CONTROL = "ngt1"
_EXPIRY_DIGITS = 15


class Role(StrEnum):
    """The role of a caller. Each route serves certain roles only."""

    PIPELINE = "pipeline"
    AGENT = "agent"
    ENVIRONMENT = "environment"
    MODEL = "model"
    OPERATOR = "operator"


class RoleError(CredentialError):
    """The credential is genuine, but the route does not serve its role."""

    code = "role"
    status = 403


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request."""

    role: Role
    name: str

    def require(self, *roles: Role, route: str) -> None:
        """Raise `RoleError` unless the caller has one of ``roles``."""
        if self.role not in roles:
            raise RoleError(
                f"{route} serves {', '.join(roles)}; the caller '{self.name}' is '{self.role}'", route=route
            )


def mac_of(key: bytes, message: str) -> str:
    """The HMAC-SHA256 of ``message``, as base64 for URLs."""
    digest = hmac.digest(key, message.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _escape(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E")


def _sign(audience_key: bytes, role: Role, caller: str, target: str) -> str:
    body = f"{_CREDENTIAL}.{role}.{_escape(caller)}.{_escape(target)}"
    return f"{body}.{mac_of(audience_key, body)}"


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """One server process's secrets: its own audience key, and a credential per server it may call."""

    instance: str
    audience_key: bytes = field(repr=False)
    outgoing: Mapping[str, str] = field(default_factory=dict, repr=False)
    _genuine: dict[str, Caller] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of callers by verified credential. Its size is bounded by the number of credentials issued."""

    def check(self, credential: str | None) -> Caller:
        """Return the caller that a credential belongs to. Raises `CredentialError` if it is missing, forged or meant
        for another server. The message never contains the credential."""
        if not credential:
            raise CredentialError(f"server '{self.instance}' needs the header {CREDENTIAL_HEADER}")
        if (cached := self._genuine.get(credential)) is not None:
            return cached
        body, _, mac = credential.rpartition(".")
        parts = body.split(".")
        if len(parts) != 4 or parts[0] != _CREDENTIAL:
            raise CredentialError(f"{CREDENTIAL_HEADER} is not a credential of this suite")
        if unquote(parts[3]) != self.instance:
            raise CredentialError(f"the credential is not meant for server '{self.instance}'")
        if not hmac.compare_digest(mac.encode(), mac_of(self.audience_key, body).encode()):
            raise CredentialError("the credential's signature is wrong: it was forged, or belongs to another stack")
        try:
            role = Role(parts[1])
        except ValueError:
            raise CredentialError("the credential names an unknown role") from None
        caller = self._genuine[credential] = Caller(role=role, name=unquote(parts[2]))
        return caller

    def for_self(self, role: Role) -> str:
        """A credential with which this server may call its own routes."""
        return _sign(self.audience_key, role, self.instance, self.instance)

    def derive(self, purpose: str) -> bytes:
        """Derive a key of this server for another purpose (session cookies, control tokens, …)."""
        return hmac.digest(self.audience_key, f"purpose:{purpose}".encode(), hashlib.sha256)

    def to_dict(self) -> dict[str, Any]:
        return {"instance": self.instance, "audience_key": self.audience_key.hex(), "outgoing": dict(self.outgoing)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServerCredentials:
        return cls(
            instance=data["instance"],
            audience_key=bytes.fromhex(data["audience_key"]),
            outgoing=dict(data.get("outgoing", {})),
        )


@dataclass(frozen=True, slots=True)
class StackKeys:
    """The root key of one stack. Only the process that starts the servers, and an operator's tools, hold it."""

    root: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.root) < ROOT_KEY_BYTES:
            raise ValueError(f"a stack's root key has at least {ROOT_KEY_BYTES} bytes, got {len(self.root)}")

    @classmethod
    def generate(cls) -> StackKeys:
        return cls(secrets.token_bytes(ROOT_KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> StackKeys:
        return cls(bytes.fromhex(text))

    def to_hex(self) -> str:
        return self.root.hex()

    def audience_key(self, instance: str) -> bytes:
        return hmac.digest(self.root, f"audience:{instance}".encode(), hashlib.sha256)

    @property
    def metrics_token(self) -> str:
        """The token with which a scraper may read the metrics of every server in the stack."""
        return hmac.digest(self.root, b"purpose:metrics", hashlib.sha256).hex()

    def caller(self, role: Role | str, name: str, target: str) -> str:
        """Issue a credential with which ``name`` may call ``target`` in ``role``."""
        return _sign(self.audience_key(target), Role(role), name, target)

    def for_server(self, name: str, role: Role | str, targets: Collection[str]) -> ServerCredentials:
        """The secrets of the server ``name``: its key, and credentials for ``targets``."""
        return ServerCredentials(
            instance=name,
            audience_key=self.audience_key(name),
            outgoing={target: self.caller(role, name, target) for target in targets},
        )

    def outgoing(self, role: Role | str, name: str, targets: Collection[str]) -> dict[str, str]:
        """Credentials for a caller that is not a server: the pipeline, or an operator's tool."""
        return {target: self.caller(role, name, target) for target in targets}


def issue_control_token(
    key: bytes, subject: str, rollout: RolloutIdentity, *, ttl_s: float = CONTROL_TOKEN_TTL_S
) -> str:
    """Issue a token to control one attempt. ``subject`` is what it controls (``environment``, a gateway session)."""
    expiry = int(time.time() + ttl_s)
    return f"{_CONTROL}.{expiry}.{mac_of(key, _control_message(subject, rollout, expiry))}"


def check_control_token(key: bytes, subject: str, rollout: RolloutIdentity, token: str | None) -> None:
    """Raise `CredentialError` unless ``token`` was issued with ``key`` for this subject and attempt and is not
    expired."""
    if not token:
        raise CredentialError(f"this request needs the header {CONTROL_TOKEN_HEADER}", rollout_id=rollout.rollout_id)
    kind, _, expiry_and_mac = token.partition(".")
    expiry_text, _, mac = expiry_and_mac.partition(".")
    if kind != _CONTROL or not expiry_text.isdecimal() or len(expiry_text) > _EXPIRY_DIGITS:
        raise CredentialError("the control token is malformed", rollout_id=rollout.rollout_id)
    expiry = int(expiry_text)
    if not hmac.compare_digest(mac.encode(), mac_of(key, _control_message(subject, rollout, expiry)).encode()):
        raise CredentialError("the control token is not one for this attempt", rollout_id=rollout.rollout_id)
    if expiry < time.time():
        raise CredentialError("the control token has expired", rollout_id=rollout.rollout_id)


def _control_message(subject: str, rollout: RolloutIdentity, expiry: int) -> str:
    return "\n".join((_CONTROL, subject, rollout.run_id, rollout.rollout_id, str(rollout.attempt), str(expiry)))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_loopback(host: str, consequence: str, *, unless: bool, key: str = "host") -> None:
    """Raise `ConfigError` with the ``consequence`` if other machines can reach ``host``, ``unless`` that is secured or
    accepted. Call it before anything listens there."""
    if not unless and not is_loopback(host):
        raise ConfigError(f"{key}={host} can be reached from other machines, and {consequence}", key=key)
