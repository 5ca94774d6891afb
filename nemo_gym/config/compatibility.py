"""Whether the chosen agent, environment, sandbox and topology fit together, before anything starts.

A plugin declares what it can do, in its block or as class attributes of its server:

- an environment: ``topologies``, the first being its default unless its block's ``topology`` names another;
  ``requires``, sandbox capabilities its tasks need;
- an agent: ``topologies`` it can be bound in; ``box_topologies``, those in which it makes a box of its own;
- both: ``sandbox_provider``, the block that names their sandbox; ``tool_access``, how a harness outside of the world
  reaches it in topology B: ``mcp``, ``http`` (NeMo Gym's tool routes) or ``exec`` (commands in the world's box).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_gym._util.suggest import nearest
from nemo_gym.config.composition import SANDBOX, Composition
from nemo_gym.config.keys import AGENT_TYPE, COMPOSITION, DEFAULT_MODEL, MODEL_TYPE, TOPOLOGY
from nemo_gym.config.plugin_keys import class_constant
from nemo_gym.config.servers import ServerBlock, references
from nemo_gym.config.strict import refuse
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Topology

UNSUPPORTED_PAIRING = "allow_unsupported_pairing"
WORLD_TOPOLOGIES = (Topology.AGENT_IN_ENV, Topology.WHOLE_INTERACTION)
"""Topologies in which the agent side needs a sandbox."""


@dataclass(frozen=True)
class Side:
    """What one server declares. ``topologies`` is ``None`` if it declares none (then every topology is allowed)."""

    instance: str
    topologies: tuple[Topology, ...] | None = None
    requires: tuple[str, ...] = ()
    box_topologies: tuple[Topology, ...] = WORLD_TOPOLOGIES
    """The topologies in which an agent makes a box."""
    tool_access: tuple[str, ...] | None = None
    """The ways to reach the world from outside of it; ``None`` if none are declared (then every way is allowed)."""


def check_composition(
    agent: Side, environment: Side, *, sandbox: str | None, topology: Topology | None = None
) -> Topology | None:
    """Return the topology that this pair runs in; ``None`` if neither declares any.

    ``sandbox`` is the provider's name, ``None`` without a sandbox. Raises `ConfigError` with the reason and the
    choices that would work.
    """
    offered = environment.topologies
    served = agent.topologies
    working = _common(offered, served)
    unreachable = _unreachable_reason(agent, environment)
    if unreachable and working is not None and Topology.ENV_SANDBOXED in working:
        working = tuple(choice for choice in working if choice is not Topology.ENV_SANDBOXED)
        if topology is Topology.ENV_SANDBOXED or not working:
            raise ConfigError(f"{unreachable}; {_alternatives(working)}", key="topology")
    if topology is not None:
        if offered is not None and topology not in offered:
            raise ConfigError(
                f"environment '{environment.instance}' does not support topology '{topology}';"
                f" {_alternatives(working)}",
                key="topology",
            )
        if served is not None and topology not in served:
            raise ConfigError(
                f"agent '{agent.instance}' cannot run in topology '{topology}'; {_alternatives(working)}",
                key="topology",
            )
    if working is not None and not working:
        raise ConfigError(
            f"agent '{agent.instance}' runs in {_listed(served)}, environment '{environment.instance}' supports"
            f" {_listed(offered)}: they have no topology in common; choose another agent or environment",
            key="agent",
        )
    selected = topology or (working[0] if working else None)
    if selected in agent.box_topologies and sandbox is None:
        boxless = [choice for choice in working or () if choice not in agent.box_topologies]
        choose = f", or choose another of {_listed(boxless)} with topology=" if boxless else ""
        raise ConfigError(
            f"agent '{agent.instance}' in topology '{selected}' needs a sandbox: add sandbox=local or"
            f" sandbox=docker{choose}",
            key="sandbox",
        )
    return selected


def _unreachable_reason(agent: Side, environment: Side) -> str | None:
    """Return why the agent cannot act on the environment's world from outside of it, or ``None`` if it can."""
    if agent.tool_access is None or environment.tool_access is None:
        return None
    if set(agent.tool_access) & set(environment.tool_access):
        return None
    return (
        f"in topology '{Topology.ENV_SANDBOXED}', environment '{environment.instance}' is reached by"
        f" {' or '.join(environment.tool_access) or 'nothing'}, and agent '{agent.instance}' can only use"
        f" {' or '.join(agent.tool_access) or 'nothing'}"
    )


def _common(offered: Sequence[Topology] | None, served: Sequence[Topology] | None) -> tuple[Topology, ...] | None:
    """Return the topologies that both support, in the environment's order of preference."""
    if offered is None:
        return tuple(served) if served is not None else None
    return tuple(choice for choice in offered if served is None or choice in served)


def _alternatives(working: Sequence[Topology] | None) -> str:
    if not working:
        return "no topology works for this pair; choose another agent or environment"
    return "use " + " or ".join(f"topology={choice}" for choice in working)


def _listed(topologies: Iterable[Topology] | None) -> str:
    return ", ".join(topologies or ()) or "any topology"


