"""Where fetched CLI packages are on this host."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_gym.errors import ConfigError
from nemo_gym.harness.package import CliPackage


def installed(package: CliPackage) -> Path:
    """The directory of a package that ``ng_prepare agents`` fetched. Raises `ConfigError` when it did not."""
    root = Path(os.environ.get("NEMO_GYM_CACHE_DIR") or Path.home() / ".cache" / "nemo-gym")
    directory = root / "agents" / package.name / package.version
    if not (directory / package.command).is_file():
        raise ConfigError(
            f"the agent CLI '{package.name}' {package.version} is not on this machine; run: ng_prepare agents",
            key="agent",
        )
    return directory
