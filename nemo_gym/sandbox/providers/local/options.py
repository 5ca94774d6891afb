"""Configuration of the local provider and of other providers with a supervisor."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from nemo_gym._util.files import from_command
from nemo_gym.contract.errors import ConfigError, SandboxCreateError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxResources


def default_state_dir(provider: str = "local") -> Path:
    """The default directory of boxes: on a disk, private to the user."""
    if os.geteuid() == 0:
        return Path("/var/lib/nemo-gym") / provider
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "nemo-gym" / provider


def default_image_dir(provider: str = "local") -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "nemo-gym" / "images" / provider


@dataclass(frozen=True)
class SupervisedOptions:
    """Settings that all providers with a supervisor share. Paths may begin with ``~``."""

    provider: ClassVar[str]
    builder: ClassVar[str]
    """Module whose function ``build`` creates a box in the supervisor."""
    program_option: ClassVar[str]
    """Option with the name or path of the program that creates boxes."""
    program_package: ClassVar[tuple[str, str]]
    """What that program is called, and how it is installed, for an error message."""

    state_dir: Path = field(default_factory=default_state_dir)
    """Directory of the supervisor and of the files that boxes write. Each directory has its own supervisor."""
    image_dir: Path = field(default_factory=default_image_dir)
    """Directory of images."""
    default_image: str = "host"
    """Image of specs that name none."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    hide: tuple[str, ...] = ()
    """Additional paths below the host's system directories to hide from boxes of the ``host`` image."""
    linger_s: float = 10.0
    """Seconds after which a supervisor without boxes and clients exits."""
    use_cgroups: bool = True
    """``False`` means no cgroups: there are no limits, and process trees are found through the processes' parents."""

    def program(self) -> str:
        """The path of the program that creates boxes.

        Raises:
            SandboxCreateError: it is not installed; the message says how to install it.
        """
        name: str = getattr(self, self.program_option)
        path = shutil.which(name)
        if path is None:
            title, installing = self.program_package
            raise SandboxCreateError(
                f"{title} was not found as '{name}': {installing} or set the option {self.program_option} of the "
                f"sandbox provider '{self.provider}'",
                provider=self.provider,
            )
        return str(Path(path).absolute())

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from configuration.

        Raises:
            ConfigError: an unknown key or a value of the wrong kind; the message names it.
        """
        where = f"sandbox provider '{cls.provider}'"
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where=where)
        options = dict(values)
        for name in ("state_dir", "image_dir"):
            if name in options:
                options[name] = from_command(options[name])
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        if "hide" in options:
            if isinstance(options["hide"], str) or not all(str(p).startswith("/") for p in options["hide"]):
                raise ConfigError(f"{where}: hide must be a list of absolute paths")
            options["hide"] = tuple(str(p) for p in options["hide"])
        if "linger_s" in options:
            try:
                options["linger_s"] = float(options["linger_s"])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where}: linger_s must be a number of seconds") from error
        for name in ("default_image", cls.program_option):
            if name in options and not (isinstance(options[name], str) and options[name]):
                raise ConfigError(f"{where}: {name} must be a non-empty string")
        if "use_cgroups" in options and not isinstance(options["use_cgroups"], bool):
            raise ConfigError(f"{where}: use_cgroups must be true or false")
        return cls(**options)


@dataclass(frozen=True)
class LocalOptions(SupervisedOptions):
    """Settings of the local provider."""

    provider: ClassVar[str] = "local"
    builder: ClassVar[str] = "nemo_gym.sandbox.providers.local.supervisor.construction"

    program_option: ClassVar[str] = "bwrap"
    program_package: ClassVar[tuple[str, str]] = (
        "bubblewrap",
        "install the package bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)",
    )

    bwrap: str = "bwrap"
    """Name or path of bubblewrap."""
