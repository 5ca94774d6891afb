"""How boxes and images are named and labelled in the engine, which is the only record of them.

A container's labels cannot change, but its name can. So the first lease's end is a label, and a renewal renames the
container to ``<base>.<unix seconds>``: everybody who can list containers sees the lease as it is, without any state
beside the engine. ``watchdog.py`` reads the same names and is not allowed to import this module; a test compares them.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from nemo_gym.sandbox.base import BoxLabel

SPEC_ENV = "nemo_gym.docker.env"
"""The spec's environment, as JSON: given to each exec, and kept out of images committed from the box."""
GIVEN_LABELS = "nemo_gym.docker.labels"
"""The creator's labels, as JSON; beside them a container carries those of its image."""
SPEC_KEY = "nemo_gym.docker.key"
"""Digest of the spec's idempotency key."""
DISK_BYTES = "nemo_gym.docker.disk_bytes"
"""What the box may write; the watchdog ends it when that is more."""
IMAGE_LABELS = "nemo_gym.docker.image_labels"
"""On a committed image: the caller's labels, as JSON."""
EXEC_MARK = "NEMO_GYM_EXEC_ID"
"""Environment variable by which the processes of one exec are found."""

_REFERENCE = re.compile(
    r"(?=.{1,255}\Z)"
    r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?\Z"
)


def key_digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]


def container_name(idempotency_key: str | None) -> str:
    """The name a box is created under: one name for one idempotency key, else a fresh one."""
    return f"nemo-gym-{key_digest(idempotency_key) if idempotency_key else uuid.uuid4().hex}"


def renewed_name(name: str, expires_at: float) -> str:
    """The name that says that the lease ends at ``expires_at`` (Unix seconds, rounded up)."""
    return f"{name.lstrip('/').partition('.')[0]}.{int(-(-expires_at // 1))}"


def lease_end(name: str, labels: Mapping[str, str]) -> float | None:
    """When a container's lease ends, in Unix seconds."""
    renewed = name.partition(".")[2]
    for text in (renewed, labels.get(BoxLabel.EXPIRES_AT, "")):
        try:
            return float(text)
        except ValueError:
            continue
    return None


def image_reference(image: str) -> str:
    """The engine's name of an image: ``image`` itself where that is a valid one, else a name derived from it."""
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
    # Always there: a committed image hands its container's labels on to the boxes made of it.
    labels[DISK_BYTES] = "" if disk_bytes is None else str(disk_bytes)
    return labels


def public_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """A container's labels as its creator gave them, with those every box of ours has."""
    held = labels or {}
    given: dict[str, Any] = json.loads(held.get(GIVEN_LABELS) or "{}")
    public = {str(key): str(value) for key, value in given.items()}
    return public | {key: held[key] for key in (BoxLabel.MANAGED, BoxLabel.EXPIRES_AT) if key in held}


def spec_env(labels: Mapping[str, str]) -> dict[str, str]:
    """The environment of the spec a container was created for."""
    stored: dict[str, Any] = json.loads(labels.get(SPEC_ENV) or "{}")
    return {str(key): str(value) for key, value in stored.items()}
