"""Lease tokens: signed, so that a forged one costs no look-up, and looked up, so that one can be taken back.

``ngl1.<box>.<lease>.<scope>.<mac>``. A token names no expiry: its lease does, and is renewed without a new token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass

from nemo_gym.broker.registry.records import LeaseRecord
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.wire.problems import BrokerError

PREFIX = "ngl1"


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """What a genuine token says. Whether its lease still holds is the registry's to say."""

    sandbox_id: str
    lease_id: str
    scope: LeaseScope


class TokenSigner:
    """Signs and checks with a key that no other server has."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, lease: LeaseRecord) -> str:
        body = f"{PREFIX}.{lease.sandbox_id}.{lease.lease_id}.{lease.scope}"
        return f"{body}.{self._mac(body)}"

    def check(self, token: str) -> LeaseClaim:
        """Raises `BrokerError` ``unauthenticated`` for anything that this signer did not issue."""
        body, _, mac = token.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise BrokerError("unauthenticated", "the lease token is not one of this broker's")
        parts = body.split(".")
        if len(parts) != 4 or parts[0] != PREFIX:
            raise BrokerError("unauthenticated", "the bearer token is no lease token")
        return LeaseClaim(parts[1], parts[2], LeaseScope(parts[3]))

    def _mac(self, body: str) -> str:
        digest = hmac.digest(self._key, body.encode("utf-8", "surrogateescape"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")
