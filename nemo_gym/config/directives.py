"""NeMo Gym's directives: a block made from another.

- ``_inherit_from: a.b`` in a mapping: the mapping is merged over ``a.b``, and ``a.b`` disappears (it was a template).
- ``_copy: a.b``: the same, and ``a.b`` stays.
- ``key: ${inherit_from:a.b}`` and ``key: ${copy:a.b}``: the value is ``a.b``, moved or copied.
- ``_delete_key: "a,b"``: these keys are removed from the mapping after it has inherited.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import COPY, DELETE_KEY, DIRECTIVE_VALUE, INHERIT_FROM
from nemo_gym.config.layers import Layer, Merged, lookup
from nemo_gym.contract.errors import ConfigError


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
