"""Everything that can be checked of a composition without starting a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym.config import compatibility
from nemo_gym.config.composition import Composition
from nemo_gym.config.files import EXTRA_ROOTS_VARIABLE, missing_roots
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE, MODEL_TYPE, UNREAD_NEMO_GYM_KEYS
from nemo_gym.config.observability import ObservabilityConfig
from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.config.plugin_keys import check_server_keys, entrypoint
from nemo_gym.config.servers import ServerBlock
from nemo_gym.config.strict import refuse
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import SESSION_TTL_S, Topology

FLAGS = ("dry_run", "allow_unsupported_pairing")
NUMBER_KEYS = ("startup_timeout_s", "shutdown_timeout_s", "max_restarts")


def check_everything(composition: Composition) -> Topology | None:
    """Raise `ConfigError` for the first thing wrong; return the topology of the chosen agent and environment."""
    if not composition.servers:
        raise ConfigError(
            "nothing to run: no file defines a server; choose agent=…, environment=… and model=…, or give"
            ' "+config_paths=[…]"',
            key="config_paths",
        )
    for server in composition.servers.values():
        entrypoint(server, composition.roots)
        if composition.values.get("error_on_unknown_keys", True):
            check_server_keys(server, composition.roots, composition.warnings)
        _check_port_and_workers(server, composition.warnings)
    for key in NUMBER_KEYS:
        value = composition.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ConfigError(f"{key} must be a number that is not negative, got {value!r}", key=key)
    for key in FLAGS:
        if not isinstance(value := composition.values.get(key, False), bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}", key=key)
    free_ports(composition.values)
    ObservabilityConfig.of(composition.values)
    Hosts.of(composition)
    _check_run_keys(composition)
    return compatibility.check(composition)


def free_ports(values: Mapping[str, Any]) -> list[int] | None:
    """Return the ports for servers whose block names none, by NeMo Gym's keys and defaults; ``None`` leaves the choice
    to the kernel. Raises `ConfigError` for wrong values."""
    low, high, taken = (values.get(key) for key in ("port_range_low", "port_range_high", "disallowed_ports"))
    if low is None and high is None and taken is None:
        return None
    low, high, taken = 10_001 if low is None else low, 20_000 if high is None else high, taken or []
    numbers = [low, high, *taken] if isinstance(taken, list) else [None]
    if not all(type(number) is int and 0 < number <= 65535 for number in numbers):
        raise ConfigError(
            "port_range_low and port_range_high must be ports, and disallowed_ports a list of them (1 to 65535); got"
            f" {low!r}, {high!r} and {taken!r}",
            key="port_range_low",
        )
    free = [port for port in range(low, high + 1) if port not in taken]
    if not free:
        raise ConfigError(
            f"port_range_low={low} and port_range_high={high} leave no port for servers; widen the range",
            key="port_range_low",
        )
    return free


def notices(composition: Composition) -> list[str]:
    """Return the warnings, one sentence each: for keys that do nothing here, with their meaning in NeMo Gym; for
    plugins in whose place another one of that name or file is used; for extra roots that do not exist; and for model
    servers whose sessions expire before an agent's time limit."""
    return [
        *composition.warnings,
        *_hidden_plugins(composition),
        *_plugins_without_their_file(composition),
        *_short_sessions(composition),
        *(f"{EXTRA_ROOTS_VARIABLE} names '{folder}', which is no folder" for folder in missing_roots()),
        *(
            f"'{key}' does nothing here; in NeMo Gym it is {meaning}"
            for key, meaning in UNREAD_NEMO_GYM_KEYS.items()
            if composition.values.get(key) is not None and key not in composition.servers
        ),
    ]


def _hidden_plugins(composition: Composition) -> list[str]:
    """Name the plugins that are not used because an earlier root of `plugin_roots` has one of the same name."""
    sentences = []
    for kind, name in dict.fromkeys(
        (block.server_type, block.implementation) for block in composition.servers.values()
    ):
        folders = [root / kind / name for root in composition.roots if (root / kind / name / "app.py").is_file()]
        used, *hidden = dict.fromkeys(folder.resolve() for folder in folders) or (None,)
        sentences += [f"there are two plugins '{name}': {used} is used, {other} is not" for other in hidden]
    return sentences


