"""Compose the command line's settings into one validated configuration. Starts no server and imports no plugin."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nemo_gym._util.files import INSTALL_ROOT, cache_root
from nemo_gym.config import compatibility
from nemo_gym.config import servers as server_blocks
from nemo_gym.config.composition import SANDBOX, Composition
from nemo_gym.config.files import (
    Choice,
    LoadedGroup,
    choose_instance,
    include_paths,
    load_files,
    load_group,
    plugin_roots,
    read_yaml,
    require_name,
    take_choices,
    unknown_choice,
)
from nemo_gym.config.keys import (
    AGENT_TYPE,
    AGENT_WIDE_KEYS,
    COMPOSITION,
    CONFIG_PATHS,
    DEFAULT_MODEL,
    ENVIRONMENT_TYPE,
    GROUPS,
    HOSTS,
    MODEL_TYPE,
    TOPOLOGY,
)
from nemo_gym.config.layers import MISSING, Layer, Merged, apply_directives, leaves, lookup, resolve
from nemo_gym.config.overrides import COMMAND_LINE, Mode, Override, apply_overrides, parse_overrides
from nemo_gym.config.servers import ServerBlock
from nemo_gym.config.strict import check_top_level, known_keys, take_environment_servers
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Topology


def compose(words: Sequence[str], *, roots: Sequence[Path] | None = None) -> Composition:
    """Compose ``words`` (``key=value`` in Hydra's grammar) with the files they name.

    Precedence, lowest first: model, sandbox, environment, agent and run groups; ``config_paths`` in order, each file
    over its includes; ``env.yaml``; the command line. Raises `ConfigError` with the key, the file and the fix.
    """
    search = list(roots) if roots is not None else plugin_roots()
    overrides = parse_overrides(words)
    command_line, overrides = _split_choices(overrides)
    env_layer = _env_yaml()
    env_values = dict(env_layer.values)
    paths, overrides = _config_paths(overrides, env_values, env_layer.source)
    file_layers = load_files(paths, search, COMMAND_LINE)

    choices: dict[str, Choice] = {}
    for layer in file_layers:
        choices |= take_choices(layer.values, layer.source)  # type: ignore[arg-type]
    choices |= take_choices(env_values, env_layer.source) | command_line
    groups, instance_choices = _load_groups(choices, search)
    named = frozenset({*groups, *instance_choices})
    if "model" not in choices and _needs_model([*_group_layers(groups), *file_layers]):
        default = load_group(Choice("model", DEFAULT_MODEL, "the default"), search)
        groups |= {"model": default} if default is not None else {}

    merged = Merged()
    for layer in _group_layers(groups):
        merged.add(layer)
    for layer in file_layers:
        merged.add(layer)
    merged.add(Layer(env_layer.source, env_values))
    known = known_keys()
    free = {env_layer.source, COMMAND_LINE}
    apply_overrides(merged, overrides, known)
    if COMPOSITION in merged.values:
        source = merged.source_of((COMPOSITION,))
        raise ConfigError(f"{source}: '{COMPOSITION}' is set by the composition itself; remove it", key=COMPOSITION)

    apply_directives(merged)
    take_environment_servers(merged)
    warnings: list[str] = []
    blocks = server_blocks.find_servers(merged)
    almost = server_blocks.almost_servers(merged, blocks)
    if almost and merged.values.get("error_on_almost_servers", True):
        problems = "; ".join(problem for found in almost.values() for problem in found)
        raise ConfigError(f"{problems} (or error_on_almost_servers=false)", keys=list(almost))
    chosen = _chosen(merged, groups, instance_choices, blocks, search)
    merged.values[COMPOSITION] = dict(chosen)
    if _needs_broker(merged, chosen, blocks, search):
        merged.values.update(broker_backend=merged.values[SANDBOX], **_BROKER)
        blocks = server_blocks.find_servers(merged)
    _complete_references(merged, chosen, blocks)
    _copy_agent_wide_keys(merged, blocks)
    if merged.values.get("error_on_unknown_keys", True):
        check_top_level(merged, [*blocks, *almost], known, free, warnings)
    unresolved = copy.deepcopy(merged.values)
    values = resolve(merged)
    merged.values = values
    blocks = server_blocks.find_servers(merged)
    server_blocks.check_references(blocks, warnings)
    files = tuple(Path(layer.source) for layer in (*_group_layers(groups), *file_layers))
    return Composition(values, unresolved, blocks, chosen, tuple(search), warnings, files, named)


_BROKER: Final = {
    SANDBOX: {"remote": {"server": {"type": ENVIRONMENT_TYPE, "name": "sandbox_broker"}}},
    "sandbox_broker": {
        ENVIRONMENT_TYPE: {
            SANDBOX: {
                "entrypoint": "app.py",
                "sandbox_provider": "broker_backend",
                "on_stop": "destroy",
                "agent_packages": True,
            }
        }
    },
}
"""What ``sandbox=broker_<backend>`` adds to a composition."""


def _needs_broker(
    merged: Merged, chosen: Mapping[str, str], blocks: Mapping[str, ServerBlock], roots: Sequence[Path]
) -> bool:
    """Whether the environment must lend its box to an agent outside of it (topology B) and the chosen sandbox cannot
    lend boxes. If so, this run puts a broker of its own in front of the sandbox."""
    agent, environment = blocks.get(chosen.get("agent", "")), blocks.get(chosen.get("environment", ""))
    block = merged.values.get(SANDBOX)
    if agent is None or environment is None or HOSTS in merged.values:
        return False
    if not isinstance(block, Mapping) or "remote" in block or environment.values.get("sandbox_provider") != SANDBOX:
        return False
    if {"broker_backend", "sandbox_broker"} & set(merged.values):
        return False
    requested = chosen.get(TOPOLOGY)
    try:
        offered = compatibility.side_of(environment, roots)
        topology = compatibility.check_composition(
            compatibility.side_of(agent, roots),
            offered,
            sandbox=SANDBOX,
            topology=Topology(requested) if requested else None,
        )
    except ConfigError:
        return False  # refused later, with its reason
    return topology is Topology.ENV_SANDBOXED and "exec" in (offered.tool_access or ())


def _needs_model(layers: Sequence[Layer]) -> bool:
    """Whether servers refer to the chosen model, and no file defines a model server."""
    values = [value for layer in layers for value in layer.values.values()]
    defined = any(isinstance(value, Mapping) and MODEL_TYPE in value for value in values)
    return not defined and any(f"${{{COMPOSITION}.model}}" in str(value) for value in values)


def _split_choices(overrides: list[Override]) -> tuple[dict[str, Choice], list[Override]]:
    choices, remaining = {}, []
    for override in overrides:
        if override.key in GROUPS:
            require_name(override.key, override.value, COMMAND_LINE)
        if override.key in GROUPS and isinstance(override.value, str) and override.mode is not Mode.DELETE:
            if not override.value:
                raise ConfigError(f"{override.key}= needs a name", key=override.key)
            choices[override.key] = Choice(override.key, override.value, COMMAND_LINE)
        else:
            remaining.append(override)
    return choices, remaining


def _env_yaml() -> Layer:
    for folder in (Path.cwd(), INSTALL_ROOT):
        path = folder / "env.yaml"
        if path.exists():
            return Layer(str(path), read_yaml(path))
    return Layer("env.yaml", {})


def _config_paths(
    overrides: list[Override], env_values: dict[str, Any], env_source: str
) -> tuple[list[str], list[Override]]:
    paths = include_paths(env_values.pop(CONFIG_PATHS, None), env_source)
    remaining = []
    for override in overrides:
        if override.key == CONFIG_PATHS and override.mode is not Mode.DELETE:
            given = include_paths(override.value, COMMAND_LINE)
            paths = [*paths, *given] if override.mode is Mode.ADD else given
        else:
            remaining.append(override)
    return paths, remaining


def _load_groups(
    choices: dict[str, Choice], roots: Sequence[Path]
) -> tuple[dict[str, LoadedGroup], dict[str, Choice]]:
    """Return the chosen groups, and the choices without a file (they may name an instance). A run file may make more
    choices; choices outside it win."""
    loaded: dict[str, LoadedGroup] = {}
    unmatched: dict[str, Choice] = {}
    if run := choices.get("run"):
        group = load_group(run, roots)
        if group is None:
            raise unknown_choice(run, roots)
        loaded["run"] = group
        from_run: dict[str, Choice] = {}
        for layer in group.layers:
            from_run |= take_choices(layer.values, layer.source)  # type: ignore[arg-type]
        choices = from_run | choices
    for name, choice in choices.items():
        if name not in loaded:
            if (group := load_group(choice, roots)) is not None:
                loaded[name] = group
            else:
                unmatched[name] = choice
    return loaded, unmatched


def _group_layers(groups: Mapping[str, LoadedGroup]) -> list[Layer]:
    """Return all group layers, lowest precedence first. A chosen agent replaces an environment's own agents."""
    layers = []
    for name in GROUPS:
        group = groups.get(name)
        if group is None:
            continue
        replaced = set()
        if name == "environment" and "agent" in groups:
            replaced = set(group.instances(AGENT_TYPE)) - set(groups["agent"].instances(AGENT_TYPE))
        for layer in group.layers:
            remaining = {key: value for key, value in layer.values.items() if key not in replaced}
            layers.append(Layer(layer.source, remaining))
    return layers


def _chosen(
    merged: Merged,
    groups: Mapping[str, LoadedGroup],
    unmatched: Mapping[str, Choice],
    blocks: Mapping[str, ServerBlock],
    roots: Sequence[Path],
) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for group, server_type in GROUPS.items():
        if server_type is None:
            if group in unmatched:
                raise unknown_choice(unmatched[group], roots)
            continue
        candidates = {name: block.implementation for name, block in blocks.items() if block.server_type == server_type}
        if choice := unmatched.get(group):
            # NeMo Gym's ``agent=<instance>``: the instance is defined in one of the given files.
            if choice.value not in candidates:
                raise unknown_choice(choice, roots)
            chosen[group] = choice.value
            if group == "agent":
                merged.values.setdefault("agent_name", choice.value)
        elif (instance := choose_instance(group, groups.get(group), candidates)) is not None:
            chosen[group] = instance
    if isinstance(merged.values.get("sandbox"), Mapping):
        chosen["sandbox"] = "sandbox"
    topology = merged.values.pop(TOPOLOGY, None)
    if topology is not None:
        chosen[TOPOLOGY] = str(Topology.parse(str(topology)))
    return chosen


def _complete_references(merged: Merged, chosen: Mapping[str, str], blocks: Mapping[str, ServerBlock]) -> None:
    """Fill the unset names (``name: ???``) in references of the chosen servers with the composition's choice."""
    types = {server_type: group for group, server_type in GROUPS.items() if server_type}
    for name in chosen.values():
        if name not in blocks:
            continue
        values = lookup(merged.values, blocks[name].path)
        for path, value in leaves(values):
            if path[-1] == "name" and value == MISSING:
                reference = lookup(values, path[:-1])
                group = types.get(reference.get("type"), "")
                if group in chosen:
                    reference["name"] = chosen[group]


def _copy_agent_wide_keys(merged: Merged, blocks: Mapping[str, ServerBlock]) -> None:
    """Copy the top-level keys that hold for all agents into the agents' blocks that do not set them."""
    shared = {key: merged.values[key] for key in AGENT_WIDE_KEYS if merged.values.get(key) is not None}
    for block in blocks.values() if shared else ():
        if block.server_type == AGENT_TYPE:
            for key, value in shared.items():
                lookup(merged.values, block.path).setdefault(key, value)


def run_directory_root() -> Path:
    """Where run directories are made by default: ``$NEMO_GYM_CACHE_DIR/runs`` or ``~/.cache/nemo-gym/runs``."""
    return cache_root() / "runs"
