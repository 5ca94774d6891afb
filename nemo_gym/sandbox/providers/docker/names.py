"""Names and labels of boxes and images in the engine, which is the only record of them.

A container's labels cannot change, but its name can. So a label holds the end of the first lease, and a renewal
renames the container to ``<base>.<unix seconds>``. Everyone who can list containers sees the current lease; there is
no state outside the engine. What the watchdog needs too is defined in ``watchdog.py``, because that cannot import this
module.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.docker.watchdog import DISK_BYTES

SPEC_ENV = "nemo_gym.docker.env"
"""The spec's environment, as JSON. Each exec gets it; images committed from the box do not."""
GIVEN_LABELS = "nemo_gym.docker.labels"
"""The creator's labels, as JSON, to tell them from the labels that the container inherits from its image."""
SPEC_KEY = "nemo_gym.docker.key"
"""Digest of the spec's idempotency key."""
IMAGE_LABELS = "nemo_gym.docker.image_labels"
"""Label of a committed image: the caller's labels, as JSON."""
EXEC_MARK = "NEMO_GYM_EXEC_ID"
"""Environment variable that identifies the processes of one exec."""

_REFERENCE = re.compile(
    r"(?=.{1,255}\Z)"
    r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?\Z"
)


def key_digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]


def container_name(idempotency_key: str | None) -> str:
    """The name for creating a box: always the same for one idempotency key, random if there is no key."""
    return f"nemo-gym-{key_digest(idempotency_key) if idempotency_key else uuid.uuid4().hex}"


def renewed_name(name: str, expires_at: float) -> str:
    """The container name for a lease that ends at ``expires_at`` (Unix seconds, rounded up)."""
    return f"{name.lstrip('/').partition('.')[0]}.{int(-(-expires_at // 1))}"


def image_reference(image: str) -> str:
    """The engine's name of an image: ``image`` itself if it is a valid reference, else a name derived from it."""
    if _REFERENCE.match(image):
        return image
    return f"nemo-gym/named:{hashlib.sha256(image.encode()).hexdigest()[:32]}"


def container_labels(
    metadata: Mapping[str, str],
    *,
    expires_at: float,
    env: Mapping[str, str],
    idempotency_key: str | None,
    disk_bytes: int | None = None,
) -> dict[str, str]:
    labels = {str(key): str(value) for key, value in metadata.items()}
    labels[GIVEN_LABELS] = json.dumps(labels)
    labels |= {BoxLabel.MANAGED: "true", BoxLabel.EXPIRES_AT: repr(expires_at), SPEC_ENV: json.dumps(dict(env))}
    if idempotency_key:
        labels[SPEC_KEY] = key_digest(idempotency_key)
    # Always set, to override the value that the box would inherit from an image committed from a container.
    labels[DISK_BYTES] = "" if disk_bytes is None else str(disk_bytes)
    return labels


def public_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """A container's labels as its creator gave them, plus the labels that every box of this suite has."""
    all_labels = labels or {}
    given_labels: dict[str, Any] = json.loads(all_labels.get(GIVEN_LABELS) or "{}")
    public = {str(key): str(value) for key, value in given_labels.items()}
    return public | {key: all_labels[key] for key in (BoxLabel.MANAGED, BoxLabel.EXPIRES_AT) if key in all_labels}


def spec_env(labels: Mapping[str, str]) -> dict[str, str]:
    """The environment in the spec that a container was created for."""
    stored: dict[str, Any] = json.loads(labels.get(SPEC_ENV) or "{}")
    return {str(key): str(value) for key, value in stored.items()}
