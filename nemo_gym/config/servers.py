"""Server instances of a composition: finding their blocks, what they refer to, and what is almost a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import SERVER_TYPES
from nemo_gym.config.layers import Merged
from nemo_gym.config.strict import refuse
from nemo_gym.contract.errors import ConfigError


@dataclass(frozen=True)
class ServerBlock:
    """One instance: ``<instance>: {<server_type>: {<implementation>: <values>}}``."""

    instance: str
    server_type: str
    implementation: str
    values: dict[str, Any] = field(repr=False)
    source: str = ""

    @property
    def path(self) -> tuple[str, str, str]:
        return (self.instance, self.server_type, self.implementation)

    @property
    def workers(self) -> int:
        """Processes that serve it on one host."""
        given = self.values.get("num_workers")
        return given if isinstance(given, int) else 1

    @property
    def where(self) -> str:
        """The block's name in messages: file and dotted path."""
        return f"{self.source}: {'.'.join(self.path)}"

    def wrong(self, key: str, problem: str) -> ConfigError:
        """The error for a key of the block; ``problem`` continues the sentence that the key's name begins."""
        return ConfigError(f"{self.where}.{key}{problem}", key=".".join((*self.path, key)))


@dataclass(frozen=True)
class Reference:
    """One ``{type, name}`` in a server's block, at ``path`` within the block."""

    path: tuple[str, ...]
    server_type: str
    name: str


def find_servers(merged: Merged) -> dict[str, ServerBlock]:
    """Every server instance, in the order of the composition. Two definitions under one name raise `ConfigError`."""
    found = {}
    for name, value in merged.values.items():
        if not isinstance(value, Mapping):
            continue
        types = [key for key in value if key in SERVER_TYPES]
        if not types:
            continue
        implementations = [
            (kind, implementation)
            for kind in types
            if isinstance(value[kind], Mapping)
            for implementation, block in value[kind].items()
            if isinstance(block, Mapping)
        ]
        if len(types) > 1 or len(implementations) > 1:
            listed = " and ".join(
                f"{kind}.{implementation} ({merged.source_of((name, kind, implementation))})"
                for kind, implementation in implementations
            )
            raise ConfigError(
                f"instance '{name}' is defined more than once: {listed}; give one of them another name, or delete it"
                f" with ~{name}",
                key=name,
            )
        if len(implementations) == 1 and len(value) == 1:
            kind, implementation = implementations[0]
            source = merged.source_of((name, kind, implementation))
            found[name] = ServerBlock(name, kind, implementation, dict(value[kind][implementation]), source)
    return found


def almost_servers(merged: Merged, servers: Mapping[str, ServerBlock]) -> dict[str, list[str]]:
    """Return the top-level blocks that look like servers but are not, with a sentence for each problem."""
    found: dict[str, list[str]] = {}
    for name, value in merged.values.items():
        if isinstance(value, Mapping) and name not in servers:
            problems = list(_block_problems(name, value))
            if problems:
                source = merged.source_of((name,))
                found[name] = [f"{source}: {problem}" for problem in problems]
    return found


def _block_problems(name: str, value: Mapping[str, Any]) -> Iterator[str]:
    types = [key for key in value if key in SERVER_TYPES]
    for kind in types:
        inner = value[kind]
        if not isinstance(inner, Mapping) or not inner:
            yield f"{name}.{kind} must hold one implementation: {{<folder name>: {{…}}}}"
            continue
        for implementation, block in inner.items():
            if not isinstance(block, Mapping):
                yield f"{name}.{kind}.{implementation} must be a block of keys"
    extra = [key for key in value if key not in SERVER_TYPES]
    if types and extra:
        yield f"{name} holds '{extra[0]}' beside {types[0]}; a server's block holds nothing else"
    if types:
        return
    misspelt = False
    for key, inner in value.items():
        hint = nearest(str(key), SERVER_TYPES)
        if hint and isinstance(inner, Mapping) and any(isinstance(item, Mapping) for item in inner.values()):
            misspelt = True
            yield f"{name}.{key} is not a server type{hint}"
    if misspelt:
        return
    shape = f"write {name}: {{<one of {', '.join(SERVER_TYPES)}>: {{<folder name>: {{…}}}}}}"
    if "entrypoint" in value:
        yield f"{name} has an 'entrypoint' but neither server type nor implementation; {shape}"
    elif any(isinstance(inner, Mapping) and "entrypoint" in inner for inner in value.values()):
        yield f"{name} lacks the server type above its implementation; {shape}"


def references(values: Any, path: tuple[str, ...] = ()) -> Iterator[Reference]:
    """Yield every reference in a block. A reference whose name is unset (``???``) does not count."""
    if isinstance(values, Mapping):
        kind, name = values.get("type"), values.get("name")
        if kind in SERVER_TYPES and isinstance(name, str):
            if name != "???":
                yield Reference(path, str(kind), name)
            return
        for key, value in values.items():
            yield from references(value, (*path, str(key)))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from references(value, (*path, str(index)))


def check_references(servers: Mapping[str, ServerBlock], warnings: list[str]) -> None:
    """Raise `ConfigError` for the first reference to an instance that does not exist or is of another type. NeMo Gym
    checks only the first level of a block, so deeper down its own files get a warning for a missing instance."""
    for server in servers.values():
        for reference in references(server.values):
            key = ".".join(reference.path)
            target = servers.get(reference.name)
            same_type = [name for name, other in servers.items() if other.server_type == reference.server_type]
            choices = f"instances of {reference.server_type}: {', '.join(same_type) or 'none'}"
            if target is None:
                hint = nearest(reference.name, servers)
                problem = server.wrong(key, f": no server instance '{reference.name}'{hint}; {choices}")
                if len(reference.path) == 1:
                    raise problem
                refuse(problem, server.source, warnings)
            elif target.server_type != reference.server_type:
                raise server.wrong(
                    key,
                    f": '{reference.name}' is one of {target.server_type}, not of {reference.server_type}; {choices}",
                )
