"""From layers to plain values: merging, which remembers where each value came from, directives, and interpolations.

Mappings merge key by key, later over earlier. NeMo Gym's directives make a block from another:

- ``_inherit_from: a.b`` in a mapping: the mapping is merged over ``a.b``, and ``a.b`` disappears (it was a template).
- ``_copy: a.b``: the same, and ``a.b`` stays.
- ``key: ${inherit_from:a.b}`` and ``key: ${copy:a.b}``: the value is ``a.b``, moved or copied.
- ``_delete_key: "a,b"``: these keys are removed from the mapping after it has inherited.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_gym._util.suggest import first_line, nearest
from nemo_gym.config.keys import (
    COMPOSITION,
    COPY,
    DELETE_KEY,
    DIRECTIVE_VALUE,
    INHERIT_FROM,
    NEMO_GYM_KEYS,
    SERVER_TYPES,
    SUITE_KEYS,
)
from nemo_gym.contract.errors import ConfigError

Path = tuple[str, ...]
MISSING = "???"
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.(?:select|decode|deprecated)\s*:\s*)?([A-Za-z_][\w.-]*)\s*(?=[},\[])")
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")


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
        """Raise `ConfigError` if ``value`` would replace a server's block and is not a block itself. Allowed are
        ``null``, which removes the server, and ``${copy:…}`` and ``${inherit_from:…}``, which stand for a block."""
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


def apply_directives(merged: Merged) -> None:
    """Resolve every directive in place. A source that does not exist, or a circle, raises `ConfigError`."""
    _Resolver(merged).run()


class _Resolver:
    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self.moved: set[tuple[str, ...]] = set()
        self.busy: list[tuple[str, ...]] = []

    def run(self) -> None:
        self.merged.values = self._resolve(self.merged.values, ())
        for path in sorted(self.moved, key=len, reverse=True):
            try:
                del lookup(self.merged.values, path[:-1])[path[-1]]
            except KeyError:
                continue  # it was inside a block that was moved, too
        _delete_keys(self.merged.values)

    def _resolve(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, str) and (match := DIRECTIVE_VALUE.match(value)):
            return self._fetch(match["path"].strip(), path, f"${{{match['word']}:}}", move=match["word"] != "copy")
        if isinstance(value, list):
            return [self._resolve(item, (*path, str(index))) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        base: Any = {}
        for word in (INHERIT_FROM, COPY):
            if word in value:
                source = value[word]
                if not isinstance(source, str):
                    raise self._error(path, word, f"must be the dotted path of a block, got {source!r}")
                fetched = self._fetch(source, path, word, move=word == INHERIT_FROM)
                if not isinstance(fetched, dict):
                    raise self._error(
                        path, word, f"'{source}' is not a block of keys, so nothing can be merged into it"
                    )
                base = _merged_over(base, fetched)
        resolved = {
            key: self._resolve(item, (*path, str(key)))
            for key, item in value.items()
            if key not in (INHERIT_FROM, COPY)
        }
        return _merged_over(base, resolved) if base else resolved

    def _fetch(self, dotted: str, path: tuple[str, ...], word: str, *, move: bool) -> Any:
        source = tuple(dotted.split("."))
        if source in self.busy or source == path[: len(source)]:
            raise self._error(path, word, f"'{dotted}' is made from this very block; break the circle")
        try:
            found = lookup(self.merged.values, source)
        except KeyError as error:
            choices = list(_mapping_paths(self.merged.values))
            raise self._error(path, word, f"there is no '{dotted}'{nearest(dotted, choices)}") from error
        if move:
            self.moved.add(source)
        self.busy.append(source)
        try:
            return copy.deepcopy(self._resolve(found, source))
        finally:
            self.busy.pop()

    def _error(self, path: tuple[str, ...], word: str, problem: str) -> ConfigError:
        where = self.merged.source_of(path)
        return ConfigError(f"{where}: {'.'.join((*path, word))}: {problem}", key=".".join(path), file=where)


def _merged_over(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = Merged()
    result.add(Layer("", base))
    result.add(Layer("", overrides))
    return result.values


def _mapping_paths(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _mapping_paths(value, f"{prefix}{key}.")


def _delete_keys(values: Any) -> None:
    if isinstance(values, list):
        for item in values:
            _delete_keys(item)
    if not isinstance(values, dict):
        return
    names = values.pop(DELETE_KEY, None)
    if names is not None:
        for name in names if isinstance(names, list) else str(names).split(","):
            values.pop(str(name).strip(), None)
    for item in values.values():
        _delete_keys(item)


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
                _value_at(config, path)
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


def _value_at(node: Any, path: tuple[str, ...]) -> Any:
    from omegaconf import ListConfig

    for part in path:
        node = node[int(part)] if isinstance(node, ListConfig) else node[_spelled_key(node, part)]
    return node


def _spelled_key(node: Any, part: str) -> Any:
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
