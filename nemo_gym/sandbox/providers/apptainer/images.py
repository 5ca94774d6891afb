"""Images of Apptainer's own kinds as images of the supervisor: directories in place, files unpacked once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

from nemo_gym.errors import SandboxCreateError
from nemo_gym.sandbox.providers.local.images import ImageManifest, ImageStore, remove_directory
from nemo_gym.sandbox.providers.local.options import SupervisedOptions

_ARCHIVES = ("docker-archive:", "oci-archive:")
_UNPACK_TIMEOUT_S = 1800.0


def image_from_path(image: str, store: ImageStore, options: SupervisedOptions) -> str:
    """The supervisor's name for an image that is given as a path; other names are returned as they are. Blocking.

    A file is unpacked once for all boxes: without root, Apptainer would do that again for each. A file that changed
    is another image.

    Raises:
        SandboxCreateError: there is nothing there, or it cannot be unpacked.
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
        _unpack_once(name, f"{kind}{path}", {"path": str(path)}, store, options)
        for older in store.names():
            if older.startswith(f"file-{family}-") and older != name:
                store.remove(older)
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _unpack_once(
    name: str, source: str, labels: dict[str, str], store: ImageStore, options: SupervisedOptions
) -> None:
    store.prepare()
    lock = os.open(store.root / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if store.manifest(name) is not None:
            return
        staged = store.new_staging()
        try:
            _unpack(source, staged / "root", options)
            xattrs = "trusted" if os.geteuid() == 0 else "user"
            store.publish(name, ImageManifest(name, host_base=False), staged, labels, xattrs)
        finally:
            if staged.exists():
                remove_directory(staged)
    finally:
        os.close(lock)


def _unpack(source: str, target: Path, options: SupervisedOptions) -> None:
    command = [options.program(), "--silent", "build", "--sandbox", str(target), source]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_UNPACK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxCreateError(f"cannot unpack '{source}': {error}", provider=options.provider) from error
    if done.returncode or not target.is_dir():
        said = done.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise SandboxCreateError(f"Apptainer cannot unpack '{source}': {said}", provider=options.provider)
