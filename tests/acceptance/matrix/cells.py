"""Every agent × environment × sandbox there is, and what composing says about each.

Nothing is listed here: agents, environments and sandboxes are the files of ``configs/``, and what a plugin needs
beside its name is data of its own folder:

- an environment: ``data/example.jsonl``, whose first row is asked, and ``data/scripted_policy.yaml``, which solves it;
- an agent: ``data/scripted_tools.yaml``, how its harness spells what the script says, where it asks a model; and
  ``data/matrix.yaml`` with ``words``, where it wants more on the command line than its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import yaml

from nemo_gym.cli.sandbox_check import check_sandbox
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.files import Choice, choose_instance, find_plugin, load_group
from nemo_gym.config.keys import GROUPS, MODEL_TYPE, TOPOLOGY
from nemo_gym.config.servers import references
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Topology

ROOT = Path(__file__).resolve().parents[3]
MODEL = "scripted"


@dataclass(frozen=True, order=True)
class Cell:
    """One agent in one environment with one sandbox. Without a topology, the one that the suite chooses."""

    agent: str
    environment: str
    sandbox: str
    topology: Topology | None = None

    def __str__(self) -> str:
        return "-".join((self.agent, self.environment, self.sandbox, *([str(self.topology)] if self.topology else [])))

    def words(self, roots: Sequence[Path]) -> list[str]:
        """What is said to ``ng_run`` beside the model, the input and the output."""
        chosen = [f"agent={self.agent}", f"environment={self.environment}", f"sandbox={self.sandbox}"]
        if self.topology is not None:
            chosen.append(f"topology={self.topology}")
        return [*chosen, *_words_of(folder("agent", self.agent, roots))]


@dataclass(frozen=True)
class Verdict:
    """What composing a cell says: the topologies it can run in, or why there is none."""

    cell: Cell
    default: Topology | None = None
    topologies: tuple[Topology, ...] = ()
    """Those that can be chosen, in the order of their letters."""
    reason: str | None = None
    data: tuple[str, ...] = ()
    """The files that the scripted model reads when the cell is run; paths below a plugin root."""

    @property
    def is_refused(self) -> bool:
        return self.reason is not None

    def cells(self) -> list[Cell]:
        """One per topology that works."""
        cell = self.cell
        return [Cell(cell.agent, cell.environment, cell.sandbox, topology) for topology in self.topologies]


def names(group: str, roots: Iterable[Path]) -> list[str]:
    """The files of a group, of every root."""
    return sorted({path.stem for root in roots for path in (root / "configs" / group).glob("*.yaml")})


def all_cells(roots: Sequence[Path] = (ROOT,)) -> Iterator[Cell]:
    for agent, environment, sandbox in product(*(names(g, roots) for g in ("agent", "environment", "sandbox"))):
        yield Cell(agent, environment, sandbox)


def folder(group: str, name: str, roots: Sequence[Path]) -> Path:
    """The plugin that a group's file composes."""
    server_type = GROUPS[group]
    assert server_type is not None
    loaded = load_group(Choice(group, name, "the matrix"), roots)
    assert loaded is not None, f"{group}={name}: there is no such file"
    servers = {
        instance: next(iter(value[server_type]))
        for layer in loaded.layers
        for instance, value in layer.values.items()
        if isinstance(value, Mapping) and server_type in value
    }
    instance = choose_instance(group, loaded, servers)
    assert instance is not None, f"{group}={name} composes no server"
    return find_plugin(server_type, servers[instance], roots)


def rows_of(environment: str, roots: Sequence[Path] = (ROOT,)) -> Path:
    return folder("environment", environment, roots) / "data" / "example.jsonl"


def asks_a_model(composition: Composition) -> bool:
    """Whether the chosen agent has a model server."""
    agent = composition.servers[composition.chosen["agent"]]
    return any(reference.server_type == MODEL_TYPE for reference in references(agent.values))


def composed(cell: Cell, roots: Sequence[Path] = (ROOT,)) -> Composition:
    """What ``ng_run`` would check and start. Raises `ConfigError`."""
    return compose([*cell.words(roots), f"model={MODEL}"], roots=roots)


def checked(composition: Composition) -> Topology | None:
    """Everything that ``ng_run`` checks before a task is touched. Raises `ConfigError`."""
    topology = check_everything(composition)
    check_sandbox(composition, topology)
    return topology


def verdict(cell: Cell, roots: Sequence[Path] = (ROOT,)) -> Verdict:
    """Compose a cell, and check it as it is and in every topology."""
    try:
        composition = composed(cell, roots)
    except ConfigError as error:
        return Verdict(cell, reason=error.message)
    default, reason = None, None
    try:
        default = checked(composition)
    except ConfigError as error:
        reason = error.message
    working = tuple(topology for topology in Topology if topology is default or _works_in(topology, composition))
    return Verdict(cell, default, working, reason, _data(composition))


def _works_in(topology: Topology, composition: Composition) -> bool:
    # As `topology=` on the command line does; the rest of the composition is the same.
    chosen = {**composition.chosen, TOPOLOGY: str(topology)}
    try:
        checked(replace(composition, chosen=chosen))
    except ConfigError:
        return False
    return True


def _data(composition: Composition) -> tuple[str, ...]:
    if not asks_a_model(composition):
        return ()
    model = composition.servers[composition.chosen["model"]].values
    return (str(model["script"]), str(model["tools"]))


def _words_of(plugin: Path) -> list[str]:
    path = plugin / "data" / "matrix.yaml"
    return [str(word) for word in yaml.safe_load(path.read_text())["words"]] if path.is_file() else []
