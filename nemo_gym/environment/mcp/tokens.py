"""Tokens whose only audience is one environment's MCP endpoint, for one attempt.

``ngm1.<claims>.<mac>``, the claims being base64 of ``[run id, rollout id, attempt, expiry in Unix seconds]``
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import orjson

from nemo_gym.contract.errors import CredentialError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.environment.attempts import AttemptKey

MCP_TOKEN_TTL_S = 24 * 3600.0
"""How long a token can work; closing or replacing its attempt ends it earlier."""

_KIND = "ngm1"


def issue_mcp_token(key: bytes, rollout: RolloutIdentity, *, ttl_s: float = MCP_TOKEN_TTL_S) -> str:
    """A token for ``rollout``'s attempt that expires in ``ttl_s`` seconds."""
    claims = orjson.dumps([*AttemptKey.of(rollout), int(time.time() + ttl_s)])
    body = f"{_KIND}.{_encode(claims)}"
    return f"{body}.{_mac(key, body)}"


def check_mcp_token(key: bytes, token: str | None) -> AttemptKey:
    """The attempt a token is for. Raises `CredentialError` for none, a forged and an expired one."""
    if not token:
        raise CredentialError("/mcp needs the header Authorization: Bearer <token of the attempt>")
    body, _, mac = token.rpartition(".")
    kind, _, claims = body.partition(".")
    if kind != _KIND or not hmac.compare_digest(mac.encode(), _mac(key, body).encode()):
        raise CredentialError("the MCP token is not one of this environment")
    run_id, rollout_id, attempt, expiry = orjson.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    if expiry < time.time():
        raise CredentialError("the MCP token has expired", rollout_id=rollout_id)
    return AttemptKey(run_id, rollout_id, attempt)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _mac(key: bytes, body: str) -> str:
    return _encode(hmac.digest(key, body.encode(), hashlib.sha256))
