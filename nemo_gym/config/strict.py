"""Reject top-level keys that nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nemo_gym._util.suggest import MISSPELT, SIMILAR, nearest
from nemo_gym.config.keys import COMPOSITION, GROUPS, NEMO_GYM_KEYS, SUITE_KEYS
from nemo_gym.config.layers import Merged, interpolated_keys, leaves
from nemo_gym.config.nemo_gym_files import is_nemo_gyms
from nemo_gym.contract.errors import ConfigError


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
