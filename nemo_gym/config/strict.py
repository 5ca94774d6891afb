"""Refuse what nothing reads, and tell which files were written for NeMo Gym.

NeMo Gym's parser accepts what this one refuses: keys that nothing reads, references that lead nowhere. In NeMo
Gym's own files these cause a warning; in all other files they are errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym._util.suggest import MISSPELT, SIMILAR, nearest
from nemo_gym.config.keys import AGENT_TYPE, COMPOSITION, GROUPS, NEMO_GYM_KEYS, SERVER_TYPES, SUITE_KEYS
from nemo_gym.config.layers import Merged, interpolated_keys, leaves
from nemo_gym.contract.errors import ConfigError

ENVIRONMENT_SERVERS: Final = "environment_servers"
"""NeMo Gym's fourth server type: an episode's driver. Here the pipeline drives episodes, so such a block only tells
which agent works in which environment."""
_REQUIRES_NEMO_GYM = re.compile(r"(^|[\s\"'])nemo-gym(\[|[\s@=<>~!\"']|$)", re.MULTILINE)


def is_nemo_gyms(source: str) -> bool:
    """Whether a file belongs to NeMo Gym or to a plugin written for it: the plugin's requirements name ``nemo-gym``,
    or the file is in a checkout or an installation of NeMo Gym."""
    path = Path(source)
    return path.is_absolute() and not path.is_relative_to(INSTALL_ROOT) and _belongs(path.parent)


@lru_cache(maxsize=4096)
def _belongs(folder: Path) -> bool:
    if folder.parent.name in (*SERVER_TYPES, ENVIRONMENT_SERVERS):
        for name in ("requirements.txt", "pyproject.toml"):
            if (file := folder / name).is_file() and _REQUIRES_NEMO_GYM.search(file.read_text(errors="replace")):
                return True
    if (folder / "nemo_gym" / "base_resources_server.py").is_file():
        return True
    return folder != folder.parent and _belongs(folder.parent)


def refuse(problem: ConfigError, source: str, warnings: list[str]) -> None:
    """Raise ``problem``, or add it to the warnings if the file is NeMo Gym's."""
    if not is_nemo_gyms(source):
        raise problem
    warnings.append(f"{problem.message} (tolerated: the file is written for NeMo Gym)")


def take_environment_servers(merged: Merged) -> None:
    """Remove blocks of environment servers: here the pipeline itself drives the agent that each block names.

    An agent that names no environment gets the one that the block names. Raises `ConfigError` for a block that names
    no agent, because nothing here replaces such a server.
    """
    for name, value in list(merged.values.items()):
        if not isinstance(value, Mapping) or ENVIRONMENT_SERVERS not in value:
            continue
        kinds = value[ENVIRONMENT_SERVERS]
        blocks = (
            [block for block in kinds.values() if isinstance(block, Mapping)] if isinstance(kinds, Mapping) else []
        )
        if len(value) > 1 or len(blocks) != 1:
            raise ConfigError(
                f"{merged.source_of((name,))}: {name}.{ENVIRONMENT_SERVERS} must hold one implementation, and {name}"
                " must hold nothing else",
                key=name,
            )
        agent = blocks[0].get("agent_server")
        if not isinstance(agent, Mapping):
            raise ConfigError(
                f"{merged.source_of((name,))}: environment server '{name}' names no 'agent_server'; here the pipeline"
                f" drives rollouts, so {', '.join(map(str, kinds))}, which drives them itself, is not served:"
                " write an agent, or use it with NeMo Gym",
                key=f"{name}.{ENVIRONMENT_SERVERS}",
            )
        _give_environment(merged, agent.get("name"), blocks[0].get("resources_server"))
        del merged.values[name]


def _give_environment(merged: Merged, agent: Any, environment: Any) -> None:
    holder = merged.values.get(agent) if isinstance(agent, str) else None
    if not isinstance(holder, dict) or not isinstance(environment, Mapping):
        return
    for block in (holder.get(AGENT_TYPE) or {}).values():
        if isinstance(block, dict) and block.get("resources_server") is None:
            block["resources_server"] = dict(environment)


def known_keys() -> frozenset[str]:
    """Every top-level key that this suite or NeMo Gym reads."""
    from nemo_gym.config.run import RUN_KEYS

    return SUITE_KEYS | NEMO_GYM_KEYS | RUN_KEYS | frozenset(GROUPS) | {COMPOSITION}


def check_top_level(
    merged: Merged, servers: Collection[str], known: Collection[str], free: Iterable[str], warnings: list[str]
) -> None:
    """Raise `ConfigError` for every `unread` key; such keys of NeMo Gym's own files become ``warnings``.

    Keys from ``free`` sources (``env.yaml`` and ``+key=value``) may be unread; one that looks like a known key
    misspelt becomes a warning.
    """
    free_sources = set(free)
    problems, keys = [], []
    for key in unread(merged.values, servers, known):
        value, source = merged.values[key], merged.source_of((key,))
        is_free = source in free_sources
        similar = nearest(key, {*known, *servers}, cutoff=MISSPELT if is_free else SIMILAR)
        if is_free and not similar:
            continue
        what = "block" if isinstance(value, Mapping) else "key"
        problem = f"{source}: unknown {what} '{key}'{similar}; nothing reads it: remove it, or use it as ${{{key}}}"
        if is_free or is_nemo_gyms(source):
            warnings.append(problem)
            continue
        keys.append(key)
        problems.append(problem)
    if problems:
        raise ConfigError("; ".join(problems), keys=keys)


def unread(values: Mapping[str, Any], servers: Collection[str], known: Collection[str]) -> list[str]:
    """Return the top-level keys that are neither a server nor ``known`` nor used, and do not start with ``_`` or
    ``x-``. A key is used when an interpolation names it, or when a string names it as a block
    (``sandbox_provider: sandbox``)."""
    used = _used(values)
    return [
        key for key in values if not (key in servers or key in known or key in used or key.startswith(("_", "x-")))
    ]


def _used(values: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for path, value in leaves(values):
        if isinstance(value, str):
            names.update(key.split(".")[0] for key in interpolated_keys(value))
            if len(path) > 1:
                names.add(value)
    return names
