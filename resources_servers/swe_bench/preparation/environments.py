"""The layer that rows share: a runtime and packages on top of the provider's base image."""

from __future__ import annotations

import functools
import tarfile

from resources_servers.swe_bench.preparation import shims
from resources_servers.swe_bench.preparation.boxes import BuildBox, add_bytes, add_link, add_tree
from resources_servers.swe_bench.preparation.plan import Environment, Runtime
from resources_servers.swe_bench.preparation.runtimes import (
    RuntimeTree,
    host_runtime,
    relocated,
    shared_libraries,
    skip_member,
)

TESTBED_PYTHON = f"{shims.TESTBED_ENV}/bin/python"

PATH = f"{shims.TESTBED_ENV}/bin:{shims.NODE_BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Finds the prepared runtime first, also in shells that activate nothing."""

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
# A runtime copied from elsewhere starts only where the libraries it was linked to are.
_CHECK_PYTHON = "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, venv, zlib"


async def build_environment(box: BuildBox, environment: Environment) -> None:
    """Put runtime, packages and stand-ins into a box that was started from the base image."""
    await box.open_registries()
    if environment.runtime.name == "node":
        await _install_node(box, environment.runtime)
    else:
        await _install_python(box, environment)
    await box.clean()


async def _find(box: BuildBox, runtime: Runtime) -> tuple[str, str] | None:
    """Version and path of a runtime that the base image has already."""
    probe = _PROBE_NODE if runtime.name == "node" else _PROBE_PYTHON.replace("{version}", runtime.version)
    for line in (await box.run(probe, step=f"looking for {runtime.name}")).splitlines():
        word, _, rest = line.partition(" ")
        version, _, path = rest.partition(" ")
        if word == "found" and runtime.accepts(version):
            return version, path
    return None


async def _install_node(box: BuildBox, runtime: Runtime) -> None:
    await box.put_files(shims.nvm_files())
    found = await _find(box, runtime)
    if found is None:
        tree = host_runtime(runtime)
        await copy_runtime(box, tree)
        version, path = tree.runtime.version, tree.executable
    else:
        version, path = found
    where = f"{shims.NVM_DIR}/versions/node/v{version}"
    script = f"""
mkdir -p {where}/bin
for name in node npm npx; do
    ln -sf "$(dirname {path})/$name" {where}/bin/$name
done
ln -sfn v{version} {shims.NVM_DIR}/versions/node/current
PATH={shims.NODE_BIN}:$PATH npm --version
"""
    await box.run(script, step=f"setting up node {version}")


async def _install_python(box: BuildBox, environment: Environment) -> None:
    found = await _find(box, environment.runtime)
    if found is None:
        tree = host_runtime(environment.runtime)
        await copy_runtime(box, tree)
        await box.run([tree.executable, "-c", _CHECK_PYTHON], step=f"starting the copied {tree.runtime}")
        python = tree.executable
    else:
        python = found[1]
    await box.put_files(shims.conda_files())
    await box.run([python, "-m", "venv", shims.TESTBED_ENV], step="making the virtual environment")
    await box.run(["ln", "-sfn", python, f"{shims.CONDA_ROOT}/bin/python"], step="linking the interpreter")
    # What builds a project that has no declaration of its own; a pin among the packages is stronger.
    names = [package.lower() for package in environment.packages or ()]
    builders = [tool for tool in ("setuptools", "wheel") if not any(name.startswith(tool) for name in names)]
    await box.run(
        [TESTBED_PYTHON, "-m", "pip", "install", *builders, *(environment.packages or ())],
        step="installing packages",
        online=True,
    )
    await box.put_files({**shims.offline_pip_files(), **shims.activation_files(environment.env)})


async def copy_runtime(box: BuildBox, tree: RuntimeTree) -> None:
    """Copy a runtime of this host, and the shared libraries that the box has not."""
    # A cache that came with the image may name libraries that did not.
    known = await box.run(f"{_LDCONFIG}\n{_LDCONFIG} -p", step="listing shared libraries")
    present = {line.split()[0] for line in known.splitlines() if " => " in line}
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
