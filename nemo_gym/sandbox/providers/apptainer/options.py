"""Configuration of the apptainer provider."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.sandbox.providers.local.options import SupervisedOptions, default_image_dir, default_state_dir


@dataclass(frozen=True)
class ApptainerOptions(SupervisedOptions):
    """Settings of the apptainer provider: those of every provider with a supervisor, and Apptainer's own."""

    provider: ClassVar[str] = "apptainer"
    builder: ClassVar[str] = "nemo_gym.sandbox.providers.apptainer.construction"

    state_dir: Path = field(default_factory=lambda: default_state_dir("apptainer"))
    """Directory of the supervisor and of what boxes write; one supervisor per directory."""
    image_dir: Path = field(default_factory=lambda: default_image_dir("apptainer"))
    """Directory of images that were committed or unpacked."""
    apptainer: str = "apptainer"
    """Name or path of Apptainer, 1.1 or later."""

    def program(self) -> str:
        found = shutil.which(self.apptainer)
        if found is None:
            raise SandboxCreateError(
                f"Apptainer was not found as '{self.apptainer}': install the package apptainer (on Debian, "
                "`scripts/install-system --with-apptainer`) or set the option apptainer of the sandbox provider "
                "'apptainer'",
                provider=self.provider,
            )
        return str(Path(found).absolute())

    @classmethod
    def program_names(cls) -> tuple[str, ...]:
        return ("apptainer",)
