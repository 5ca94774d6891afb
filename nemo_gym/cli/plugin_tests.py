"""``ng env test``: a plugin's own tests, in its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.cli import command
from nemo_gym.cli.gym import SEARCH_DIR, add_root
from nemo_gym.config.roots import EXTRA_ROOTS_VARIABLE
from nemo_gym.contract.errors import ConfigError


def run_tests(argv: Sequence[str]) -> int:
    """Run pytest in the plugin's folder, as NeMo Gym does: the folder and its root are on the import path."""
    parser = command.parser("ng env test", "Run a plugin's own tests.", words="NAME | FOLDER")
    for flag in ("--resources-server", "--environment", "--agent"):
        parser.add_argument(flag, dest="name", help="the plugin")
    parser.add_argument(
        "--all", action="store_true", help=f"every plugin with tests, below {EXTRA_ROOTS_VARIABLE} if that is set"
    )
    parser.add_argument(SEARCH_DIR, action="append", default=[], help="look for plugins below this folder first")
    arguments, pytest_args = parser.parse_known_intermixed_args(argv)
    name = command.plugin_name(arguments.settings, arguments.name)
    for folder in arguments.search_dir:
        add_root(folder)
    if arguments.all:
        if name:
            raise ConfigError(f"--all tests every plugin; leave out '{name}', or --all", key="entrypoint")
        folders = tested_plugins()
        failed = [str(folder) for folder in folders if not _passes(folder, pytest_args)]
        print(f"plugins tested: {len(folders)}; failed: {', '.join(failed) or 'none'}")
        return command.EXIT_FAILED if failed else command.EXIT_OK
    if not name:
        raise ConfigError("name a plugin or its folder, for example: ng env test mcqa", key="entrypoint")
    folder = plugin_folder(name)
    if not _has_tests(folder):
        raise ConfigError(f"{folder} has no tests (test_*.py)", key="entrypoint")
    return command.EXIT_OK if _passes(folder, pytest_args) else command.EXIT_FAILED


def _has_tests(folder: Path) -> bool:
    return next(folder.rglob("test_*.py"), None) is not None


def _passes(folder: Path, pytest_args: Sequence[str]) -> bool:
    root = folder.parents[1]
    roots = os.pathsep.join(part for part in (str(root), os.environ.get(EXTRA_ROOTS_VARIABLE)) if part)
    path = os.pathsep.join(part for part in (str(folder), str(root), os.environ.get("PYTHONPATH")) if part)
    options = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function", "addopts=")
    words = [sys.executable, "-m", "pytest", *(f"-o{option}" for option in options), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, *pytest_args, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, EXTRA_ROOTS_VARIABLE: roots},
        check=False,
    )
    return done.returncode == 0


def tested_plugins() -> list[Path]:
    """The folders of all plugins with tests: those of `EXTRA_ROOTS_VARIABLE` if it is set, else of every root. Raises
    `ConfigError` if there are none."""
    from nemo_gym.config.keys import SERVER_TYPES
    from nemo_gym.config.roots import plugin_roots

    extra = [part for part in os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep) if part]
    roots = [Path(part).expanduser().resolve() for part in extra] or plugin_roots()
    found: dict[tuple[str, str], Path] = {}
    for root in roots:
        for app in sorted(app for kind in SERVER_TYPES for app in root.glob(f"{kind}/*/app.py")):
            found.setdefault((app.parts[-3], app.parts[-2]), app.parent)
    if not (folders := [folder for folder in found.values() if _has_tests(folder)]):
        raise ConfigError(f"no plugin below {', '.join(map(str, roots))} has tests (test_*.py)", key="entrypoint")
    return folders


def plugin_folder(name: str) -> Path:
    """Return the folder of a plugin, given by path or by name. Raises `ConfigError` that suggests the nearest name."""
    given = Path(name).expanduser()
    if given.is_dir() and (given / "app.py").is_file():
        return given.resolve()
    from nemo_gym.config.keys import ENVIRONMENT_TYPE, SERVER_TYPES
    from nemo_gym.config.roots import find_plugin, plugin_roots

    roots = plugin_roots()
    found = [root / kind / name for kind in SERVER_TYPES for root in roots if (root / kind / name).is_dir()]
    return found[0].resolve() if found else find_plugin(ENVIRONMENT_TYPE, name, roots)
