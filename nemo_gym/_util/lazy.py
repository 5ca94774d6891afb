"""Modules that are loaded when one of their attributes is first used, or from a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def lazily(name: str) -> ModuleType:
    """Return the top-level module ``name``, which is loaded when an attribute is first used.

    Servers and commands start faster without modules that only some of them use: ``aiohttp`` alone takes 0.15 s of
    CPU. For type checkers, import the module itself:

        if TYPE_CHECKING:
            import aiohttp
        else:
            aiohttp = lazily("aiohttp")

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def module_of(path: Path, name: str) -> ModuleType:
    """Import a Python file as the module ``name``. Raises whatever its code raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
