"""The command line's ``key=value`` words, in Hydra's grammar: ``k=v``, ``+k=v``, ``++k=v``, ``~k``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import OBSERVABILITY, SERVE
from nemo_gym.config.layers import Layer, Merged, lookup
from nemo_gym.contract.errors import ConfigError

COMMAND_LINE = "the command line"
_NAMES = frozenset({"policy_model_name", "policy_api_key"})
"""Keys whose values are text, also those that look like a number or a truth value."""


class Mode(Enum):
    CHANGE = ""
    ADD = "+"
    FORCE = "++"
    DELETE = "~"


@dataclass(frozen=True)
class Override:
    """One word of the command line."""

    mode: Mode
    key: str
    value: Any
    word: str

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parse words; raises `ConfigError` naming the word's key (never its value, which may be secret) and the fix."""
    return [_parse(word) for word in words]


def given_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that the words set, for a command that composes nothing. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    for override in parse_overrides(words):
        if override.mode is Mode.DELETE:
            raise ConfigError(
                f"'{override.word}': there is nothing to delete from; leave the key out", key=override.key
            )
        *parents, last = override.path
        node = values
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = override.value
    return values


def word_of(key: str, value: Any) -> str:
    """Return the ``key=value`` word for ``value``, which is plain data and may hold any characters."""
    return f"{key}={_hydra_value(value)}"


def _hydra_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_escaped_key(str(key))}:{_hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra_value(item) for item in value) + "]"
    # In Hydra's quotes, backslashes are special only before a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value))
    return f"'{quoted}'"


def _escaped_key(key: str) -> str:
    """Escape a key of a mapping. Hydra has no quotes for keys; a key that holds a quote is refused when it is read."""
    return re.sub(r"([\\()\[\]{}:=,'\"\s])", r"\\\1", key)


def _parse(word: str) -> Override:
    name = word.lstrip("+~").split("=", 1)[0]
    if "=" not in word and not word.startswith("~"):
        raise ConfigError(f"'{word}' is not a setting; write key=value, or see --help", key=word)
    marker = _marker(word)
    parsed = _hydra_override(_ascii(word, marker), name)
    if parsed.is_sweep_override():
        raise ConfigError(f"{name}: sweeps are not supported; give one value", key=name)
    mode = Mode(word[: len(word) - len(word.lstrip("+~"))])
    value = None if mode is Mode.DELETE else parsed.value()
    if type(value).__name__ == "ListExtensionOverrideValue":
        raise ConfigError(f"{name}: list extensions are not supported; give the whole list", key=name)
    value = _plain(value, marker)
    if name in _NAMES and isinstance(value, bool | int | float):
        value = word.partition("=")[2]  # 4.10 is not 4.1
    return Override(mode, _original(parsed.key_or_group, marker), value, word)


def _marker(word: str) -> str:
    """Return letters that do not occur in the word."""
    marker = "Uq"
    while marker in word:
        marker += "q"
    return marker


def _ascii(word: str, marker: str) -> str:
    """Replace characters outside of ASCII, which Hydra's grammar refuses without quotes although none of them has a
    meaning in it, with names that `_original` turns back."""
    return "".join(each if each.isascii() else f"{marker}{ord(each):x}z" for each in word)


def _original(text: str, marker: str) -> str:
    return re.sub(f"{marker}([0-9a-f]+)z", lambda found: chr(int(found[1], 16)), text)


def _hydra_override(word: str, name: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"{name}: the value cannot be read; put a value with one of ,={{}}[]()'\"#&~;<>!^` in quotes:"
            f" \"{name}='value'\"",
            key=name,
        ) from error


def _plain(value: Any, marker: str) -> Any:
    """Hydra's parsed value as plain data, without quotes and with the characters that `_ascii` took."""
    if isinstance(value, dict):
        return {str(_plain(key, marker)): _plain(item, marker) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, marker) for item in value]
    if type(value).__name__ == "QuotedString":
        value = value.text
    return _original(value, marker) if isinstance(value, str) else value


def apply_overrides(merged: Merged, overrides: Iterable[Override], known: Iterable[str]) -> None:
    """Change ``merged`` in place. ``k=v`` needs a key that exists, is ``known``, or is in a block that is checked
    later: a server's, a sandbox provider's, ``serve`` or ``observability``. ``+k=v`` and ``++k=v`` may add a key;
    ``~k`` needs a key that exists."""
    known_names = set(known)
    for override in overrides:
        if override.mode is Mode.DELETE:
            _delete(merged, override)
        else:
            if override.mode is Mode.CHANGE:
                _require_known(merged, override, known_names)
            _set(merged, override)


def _require_known(merged: Merged, override: Override, known: set[str]) -> None:
    path = override.path
    if (len(path) == 1 and path[0] in known) or (len(path) > 1 and path[0] in (SERVE, OBSERVABILITY)):
        return
    with suppress(KeyError):
        lookup(merged.values, path)
        return
    block = path[:2] if path[0] == "sandbox" else path[:3]
    if len(path) > len(block) and _is_mapping(merged, block):
        return
    parents = next(path[:length] for length in reversed(range(len(path))) if _is_mapping(merged, path[:length]))
    choices = set(lookup(merged.values, parents) if parents else merged.values)
    wrong = path[len(parents)]
    if len(path) == 1:
        choices |= known
    raise ConfigError(
        f"{COMMAND_LINE}: unknown key '{override.key}'{nearest(wrong, choices)}; to add a key that no file has,"
        f" write '+{override.key}=…'",
        key=override.key,
    )


def _is_mapping(merged: Merged, path: Sequence[str]) -> bool:
    if not path:
        return True
    try:
        return isinstance(lookup(merged.values, path), dict)
    except KeyError:
        return False


def _set(merged: Merged, override: Override) -> None:
    *parents, last = override.path
    if not parents:
        merged.check_replacement(last, override.value, COMMAND_LINE)
    node: Any = merged.values
    for index, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_position(node, part, override)]
            continue
        if not isinstance(node.get(part), dict | list):
            node[part] = {}
            merged.sources[tuple(parents[: index + 1])] = COMMAND_LINE
        node = node[part]
    if isinstance(node, list):
        node[_position(node, last, override)] = override.value
    elif isinstance(override.value, dict) and isinstance(node.get(last), dict) and override.mode is not Mode.CHANGE:
        nested: dict[str, Any] = override.value
        for part in reversed(override.path):
            nested = {part: nested}
        merged.add(Layer(COMMAND_LINE, nested))
    else:
        node[last] = override.value
    merged.sources[override.path] = COMMAND_LINE


def _position(node: list[Any], part: str, override: Override) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(
            f"{COMMAND_LINE}: '{override.key}': '{part}' is not an index of a list of {len(node)}", key=override.key
        )
    return int(part)


def _delete(merged: Merged, override: Override) -> None:
    *parents, last = override.path
    try:
        node = lookup(merged.values, parents)
        del node[last]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{COMMAND_LINE}: '~{override.key}': there is no such key{nearest(override.key, merged.values)}",
            key=override.key,
        ) from None
