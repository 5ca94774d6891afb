"""Merging: plain mappings, later over earlier, remembering where every value came from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.config.keys import DIRECTIVE_VALUE, SERVER_TYPES
from nemo_gym.contract.errors import ConfigError

Path = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One source of values: a file, ``env.yaml`` or the command line."""

    source: str
    values: Mapping[str, Any]


@dataclass
class Merged:
    """The merged values and, per path, the source that last set it."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Path, str] = field(default_factory=dict)

    def add(self, layer: Layer) -> None:
        """Merge a layer over what is there: mappings by key, everything else replaced whole. Raises `ConfigError` for
        a value in place of a server's block."""
        for key, value in layer.values.items():
            self.check_replacement(key, value, layer.source)
        self._merge(self.values, layer.values, (), layer.source)

    def check_replacement(self, name: str, value: Any, source: str) -> None:
        """Raise `ConfigError` if ``value`` would stand in place of a server's block, and is none; ``null`` removes
        the server, and in place of ``${copy:…}`` and ``${inherit_from:…}`` another block goes."""
        present = self.values.get(name)
        if value is None or isinstance(value, Mapping) or not isinstance(present, Mapping):
            return
        if isinstance(value, str) and DIRECTIVE_VALUE.match(value):
            return
        if any(key in SERVER_TYPES for key in present):
            raise ConfigError(
                f"{source}: '{name}' is a server ({self.source_of((name,))}), so its value must be a mapping of keys,"
                f" not {type(value).__name__}; give single keys of it, or another name to this one",
                key=name,
            )

    def _merge(self, into: dict[str, Any], values: Mapping[str, Any], path: Path, source: str) -> None:
        for key, value in values.items():
            here = (*path, str(key))
            self.sources[here] = source
            present = into.get(key)
            if isinstance(value, Mapping) and isinstance(present, dict):
                self._merge(present, value, here, source)
            elif isinstance(value, Mapping):
                into[key] = {}
                self._merge(into[key], value, here, source)
            else:
                into[key] = copy.deepcopy(value)

    def source_of(self, path: Sequence[str]) -> str:
        """The source of a path, or of its nearest known ancestor."""
        key = tuple(path)
        while key:
            if key in self.sources:
                return self.sources[key]
            key = key[:-1]
        return "the composed configuration"


def leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no container, with its path; list positions are decimal strings."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from leaves(value, (*path, str(index)))
    else:
        yield path, values


def lookup(values: Any, path: Sequence[str]) -> Any:
    """The value at a path; raises `KeyError` with the part that is absent."""
    for part in path:
        if isinstance(values, Mapping):
            values = values[part]
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            raise KeyError(part)
    return values
