"""Resolve interpolations, and report everything that is unset or unresolvable in one message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nemo_gym._util.suggest import first_line, nearest
from nemo_gym.config.keys import COMPOSITION, NEMO_GYM_KEYS, SUITE_KEYS
from nemo_gym.config.layers import Merged, leaves, lookup
from nemo_gym.contract.errors import ConfigError

MISSING = "???"
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.(?:select|decode|deprecated)\s*:\s*)?([A-Za-z_][\w.-]*)\s*(?=[},\[])")
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")


def interpolated_keys(text: str) -> list[str]:
    """Return the dotted keys that a string's interpolations name, without those of resolvers such as ``oc.env``."""
    return _REFERENCE.findall(text)


def resolve(merged: Merged) -> dict[str, Any]:
    """The values with every interpolation resolved. Raises one `ConfigError` that lists all unset (``???``) keys and
    all interpolations that lead nowhere, each with its file and the fix."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(merged.values)
    problems: list[str] = []
    reported: set[str] = set()
    keys: list[str] = []
    for path, value in leaves(merged.values):
        if not isinstance(value, str):
            continue
        dotted = ".".join(path)
        if value == MISSING:
            keys.append(dotted)
            problems.append(f"{dotted} ({merged.source_of(path)}) is not set: add {dotted}=…")
        elif "${" in value:
            try:
                _get(config, path)
            except OmegaConfBaseException as error:
                keys.append(dotted)
                reason = _reason(value, error, merged)
                # A value that several places lack is reported once.
                if reason not in reported:
                    problems.append(f"{dotted} ({merged.source_of(path)}) {reason}")
                reported.add(reason)
    if problems:
        raise ConfigError("; ".join(problems), keys=keys)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _get(node: Any, path: tuple[str, ...]) -> Any:
    from omegaconf import ListConfig

    for part in path:
        node = node[int(part)] if isinstance(node, ListConfig) else node[_key(node, part)]
    return node


def _key(node: Any, part: str) -> Any:
    """The key as the mapping spells it: paths hold strings, YAML keys may be numbers."""
    if isinstance(node, Mapping) and part not in node:
        return next((key for key in node if str(key) == part), part)
    return part


def _reason(value: str, error: BaseException, merged: Merged, followed: tuple[str, ...] = ()) -> str:
    if (variable := _VARIABLE.search(value)) and variable[1] in str(error):
        return f"uses the environment variable {variable[1]}, which is not set: export it"
    for key in interpolated_keys(value):
        first = key.split(".")[0]
        if first == COMPOSITION:
            group = key.partition(".")[2]
            return f"needs a choice of {group}: add {group}=…"
        if first not in merged.values or merged.values[first] == MISSING:
            # A well-known key is simply not set; only a name that nobody knows may be misspelt.
            misspelt = first not in merged.values and first not in SUITE_KEYS | NEMO_GYM_KEYS
            hint = nearest(first, merged.values) if misspelt else ""
            return f"uses ${{{key}}}, which is not set{hint}: add {key}=… or put it in env.yaml"
        with suppress(KeyError):
            # The key is set, to something that cannot be resolved itself: its reason is the reason.
            behind = lookup(merged.values, key.split("."))
            if isinstance(behind, str) and "${" in behind and behind not in (*followed, value):
                return _reason(behind, error, merged, (*followed, value))
    return f"cannot be resolved: {first_line(error)}"
