"""Configurations written for NeMo Gym: how they are recognised, and what is read differently here.

NeMo Gym's parser accepts what this one refuses: keys that nothing reads, references that lead nowhere. In NeMo Gym's
own files these cause a warning; in all other files they are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym.config.keys import AGENT_TYPE, SERVER_TYPES
from nemo_gym.config.layers import Merged
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
