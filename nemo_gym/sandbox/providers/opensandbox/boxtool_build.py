"""The helper program that runs in boxes: compiled from ``boxtool/`` with Go's tool chain, once per version of it."""

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

from nemo_gym.contract.errors import SandboxCreateError

_SOURCES = Path(__file__).parent / "boxtool"
_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_BUILD_TIMEOUT_S = 900


def go_program() -> str:
    """The Go tool: the one of this Python environment (extra ``opensandbox``), else of ``PATH``.

    Raises:
        SandboxCreateError: there is none.
    """
    beside = Path(sys.executable).parent / "go"
    found = str(beside) if beside.is_file() else shutil.which("go")
    if found is None:
        raise SandboxCreateError(
            "opensandbox: the program that works inside boxes is compiled with Go, and there is no 'go' here; "
            "install it with: pip install 'nemo-gym-suite[opensandbox]'"
        )
    return found


def build(sources: Path, name: str, architecture: str | None = None) -> Path:
    """A static Linux program of the Go module in ``sources``, from the cache where it has been built before.

    Raises:
        SandboxCreateError: there is no Go, or the module does not compile.
    """
    goarch = architecture or _ARCHITECTURES.get(platform.machine())
    if goarch is None:
        raise SandboxCreateError(f"opensandbox: set box_architecture; '{platform.machine()}' is not known")
    seen = hashlib.sha256(goarch.encode())
    for path in sorted([*sources.glob("*.go"), sources / "go.mod"]):
        seen.update(path.name.encode() + path.read_bytes())
    configured = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(configured) if configured else Path("~").expanduser() / ".cache") / "nemo-gym" / "opensandbox"
    target = cache / f"{name}-{goarch}-{seen.hexdigest()[:16]}"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache) as work:
            made = Path(work) / name
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
                    [go_program(), "build", "-trimpath", "-ldflags=-s -w", "-o", str(made), "."],
                    cwd=sources,
                    env=environment,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=_BUILD_TIMEOUT_S,
                )
            except subprocess.CalledProcessError as error:
                raise SandboxCreateError(f"opensandbox: '{name}' does not compile: {error.stderr[-2000:]}") from error
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SandboxCreateError(f"opensandbox: '{name}' cannot be compiled: {error}") from error
            made.replace(target)
    return target


def boxtool(architecture: str | None = None) -> bytes:
    """The helper program for boxes of that architecture (``None``: of this machine's)."""
    return build(_SOURCES, "boxtool", architecture).read_bytes()
