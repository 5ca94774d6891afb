"""Configuration files: the folders that are searched, the files that a file includes, and those that groups choose.

The folders are those of ``NEMO_GYM_EXTRA_ROOTS`` (separated like ``PATH``), the working directory and the
installation. The first that has a plugin or file wins, so a user's folder can add to or replace what ships. Groups
choose one file each: ``agent=claude_code environment=swe_bench sandbox=docker model=openai run=nightly``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym._util.suggest import first_line, nearest
from nemo_gym.config.keys import CONFIG_PATHS, GROUPS, SERVER_TYPES
from nemo_gym.config.layers import Layer
from nemo_gym.contract.errors import ConfigError

EXTRA_ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"


def plugin_roots() -> list[Path]:
    """The roots in order of precedence, without duplicates."""
    extra = [Path(part).expanduser() for part in os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep) if part]
    return list(dict.fromkeys(path.resolve() for path in (*extra, Path.cwd(), INSTALL_ROOT)))


def missing_roots() -> list[str]:
    """The folders of `EXTRA_ROOTS_VARIABLE` that do not exist, as they are written there."""
    parts = os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep)
    return [part for part in parts if part and not Path(part).expanduser().is_dir()]


def extra_roots_hint() -> str:
    """`EXTRA_ROOTS_VARIABLE`, and which of its folders do not exist."""
    missing = missing_roots()
    return EXTRA_ROOTS_VARIABLE + (f" (of those, {', '.join(missing)} does not exist)" if missing else "")


def find_file(relative: str | Path, roots: Iterable[Path], beside: Path | None = None) -> Path | None:
    """The first existing file of that path under the roots (absolute paths as they are), or beside another file."""
    path = Path(relative).expanduser()
    if path.is_absolute():
        return path if path.is_file() else None
    candidates = [root / path for root in roots]
    if beside is not None:
        candidates.append(beside / path)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def find_plugin(server_type: str, implementation: str, roots: Iterable[Path] | None = None) -> Path:
    """The folder ``<root>/<server type>/<implementation>``; raises `ConfigError` with the nearest existing name."""
    searched = list(roots) if roots is not None else plugin_roots()
    for root in searched:
        folder = root / server_type / implementation
        if folder.is_dir():
            return folder
    known = sorted({each.name for root in searched for each in (root / server_type).glob("[!._]*") if each.is_dir()})
    raise ConfigError(
        f"there is no implementation '{implementation}' of {server_type}{nearest(implementation, known)}; there are:"
        f" {', '.join(known) or 'none'}. Other folders are found through {extra_roots_hint()}",
        key=f"{server_type}.{implementation}",
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one file's mapping without interpolation. Duplicate keys and bad YAML raise `ConfigError` with the line."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        loaded = OmegaConf.load(path)
    except RecursionError as error:
        raise ConfigError(
            f"{path}: is nested too deeply, or one of its anchors holds itself", file=str(path)
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not valid YAML'}", file=str(path)) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}", file=str(path)) from error
    values = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(loaded, DictConfig) or _is_text(path, values):
        raise ConfigError(
            f"{path}: the file must hold a mapping of keys to values ('key: value'), not a list, a text or a number",
            file=str(path),
        )
    if values is None:
        return {}
    assert isinstance(values, dict)
    # Deeper keys may be anything YAML allows (logit biases by token id): they are the plugin's business.
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}: key {key!r} is a {type(key).__name__}; write it in quotes", file=str(path), key=str(key)
            )
    return values  # type: ignore[return-value]


def _is_text(path: Path, values: Any) -> bool:
    """Whether a file holds one text, as it does when the colon after its only key is forgotten. OmegaConf reads it as
    a key without a value; the text may be a secret."""
    import yaml

    if not isinstance(values, dict) or [*values.values()] != [None]:
        return False
    return isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), str)


def include_paths(value: Any, source: str) -> list[str]:
    """The value of ``config_paths`` as a list of paths, with environment variables resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"{source}: {CONFIG_PATHS} must be a list of file paths, got {value!r};"
            f' write "+{CONFIG_PATHS}=[first.yaml,second.yaml]"',
            key=CONFIG_PATHS,
        )
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(value), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {CONFIG_PATHS}: {first_line(error)}", key=CONFIG_PATHS) from error
    assert isinstance(resolved, list)
    return [str(item) for item in resolved]


def load_files(paths: Iterable[str], roots: Sequence[Path], source: str) -> list[Layer]:
    """Return the layers of the files and everything they include, lowest precedence first: includes come before the
    file that includes them, in their order. A file that is included twice is loaded once, at its first place."""
    layers: list[Layer] = []
    done: set[Path] = set()
    for path in paths:
        _load_file(path, roots, source, None, (), done, layers)
    return layers


def _load_file(
    name: str,
    roots: Sequence[Path],
    source: str,
    beside: Path | None,
    chain: tuple[Path, ...],
    done: set[Path],
    layers: list[Layer],
) -> None:
    path = find_file(name, roots, beside)
    if path is None:
        raise ConfigError(_not_found(name, roots, source), key=CONFIG_PATHS, file=name)
    path = path.resolve()
    if path in chain:
        cycle = " → ".join(str(item) for item in (*chain[chain.index(path) :], path))
        raise ConfigError(
            f"{CONFIG_PATHS} include each other in a circle: {cycle}; remove one of them", file=str(path)
        )
    if path in done:
        return
    values = read_yaml(path)
    for included in include_paths(values.pop(CONFIG_PATHS, None), str(path)):
        _load_file(included, roots, str(path), path.parent, (*chain, path), done, layers)
    done.add(path)
    layers.append(Layer(str(path), values))


def _not_found(name: str, roots: Sequence[Path], source: str) -> str:
    folders = [root / Path(name).parent for root in roots]
    siblings = [entry.name for folder in folders if folder.is_dir() for entry in folder.glob("*.y*ml")]
    where = ", ".join(str(root) for root in roots)
    return f"{source}: no file '{name}'{nearest(Path(name).name, siblings)}; searched {where}"


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
