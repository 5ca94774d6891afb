"""Language runtimes of this host, as trees that can be copied into an image that has none of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from resources_servers.swe_bench.preparation.errors import PreparationError
from resources_servers.swe_bench.preparation.plan import Runtime

PYTHON_ROOT = "/opt/python"
_PROBE = """
import json, os, sys, sysconfig, importlib.util as u
paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix,
    "installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix})
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "stdlib": paths["stdlib"], "platstdlib": paths["platstdlib"], "include": paths["include"],
    "ensurepip": u.find_spec("ensurepip") is not None and u.find_spec("venv") is not None,
}))
"""
_NOT_COPIED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "turtledemo", "tkinter", "idle_test"}
)
_CORE_LIBRARIES = (
    "ld-linux",
    "libc.so",
    "libm.so",
    "libpthread.so",
    "libdl.so",
    "librt.so",
    "libutil.so",
    "linux-vdso",
)


@dataclass(frozen=True)
class RuntimeTree:
    """Where files of a runtime are on this host and where they go in a box."""

    runtime: Runtime
    """With its whole version."""
    members: tuple[tuple[Path, str], ...]
    """Host path → absolute path in the box; directories are copied with what is below them."""
    links: tuple[tuple[str, str], ...]
    """Absolute path in the box → target of the symbolic link."""
    executable: str
    """The interpreter's path in the box."""


def skip_member(source: Path, name: str) -> bool:
    """Whether a path relative to a copied directory is left out: what no test of a project needs, and links to
    absolute paths, which mean this host's files (``sitecustomize.py`` of Debian's Python)."""
    if any(part in _NOT_COPIED or part.startswith("config-") for part in Path(name).parts):
        return True
    path = source / name
    return name.endswith((".a", ".pyc")) or (path.is_symlink() and path.readlink().is_absolute())


@dataclass(frozen=True)
class _HostPython:
    version: str
    executable: Path
    stdlib: Path
    platstdlib: Path
    include: Path
    ensurepip: bool


def _candidates() -> Iterator[str]:
    yield sys.executable
    names = (
        "python3.15",
        "python3.14",
        "python3.13",
        "python3.12",
        "python3.11",
        "python3.10",
        "python3.9",
        "python3",
    )
    for name in names:
        if found := shutil.which(name):
            yield found
    roots = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
    for root in dict.fromkeys(filter(None, roots)):
        for path in sorted(Path(root, "versions").glob("*/bin/python3")):
            yield str(path)


@lru_cache(maxsize=1)
def _host_pythons() -> tuple[_HostPython, ...]:
    """Every Python of this host that can be asked, without repeats."""
    found: dict[Path, _HostPython] = {}
    for candidate in _candidates():
        try:
            done = subprocess.run(
                [candidate, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True
            )
            facts = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue  # A version manager's stand-in for a Python that is not installed, or one too old to ask.
        paths = {name: Path(facts[name]) for name in ("executable", "stdlib", "platstdlib", "include")}
        found.setdefault(
            paths["executable"], _HostPython(version=facts["version"], ensurepip=bool(facts["ensurepip"]), **paths)
        )
    return tuple(found.values())


def host_runtime(runtime: Runtime) -> RuntimeTree:
    """A tree of this host that ``runtime`` accepts.

    Raises:
        PreparationError: there is none; names the versions there are.
    """
    return _node_tree(runtime) if runtime.name == "node" else _python_tree(runtime)


def _python_tree(runtime: Runtime) -> RuntimeTree:
    usable = [python for python in _host_pythons() if python.ensurepip]
    for python in usable:
        if runtime.accepts(python.version):
            break
    else:
        there = ", ".join(sorted({python.version for python in usable})) or "none with venv and ensurepip"
        raise PreparationError(
            f"runtime '{runtime}' is neither in the base image nor on this machine (Python here: {there}); "
            "install it, or take a base image that has it"
        )
    short = ".".join(python.version.split(".")[:2])
    root = f"{PYTHON_ROOT}/{python.version}"
    executable = f"{root}/bin/python{short}"
    members = [(python.executable, executable), (python.stdlib, f"{root}/lib/python{short}")]
    if python.platstdlib != python.stdlib:
        members.append((python.platstdlib, f"{root}/lib/python{short}"))
    if python.include.is_dir():
        members.append((python.include, f"{root}/include/python{short}"))
    return RuntimeTree(
        Runtime("python", python.version),
        tuple(members),
        ((f"{root}/bin/python3", f"python{short}"), (f"{root}/bin/python", f"python{short}")),
        executable,
    )


def _node_tree(runtime: Runtime) -> RuntimeTree:
    found = shutil.which("node")
    version = ""
    if found:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
        version = done.stdout.strip().removeprefix("v")
    if not found or not runtime.accepts(version):
        raise PreparationError(
            f"runtime '{runtime}' is neither in the base image nor on this machine (Node.js here: "
            f"{version or 'none'}); install it, or take a base image that has it"
        )
    executable = Path(found).resolve()
    root = f"/opt/node/{version}"
    npm = next(
        (
            path
            for path in (executable.parents[1] / "lib/node_modules/npm", Path("/usr/share/nodejs/npm"))
            if path.is_dir()
        ),
        None,
    )
    if npm is None:
        raise PreparationError(f"Node.js {version} of this machine has no npm beside it; install npm")
    modules = "../lib/node_modules/npm/bin"
    return RuntimeTree(
        Runtime("node", version),
        ((executable, f"{root}/bin/node"), (npm.resolve(), f"{root}/lib/node_modules/npm")),
        ((f"{root}/bin/npm", f"{modules}/npm-cli.js"), (f"{root}/bin/npx", f"{modules}/npx-cli.js")),
        f"{root}/bin/node",
    )


def relocated(executable: Path) -> bytes:
    """The executable's content, looking for its own shared libraries beside itself instead of in this host's place."""
    content = executable.read_bytes()
    own = os.fsencode(executable.parents[1] / "lib") + b"\0"
    beside = b"$ORIGIN/../lib"
    return content.replace(own, beside.ljust(len(own), b"\0")) if len(beside) < len(own) else content


def shared_libraries(tree: RuntimeTree) -> dict[str, Path]:
    """Shared libraries beside the C library that the tree's binaries load on this host, by the name they ask for."""
    binaries = [tree.members[0][0]]
    for source, _ in tree.members:
        if source.is_dir():
            binaries.extend(source.glob("lib-dynload/*.so"))
    libraries: dict[str, Path] = {}
    for start in range(0, len(binaries), 64):
        listing = subprocess.run(
            ["ldd", *binaries[start : start + 64]], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        for line in listing.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            path = rest.split(" (")[0]
            if arrow and path.startswith("/") and not name.startswith(_CORE_LIBRARIES):
                libraries[name] = Path(path)
    return libraries
