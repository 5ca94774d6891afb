"""Fetches CLI packages into the cache: npm archives and wheels of exact versions, checked against pinned checksums."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson

from nemo_gym._util.files import cache_root
from nemo_gym.agent.harness.base import CliPackage
from nemo_gym.agent.harness.provision import (
    GLIBC,
    MARKER,
    PYTHON_RECORD,
    RECORD,
    fetched_directory,
    installed,
    is_installed,
    requirements_checksum,
    take_along,
)
from nemo_gym.agent.harness.provision.python_tree import make_python_tree
from nemo_gym.contract.errors import ConfigError
from nemo_gym.sandbox.archive import ArchiveError, extract

FETCH_TIMEOUT_S = 1800.0


def fetch(package: CliPackage) -> Path:
    """Fetch the package if it is missing, and return its directory. Safe for concurrent processes: an incomplete
    directory never appears under the final name.

    Raises:
        ConfigError: there is no npm or no suitable Python, an archive could not be fetched or does not match its
            checksum, or the cache cannot be written to.
    """
    if _is_whole(package):
        return installed(package)
    try:
        return _fetch_locked(package, fetched_directory(package))
    except OSError as error:
        raise ConfigError(
            f"the cache {cache_root()} cannot hold '{package.name}': {error.strerror or error}; set"
            " NEMO_GYM_CACHE_DIR to another directory",
            key="NEMO_GYM_CACHE_DIR",
        ) from error


def _fetch_locked(package: CliPackage, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_installed(package):
            with _staging(target.parent, f".{package.version}.", old=".*.*") as staging:
                _make(package, staging)
                shutil.rmtree(target, ignore_errors=True)
                (staging / "package").rename(target)
        directory = installed(package)
        if not _is_whole(package):  # installed without a copy of glibc
            with _staging(directory, f"{GLIBC}.", old=f"{GLIBC}.*") as staging:
                take_along([directory / package.command], staging / GLIBC)
                (staging / GLIBC).rename(directory / GLIBC)
    return directory


@contextlib.contextmanager
def _staging(parent: Path, prefix: str, *, old: str) -> Iterator[Path]:
    """A directory for an incomplete installation. Deletes those that killed processes left, which match ``old``; no
    other process uses one, because the caller holds the lock of the package's name."""
    for left in parent.glob(old):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as staging:
        yield Path(staging)


def _is_whole(package: CliPackage) -> bool:
    return is_installed(package) and (package.runtime != "elf-glibc" or (installed(package) / GLIBC).is_dir())


def _make(package: CliPackage, staging: Path) -> None:
    root = staging / "package"
    if package.requirements is not None:
        version = make_python_tree(package, root)
        record = {"python": version, "requirements": requirements_checksum(package)}
        (root / PYTHON_RECORD).write_bytes(orjson.dumps(record))
    else:
        _make_of_npm(package, staging, root)
    (root / MARKER).touch()


def _make_of_npm(package: CliPackage, staging: Path, root: Path) -> None:
    record = {}
    for name, version in package.npm.items():
        pinned = package.integrity.get(name)
        if pinned is None:
            raise ConfigError(f"the CLI package '{package.name}' pins no checksum of '{name}'", key="integrity")
        archive = _pack(name, version, staging)
        if (found := _integrity(archive)) != pinned:
            raise ConfigError(
                f"'{name}' {version} has checksum {found} in the registry, but {pinned} is pinned; refused",
                key="integrity",
            )
        _unpack(archive, root / "node_modules" / name)
        archive.unlink()
        record[f"node_modules/{name}"] = {"version": version, "integrity": found}
    if not (root / package.command).is_file():
        raise ConfigError(f"the CLI package '{package.name}' has no '{package.command}'", key="command")
    (root / package.command).chmod(0o755)
    (root / RECORD).write_bytes(orjson.dumps({"packages": record}))


def _pack(name: str, version: str, directory: Path) -> Path:
    """Download one archive; ``version`` may be an alias (``npm:other@1.2.3``)."""
    spec = version.removeprefix("npm:") if version.startswith("npm:") else f"{name}@{version}"
    options = ("--json", "--ignore-scripts", "--loglevel=error", f"--pack-destination={directory}")
    command = [_npm(), "pack", spec, *options]
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # node is beside npm
    try:
        completed = subprocess.run(
            command, cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, timeout=FETCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"npm did not fetch '{spec}' within {FETCH_TIMEOUT_S:.0f} s; try again", key="npm") from None
    archives = list(directory.glob("*.tgz"))
    if completed.returncode != 0 or len(archives) != 1:
        error_text = completed.stderr.decode("utf-8", "replace").strip()[-500:]
        raise ConfigError(f"npm could not fetch '{spec}': {error_text}", key="npm")
    return archives[0]


def _npm() -> str:
    npm = shutil.which("npm") or next(map(str, (cache_root() / "clis" / "node").glob("*/bin/npm")), None)
    if npm is None:
        raise ConfigError(
            "fetching agent CLIs needs npm: install Node.js, or run scripts/install-clis node for one in the cache",
            key="npm",
        )
    return npm


def _integrity(path: Path) -> str:
    with path.open("rb") as file:
        return "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()


def _unpack(archive: Path, directory: Path) -> None:
    """Unpack an archive into ``directory``, without the archive's top directory."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as unpacked:
        # `tarfile` can refuse members that escape the directory only since Python 3.11.4, so it is not used.
        try:
            with gzip.open(archive) as stream:
                extract(stream.read, unpacked)
            (first,) = Path(unpacked).iterdir()
        except (ArchiveError, EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"the npm archive {archive.name} cannot be unpacked: {error}", key="npm") from error
        directory.parent.mkdir(parents=True, exist_ok=True)
        first.rename(directory)
