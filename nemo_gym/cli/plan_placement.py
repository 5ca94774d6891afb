"""``ng_plan_placement``: which agent server uses which engines, on a cluster of nodes with and without GPUs.

Every node has one agent server, and a node with GPUs has ``gpus / tp_size`` engines. These are registered with the
agent server of their own node, so that its calls stay on the node. Agent servers of nodes without GPUs share all
engines evenly: the numbers of engines per agent server, and of these agent servers per engine, differ by at most 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

NAME = "ng_plan_placement"
KEYS = ("nodes", "tp_size", "agent_port", "engine_port")
AGENT_PORT = 8006
ENGINE_PORT = 8100
MAX_PORT = 65535


def main() -> None:
    command.run(NAME, plan)


def plan(argv: Sequence[str]) -> int:
    """Print the plan for a list of nodes."""
    parser = command.parser(
        NAME,
        "Plan one agent server per node and gpus / tp_size engines per node with GPUs, and say which engines each"
        " agent server uses: those of its own node, and an even share of all of them where it has none.",
        words="NAME[:GPUS] | nodes=FILE.(yaml|json) | tp_size=N",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    given = command.settings_of((word for word in arguments.settings if "=" in word), KEYS)
    numbers = {key: command.whole_number(key, given[key]) for key in KEYS[1:] if key in given}
    if "tp_size" not in numbers:
        raise ConfigError("tp_size= is missing: the GPUs of one engine (tp_size=1 for one engine per GPU)")
    nodes = _from_file(given["nodes"]) if "nodes" in given else []
    nodes += [_from_word(word) for word in arguments.settings if "=" not in word]
    placement = plan_placement(nodes, **numbers)
    if arguments.json:
        print(json.dumps(placement.as_dict(), indent=2))
    else:
        _print(placement)
    return command.EXIT_OK


def _from_word(word: str) -> Node:
    name, colon, gpus = word.partition(":")
    if not name or (colon and not (gpus.isascii() and gpus.isdigit())):
        raise ConfigError(f"'{word}' is not a node; write NAME or NAME:GPUS, for example gpu-1:8", key="nodes")
    return Node(name, int(gpus or 0))


def _from_file(path: str) -> list[Node]:
    import yaml

    try:
        return nodes_of(yaml.safe_load(Path(path).read_text(encoding="utf-8")))  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"nodes='{path}' cannot be read: {error.strerror}", key="nodes") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"nodes='{path}' is neither YAML nor JSON: {error}", key="nodes") from error


def _print(placement: Placement) -> None:
    command.print_columns(
        ("ENGINE", "URL", "GPUS"),
        [(engine.name, engine.url, ",".join(map(str, engine.gpus))) for engine in placement.engines],
    )
    print()
    command.print_columns(
        ("AGENT SERVER", "URL", "ENGINES"),
        [
            (server.node, server.url, ("own: " if server.local else "shared: ") + ", ".join(server.engines))
            for server in placement.agent_servers
        ],
    )


# The plan


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, on consecutive GPUs of its node."""

    name: str
    node: str
    url: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgentServer:
    """One agent server, and the engines to register with it."""

    node: str
    url: str
    local: bool
    """Whether its engines are on its own node."""
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    tp_size: int
    engines: tuple[Engine, ...]
    agent_servers: tuple[AgentServer, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_placement(
    nodes: Sequence[Node], tp_size: int, *, agent_port: int = AGENT_PORT, engine_port: int = ENGINE_PORT
) -> Placement:
    """Return the placement. Raises `ConfigError` naming the node or key that makes it impossible."""
    _check(nodes, tp_size)
    on_node = {
        node.name: [
            Engine(
                name=f"{node.name}/engine-{number}",
                node=node.name,
                url=f"http://{node.name}:{engine_port + number}",
                gpus=tuple(range(number * tp_size, (number + 1) * tp_size)),
            )
            for number in range(node.gpus // tp_size)
        ]
        for node in nodes
    }
    _check_ports(on_node, agent_port, engine_port)
    shared = _shared([node.name for node in nodes if not node.gpus], on_node.values())
    return Placement(
        tp_size=tp_size,
        engines=tuple(engine for engines in on_node.values() for engine in engines),
        agent_servers=tuple(
            AgentServer(
                node=node.name,
                url=f"http://{node.name}:{agent_port}",
                local=node.gpus > 0,
                engines=tuple(engine.name for engine in on_node[node.name]) or tuple(shared[node.name]),
            )
            for node in nodes
        ),
    )


def _shared(agents: Sequence[str], engines: Iterable[Sequence[Engine]]) -> dict[str, list[str]]:
    """Share all engines among ``agents`` in turn, in an order that alternates between the engines' nodes."""
    in_turn = [engine.name for rank in zip_longest(*engines) for engine in rank if engine is not None]
    shared: dict[str, list[str]] = {agent: [] for agent in agents}
    for number in range(max(len(agents), len(in_turn)) if agents else 0):
        shared[agents[number % len(agents)]].append(in_turn[number % len(in_turn)])
    return shared


def _check(nodes: Sequence[Node], tp_size: int) -> None:
    if tp_size < 1:
        raise ConfigError(f"tp_size={tp_size} must be at least 1: it is the GPUs of one engine", key="tp_size")
    if not nodes:
        raise ConfigError("no nodes: name at least one, as NAME:GPUS or in nodes=FILE", key="nodes")
    names: set[str] = set()
    for node in nodes:
        if node.name in names:
            raise ConfigError(f"node '{node.name}' is named twice; a node has one agent server", key="nodes")
        names.add(node.name)
        if node.gpus % tp_size:
            raise ConfigError(
                f"node '{node.name}' has {node.gpus} GPUs, which tp_size={tp_size} does not divide:"
                f" {node.gpus % tp_size} would stay idle. Choose a tp_size that divides them, or give the node"
                f" {node.gpus - node.gpus % tp_size}",
                key="tp_size",
            )
    if not any(node.gpus for node in nodes):
        raise ConfigError("no node has GPUs, so nothing could serve the policy; give one as NAME:GPUS", key="nodes")


def _check_ports(on_node: Mapping[str, Sequence[Engine]], agent_port: int, engine_port: int) -> None:
    """Raise `ConfigError` for ports that do not exist, and for those of engines that are an agent server's as well."""
    for key, first, count in (
        ("agent_port", agent_port, 1),
        ("engine_port", engine_port, max(map(len, on_node.values()))),
    ):
        if not 1 <= first <= MAX_PORT - count + 1:
            last = f", and {count} engines take {first} to {first + count - 1}" if count > 1 else ""
            raise ConfigError(f"{key}={first}: ports are 1 to {MAX_PORT}{last}", key=key)
    for node, engines in on_node.items():
        if engine_port <= agent_port < engine_port + len(engines):
            taken = f"{engine_port} to {engine_port + len(engines) - 1}" if len(engines) > 1 else f"{engine_port}"
            raise ConfigError(
                f"agent_port={agent_port} is also the port of an engine of node '{node}' ({taken}); choose another, or"
                " another engine_port",
                key="agent_port",
            )


def nodes_of(given: object) -> list[Node]:
    """Return the nodes in a file's content: a list of ``{name, gpus}`` or of names, or a mapping of names to GPUs.
    Raises `ConfigError`."""
    if isinstance(given, Mapping):
        given = [{"name": name, "gpus": gpus} for name, gpus in given.items()]
    if not isinstance(given, list):
        raise ConfigError("nodes must be a list of {name, gpus}, or a mapping of names to GPUs", key="nodes")
    return [_node_of(item) for item in given]


def _node_of(item: object) -> Node:
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, Mapping) or not {"name"} <= set(item) <= {"name", "gpus"}:
        raise ConfigError(f"a node is {{name, gpus}} or a name, got {item!r}", key="nodes")
    name, gpus = item["name"], item.get("gpus", 0)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a node's name must be a text that is not empty, got {name!r}", key="nodes")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 0:
        raise ConfigError(f"node '{name}': gpus must be a whole number from 0, got {gpus!r}", key="gpus")
    return Node(name, gpus)
