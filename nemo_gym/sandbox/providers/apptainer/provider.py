"""`ApptainerProvider`: boxes that Apptainer makes, held by a supervisor of their own."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.apptainer.images import image_from_path
from nemo_gym.sandbox.providers.apptainer.options import ApptainerOptions
from nemo_gym.sandbox.providers.local.options import SupervisedOptions
from nemo_gym.sandbox.providers.local.provider import LocalProvider


class ApptainerProvider(LocalProvider):
    """Boxes of Apptainer on this machine. Images are ``host``, committed ones, or the path of a SIF file, of an
    archive that Apptainer reads (``docker-archive:…``, ``oci-archive:…``), or of a directory with a root filesystem.

    Args:
        options: the fields of `ApptainerOptions`. Unknown ones raise `ConfigError`.
    """

    name = "apptainer"
    options_class: type[SupervisedOptions] = ApptainerOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unpacking: dict[str, asyncio.Lock] = {}

    async def _with_image(self, spec: SandboxSpec) -> SandboxSpec:
        image = spec.image or self.options.default_image
        name = await asyncio.to_thread(image_from_path, image, self._images, self.options)
        return dataclasses.replace(spec, image=name)
