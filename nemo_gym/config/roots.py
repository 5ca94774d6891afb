"""The folders that are searched for plugins and configuration files.

The order is ``NEMO_GYM_EXTRA_ROOTS`` (separated like ``PATH``), the working directory, the installation. The first
root that has a plugin or file wins, so a user's folder can add to or replace what ships.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError

EXTRA_ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"


def plugin_roots() -> list[Path]:
    """The roots in order of precedence, without duplicates."""
    extra = [Path(part).expanduser() for part in os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep) if part]
    return list(dict.fromkeys(path.resolve() for path in (*extra, Path.cwd(), INSTALL_ROOT)))


def missing_roots() -> list[str]:
    """The folders of `EXTRA_ROOTS_VARIABLE` that do not exist, as they are written there."""
    parts = os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep)
    return [part for part in parts if part and not Path(part).expanduser().is_dir()]


def extra_roots_hint() -> str:
    """`EXTRA_ROOTS_VARIABLE`, and which of its folders do not exist."""
    missing = missing_roots()
    return EXTRA_ROOTS_VARIABLE + (f" (of those, {', '.join(missing)} does not exist)" if missing else "")


def find_file(relative: str | Path, roots: Iterable[Path], beside: Path | None = None) -> Path | None:
    """The first existing file of that path under the roots (absolute paths as they are), or beside another file."""
    path = Path(relative).expanduser()
    if path.is_absolute():
        return path if path.is_file() else None
    candidates = [root / path for root in roots]
    if beside is not None:
        candidates.append(beside / path)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def find_plugin(server_type: str, implementation: str, roots: Iterable[Path] | None = None) -> Path:
    """The folder ``<root>/<server type>/<implementation>``; raises `ConfigError` with the nearest existing name."""
    searched = list(roots) if roots is not None else plugin_roots()
    for root in searched:
        folder = root / server_type / implementation
        if folder.is_dir():
            return folder
    known = sorted({each.name for root in searched for each in (root / server_type).glob("[!._]*") if each.is_dir()})
    raise ConfigError(
        f"there is no implementation '{implementation}' of {server_type}{nearest(implementation, known)}; there are:"
        f" {', '.join(known) or 'none'}. Other folders are found through {extra_roots_hint()}",
        key=f"{server_type}.{implementation}",
    )
