"""Small helpers for building a `SandboxSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CPU_CAP_ENV_VARS = (
    # Thread pools of numeric libraries.
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OPENBLAS_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    # Language runtimes and builds.
    "CARGO_BUILD_JOBS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "GOMAXPROCS",
    "LOKY_MAX_CPU_COUNT",
    "PYTHON_CPU_COUNT",
    "RAYON_NUM_THREADS",
    "UV_THREADPOOL_SIZE",
    # Test runners.
    "DJANGO_TEST_PROCESSES",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "RUST_TEST_THREADS",
)
"""Each variable sets how many threads or processes some runtime starts."""


def cpu_cap_env(cpu: float | None) -> dict[str, str]:
    """Return environment variables that limit thread pools to the whole cores of the box's CPU limit, at least one.

    A CPU quota does not change how many cores a program sees, so without these variables a pool on a large host is
    sized for the host. Empty when there is no limit.
    """
    if cpu is None:
        return {}
    count = str(max(1, int(cpu)))
    return dict.fromkeys(CPU_CAP_ENV_VARS, count)


def rewrite_image(image: str | None, rewrites: Sequence[Mapping[str, str]]) -> str | None:
    """Replace the prefix of an image's name by the first of ``rewrites`` that matches, for mirrored registries.

    Args:
        rewrites: mappings ``{from: prefix, to: prefix}``.
    """
    for rewrite in rewrites:
        if image is not None and image.startswith(rewrite["from"]):
            return rewrite["to"] + image.removeprefix(rewrite["from"])
    return image
