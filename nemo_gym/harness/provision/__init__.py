"""Where fetched CLI packages are on this host, and whether an image can run one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.harness.package import CliPackage

INSTALL_COMMAND = "ng_prepare agents"
RECORD = "node_modules/.package-lock.json"
"""npm's record of what it unpacked where, with checksums."""
MARKER = ".installed"
"""The last file of an installation; a directory without it is half made."""


UNFIT_STATUS = 97
"""Exit status of `fitness_check` where the image cannot run a package."""
GLIBC_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


def fetched_directory(package: CliPackage) -> Path:
    """Where ``ng_prepare agents`` puts a package: ``agents/<name>/<version>`` in ``$NEMO_GYM_CACHE_DIR`` or
    ``~/.cache/nemo-gym``."""
    return cache_root() / "agents" / package.name / package.version


def is_installed(package: CliPackage) -> bool:
    """Whether a whole installation is there, whatever its checksums."""
    return _found(package) is not None


def installed(package: CliPackage) -> Path:
    """The directory of a package on this host.

    Raises:
        ConfigError: it is not there, only half of it is, or its checksums are not the pinned ones; with the command
            that installs it.
    """
    directory = _found(package)
    if directory is None:
        raise ConfigError(
            f"the agent CLI '{package.name}' {package.version} is not in {cache_root()}; run: {INSTALL_COMMAND}",
            key="agent",
        )
    recorded = _recorded(directory)
    for name, pinned in package.integrity.items():
        if (found := recorded.get(f"node_modules/{name}", {}).get("integrity")) != pinned:
            raise ConfigError(
                f"{directory} holds another '{name}' than the pinned one (its checksum is {found}, not {pinned});"
                f" remove the directory and run: {INSTALL_COMMAND}",
                key="agent",
            )
    return directory


def _found(package: CliPackage) -> Path | None:
    # What scripts/install-clis installed is the same package with npm's links around it.
    for directory in (fetched_directory(package), cache_root() / "clis" / package.name / package.version):
        if (directory / MARKER).is_file() and (directory / package.command).is_file():
            return directory
    return None


def cache_root() -> Path:
    """``$NEMO_GYM_CACHE_DIR`` or ``~/.cache/nemo-gym``."""
    given = os.environ.get("NEMO_GYM_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo-gym"


def _recorded(directory: Path) -> Mapping[str, Any]:
    """npm's own record of what it unpacked, after it compared each archive with its checksum."""
    try:
        packages = orjson.loads((directory / RECORD).read_bytes())["packages"]
    except (OSError, orjson.JSONDecodeError, KeyError):
        return {}
    return packages if isinstance(packages, dict) else {}


def fitness_check(package: CliPackage) -> str:
    """Lines of a POSIX shell script that end it with `UNFIT_STATUS` and a sentence where the box cannot run the
    package."""
    lines = [_need(f"[ -e {shlex.quote(package.executable)} ]", f"{package.executable} is not mounted into the box")]
    match package.runtime:
        case "elf-glibc":
            found = " || ".join(f"[ -e {loader} ]" for loader in GLIBC_LOADERS)
            lines.append(_need(found, f"its image has no glibc, which {package.name} needs (musl will not do)"))
        case "node":
            lines.append(_need("command -v node >/dev/null", f"its image has no node, which {package.name} needs"))
        case "python":
            lines.append(
                _need("command -v python3 >/dev/null", f"its image has no python3, which {package.name} needs")
            )
        case "elf-static" | "script":
            pass
    return "\n".join(lines)


def _need(condition: str, otherwise: str) -> str:
    return f"{{ {condition}; }} || {{ printf %s {shlex.quote(otherwise)} >&2; exit {UNFIT_STATUS}; }}"
