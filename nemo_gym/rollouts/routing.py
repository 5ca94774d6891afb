"""Finds the servers that a run's agents need, and checks them before any task runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE, MODEL_TYPE
from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import NO_PROMPT
from nemo_gym.http.client import ServerClient
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.rows import MaterializedInputs, numbered_lines

PROMPT_BATCH = 256
"""The number of rows at which a request to an environment is sent."""
PROMPT_BATCH_BYTES = 1 << 20
"""The size of the rows at which it is sent, even if they are fewer."""


def agent_instances(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the agent server instances of a global configuration."""
    return _instances(config, AGENT_TYPE)


def environment_instances(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the environment server instances of a global configuration."""
    return _instances(config, ENVIRONMENT_TYPE)


def _instances(config: Mapping[str, Any], server_type: str) -> list[str]:
    return [str(name) for name, block in config.items() if isinstance(block, Mapping) and server_type in block]


def servers_of(config: Mapping[str, Any], agent: str) -> Servers:
    """Return the servers that ``agent`` is configured with. Raises `ConfigError` if one does not exist."""
    block = _implementation(config, agent, AGENT_TYPE)

    def named(key: str, server_type: str) -> str | None:
        ref = block.get(key)
        if ref is None:
            return None
        name = str(ref.get("name") if isinstance(ref, Mapping) else ref)
        _implementation(config, name, server_type, referred_by=f"{agent}.{key}")
        return name

    return Servers(
        agent=agent,
        environment=named("resources_server", ENVIRONMENT_TYPE),
        model=named("model_server", MODEL_TYPE),
        row_access=str(block.get("row_access") or "public"),
        skipped_reward=float(block.get("skip_verification_reward") or 0.0) if block.get("skip_verification") else None,
    )


def _implementation(
    config: Mapping[str, Any], name: str, server_type: str, referred_by: str | None = None
) -> Mapping[str, Any]:
    block = config.get(name)
    if not isinstance(block, Mapping) or server_type not in block:
        names = _instances(config, server_type)
        where = f"{referred_by}: " if referred_by else ""
        raise ConfigError(
            f"{where}no {server_type} instance is named '{name}'{nearest(name, names)}; there are:"
            f" {', '.join(names) or 'none'}",
            key=referred_by or name,
        )
    implementations = block[server_type]
    chosen: Mapping[str, Any] = implementations[next(iter(implementations))]
    return chosen


def check_validation(servers: Servers, config: PipelineConfig) -> None:
    """Raise `ConfigError` if an agent does not fit the run's validation mode."""
    if config.validation is not None and servers.row_access != "validation":
        raise ConfigError(
            f"validation={config.validation} shows the solution to the agent; '{servers.agent}' is not configured for"
            " it (row_access: validation), use the oracle agent",
            key="validation",
        )
    if config.validation is None and servers.row_access == "validation":
        raise ConfigError(
            f"agent '{servers.agent}' only validates environments; run it with oracle=gold or oracle=nothing",
            key="validation",
        )


async def checked_servers(client: ServerClient, peers: Peers, agent: str, config: PipelineConfig) -> Servers:
    """Return the servers of an agent. Raises `ConfigError` if the agent is not ready, has no environment to grade it,
    cannot enforce the run's limits, or does not fit the run's validation mode."""
    servers = servers_of(client.global_config_dict, agent)
    agent_facts = await _facts(peers, "agent", agent)
    own_run = bool(agent_facts.get("overrides_run"))
    servers = replace(servers, own_metrics=bool(agent_facts.get("overrides_metrics")))
    if servers.environment is None and not own_run:
        raise ConfigError(
            f"agent '{agent}' has no 'resources_server', so its work cannot be graded; set one", key=agent
        )
    check_validation(servers, config)
    if own_run or servers.environment is None:
        _check_limits(agent, agent_facts, config, owns_boxes=False)
        return replace(servers, own_run=own_run)
    facts = await _facts(peers, "environment", servers.environment)
    owns_boxes = bool(facts.get("owns_boxes"))
    _check_limits(agent, agent_facts, config, owns_boxes=owns_boxes)
    return replace(
        servers,
        needs_prompt=bool(agent_facts.get("needs_prompt", True)),
        enforce_row_sampling=bool(agent_facts.get("enforce_row_sampling")),
        words_prompts=bool(facts.get("words_prompts")),
        box_needs=await _box_needs(peers, servers) if owns_boxes else None,
    )


def _check_limits(agent: str, agent_facts: Mapping[str, Any], config: PipelineConfig, *, owns_boxes: bool) -> None:
    """Raise `ConfigError` for limits of the run that neither the agent nor its environment enforces."""
    enforced = set(agent_facts.get("limits") or ())
    if owns_boxes:
        enforced |= {"memory_mib", "cpu"}
    unmet = [name for name in config.limits.model_dump(exclude_none=True) if name not in enforced]
    if unmet:
        able = f"it enforces {', '.join(sorted(enforced))}" if enforced else "it enforces none of a run's limits"
        raise ConfigError(
            f"agent '{agent}' cannot enforce {' and '.join(unmet)} ({able}). Leave the key out, or choose an"
            " agent that works in a sandbox",
            key=unmet[0],
        )


async def _facts(peers: Peers, kind: str, server: str) -> Mapping[str, Any]:
    """Return what a server reports when it is ready. Raises `ConfigError` if it is not."""
    try:
        facts = (await peers.get(server, "/ready")).json()
    except PeerError as error:
        raise ConfigError(f"{kind} '{server}' is not ready: {error}", key=server) from error
    return facts if isinstance(facts, dict) else {}


async def _box_needs(peers: Peers, servers: Servers) -> Mapping[str, Any]:
    """Ask the agent what it needs in its sandboxes, which the environment creates."""
    try:
        reply = await peers.get(servers.agent, "/box_needs")
    except PeerError as error:
        raise ConfigError(
            f"'{error.server}' did not report its sandbox needs (/box_needs): {error}", key=error.server
        ) from error
    try:
        needs = reply.json()
    except orjson.JSONDecodeError:
        needs = None
    if not isinstance(needs, dict):
        raise ConfigError(f"agent '{servers.agent}' did not answer /box_needs with a JSON object", key=servers.agent)
    return needs


async def preflight(
    servers: Iterable[Servers], peers: Peers, say: Callable[[str], None], *, reachable: bool = False
) -> None:
    """Have each model server check its engines once, and report them with ``say``. Raises `ConfigError` if no rollout
    could succeed with an engine; with ``reachable``, also if an engine does not answer now."""
    for model in dict.fromkeys(each.model for each in servers if each.model is not None and not each.own_run):
        try:
            checks = (await peers.post(model, "/preflight", {})).json()["engines"]
        except PeerError as error:
            if error.status == 404:  # the server does not support this route
                continue
            raise ConfigError(f"model server '{model}' cannot be used: {error}", key=model) from error
        if problems := [check["problem"] for check in checks if check["problem"]]:
            raise ConfigError(f"model server '{model}': {'; '.join(problems)}", key=model)
        for check in checks:
            if check["warning"]:
                say(f"{model}: {check['warning']}")
            if check["unreachable"] and reachable:
                raise ConfigError(f"model server '{model}': {check['unreachable']}; fix that and try again", key=model)
            if check["unreachable"]:
                say(f"{model}: {check['unreachable']}; the run starts anyway, and calls to it are retried")
            elif check["context_tokens"]:
                say(f"{model}: engine '{check['engine']}' has a context of {check['context_tokens']} tokens")


async def rows_without_prompt(
    config: RolloutRunConfig, inputs: MaterializedInputs, servers: Mapping[str, Servers], peers: Peers
) -> dict[int, str]:
    """Return the rows for which neither the dataset nor the environment has a prompt: line numbers with reasons."""
    refused: dict[int, str] = {}
    lines = numbered_lines(config.input, inputs.without_prompt)
    rows = ((number, inputs.without_prompt[number].agent, line) for number, line in lines)
    for environment, batch in prompt_batches(rows, servers, refused):
        refused |= await unworded(peers, environment, batch)
    return refused


def prompt_batches(
    rows: Iterable[tuple[int, str, bytes]], servers: Mapping[str, Servers], refused: dict[int, str]
) -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
    """Yield batches of those ``rows`` whose agents need a prompt, by number, to ask their environment about
    (`unworded`). Rows whose environment writes no prompts are added to ``refused``.

    Args:
        rows: the number, agent and JSON object of each row that has no prompt of its own.
    """
    batches: dict[str, dict[int, dict[str, Any]]] = {}
    sizes: Counter[str] = Counter()
    for number, agent, line in rows:
        route = servers[agent]
        if not route.needs_prompt or route.environment is None:
            continue
        if not route.words_prompts:
            refused[number] = NO_PROMPT
            continue
        batch = batches.setdefault(route.environment, {})
        batch[number] = orjson.loads(line)
        sizes[route.environment] += len(line)
        if len(batch) >= PROMPT_BATCH or sizes[route.environment] >= PROMPT_BATCH_BYTES:
            yield route.environment, batches.pop(route.environment)
            del sizes[route.environment]
    yield from batches.items()


async def unworded(peers: Peers, environment: str, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the keys of those ``rows`` for which the environment has no prompt, each with the reason."""
    try:
        reply = (await peers.post(environment, "/row_prompts", {"rows": list(rows.values())})).json()
        without = dict(reply["without"])
    except (PeerError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"environment '{environment}' did not report which rows have a prompt: {error}", key=environment
        ) from error
    numbers = list(rows)
    return {numbers[int(position)]: str(why) for position, why in without.items()}
