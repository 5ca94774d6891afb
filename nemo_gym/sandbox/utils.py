"""Small helpers for building a `SandboxSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "GOMAXPROCS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
)


def cpu_cap_env(cpu: float | None) -> dict[str, str]:
    """Environment that makes thread pools as large as the box's CPU limit.

    A CPU quota does not change how many cores a program sees, so without this a pool on a large host is sized for the
    host. Empty when there is no limit.
    """
    if cpu is None:
        return {}
    count = str(max(1, math.ceil(cpu)))
    return dict.fromkeys(_THREAD_VARIABLES, count)


def rewrite_image(image: str | None, rewrites: Sequence[Mapping[str, str]]) -> str | None:
    """The image's name with its prefix replaced by the first of ``rewrites`` that fits, for mirrored registries.

    Args:
        rewrites: mappings ``{from: prefix, to: prefix}``.
    """
    for rewrite in rewrites:
        if image is not None and image.startswith(rewrite["from"]):
            return rewrite["to"] + image.removeprefix(rewrite["from"])
    return image
