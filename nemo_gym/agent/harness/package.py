"""What is fetched once and mounted read-only into every box for a CLI. Data only; `provision` does the fetching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

BOX_DIRECTORY = "/opt/nemo-gym/agents"
"""Where packages are mounted in a box, one directory each."""

Runtime = Literal["elf-glibc", "elf-static", "node", "python", "script"]


@dataclass(frozen=True)
class CliPackage:
    """One CLI at one version."""

    name: str
    """Of the mount: ``/opt/nemo-gym/agents/<name>``."""
    version: str
    command: str
    """Path of the program below the installed directory."""
    runtime: Runtime
    """What the program needs to be started: a glibc loader, nothing, a node or Python interpreter, or ``/bin/sh``."""
    npm: Mapping[str, str] = field(default_factory=dict)
    """npm package name → exact version, all unpacked side by side below ``node_modules``."""
    integrity: Mapping[str, str] = field(default_factory=dict)
    """npm package name → Subresource Integrity of its tarball (``sha512-…``); every package in ``npm`` has one."""
    requirements: Path | None = None
    """A pip requirements file with the exact version and the checksums of every PyPI package, installed beside a
    CPython that is taken along from this host. Its ``command`` is ``bin/python`` and its runtime ``script``."""
    pythons: tuple[str, ...] = ()
    """Python versions that ``requirements`` has checksums for, the preferred one first: ``("3.12", "3.13")``."""
    box_commands: tuple[str, ...] = ()
    """Commands that the image has to have for it."""
    directory: Path | None = None
    """A directory of this host that is the package already (beside the plugin, say): nothing is fetched."""

    @property
    def is_fetched(self) -> bool:
        """Whether there is something to fetch before it can be mounted."""
        return self.directory is None and bool(self.npm or self.requirements)

    @property
    def install_dir(self) -> str:
        """The directory in the box."""
        return f"{BOX_DIRECTORY}/{self.name}"

    @property
    def executable(self) -> str:
        """The program in the box."""
        return f"{self.install_dir}/{self.command}"
