"""The helper program of OpenSandbox's boxes as static Linux binaries, so that nobody who uses it needs a compiler.

``scripts/build-boxtool`` compiles ``source/`` into ``bin/``. The binaries are part of the built distribution, not of
the repository; ``bin/SOURCE`` says of which sources they are.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
BINARIES = Path(__file__).parent / "bin"
ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
"""What machines call themselves, and what Go calls them."""


def program(architecture: str | None = None) -> bytes:
    """The binary for ``amd64`` or ``arm64``; by default for this machine.

    Raises:
        FileNotFoundError: there is none for it, or ``bin/`` was compiled from other sources.
    """
    name = architecture or platform.machine()
    goarch = ARCHITECTURES.get(name)
    if goarch is None:
        raise FileNotFoundError(f"the helper program is compiled for amd64 and arm64, not for '{name}'")
    binary, stamp = BINARIES / f"boxtool-{goarch}", BINARIES / "SOURCE"
    if not binary.is_file() or not stamp.is_file() or stamp.read_text().strip() != source_digest():
        raise FileNotFoundError("the helper program is not compiled from these sources; run scripts/build-boxtool")
    return binary.read_bytes()


def source_digest() -> str:
    """SHA-256 of the Go module."""
    seen = hashlib.sha256()
    for path in sorted([*SOURCE.glob("*.go"), SOURCE / "go.mod"]):
        content = path.read_bytes()
        seen.update(f"{path.name} {len(content)}\n".encode() + content)
    return seen.hexdigest()
