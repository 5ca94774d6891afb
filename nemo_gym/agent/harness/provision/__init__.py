"""Locates fetched CLI packages on this host, checks whether an image can run one, and copies the shared libraries that
a program needs, glibc above all, from this host into the program's package: with them it also runs in images that
have another C library or an older one."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.files import cache_root
from nemo_gym.agent.harness.base import CliPackage
from nemo_gym.contract.errors import ConfigError

LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
"""The path of the loader in glibc programs, by architecture."""
UNWINDER = "libgcc_s.so.1"
SYSTEM_DIRECTORY = "system-directory"
"""A file beside the copied libraries. It names the system directory in which their loader looks for libraries."""
_LISTED = re.compile(r"^\t(\S+) => (\S+) \(0x", re.MULTILINE)
_MISSING = re.compile(r"^\t(\S+) => not found", re.MULTILINE)
INSTALL_COMMAND = "ng_prepare agents"
RECORD = "node_modules/.package-lock.json"
"""The record of the unpacked npm packages, with their checksums."""
PYTHON_RECORD = "python.json"
"""The same for PyPI packages: ``{"python": its version, "requirements": the file's checksum}``."""
MARKER = ".installed"
"""The last file that an installation writes; a directory without it is incomplete."""
GLIBC = ".glibc"
"""The directory with a copy of glibc for a program that needs it, for images without glibc."""
UNFIT_STATUS = 97
"""The exit status of `fitness_check` if the image cannot run a package."""


def host_loader() -> Path:
    """This host's glibc loader. Raises `ConfigError` if there is none."""
    for path in map(Path, LOADERS):
        if path.exists():
            return path
    raise ConfigError(
        "this host has no glibc to take along for the agent's box; prepare agents on a host that has one", key="agent"
    )


def listed(program: Path) -> tuple[Mapping[str, Path], tuple[str, ...]]:
    """Libraries that the loader finds for a program or library (name → path), and names that it does not find."""
    done = subprocess.run([str(host_loader()), "--list", str(program)], capture_output=True, text=True, timeout=60)
    return {name: Path(path) for name, path in _LISTED.findall(done.stdout)}, tuple(_MISSING.findall(done.stdout))


def take_along(programs: Iterable[Path], directory: Path, below: Path | None = None) -> None:
    """Copy the loader and every library that ``programs`` need into ``directory``, each under the name by which it is
    requested. Libraries under the directory ``below`` are skipped."""
    directory.mkdir(parents=True)
    loader = host_loader()
    shutil.copy(loader.resolve(), directory / loader.name)
    for program in programs:
        for name, path in listed(program)[0].items():
            if below is not None and path.resolve().is_relative_to(below):
                continue
            # glibc itself loads the unwinder when a thread ends; programs do not list it.
            for library_name, source in ((name, path), (UNWINDER, path.with_name(UNWINDER))):
                if source.exists() and not (directory / library_name).exists():
                    shutil.copy(source.resolve(), directory / library_name)
    (directory / SYSTEM_DIRECTORY).write_text(_system_directory(loader))


def _system_directory(loader: Path) -> str:
    completed = subprocess.run([str(loader), "--help"], capture_output=True, text=True, timeout=60)
    match = re.search(r"^\s+(/\S+) \(system search path\)", completed.stdout, re.MULTILINE)
    # Loaders older than glibc 2.33 do not print their search path.
    return match.group(1).rstrip("/") if match else "/lib64"


def fetched_directory(package: CliPackage) -> Path:
    """The directory into which ``ng_prepare agents`` fetches a package: ``agents/<name>/<version>`` in
    ``$NEMO_GYM_CACHE_DIR`` or ``~/.cache/nemo-gym``."""
    return cache_root() / "agents" / package.name / package.version


def is_installed(package: CliPackage) -> bool:
    """Whether a complete installation exists; its checksums are not checked."""
    return _installed_directory(package) is not None


def installed(package: CliPackage) -> Path:
    """The directory of a package on this host.

    Raises:
        ConfigError: it is missing or incomplete, or its checksums are not the pinned ones. The message names the
            command that installs it.
    """
    directory = _installed_directory(package)
    if directory is None:
        raise ConfigError(
            f"the agent CLI '{package.name}' {package.version} is not in {cache_root()}; run: {INSTALL_COMMAND}",
            key="agent",
        )
    if package.requirements is not None:
        _check_python(package, directory)
    recorded = _read_record(directory)
    for name, pinned in package.integrity.items():
        if (actual := recorded.get(f"node_modules/{name}", {}).get("integrity")) != pinned:
            raise ConfigError(
                f"{directory} holds another '{name}' than the pinned one (its checksum is {actual}, not {pinned});"
                f" remove the directory and run: {INSTALL_COMMAND}",
                key="agent",
            )
    return directory


def _check_python(package: CliPackage, directory: Path) -> None:
    try:
        recorded = orjson.loads((directory / PYTHON_RECORD).read_bytes())["requirements"]
    except (OSError, orjson.JSONDecodeError, KeyError):
        recorded = None
    if recorded != requirements_checksum(package):
        raise ConfigError(
            f"{directory} was installed from other requirements than {package.requirements}; remove the directory and"
            f" run: {INSTALL_COMMAND}",
            key="agent",
        )


def requirements_checksum(package: CliPackage) -> str:
    """The checksum of the requirements file that pins a PyPI package."""
    assert package.requirements is not None
    return "sha256-" + hashlib.sha256(package.requirements.read_bytes()).hexdigest()


def _installed_directory(package: CliPackage) -> Path | None:
    # scripts/install-clis installs the same package, with npm's links around it.
    for directory in (fetched_directory(package), cache_root() / "clis" / package.name / package.version):
        if (directory / MARKER).is_file() and (directory / package.command).is_file():
            return directory
    return None


def _read_record(directory: Path) -> Mapping[str, Any]:
    """The record of unpacked npm packages, written after each archive matched its checksum."""
    try:
        packages = orjson.loads((directory / RECORD).read_bytes())["packages"]
    except (OSError, orjson.JSONDecodeError, KeyError):
        return {}
    return packages if isinstance(packages, dict) else {}


def fitness_check(package: CliPackage) -> str:
    """Lines of a POSIX shell script that exits with `UNFIT_STATUS` and an explanation if the box cannot run the
    package. If the image has no glibc, they link the package's copy into two places of the box's file system."""
    lines = [_need(f"[ -e {shlex.quote(package.executable)} ]", f"{package.executable} is not mounted into the box")]
    for name in package.box_commands:
        lines.append(_need(f"command -v {shlex.quote(name)} >/dev/null", _lacks(name, package)))
    match package.runtime:
        case "elf-glibc":
            lines.append(_glibc(package))
        case "node":
            lines.append(_need("command -v node >/dev/null", _lacks("node", package)))
        case "python":
            lines.append(_need("command -v python3 >/dev/null", _lacks("python3", package)))
        case "elf-static" | "script":
            pass
    return "\n".join(lines)


def _glibc(package: CliPackage) -> str:
    """Shell lines that link the package's glibc into a box without one, and have the loader check that all libraries
    of the program exist in the versions it needs. A package whose command is its directory names no program, so only
    glibc itself is looked for."""
    bundled, program = shlex.quote(f"{package.install_dir}/{GLIBC}"), shlex.quote(package.executable)
    no_glibc = _lacks("glibc", package, end="")
    none_taken = f"{no_glibc}, and none was taken along; run: {INSTALL_COMMAND}"
    lines = ["loader="]
    lines += [f"[ -e {loader} ] && loader={loader}" for loader in LOADERS]
    lines += [
        f'if [ -z "$loader" ]; then libraries={bundled}',
        _need('[ -d "$libraries" ]', none_taken if package.is_fetched else _lacks("glibc", package)),
        f'for found in {" ".join(LOADERS)}; do [ -e "$libraries/${{found##*/}}" ] && loader=$found; done',
        f'read -r directory < "$libraries/{SYSTEM_DIRECTORY}"',
        _need(
            '{ mkdir -p "${loader%/*}" "$directory" && ln -s "$libraries/${loader##*/}" "$loader" &&'
            ' for file in "$libraries"/lib*; do ln -s "$file" "$directory/" || break; done; } 2>/dev/null',
            f"{no_glibc}, and its root cannot be written to link one in; use an image with glibc, or run as root",
        ),
        "fi",
        f'if [ ! -d {program} ] && ! found=$("$loader" --list {program} 2>&1); then',
        f"printf '%s: %s' {shlex.quote(f'its glibc cannot load {package.name}, use a newer image')}"
        ' "$(printf %s "$found" | tail -n 2)" >&2',
        f"exit {UNFIT_STATUS}; fi",
    ]
    return "\n".join(lines)


def _lacks(what: str, package: CliPackage, end: str = "; use an image that has it") -> str:
    return f"it has no {what}, which {package.name} needs{end}"


def _need(condition: str, otherwise: str) -> str:
    return f"{{ {condition}; }} || {{ printf %s {shlex.quote(otherwise)} >&2; exit {UNFIT_STATUS}; }}"
