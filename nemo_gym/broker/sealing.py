"""Secrets at rest: create requests and doors hold credentials, which no reader of the database shall see."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from nemo_gym.contract.errors import SandboxError

_NONCE_BYTES = 12


class SealError(SandboxError):
    """Sealed data that this broker's key does not open: it was sealed by another stack, or changed."""

    code = "sealed"


class Sealer:
    """Authenticated encryption with one key of 32 bytes. ``context`` (the row's id) binds data to its place."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, context: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Raises `SealError`."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context.encode())
        except (InvalidTag, ValueError) as error:
            raise SealError("what was stored of this box was sealed with another key") from error
