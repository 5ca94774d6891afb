"""Choosing one file per group: ``agent=claude_code environment=swe_bench sandbox=docker model=openai run=nightly``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.config.files import load_files
from nemo_gym.config.keys import GROUPS, SERVER_TYPES
from nemo_gym.config.layers import Layer
from nemo_gym.config.roots import extra_roots_hint
from nemo_gym.contract.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """``<group>=<value>`` and its source."""

    group: str
    value: str
    source: str


@dataclass(frozen=True)
class LoadedGroup:
    """A group's layers, lowest precedence first, and the instances that they define by server type."""

    choice: Choice
    layers: list[Layer] = field(default_factory=list)

    def instances(self, server_type: str) -> list[str]:
        names = [
            name
            for layer in self.layers
            for name, value in layer.values.items()
            if isinstance(value, Mapping) and isinstance(value.get(server_type), Mapping)
        ]
        return list(dict.fromkeys(names))


def take_choices(values: dict[str, Any], source: str) -> dict[str, Choice]:
    """Remove the group choices of one layer's top level and return them. A mapping under a group's name (the
    ``sandbox`` block) is no choice."""
    taken = {}
    for group in GROUPS:
        value = values.get(group)
        require_name(group, value, source)
        if isinstance(value, str) and value != "???":
            taken[group] = Choice(group, value, source)
            del values[group]
    return taken


def require_name(group: str, value: Any, source: str) -> None:
    """Raise `ConfigError` if ``value`` is neither a group's name nor a block under the group's key."""
    if value is not None and not isinstance(value, str | Mapping):
        raise ConfigError(f"{source}: {group}= takes one name, got {value!r}", key=group)


def find_group_file(choice: Choice, roots: Sequence[Path]) -> Path | None:
    """Find ``configs/<group>/<name>.yaml`` under any root, else the plugin's ``configs/<name>.yaml``, or a path."""
    if choice.value.endswith((".yaml", ".yml")):
        path = Path(choice.value).expanduser()
        candidates = [path] if path.is_absolute() else [root / path for root in roots]
    else:
        candidates = [root / "configs" / choice.group / f"{choice.value}.yaml" for root in roots]
        if server_type := GROUPS[choice.group]:
            candidates += [root / server_type / choice.value / "configs" / f"{choice.value}.yaml" for root in roots]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def load_group(choice: Choice, roots: Sequence[Path]) -> LoadedGroup | None:
    """The group's layers, or ``None`` when no file has that name."""
    path = find_group_file(choice, roots)
    if path is None:
        return None
    return LoadedGroup(choice, load_files([str(path)], roots, choice.source))


def available(group: str, roots: Iterable[Path]) -> list[str]:
    """Return the names that ``<group>=`` accepts."""
    names: set[str] = set()
    for root in roots:
        names |= {path.stem for path in (root / "configs" / group).glob("*.yaml")}
        if server_type := GROUPS[group]:
            names |= {
                path.stem for path in (root / server_type).glob("*/configs/*.yaml") if path.stem == path.parts[-3]
            }
    return sorted(names)


def unknown_choice(choice: Choice, roots: Sequence[Path]) -> ConfigError:
    """The error for a name that no file has."""
    names = available(choice.group, roots)
    server_type = GROUPS[choice.group]
    places = f"configs/{choice.group}/{choice.value}.yaml"
    if server_type:
        places += f" or {server_type}/{choice.value}/configs/{choice.value}.yaml"
    return ConfigError(
        f"{choice.source}: unknown {choice.group} '{choice.value}'{nearest(choice.value, names)};"
        f" there are: {', '.join(names) or 'none'}. To add one, write {places} under the working directory or a folder"
        f" of {extra_roots_hint()}",
        key=choice.group,
    )


def choose_instance(group: str, chosen: LoadedGroup | None, servers: Mapping[str, str]) -> str | None:
    """Return a group's instance. ``servers`` maps instance names of the group's type to implementations.

    If a chosen file defines several, take the one whose name, or else implementation, is the choice. Without a choice,
    take ``policy_model`` for models, else the only instance of the type, else return ``None``.
    """
    if chosen is None:
        if group == "model" and "policy_model" in servers:
            return "policy_model"
        return next(iter(servers)) if len(servers) == 1 else None
    server_type = GROUPS[group]
    assert server_type in SERVER_TYPES
    defined = chosen.instances(server_type)
    names = [name for name in defined if name in servers]
    if defined and not names:
        return None  # deleted again by ``~name``
    wanted = Path(chosen.choice.value).stem
    if len(names) > 1:
        names = (
            [name for name in names if name == wanted] or [name for name in names if servers[name] == wanted] or names
        )
    if len(names) == 1:
        return names[0]
    what = f"several ({', '.join(names)})" if names else "none"
    raise ConfigError(
        f"{chosen.layers[-1].source}: {group}={chosen.choice.value} must define one instance of {server_type}, found"
        f" {what}; name one of them '{wanted}', or use +config_paths=[…]",
        key=group,
    )
