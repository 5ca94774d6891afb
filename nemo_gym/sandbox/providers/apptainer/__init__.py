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

__all__ = ["CONFIGURATION", "ApptainerProvider"]

CONFIGURATION = """\
allow setuid = no
allow pid ns = yes
allow user ns = yes
config passwd = no
config group = no
config resolv_conf = no
mount proc = yes
mount sys = no
mount dev = minimal
mount devpts = yes
mount home = no
mount tmp = no
mount hostfs = no
mount slave = no
user bind control = yes
enable overlay = yes
enable underlay = no
sessiondir max size = 16
always use nv = no
always use rocm = no
root default capabilities = no
memory fs type = tmpfs
systemd cgroups = no
"""
"""What decides the box is the same on every machine, whatever its administrator configured for others."""


def __getattr__(name: str) -> Any:
    if name == "ApptainerProvider":
        from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

        return ApptainerProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
