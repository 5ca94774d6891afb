"""The layer that rows share: a language runtime and packages. The runtime is copied from this host if the provider's
base image has none."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from resources_servers.swe_bench.preparation import shims
from resources_servers.swe_bench.preparation.boxes import BuildBox, add_bytes, add_link, add_tree
from resources_servers.swe_bench.preparation.plan import Environment, PreparationError, Runtime

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
    """The files of a runtime on this host, and their places in a box."""

    runtime: Runtime
    """The runtime with its full version."""
    members: tuple[tuple[Path, str], ...]
    """Host path → absolute path in the box. Directories are copied recursively."""
    links: tuple[tuple[str, str], ...]
    """Absolute path in the box → target of the symbolic link."""
    executable: str
    """The interpreter's path in the box."""


def skip_member(source: Path, name: str) -> bool:
    """Whether to leave out a path relative to a copied directory: files that no project's tests need, and links to
    absolute paths, which point to this host's files (``sitecustomize.py`` of Debian's Python)."""
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
    for name in (*(f"python3.{minor}" for minor in range(15, 8, -1)), "python3"):
        if executable := shutil.which(name):
            yield executable
    roots = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
    for root in dict.fromkeys(filter(None, roots)):
        for path in sorted(Path(root, "versions").glob("*/bin/python3")):
            yield str(path)


