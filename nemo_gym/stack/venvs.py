"""Interpreters for plugins whose requirements the current interpreter does not meet.

A plugin lists its requirements in ``requirements.txt`` (or ``pyproject.toml``). If they are all installed here, the
server runs in this interpreter. Otherwise it gets its own virtual environment, which is created once, cached by a
digest of the requirements, and layered over this one, so that only missing or different packages are installed.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from nemo_gym._util.files import cache_root
from nemo_gym.contract.errors import ConfigError, ServerError

OWN_NAMES = frozenset({"nemo-gym", "nemo-gym-suite"})
"""Distributions that this suite provides itself; a requirement for any version of them is met."""
_COMPLETE = ".complete"
_EDITABLE_OWN = re.compile(r"^-e\s+(nemo[-_.]gym[^@]*@|\.\./\.\.|.*nemo[-_.]gym)", re.IGNORECASE)
_INSTALLER_OPTIONS = ("--extra-index-url", "--index-url", "--no-index", "--find-links", "-i ", "-f ", "--trusted-host")
"""Beginnings of lines that configure the installer and require no package."""
_INSTALL_TIMEOUT_S = 1800.0
_PROJECT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
NEMO_GYM_BRINGS: Final = {
    **{name: name for name in ("anthropic", "datasets", "devtools", "docker", "httptools", "jinja2", "jsonschema")},
    **{name: name for name in ("matplotlib", "mcp", "mlflow", "numpy", "pandas", "psutil", "pyarrow", "pydot")},
    **{name: name for name in ("ray", "requests", "scipy", "sqlparse", "tenacity", "tqdm", "wandb", "yappi")},
    **{"PIL": "pillow", "git": "gitpython", "jwt": "pyjwt", "yaml": "pyyaml", "huggingface_hub": "huggingface-hub"},
}
"""Module → distribution, for packages that NeMo Gym installs, so that its plugins import them without listing them."""


def requirement_lines(plugin: Path) -> list[str]:
    """Return the plugin's requirements, without comments. Replace this suite by the `_unlisted` packages it brings."""
    lines: list[str] = []
    requirements = plugin / "requirements.txt"
    if requirements.is_file():
        lines = list(_file_lines(requirements))
    elif (plugin / "pyproject.toml").is_file():
        import tomllib

        try:
            project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{plugin / 'pyproject.toml'}: {error}", file=str(plugin / "pyproject.toml")) from error
        lines = [str(line) for line in project.get("dependencies", [])]
    listed = [line for line in lines if not _is_own(line)]
    return [*listed, *_unlisted(plugin, listed)] if len(listed) < len(lines) else listed


def _unlisted(plugin: Path, lines: list[str]) -> list[str]:
    """Return packages that a NeMo Gym plugin imports without listing them, because NeMo Gym itself brings them."""
    listed = {re.sub(r"[-_.]+", "-", match[0]).lower() for line in lines if (match := _PROJECT.match(line))}
    imported: set[str] = set()
    for file in plugin.rglob("*.py"):
        if "tests" in file.relative_to(plugin).parts:
            continue
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, ValueError):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Import):
                    imported |= {name.name.split(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    missing = {NEMO_GYM_BRINGS[name] for name in imported & set(NEMO_GYM_BRINGS) if find_spec(name) is None}
    return sorted(missing - listed)


def _file_lines(path: Path) -> Iterator[str]:
    for raw in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        included = re.match(r"^(?:-r|--requirement)[\s=]+(.+)$", line)
        if included:
            yield from _file_lines(path.parent / included[1])
        elif line:
            yield line


def _is_own(line: str) -> bool:
    if _EDITABLE_OWN.match(line):
        return True
    name = _PROJECT.match(line)
    return name is not None and re.sub(r"[-_.]+", "-", name[0]).lower() in OWN_NAMES


def unmet(lines: list[str]) -> list[str]:
    """Return the requirements that this interpreter does not meet, including those that cannot be checked here."""
    return [line for line in lines if not _is_met(line, set())]


def _is_met(line: str, seen: set[str]) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import InvalidRequirement, Requirement

    if line in seen:
        return True
    seen.add(line)
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return line.startswith(_INSTALLER_OPTIONS)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        installed = distribution(requirement.name)
    except PackageNotFoundError:
        return False
    if not requirement.specifier.contains(installed.version, prereleases=True):
        return False
    for extra in requirement.extras:
        for needed in installed.requires or []:
            marker = Requirement(needed).marker
            if (
                marker is not None
                and marker.evaluate({"extra": extra})
                and not marker.evaluate({"extra": ""})
                and not _is_met(needed.split(";")[0].strip(), seen)
            ):
                return False
    return True


def environment_key(lines: list[str], constraints: list[str]) -> str:
    """Return a digest of an environment's contents: requirements, constraints, this interpreter and its prefix."""
    parts = [*sorted(lines), "--", *sorted(constraints), sys.version, sys.prefix]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def interpreter_for(plugin: Path) -> str | None:
    """Return the Python executable that a plugin needs, or ``None`` for this one. Creates a missing environment.

    Raises `ConfigError`, with the installer's last lines, if a requirement cannot be installed."""
    lines = requirement_lines(plugin)
    if not unmet(lines):
        return None
    overrides = plugin / "overrides.txt"
    constraints = list(_file_lines(overrides)) if overrides.is_file() else []
    home = cache_root() / "venvs"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"{plugin.name}-{environment_key(lines, constraints)}"
    with (home / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _COMPLETE).is_file():
            # Discard the incomplete environment of an interrupted run.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _make(folder, plugin, lines, constraints)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (folder / _COMPLETE).touch()
    return str(folder / "bin" / "python")


def _make(folder: Path, plugin: Path, lines: list[str], constraints: list[str]) -> None:
    # The pip of this interpreter is visible through the layer below; installing a second one takes seconds.
    venv_options = ["--without-pip"] if find_spec("pip") else []
    _run([sys.executable, "-m", "venv", *venv_options, str(folder)], plugin)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A venv made from a venv sees only the base interpreter's packages; this file adds those of this interpreter.
    folders = [path for path in site.getsitepackages() if Path(path).is_dir()]
    inherited = "".join(f"import site; site.addsitedir({path!r})\n" for path in folders)
    (packages / "zz_nemo_gym_parent.pth").write_text(inherited, encoding="utf-8")
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join([*lines, *constraints]) + "\n", encoding="utf-8")
    # Use pip, not uv: uv does not see the layer below, and would install another pydantic on top of the suite's.
    _run(
        [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "-r", str(requirements)],
        plugin,
    )


def _run(command: list[str], plugin: Path) -> None:
    try:
        completed = subprocess.run(
            command,
            cwd=plugin,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONNOUSERSITE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"installing the requirements of {plugin} took over {_INSTALL_TIMEOUT_S:.0f} s") from error
    if completed.returncode != 0:
        tail = "\n".join(completed.stdout.strip().splitlines()[-8:])
        raise ConfigError(
            f"the requirements of {plugin} cannot be installed; correct its requirements.txt, or check the package"
            f" index:\n{tail}",
            file=str(plugin / "requirements.txt"),
        )
