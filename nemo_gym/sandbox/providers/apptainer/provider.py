"""`ApptainerProvider`: boxes that Apptainer creates, held by a supervisor process."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.linux import locked
from nemo_gym.sandbox.providers.apptainer import CONFIGURATION
from nemo_gym.sandbox.providers.local.client import SupervisedOptions, default_image_dir, default_state_dir
from nemo_gym.sandbox.providers.local.images import ImageStore
from nemo_gym.sandbox.providers.local.provider import LocalProvider


@dataclass(frozen=True)
class ApptainerOptions(SupervisedOptions):
    """Settings of the apptainer provider: those that all providers with a supervisor share, and Apptainer's own."""

    provider: ClassVar[str] = "apptainer"
    builder: ClassVar[str] = "nemo_gym.sandbox.providers.apptainer.construction"

    program_option: ClassVar[str] = "apptainer"
    program_package: ClassVar[tuple[str, str]] = (
        "Apptainer",
        "install the package apptainer (on Debian, `scripts/install-system --with-apptainer`)",
    )

    state_dir: Path = field(default_factory=lambda: default_state_dir("apptainer"))
    """Directory of the supervisor and of the files that boxes write. Each directory has its own supervisor."""
    image_dir: Path = field(default_factory=lambda: default_image_dir("apptainer"))
    """Directory of committed and unpacked images."""
    apptainer: str = "apptainer"
    """Name or path of Apptainer, 1.1 or later."""


# -- Images --------------------------------------------------------------------------------------------------------

_ARCHIVES = ("docker-archive:", "oci-archive:")
_UNPACK_TIMEOUT_S = 1800.0
_SQUASHFS = re.compile(r"\|(\d+)-\d+\s*\|FS \(Squashfs/\*System")


def image_from_path(image: str, store: ImageStore, options: SupervisedOptions) -> str:
    """Return the supervisor's name for an image given as a path; return other names unchanged. Blocks.

    A file is unpacked once for all boxes; without root, Apptainer would unpack it again for each. A changed file is a
    new image.

    Raises:
        SandboxCreateError: the path does not exist, or the file cannot be unpacked.
    """
    kind = next((prefix for prefix in _ARCHIVES if image.startswith(prefix)), "")
    path = Path(image.removeprefix(kind)).expanduser()
    if not kind and not image.startswith(("/", "~")):
        return image
    try:
        path = path.resolve(strict=True)
        info = path.stat()
    except OSError as error:
        raise SandboxCreateError(f"image '{image}': {error.strerror}", provider=options.provider) from error
    if path.is_dir():
        name = f"directory-{_digest(str(path))}"
        if store.manifest(name) is None:
            store.add_base(name, path, {"path": str(path)})
        return name
    family = _digest(str(path))
    name = f"file-{family}-{_digest(f'{info.st_size} {info.st_mtime_ns} {info.st_ino}')}"
    if store.manifest(name) is None:
        store.prepare()
        with locked(store.root / f".{name}.lock"):
            if store.manifest(name) is None:  # another process may have unpacked it meanwhile
                with store.building(name, {"path": str(path)}) as staged:
                    _unpack(f"{kind}{path}", staged, options)
        for older in store.names():
            if older.startswith(f"file-{family}-") and older != name:
                store.remove(older)
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _unpack(source: str, staged: Path, options: SupervisedOptions) -> None:
    """Unpack the root filesystem of an image file into ``staged/root``."""
    if source.startswith(_ARCHIVES):
        configuration = staged / "apptainer.conf"
        configuration.write_text(CONFIGURATION)
        build = ["--silent", "--config", str(configuration), "build", "--sandbox", str(staged / "root"), source]
        _run([options.program(), *build], source, options)
        configuration.unlink()
        return
    # Apptainer would unpack a SIF file inside a container, which needs capabilities that root may lack.
    unsquashfs = shutil.which("unsquashfs", path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    if unsquashfs is None:
        raise SandboxCreateError(
            "unsquashfs was not found; install the package squashfs-tools", provider=options.provider
        )
    listing = _run([options.program(), "sif", "list", source], source, options)
    squashfs = _SQUASHFS.search(listing)
    if squashfs is None:
        raise SandboxCreateError(
            f"'{source}' is not a SIF file with a squashfs file system", provider=options.provider
        )
    command = [unsquashfs, "-quiet", "-no-progress", "-offset", squashfs[1], "-dest", str(staged / "root"), source]
    # Exit code 2 means that owners or attributes were not set. Only root can set these, and an ordinary user's boxes
    # could not have them anyway.
    _run(command, source, options, accepted=(0,) if os.geteuid() == 0 else (0, 2))


def _run(command: Sequence[str], source: str, options: SupervisedOptions, *, accepted: Sequence[int] = (0,)) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_UNPACK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxCreateError(f"cannot unpack '{source}': {error}", provider=options.provider) from error
    if result.returncode not in accepted:
        error_text = result.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise SandboxCreateError(f"cannot unpack '{source}': {error_text}", provider=options.provider)
    return result.stdout.decode("utf-8", "replace")


# -- Provider ------------------------------------------------------------------------------------------------------


class ApptainerProvider(LocalProvider):
    """Boxes of Apptainer on this machine. An image is ``host``, a committed image, or the path of a SIF file, of an
    archive that Apptainer reads (``docker-archive:…``, ``oci-archive:…``), or of a directory with a root filesystem.

    Args:
        options: the fields of `ApptainerOptions`. Unknown options raise `ConfigError`.
    """

    name = "apptainer"
    options_class: type[SupervisedOptions] = ApptainerOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unpacking: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[str]] = {}

    async def _with_image(self, spec: SandboxSpec) -> SandboxSpec:
        image = spec.image or self.options.default_image
        key = asyncio.get_running_loop(), image
        if (unpacking := self._unpacking.get(key)) is None:
            # One thread for each image, however many creates wait for it or gave up.
            work = asyncio.to_thread(image_from_path, image, self._images, self.options)
            unpacking = self._unpacking[key] = asyncio.create_task(work)
            unpacking.add_done_callback(partial(self._unpacked, key))
        return dataclasses.replace(spec, image=await asyncio.shield(unpacking))

    def _unpacked(self, key: tuple[asyncio.AbstractEventLoop, str], done: asyncio.Task[str]) -> None:
        del self._unpacking[key]
        if not done.cancelled():
            done.exception()  # asked for, so that asyncio does not log it if every create has given up