def _plugins_without_their_file(composition: Composition) -> list[str]:
    """Name the plugins whose own file runs another plugin instead, as the file of a copied folder does."""
    servers = composition.servers.values()
    used = {(block.source, block.server_type, block.implementation) for block in servers}
    sentences = []
    for source, kind, name in sorted(used):
        folder = next((each for each in Path(source).parents if each.parent.name == kind), None)
        if folder is None or not (folder / "app.py").is_file() or (source, kind, folder.name) in used:
            continue
        sentences.append(
            f"{source} runs the plugin '{name}' and not '{folder.name}', in whose folder it is; to run that one, write"
            f" '{kind}: {{{folder.name}: …}}' there"
        )
    return sentences


def _short_sessions(composition: Composition) -> list[str]:
    servers = composition.servers.values()
    agents = [server.values.get("wall_clock_s") for server in servers if server.server_type == AGENT_TYPE]
    limits = [composition.run_values().get("wall_clock_s") or limit for limit in agents]
    longest_s = max((limit for limit in limits if isinstance(limit, int | float)), default=0)
    return [
        f"{server.instance}: session_ttl_s={ttl_s:g} is shorter than wall_clock_s={longest_s:g}, and the model refuses"
        " an attempt's calls after it; raise session_ttl_s"
        for server in servers
        if server.server_type == MODEL_TYPE
        and isinstance(ttl_s := server.values.get("session_ttl_s") or SESSION_TTL_S, int | float)
        and ttl_s < longest_s
    ]


def _check_port_and_workers(server: ServerBlock, warnings: list[str]) -> None:
    port: Any = server.values.get("port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535):
        raise server.wrong("port", f" must be a whole number from 0 (choose a free one) to 65535, got {port!r}")
    workers = server.values.get("num_workers")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        problem = f" is the number of server processes; it must be a whole number ≥ 1, got {workers!r}"
        refuse(server.wrong("num_workers", problem), server.source, warnings)


def _check_run_keys(composition: Composition) -> None:
    """Check the values of run keys, also without a run. Only one of ``input`` and ``output`` is an error."""
    run = composition.run_values()
    has_output = "output" in run or "output_jsonl_fpath" in run
    join = composition.values.get("join")
    if join is not None:
        if not isinstance(join, str) or not join.startswith(("http://", "https://")):
            raise ConfigError("join must be the URL of a rollout service, as in join=http://10.0.0.1:8210", key="join")
        if composition.has_run or has_output or composition.serves:
            raise ConfigError(
                "join lends a stack's servers to a service elsewhere; leave out input=, output= and serve", key="join"
            )
    if composition.serves:
        from nemo_gym.config.pipeline import ServiceConfig

        if composition.has_run or has_output:
            raise ConfigError(
                "a stack either serves rollouts (serve), and jobs come over HTTP, or runs those of input= and writes"
                " output=; leave out serve, or input= and output=",
                key="serve",
            )
        serve = composition.values["serve"]
        if not isinstance(serve, Mapping):
            raise ConfigError("serve must be a block of keys, as in +serve.port=8210", key="serve")
        _check_caps(ServiceConfig.parse(composition.serve_values(), within=serve, where="serve"), composition)
    elif composition.has_run != has_output:
        missing = "output" if composition.has_run else "input"
        raise ConfigError(f"a rollout run needs both input= and output=; add {missing}=<file>.jsonl", key=missing)
    if composition.has_run and all(server.server_type != AGENT_TYPE for server in composition.servers.values()):
        raise ConfigError(
            "a rollout run needs an agent, and no file defines one; add agent=… (ng list agents shows them), or serve"
            " without a run: input=null",
            key="agent",
        )
    if run:
        from nemo_gym.config.run import RolloutRunConfig

        placeholders = {} if composition.has_run else {"input": "rows.jsonl", "output": "rollouts.jsonl"}
        _check_caps(RolloutRunConfig.parse({**run, **placeholders}), composition)


def _check_caps(config: PipelineConfig, composition: Composition) -> None:
    agents, environments = (
        [name for name, server in composition.servers.items() if server.server_type == kind]
        for kind in (AGENT_TYPE, ENVIRONMENT_TYPE)
    )
    config.check_caps(agents, environments)
