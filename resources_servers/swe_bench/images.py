"""Names of the images that swe_bench rows run in: a pure function of the row, so that preparing, seeding and grading
agree without asking each other.

A *prepared* image is built by ``ng_prepare swe_bench`` for any provider that can commit a box. An *official* image is
the one that the benchmark's authors publish, named by the row; only container engines have those.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from nemo_gym.contract.errors import RowError, SandboxImageMissingError
from nemo_gym.sandbox.base import SandboxProvider, SupportsSnapshot, require

PREFIX = "ng-swe-bench"
CONTENT_LABEL = "nemo_gym.swe_bench.content"
"""Digest of everything a prepared image was built from; another digest means that it is out of date."""
INSTANCE_LABEL = "nemo_gym.swe_bench.instance"
ENV_LABEL = "nemo_gym.swe_bench.env"
"""Variables (JSON) that processes of boxes from the image need, beside those of the image itself."""

TESTBED = "/testbed"
"""Where the repository is in every image, official or prepared."""

_UNSAFE = re.compile(r"[^a-z0-9._-]+")
_SEPARATORS = re.compile(r"([._-])[._-]*")
_MAX_SLUG = 80


def _field(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise RowError(f"row {row.get('instance_id', '?')!r}: field '{name}' must be a non-empty string", field=name)
    return value


def content_digest(parts: object) -> str:
    """SHA-256 (hex) of plain data, the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def image_slug(text: str) -> str:
    """``text`` as part of an image name: lower case, only characters and separators every engine accepts."""
    slug = _SEPARATORS.sub(r"\1", _UNSAFE.sub("-", text.lower())).lstrip("._-")
    return slug[:_MAX_SLUG].rstrip("._-") or "x"


def prepared_image(row: Mapping[str, Any]) -> str:
    """The image that ``ng_prepare swe_bench`` makes for this row.

    Two rows share it only when instance, repository and base commit are the same. What else went into the image
    (packages, runtime, provider base) is in its `CONTENT_LABEL`, not in its name, because a run does not know them.

    Raises:
        RowError: the row lacks ``instance_id``, ``repo`` or ``base_commit``.
    """
    identity = {name: _field(row, name) for name in ("instance_id", "repo", "base_commit")}
    return f"{PREFIX}.{image_slug(identity['instance_id'])}.{content_digest(identity)[:12]}"


def official_image(row: Mapping[str, Any]) -> str:
    """The published image: the row's own ``image``, or for rows older than that field the name it would have."""
    image = row.get("image")
    if isinstance(image, str) and image:
        return image
    instance_id = _field(row, "instance_id").lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{instance_id}:latest"


@dataclass(frozen=True)
class PreparedImage:
    """An image that is ready for boxes, and the variables its processes need."""

    name: str
    env: Mapping[str, str]
    content: str = ""
    """Digest of what the image was made from."""


async def resolve_image(provider: SandboxProvider, row: Mapping[str, Any]) -> PreparedImage:
    """The row's prepared image. An official image is never used as it is: its repository is not scrubbed.

    Raises:
        SandboxCapabilityError: the provider keeps no images.
        SandboxImageMissingError: the image was not prepared; the message says how to do that.
    """
    image = prepared_image(row)
    require(provider, SupportsSnapshot, why="to hold the images of swe_bench rows")
    labels = await cast(SupportsSnapshot, provider).image_labels(image)
    if labels is None or CONTENT_LABEL not in labels:
        raise SandboxImageMissingError(
            f"sandbox provider '{provider.name}' has no image for '{row['instance_id']}' ({image}); prepare it with: "
            f"ng_prepare swe_bench rows=ROWS.jsonl sandbox={provider.name} [repos=DIR] "
            "[environments=ENVIRONMENTS.json]",
            image=image,
            provider=provider.name,
        )
    return PreparedImage(image, json.loads(labels.get(ENV_LABEL, "{}")), labels[CONTENT_LABEL])
