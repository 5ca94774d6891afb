"""``ng_plan_placement``: which agent server uses which engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError
from nemo_gym.placement import Node, Placement, nodes_of, plan_placement

NAME = "ng_plan_placement"
KEYS = ("nodes", "tp_size", "agent_port", "engine_port")


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
