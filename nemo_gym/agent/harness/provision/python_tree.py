"""Builds a relocatable CPython for a PyPI package, with its standard library, its C library and the wheels.

No registry serves an interpreter, so one is copied from this host. It starts through its own copy of glibc, and so
runs in every image of its architecture that has ``/bin/sh``, whatever Python or C library the image has. This sets no
environment variable, because programs that it starts must find the image's own Python and libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from nemo_gym.agent.harness.base import CliPackage
from nemo_gym.agent.harness.provision import host_loader, listed, take_along
from nemo_gym.contract.errors import ConfigError

PYTHON_VARIABLE = "NEMO_GYM_AGENT_PYTHON"
"""The variable that names the interpreter to copy, instead of a search."""
INSTALL_TIMEOUT_S = 1800.0
NATIVE = "native"
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*", "__pycache__")
_SITES = ("site-packages", "dist-packages")
# $0 is absolute, because a package is started by its path in the box. Python finds its home by argv[0], hence --argv0.
_START = """#!/bin/sh
root="${{0%/bin/*}}"
exec "$root/{native}/{loader}" --library-path "$root/{native}" --argv0 "$root/bin/{link}" \
"$root/bin/{program}" "$@"
"""
_QUERY_SCRIPT = """
import json, os, platform, ssl, sqlite3, sys, sysconfig, ctypes, zlib
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2], "full": platform.python_version(),
    "program": os.path.realpath(sys.executable), "stdlib": sysconfig.get_path("stdlib"),
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython on this host."""

    version: str
    """``3.12``"""
    full: str
    """``3.12.1``"""
    program: Path
    stdlib: Path


def make_python_tree(package: CliPackage, root: Path) -> str:
    """Create the package's directory and return the full version of its Python.

    Raises:
        ConfigError: this host has no suitable interpreter, or a wheel cannot be fetched or has another checksum.
    """
    assert package.requirements is not None
    interpreter = find_interpreter(package)
    library = root / "lib" / f"python{interpreter.version}"
    shutil.copytree(interpreter.stdlib, library, ignore=shutil.ignore_patterns(*_LEFT_OUT, *_SITES))
    _install(package, interpreter, library / "site-packages")
    (library / "dist-packages").symlink_to("site-packages")  # Debian's own Python looks in dist-packages
    (root / "bin").mkdir()
    program = root / "bin" / f"python{interpreter.version}"
    shutil.copy(interpreter.program, program)
    extensions = [path for path in root.rglob("*.so*") if path.is_file()]
    for extension in library.joinpath("lib-dynload").glob("*.so"):
        if listed(extension)[1]:  # an optional module (tkinter, for example) whose library this host lacks
            extension.unlink()
            extensions.remove(extension)
    take_along([program, *extensions], root / NATIVE, below=root.resolve())
    start = root / "bin" / "python"
    start.write_text(
        _START.format(native=NATIVE, loader=host_loader().name, program=program.name, link=start.name),
        encoding="utf-8",
    )
    start.chmod(0o755)
    # The tree is mounted read-only, so modules not compiled now would be compiled at every start.
    _run([str(start), "-I", "-m", "compileall", "-q", "-j2", "--invalidation-mode=unchecked-hash", str(library)])
    return interpreter.full


def find_interpreter(package: CliPackage) -> Interpreter:
    """The interpreter that `PYTHON_VARIABLE` names, or the first suitable one on ``PATH``, of pyenv or of uv."""
    configured = os.environ.get(PYTHON_VARIABLE)
    if configured:
        interpreter = _query(configured)
        if interpreter is None or interpreter.version not in package.pythons:
            problem = "cannot be run, or lacks a module" if interpreter is None else f"is Python {interpreter.full}"
            raise ConfigError(
                f"{PYTHON_VARIABLE}={configured} {problem}; '{package.name}' needs CPython {_versions(package)}",
                key=PYTHON_VARIABLE,
            )
        return interpreter
    for candidate in _candidates(package):
        if (interpreter := _query(candidate)) is not None and interpreter.version in package.pythons:
            return interpreter
    raise ConfigError(
        f"'{package.name}' needs CPython {_versions(package)}, and this host has none on PATH, of pyenv or of uv;"
        f" install one (pyenv install {package.pythons[0]}, or the distribution's python{package.pythons[0]}), or set"
        f" {PYTHON_VARIABLE} to one",
        key="python",
    )


def _versions(package: CliPackage) -> str:
    return " or ".join(package.pythons)


def _candidates(package: CliPackage) -> Iterator[str]:
    homes = [
        Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local" / "share" / "uv" / "python"),
    ]
    for version in package.pythons:
        yield from filter(None, [shutil.which(f"python{version}")])
        for home in homes:
            yield from map(str, sorted(home.glob(f"*{version}*/bin/python{version}")))


def _query(python: str) -> Interpreter | None:
    """Query an interpreter's version and paths; ``None`` if it cannot be run or lacks a commonly needed module."""
    try:
        completed = subprocess.run([python, "-I", "-c", _QUERY_SCRIPT], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if completed.returncode != 0:
        return None
    info = orjson.loads(completed.stdout)
    return Interpreter(info["version"], info["full"], Path(info["program"]), Path(info["stdlib"]))


def _install(package: CliPackage, interpreter: Interpreter, site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    pip += ["--require-hashes", "--ignore-requires-python", "--python-version", interpreter.version]
    pip += ["--implementation", "cp"]
    _run([*pip, "--target", str(site), "--requirement", str(package.requirements)])


def _run(command: list[str]) -> None:
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"'{' '.join(command)}' took more than {INSTALL_TIMEOUT_S:.0f} s", key="agent") from None
    if completed.returncode != 0:
        error_text = (completed.stderr or completed.stdout).strip()[-800:]
        raise ConfigError(f"'{' '.join(command)}' failed: {error_text}", key="agent")