@lru_cache(maxsize=1)
def _host_pythons() -> tuple[_HostPython, ...]:
    """Return every Python of this host that can run the probe, without duplicates."""
    by_executable: dict[Path, _HostPython] = {}
    for candidate in _candidates():
        try:
            done = subprocess.run(
                [candidate, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True
            )
            facts = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue  # A version manager's shim of a Python that is not installed, or one too old for the probe.
        paths = {name: Path(facts[name]) for name in ("executable", "stdlib", "platstdlib", "include")}
        by_executable.setdefault(
            paths["executable"], _HostPython(version=facts["version"], ensurepip=bool(facts["ensurepip"]), **paths)
        )
    return tuple(by_executable.values())


def host_runtime(runtime: Runtime) -> RuntimeTree:
    """Return a tree of this host that ``runtime`` accepts.

    Raises:
        PreparationError: there is none. The error names the available versions.
    """
    return _node_tree(runtime) if runtime.name == "node" else _python_tree(runtime)


def _python_tree(runtime: Runtime) -> RuntimeTree:
    candidates = [python for python in _host_pythons() if python.ensurepip]
    for python in candidates:
        if runtime.accepts(python.version):
            break
    else:
        available = ", ".join(sorted({python.version for python in candidates})) or "none with venv and ensurepip"
        raise PreparationError(
            f"runtime '{runtime}' is neither in the base image nor on this machine (Python here: {available}); "
            "install it, or take a base image that has it"
        )
    minor_version = ".".join(python.version.split(".")[:2])
    root = f"{PYTHON_ROOT}/{python.version}"
    executable = f"{root}/bin/python{minor_version}"
    members = [(python.executable, executable), (python.stdlib, f"{root}/lib/python{minor_version}")]
    if python.platstdlib != python.stdlib:
        members.append((python.platstdlib, f"{root}/lib/python{minor_version}"))
    if python.include.is_dir():
        members.append((python.include, f"{root}/include/python{minor_version}"))
    return RuntimeTree(
        Runtime("python", python.version),
        tuple(members),
        ((f"{root}/bin/python3", f"python{minor_version}"), (f"{root}/bin/python", f"python{minor_version}")),
        executable,
    )


def _node_tree(runtime: Runtime) -> RuntimeTree:
    node = shutil.which("node")
    version = ""
    if node:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
        version = done.stdout.strip().removeprefix("v")
    if not node or not runtime.accepts(version):
        raise PreparationError(
            f"runtime '{runtime}' is neither in the base image nor on this machine (Node.js here: "
            f"{version or 'none'}); install it, or take a base image that has it"
        )
    executable = Path(node).resolve()
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
    """Return the executable's content, changed to search for its own shared libraries relative to itself (``$ORIGIN``)
    and not at this host's path."""
    content = executable.read_bytes()
    prefix = os.fsencode(executable.parents[1] / "lib") + b"\0"
    origin = b"$ORIGIN/../lib"
    return content.replace(prefix, origin.ljust(len(prefix), b"\0")) if len(origin) < len(prefix) else content


def shared_libraries(tree: RuntimeTree) -> dict[str, Path]:
    """Return name → path of the shared libraries that the tree's binaries load on this host, without the C library."""
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
            name, arrow, target = line.strip().partition(" => ")
            path = target.split(" (")[0]
            if arrow and path.startswith("/") and not name.startswith(_CORE_LIBRARIES):
                libraries[name] = Path(path)
    return libraries


TESTBED_PYTHON = f"{shims.TESTBED_ENV}/bin/python"

PATH = f"{shims.TESTBED_ENV}/bin:{shims.NODE_BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""This PATH has the prepared runtime first, even in shells that activate no environment."""

_PROBE_PYTHON = r"""
for name in python{version} python3 python; do
    found="$(command -v "$name" 2>/dev/null)" || continue
    "$found" -I -c '
import ensurepip, sys, venv
print("found", ".".join(map(str, sys.version_info[:3])), sys.executable)' 2>/dev/null || true
done
"""
_PROBE_NODE = r"""
if command -v node >/dev/null && command -v npm >/dev/null; then
    echo "found $(node --version | tr -d v) $(command -v node)"
fi
"""
_LDCONFIG = 'PATH="$PATH:/usr/sbin:/sbin" ldconfig'
# A copied runtime starts only if the libraries it is linked to exist in the box.
_CHECK_PYTHON = "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, venv, zlib"


async def build_environment(box: BuildBox, environment: Environment) -> None:
    """Install runtime, packages and shims in a box that was started from the base image."""
    await box.open_registries()
    if environment.runtime.name == "node":
        await _install_node(box, environment.runtime)
    else:
        await _install_python(box, environment)
    await box.clean()


async def _find(box: BuildBox, runtime: Runtime) -> tuple[str, str] | None:
    """Return the version and path of a suitable runtime in the base image, or ``None``."""
    probe = _PROBE_NODE if runtime.name == "node" else _PROBE_PYTHON.replace("{version}", runtime.version)
    for line in (await box.run(probe, step=f"looking for {runtime.name}")).splitlines():
        marker, _, remaining = line.partition(" ")
        version, _, path = remaining.partition(" ")
        if marker == "found" and runtime.accepts(version):
            return version, path
    return None


async def _install_node(box: BuildBox, runtime: Runtime) -> None:
    await box.put_files(shims.nvm_files())
    existing = await _find(box, runtime)
    if existing is None:
        tree = host_runtime(runtime)
        await copy_runtime(box, tree)
        version, path = tree.runtime.version, tree.executable
    else:
        version, path = existing
    node_dir = f"{shims.NVM_DIR}/versions/node/v{version}"
    script = f"""
mkdir -p {node_dir}/bin
for name in node npm npx; do
    ln -sf "$(dirname {path})/$name" {node_dir}/bin/$name
done
ln -sfn v{version} {shims.NVM_DIR}/versions/node/current
PATH={shims.NODE_BIN}:$PATH npm --version
"""
    await box.run(script, step=f"setting up node {version}")


async def _install_python(box: BuildBox, environment: Environment) -> None:
    existing = await _find(box, environment.runtime)
    if existing is None:
        tree = host_runtime(environment.runtime)
        await copy_runtime(box, tree)
        await box.run([tree.executable, "-c", _CHECK_PYTHON], step=f"starting the copied {tree.runtime}")
        python = tree.executable
    else:
        python = existing[1]
    await box.put_files(shims.conda_files())
    await box.run([python, "-m", "venv", shims.TESTBED_ENV], step="making the virtual environment")
    await box.run(["ln", "-sfn", python, f"{shims.CONDA_ROOT}/bin/python"], step="linking the interpreter")
    # These build projects that declare no build requirements. A pin among the packages takes precedence.
    names = [package.lower() for package in environment.packages or ()]
    builders = [tool for tool in ("setuptools", "wheel") if not any(name.startswith(tool) for name in names)]
    await box.run(
        [TESTBED_PYTHON, "-m", "pip", "install", *builders, *(environment.packages or ())],
        step="installing packages",
        online=True,
    )
    await box.put_files({**shims.offline_pip_files(), **shims.activation_files(environment.env)})


async def copy_runtime(box: BuildBox, tree: RuntimeTree) -> None:
    """Copy a runtime of this host, and the shared libraries that the box lacks."""
    # Rebuild the linker cache first: a cache in the image may name libraries that do not exist there.
    listing = await box.run(f"{_LDCONFIG}\n{_LDCONFIG} -p", step="listing shared libraries")
    present = {line.split()[0] for line in listing.splitlines() if " => " in line}
    executable = tree.members[0][0]
    libraries = {
        name: path
        for name, path in shared_libraries(tree).items()
        if name not in present or path.is_relative_to(executable.parents[1] / "lib")
    }
    directory = f"{tree.executable.rsplit('/bin/', 1)[0]}/lib"

    def write(tar: tarfile.TarFile) -> None:
        add_bytes(tar, tree.executable, relocated(executable), 0o755)
        for source, target in tree.members[1:]:
            add_tree(tar, source, target, functools.partial(skip_member, source))
        for path, link in tree.links:
            add_link(tar, path, link)
        for name, source in libraries.items():
            add_tree(tar, source.resolve(), f"{directory}/{name}")

    await box.put("/", write)
    if any(name not in present for name in libraries):
        script = f"""
mkdir -p /etc/ld.so.conf.d
echo {directory} > /etc/ld.so.conf.d/ng-{tree.runtime.name}.conf
grep -qs ld.so.conf.d /etc/ld.so.conf || echo "include /etc/ld.so.conf.d/*.conf" >> /etc/ld.so.conf
{_LDCONFIG}
"""
        await box.run(script, step="registering shared libraries")
