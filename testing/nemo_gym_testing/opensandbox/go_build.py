"""Compile Go programs: daemons for tests and, before every release, the helper program of OpenSandbox's boxes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nemo_gym._util.files import cache_root
from nemo_gym_boxtool import ARCHITECTURES, BINARIES, SOURCE, source_digest

_BUILD_TIMEOUT_S = 900


def go_program() -> str:
    """Return the Go tool of this Python environment (extra ``dev``), else the one in ``PATH``."""
    beside = Path(sys.executable).parent / "go"
    found = str(beside) if beside.is_file() else shutil.which("go")
    if found is None:
        raise RuntimeError("there is no 'go' here; install it with: pip install 'nemo-gym-suite[dev]'")
    return found


def build(sources: Path, name: str, architecture: str | None = None) -> Path:
    """Build a static Linux program from the Go module in ``sources``, or take it from the cache. Raises `RuntimeError`
    if there is no Go, or the module does not compile."""
    goarch = ARCHITECTURES[architecture or platform.machine()]
    digest = hashlib.sha256(goarch.encode())
    for path in sorted([*sources.glob("*.go"), sources / "go.mod"]):
        digest.update(path.name.encode() + path.read_bytes())
    cache = cache_root() / "opensandbox"
    target = cache / f"{name}-{goarch}-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as work:
            program = Path(work) / name
            environment = {
                **os.environ,
                "CGO_ENABLED": "0",
                "GOOS": "linux",
                "GOARCH": goarch,
                "GOTOOLCHAIN": "local",
                "GOTELEMETRY": "off",
                "GOFLAGS": "-mod=mod -buildvcs=false",
                "GOCACHE": str(cache / "go-build"),
                "GOPATH": str(Path(work) / "gopath"),
            }
            try:
                subprocess.run(
                    [go_program(), "build", "-trimpath", "-ldflags=-s -w", "-o", str(program), "."],
                    cwd=sources,
                    env=environment,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=_BUILD_TIMEOUT_S,
                )
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"'{name}' does not compile: {error.stderr[-2000:]}") from error
            program.replace(target)
    return target


def build_boxtool() -> None:
    """Compile the helper program for every architecture into its distribution, unless it is already there."""
    stamp, digest = BINARIES / "SOURCE", source_digest()
    binaries = {goarch: BINARIES / f"boxtool-{goarch}" for goarch in sorted(set(ARCHITECTURES.values()))}
    if stamp.is_file() and stamp.read_text().strip() == digest and all(path.is_file() for path in binaries.values()):
        return
    BINARIES.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    for goarch, target in binaries.items():
        shutil.copyfile(build(SOURCE, "boxtool", goarch), target)
    stamp.write_text(digest + "\n")


if __name__ == "__main__":
    build_boxtool()
