"""The first process of a local engine's boxes: the program of the local provider's, as a file for them to mount.

A box lives as long as its first process. An idle command of the image's is a process among others there: `kill -9 -1`
would end the box, which then looks lost through no fault of its contents, and a lost box is tried again. Only process
1 itself is safe from signals of its own box, and only an unreadable program from being traced there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.sandbox.init_program import elf_image


def program_path() -> Path | None:
    """The program, written when it is not there yet; ``None`` for a type of processor it does not exist for.

    Raises:
        SandboxCreateError: the cache directory cannot be written.
    """
    try:
        image = elf_image(platform.machine())
    except NotImplementedError:
        return None
    configured = os.environ.get("XDG_CACHE_HOME")
    cache = Path(configured) if configured else Path("~").expanduser() / ".cache"
    path = cache / "nemo-gym" / f"box-init-{hashlib.sha256(image).hexdigest()[:16]}"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".box-init-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(image)
            os.fchmod(file.fileno(), 0o111)
        Path(name).replace(path)
    except OSError as error:
        raise SandboxCreateError(
            f"docker: cannot write the first process of boxes to {path}: {error.strerror}; set XDG_CACHE_HOME to a "
            "directory that can be written"
        ) from error
    return path
