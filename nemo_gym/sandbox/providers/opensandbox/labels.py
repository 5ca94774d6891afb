"""A box's labels as the backend's metadata, which takes only what Kubernetes takes: short words of few characters.

So all labels travel together, encoded, in as many numbered entries as they need; beside them each one has an entry of
its own, named by its digest, that the server can select by.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping

from nemo_gym.sandbox.labels import MANAGED

PREFIX = "nemo-gym"
KEY = f"{PREFIX}.key"
"""Digest of the create that made the box: of the spec's idempotency key, or a random one."""
_SELECT = f"{PREFIX}.is."
_DATA = f"{PREFIX}.data."
_PIECE = 60


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def encode(labels: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Metadata of a box with these labels, made by the create with this ``key``."""
    given = {str(name): str(value) for name, value in labels.items()} | {MANAGED: "true"}
    packed = base64.b32encode(zlib.compress(json.dumps(given).encode(), 9)).decode().rstrip("=")
    metadata = {f"{_DATA}{n // _PIECE}": packed[n : n + _PIECE] for n in range(0, len(packed), _PIECE)}
    return metadata | select(given) | {KEY: digest(key)}


def select(labels: Mapping[str, str]) -> dict[str, str]:
    """The metadata that boxes with these labels have, to filter a listing by."""
    return {_SELECT + digest(f"{name}={value}"): "1" for name, value in labels.items()}


def decode(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """The labels that were encoded; ``None`` when this is no box of this suite."""
    held = metadata or {}
    pieces: list[str] = []
    while (piece := held.get(f"{_DATA}{len(pieces)}")) is not None:
        pieces.append(piece)
    packed = "".join(pieces)
    try:
        found = json.loads(zlib.decompress(base64.b32decode(packed + "=" * (-len(packed) % 8))))
    except (ValueError, zlib.error):
        return None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None