def side_of(server: ServerBlock, roots: Sequence[Path]) -> Side:
    """What a server's block and source declare."""
    boxes = _topologies(server, "box_topologies", roots)
    access = _declared(server, "tool_access", roots)
    topologies = _topologies(server, "topologies", roots)
    default = server.values.get(TOPOLOGY)
    if topologies is not None and isinstance(default, str):
        topologies = tuple(sorted(topologies, key=lambda choice: choice != default))
    return Side(
        server.instance,
        topologies=topologies,
        requires=tuple(_words(server, "requires") or ()),
        box_topologies=WORLD_TOPOLOGIES if boxes is None else boxes,
        tool_access=None if access is None else tuple(access),
    )


def _declared(server: ServerBlock, name: str, roots: Sequence[Path]) -> list[str] | None:
    """Return the list that a server's block declares, else the one that its class declares."""
    declared = _words(server, name)
    return class_constant(server, name, roots) if declared is None else declared


def _words(server: ServerBlock, key: str) -> list[str] | None:
    """Return the list of names under a block's key, which may be a single name; ``None`` without the key. Raises
    `ConfigError`."""
    given = server.values.get(key)
    if given is None:
        return None
    words = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(word, str) for word in words):
        raise server.wrong(key, f" must be a name or a list of names, got {given!r}")
    return [*words]


def _topologies(server: ServerBlock, name: str, roots: Sequence[Path]) -> tuple[Topology, ...] | None:
    words = _declared(server, name, roots)
    if words is None:
        return None
    try:
        return tuple(Topology.parse(word) for word in words)
    except ConfigError as error:
        raise ConfigError(f"{server.where}.{name}: {error.message}", key=name) from error


def sandbox_provider(composition: Composition, server: ServerBlock) -> str | None:
    """Return the name of the provider that a server's ``sandbox_provider`` selects; ``None`` without one. Raises
    `ConfigError` for a block that does not exist, names no single provider, or names one that is not installed."""
    from nemo_gym.config.sandbox_blocks import list_providers, resolve_provider_config

    named = server.values.get("sandbox_provider")
    if named is None:
        return None
    where = f"{server.where}.sandbox_provider"
    if named == SANDBOX and named not in composition.values:
        if server.server_type == AGENT_TYPE:
            return None  # whether that is right depends on the topology
        problem = ConfigError(
            f"environment '{server.instance}' needs a sandbox: add sandbox=local or sandbox=docker", key="sandbox"
        )
        refuse(problem, server.source, composition.warnings)
        return None
    try:
        (name,) = resolve_provider_config(named, composition.values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", key="sandbox_provider") from error
    providers = list_providers()
    if name not in providers:
        raise ConfigError(
            f"{where}: unknown sandbox provider '{name}'{nearest(name, providers)}; installed:"
            f" {', '.join(providers) or 'none'}",
            key="sandbox",
        )
    return name


def _check_pairing(composition: Composition, agent: ServerBlock, environment: ServerBlock) -> None:
    """Check an environment's ``allowed_agents`` (instances or implementations) and ``allowed_model_types``
    (implementations). This suite's gateway is always allowed, because it serves what other models do."""
    if composition.values.get(UNSUPPORTED_PAIRING):
        return
    models = [composition.servers[ref.name] for ref in references(agent.values) if len(ref.path) == 1]
    checks = [("allowed_agents", "agent", agent)] + [
        ("allowed_model_types", "model", model)
        for model in models
        if model.server_type == MODEL_TYPE and model.implementation != DEFAULT_MODEL
    ]
    for key, kind, server in checks:
        allowed = environment.values.get(key)
        if allowed is None:
            continue
        if isinstance(allowed, str) or not isinstance(allowed, Sequence):
            raise ConfigError(f"{environment.where}.{key} must be a list of names, got {allowed!r}", key=key)
        if not {server.instance, server.implementation} & {str(name) for name in allowed}:
            raise ConfigError(
                f"environment '{environment.instance}' is made for {kind}s {', '.join(map(str, allowed)) or 'none'}"
                f" ({environment.where}.{key}), not for '{server.instance}'; choose one of them, or add"
                f" {UNSUPPORTED_PAIRING}=true",
                key=".".join((*environment.path, key)),
            )


def check(composition: Composition) -> Topology | None:
    """Check every agent of the composition with the environment it refers to.

    Returns the chosen agent's topology. If the environment declares topologies, the result is also stored in the
    composition's values, so that every attempt runs in it.
    """
    requested = composition.chosen.get("topology")
    topology = Topology(requested) if requested else None
    selected: Topology | None = None
    for server in composition.servers.values():
        provider = sandbox_provider(composition, server)
        if server.server_type != AGENT_TYPE:
            continue
        for reference in references(server.values):
            if reference.path != ("resources_server",):
                continue
            environment = composition.servers[reference.name]
            _check_pairing(composition, server, environment)
            offered = side_of(environment, composition.roots)
            result = check_composition(
                side_of(server, composition.roots),
                offered,
                sandbox=provider or sandbox_provider(composition, environment),
                topology=topology if server.instance == composition.chosen.get("agent", server.instance) else None,
            )
            if server.instance == composition.chosen.get("agent"):
                selected = result
                if result is not None and offered.topologies is not None:
                    composition.values[COMPOSITION][TOPOLOGY] = str(result)
    return selected
