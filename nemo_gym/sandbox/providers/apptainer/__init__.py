"""The `apptainer` sandbox provider: boxes that Apptainer creates, rootless, for machines that offer only Apptainer.

Apptainer creates a box: its namespaces, root, devices and the environment of its image. The supervisor of the local
provider holds the box: it enforces the lease, which Apptainer lacks, runs commands, transfers files and removes boxes.
The half of this package that runs in the supervisor uses only the standard library, so the other half is imported on
first use.
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
"""Apptainer's configuration, so that boxes are the same on every machine, whatever its administrator configured."""


def __getattr__(name: str) -> Any:
    if name == "ApptainerProvider":
        from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

        return ApptainerProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
