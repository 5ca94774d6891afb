"""Where fetched CLI packages are on this host, and whether an image can run one."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_gym.errors import ConfigError
from nemo_gym.harness.package import CliPackage

INSTALL_COMMAND = "scripts/install-clis"
MARKER = ".installed"
"""The last file of an installation; a directory without it is half made."""


def installed(package: CliPackage) -> Path:
    """The directory of a package on this host. Raises `ConfigError`, with the command that installs it, when it is
    not there."""
    cache = os.environ.get("NEMO_GYM_CACHE_DIR")
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo-gym"
    directory = root / "clis" / package.name / package.version
    if not (directory / MARKER).is_file() or not (directory / package.command).is_file():
        raise ConfigError(
            f"the agent CLI '{package.name}' {package.version} is not in {root / 'clis'};"
            f" install it: {INSTALL_COMMAND} {package.name}",
            key="agent",
        )
    return directory
