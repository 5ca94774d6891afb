"""Copies the shared libraries that a program needs, glibc above all, from this host into the program's package.

With them the program also runs in images that have another C library or an older one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_gym.contract.errors import ConfigError

LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
"""The path of the loader in glibc programs, by architecture."""
UNWINDER = "libgcc_s.so.1"
SYSTEM_DIRECTORY = "system-directory"
"""A file beside the copied libraries. It names the system directory in which their loader looks for libraries."""
_LISTED = re.compile(r"^\t(\S+) => (\S+) \(0x", re.MULTILINE)
_MISSING = re.compile(r"^\t(\S+) => not found", re.MULTILINE)


def host_loader() -> Path:
    """This host's glibc loader. Raises `ConfigError` if there is none."""
    for path in map(Path, LOADERS):
        if path.exists():
            return path
    raise ConfigError(
        "this host has no glibc to take along for the agent's box; prepare agents on a host that has one", key="agent"
    )


def listed(program: Path) -> tuple[Mapping[str, Path], tuple[str, ...]]:
    """Libraries that the loader finds for a program or library (name → path), and names that it does not find."""
    done = subprocess.run([str(host_loader()), "--list", str(program)], capture_output=True, text=True, timeout=60)
    return {name: Path(path) for name, path in _LISTED.findall(done.stdout)}, tuple(_MISSING.findall(done.stdout))


def take_along(programs: Iterable[Path], directory: Path, below: Path | None = None) -> None:
    """Copy the loader and every library that ``programs`` need into ``directory``, each under the name by which it is
    requested. Libraries under the directory ``below`` are skipped."""
    directory.mkdir(parents=True)
    loader = host_loader()
    shutil.copy(loader.resolve(), directory / loader.name)
    for program in programs:
        for name, path in listed(program)[0].items():
            if below is not None and path.resolve().is_relative_to(below):
                continue
            # glibc itself loads the unwinder when a thread ends; programs do not list it.
            for library_name, source in ((name, path), (UNWINDER, path.with_name(UNWINDER))):
                if source.exists() and not (directory / library_name).exists():
                    shutil.copy(source.resolve(), directory / library_name)
    (directory / SYSTEM_DIRECTORY).write_text(_system_directory(loader))


def _system_directory(loader: Path) -> str:
    completed = subprocess.run([str(loader), "--help"], capture_output=True, text=True, timeout=60)
    match = re.search(r"^\s+(/\S+) \(system search path\)", completed.stdout, re.MULTILINE)
    # Loaders older than glibc 2.33 do not print their search path.
    return match.group(1).rstrip("/") if match else "/lib64"
