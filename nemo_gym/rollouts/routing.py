"""Which servers a run's agents need, checked before any task runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.attempt import Route, route_of
from nemo_gym.rollouts.config import RolloutRunConfig
from nemo_gym.rollouts.failures import PeerError
from nemo_gym.rollouts.peers import Peers
from nemo_gym.serving.client import ServerClient


async def checked_route(client: ServerClient, peers: Peers, agent: str, config: RolloutRunConfig) -> Route:
    """The servers of an agent. Raises `ConfigError` when it is not ready, has nobody to judge it, or does not fit the
    run's validation mode."""
    route = route_of(client.global_config_dict, agent)
    try:
        ready = (await peers.get(agent, "/ready")).json()
    except PeerError as error:
        raise ConfigError(f"agent '{agent}' is not ready: {error}", key=agent) from error
    opaque = bool(ready.get("overrides_run")) if isinstance(ready, dict) else False
    if route.environment is None and not opaque:
        raise ConfigError(
            f"agent '{agent}' names no 'resources_server', so nothing could judge its work; name one", key=agent
        )
    if config.validation is not None and route.row_access != "validation":
        raise ConfigError(
            f"validation={config.validation} shows the solution to the agent; '{agent}' is not configured for it"
            " (row_access: validation), use the oracle agent",
            key="validation",
        )
    if config.validation is None and route.row_access == "validation":
        raise ConfigError(
            f"agent '{agent}' only validates environments; run it with oracle=gold or oracle=nothing", key="validation"
        )
    box_needs = None if opaque else await _box_needs(peers, route)
    _check_limits(agent, ready, config, owns_boxes=box_needs is not None)
    return replace(route, opaque_run=opaque, box_needs=box_needs)


def _check_limits(agent: str, ready: Any, config: RolloutRunConfig, *, owns_boxes: bool) -> None:
    """Refuse limits of the run that nobody would keep."""
    kept = set(ready.get("limits") or ()) if isinstance(ready, dict) else set()
    if owns_boxes:
        kept |= {"memory_mib", "cpu"}
    lost = [name for name in config.limits.model_dump(exclude_none=True) if name not in kept]
    if lost:
        able = f"it keeps {', '.join(sorted(kept))}" if kept else "it keeps none of a run's limits"
        raise ConfigError(
            f"{' and '.join(lost)} cannot be kept with agent '{agent}': {able}. Leave the key out, or choose an agent"
            " that works in a box",
            key=lost[0],
        )


async def _box_needs(peers: Peers, route: Route) -> Mapping[str, Any] | None:
    """What the agent needs of boxes, where its environment makes them."""
    if route.environment is None:
        return None
    try:
        facts = (await peers.get(route.environment, "/ready")).json()
        if not isinstance(facts, dict) or not facts.get("owns_boxes"):
            return None
        told = await peers.get(route.agent, "/box_needs")
    except PeerError as error:
        raise ConfigError(
            f"'{error.server}' does not say how boxes are to be made: {error}", key=error.server
        ) from error
    try:
        needs = told.json()
    except orjson.JSONDecodeError:
        needs = None
    if not isinstance(needs, dict):
        raise ConfigError(f"agent '{route.agent}' answers /box_needs with no JSON object", key=route.agent)
    return needs


def chosen_topology(client: ServerClient) -> str | None:
    """The composition's topology; ``None`` leaves the environment its default."""
    topology = (client.global_config_dict.get("composition") or {}).get("topology")
    return str(topology) if topology is not None else None
