"""The `apptainer` sandbox provider: boxes that Apptainer makes, rootless, for machines where it is what there is.

Apptainer makes a box: its namespaces, its root, its devices, the environment of its image. The supervisor of the local
provider holds it: it has the leases that Apptainer lacks, runs the commands, moves the files and ends what is over.
Half of this package runs in the supervisor with the standard library alone, so the other half is imported on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

__all__ = ["ApptainerProvider"]


def __getattr__(name: str) -> Any:
    if name == "ApptainerProvider":
        from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

        return ApptainerProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
