"""``ng_run``: compose, start and supervise servers; with ``input=`` and ``output=``, run the rollouts and exit.

``ng_serve_rollouts`` starts servers the same way, and takes rollouts as jobs over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from nemo_gym.config.composition import Composition
    from nemo_gym.config.run import RolloutRunConfig
    from nemo_gym.contract.session import Topology
    from nemo_gym.rollouts.collection import RunOutlook
    from nemo_gym.stack.supervisor import Supervisor

NAME = "ng_run"


def main() -> None:
    command.run(NAME, run_command)


def run_command(argv: Sequence[str]) -> int:
    """Parse, start the nursery, compose, check, run. The nursery warms up during composition and checks."""
    arguments = command.parser(
        NAME,
        "Run rollouts: input= names their rows (left out, the environment's own examples), output= their results"
        " (results/<time>/rollouts.jsonl). Without an agent= and an environment=, here or in a file, and where the"
        " stack is named (run_id= or run_dir=), nothing runs unless input= or output= is there: the servers start and"
        " stay, as with `ng env start` and with input=null.",
    ).parse_args(argv)
    return with_stack(lambda: compose_stack(arguments.settings, wants_run=None))


def evaluate_command(argv: Sequence[str]) -> int:
    """``ng eval run``: like `run_command`, but refuse to start servers without rows for them."""
    arguments = command.parser("ng eval run", "Start servers, run rows, write results.").parse_args(argv)
    return with_stack(lambda: compose_stack(arguments.settings, wants_run=True))


def start_command(argv: Sequence[str]) -> int:
    """``ng env start``: keep the servers running until a signal, unless the settings ask for a run."""
    arguments = command.parser("ng env start", "Start servers and keep them running.").parse_args(argv)
    return with_stack(lambda: compose_stack(arguments.settings))


def main_serving() -> None:
    command.run("ng_serve_rollouts", serve_command)


def serve_command(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    parser = command.parser(
        "ng_serve_rollouts",
        "Start the servers of a composition and serve rollouts: jobs come over HTTP, and results are kept in a store"
        " that outlives this process. The keys of its serve block are serve.port=, serve.store=, …; attach=DIR serves"
        " over the stack that runs in a run directory, and starts no server.",
    )
    words = parser.parse_args(argv).settings
    attached = [word.partition("=")[2] for word in words if word.startswith("attach=")]
    if attached:
        return _attach(attached[-1], [word for word in words if not word.startswith("attach=")])
    return with_stack(lambda: compose_stack(words, serves=True))


@command.outlasts_output()
def _attach(run_dir: str, words: Sequence[str]) -> int:
    import uvloop

    from nemo_gym._util.tasks import until_signal
    from nemo_gym.cli.collect_rollouts import serve_jobs
    from nemo_gym.config.overrides import given_values
    from nemo_gym.config.pipeline import ServiceConfig
    from nemo_gym.stack.endpoints import find_stack

    stack = find_stack(run_dir)
    values = given_values(words)
    values |= values.pop("serve", {})
    if "agent" in stack.chosen:
        values.setdefault("agent_name", stack.chosen["agent"])
    serving = serve_jobs(stack, ServiceConfig.parse(values), lambda text: print(text, flush=True))
    return uvloop.run(until_signal(serving, stopped=command.EXIT_OK))


def is_a_whole_run(composition: Composition) -> bool:
    """Whether the settings choose agent and environment, and do not name a stack for other commands to find."""
    named = ("run_id", "run_dir", "host", "hosts", "serve", "join")
    return {"agent", "environment"} <= composition.groups and all(composition.values.get(key) is None for key in named)


MAX_CHANGED_KEYS = 3
"""Keys that a notice about another configuration names."""

Work = Callable[["Supervisor"], Awaitable[int]]
"""The work to do with a ready stack; returns the exit code."""


@command.outlasts_output()
def with_stack(compose: Callable[[], tuple[Composition, Topology | None, Work | int]]) -> int:
    """Start what ``compose`` returns, do its work and stop. If ``compose`` returns an exit code in place of work,
    return it and start no server."""
    from nemo_gym._util.secrets import public_environment
    from nemo_gym.stack import nursery

    process = nursery.spawn(public_environment(os.environ))
    is_handed_over = False
    try:
        composition, topology, work = compose()
        if isinstance(work, int):
            return work
        if composition.values.get("dry_run"):
            return _dry_run(composition, topology)
        import uvloop

        is_handed_over = True
        return uvloop.run(_run(composition, topology, process, work))
    finally:
        if not is_handed_over:
            from nemo_gym.stack.supervisor import stop_nursery

            process[1].close()
            stop_nursery(process[0])


def _dry_run(composition: Composition, topology: Topology | None) -> int:
    """Check everything that can be checked without starting a server, and start nothing."""
    from nemo_gym.cli.sandbox_check import check_sandbox

    check_sandbox(composition, topology)
    say(
        f"dry run: {len(composition.servers)} servers were checked and none was started; ng_prepare fetches and builds"
    )
    return command.EXIT_OK


def compose_stack(
    words: Sequence[str], *, serves: bool = False, wants_run: bool | None = False
) -> tuple[Composition, Topology | None, Work | int]:
    """Compose, check, and return the work of the stack; ``wants_run`` is as in `complete_run`, and with ``None`` the
    composition decides."""
    from nemo_gym.config.check import check_everything, notices
    from nemo_gym.config.compose import compose
    from nemo_gym.config.hosts import NodePart, RayConfig
    from nemo_gym.config.launch import die_with_parent
    from nemo_gym.config.run_defaults import complete_run
    from nemo_gym.stack.ports import check_addresses

    composition = compose(words)
    if serves:
        composition.values["serve"] = composition.values.get("serve") or {}
    if (part := NodePart.from_parent()) is not None:
        die_with_parent(part.parent_pid)
        part.take(composition)
    on_ray = RayConfig.of(composition)
    if part is None and not composition.serves and composition.values.get("join") is None:
        complete_run(composition, wanted=is_a_whole_run(composition) if wants_run is None else wants_run)
    topology = check_everything(composition)
    if on_ray is None and part is None:
        check_addresses(composition)
    for notice in notices(composition):
        say(notice)
    for word in words:
        # The settings of a node, and of a stack that a program starts, come through a pipe.
        if part is None and sys.argv[1:] and command.is_secret(word):
            key = command.key_of(word)
            say(f"{key} on the command line can be read by other users of this machine; put it in env.yaml")
    only_serves = not composition.has_run and "input" not in composition.values
    others = ("serve", "join", "hosts", "dry_run")
    if wants_run is not False and part is None and only_serves and not any(map(composition.values.get, others)):
        if wants_run:
            raise ConfigError(
                "there are no rows to run; name them with --input (input=), or keep servers with `ng env start`",
                key="input",
            )
        say("serving; no rows will be run: add input=…")
    if on_ray is None or composition.values.get("dry_run"):
        return composition, topology, _work_of(composition)
    from nemo_gym.cli.ray_dispatch import RayRun

    # The cluster's nodes become the composition's hosts.
    on_nodes = RayRun(composition, on_ray, words, say)
    work = _work_of(composition)
    return composition, topology, work if isinstance(work, int) else on_nodes.around(work)


def _work_of(composition: Composition) -> Work | int:
    if composition.serves:
        return _serving(composition)
    if (service := composition.values.get("join")) is not None:
        return _joining(composition, str(service))
    if not composition.has_run:
        return _serve
    from nemo_gym.cli.collect_rollouts import exit_code_of
    from nemo_gym.rollouts.collection import show_finished
    from nemo_gym.rollouts.results import RunFiles

    config, outlook = check_rollout_run(composition, keep=True)
    changed = [] if outlook.recorded is None else _changed_keys(composition, RunFiles(config.output).configuration)
    if outlook.recorded is not None and outlook.finished:  # else the collection names them
        changed = [*outlook.recorded.changed_limits(config), *changed]
    if changed:
        more = f" and {len(changed) - MAX_CHANGED_KEYS} more" if len(changed) > MAX_CHANGED_KEYS else ""
        say(
            f"the run in '{config.output}' was started with other values of"
            f" {', '.join(changed[:MAX_CHANGED_KEYS])}{more}; its finished rollouts are kept as they are (choose"
            " another 'output', or discard the run with overwrite=true, if they must not be mixed)"
        )
    if outlook.finished:
        assert outlook.recorded is not None
        shown = show_finished(config, outlook.recorded, command.result_console())
        return exit_code_of(asyncio.run(shown))
    return _collecting(composition, config, outlook)


def _changed_keys(composition: Composition, configuration: Path) -> list[str]:
    """Return the keys of servers and sandboxes whose values are others in the stored ``configuration`` of a run.
    Addresses do not count, and secrets, which are not stored, cannot be compared."""
    import yaml

    from nemo_gym._util.secrets import redact, secret_values
    from nemo_gym.config.layers import leaves

    try:
        stored = yaml.safe_load(configuration.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    blocks = {*composition.servers, "sandbox"}

    def settings(values: Any) -> dict[str, Any]:
        return {
            ".".join(path): value
            for path, value in leaves(values)
            if path and path[0] in blocks and path[-1] not in ("host", "port")
        }

    # Earlier versions stored values that are secret now.
    then = settings(redact(stored, secret_values(composition.values)))
    now = settings(redact(composition.values))
    return [key for key in {**now, **then} if key not in now or key not in then or not _is_same(now[key], then[key])]


def _is_same(first: object, second: object) -> bool:
    return first == second or repr(first) == repr(second)  # NaN does not equal itself


def check_rollout_run(composition: Composition, *, keep: bool) -> tuple[RolloutRunConfig, RunOutlook]:
    """Check the composition's run as far as possible before any server starts; ``keep`` its rows for the run."""
    from dataclasses import replace

    from nemo_gym.config.run import RolloutRunConfig
    from nemo_gym.contract.verdict import NO_PROMPT
    from nemo_gym.rollouts.collection import check_run
    from nemo_gym.rollouts.routing import check_validation, servers_of
    from nemo_gym.rollouts.rows import without_rows

    config = RolloutRunConfig.of_stack(composition.run_values(), composition.chosen)
    outlook = asyncio.run(check_run(config, composition.values, keep=keep, configurations=composition.files))
    inputs = outlook.inputs
    try:
        for agent in inputs.agents:
            check_validation(servers_of(composition.values, agent), config)
    except ConfigError:
        inputs.close()
        raise
    promptless = {agent for agent in inputs.agents if _has_no_own_prompt(composition, agent)}
    refused = {line: NO_PROMPT for line, row in inputs.without_prompt.items() if row.agent in promptless}
    return config, replace(outlook, inputs=without_rows(config, inputs, refused))


def _has_no_own_prompt(composition: Composition, agent: str) -> bool:
    """Whether the sources show that this agent needs a prompt and that only its rows can provide it."""
    from nemo_gym.config.plugin_keys import defines
    from nemo_gym.rollouts.routing import servers_of

    environment = servers_of(composition.values, agent).environment
    if (
        environment is None
        or defines(composition.servers[agent], ("run", "needs_prompt"), composition.roots) is not False
    ):
        return False
    return defines(composition.servers[environment], ("public_row",), composition.roots) is False


def say(text: str, name: str = NAME) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


async def _run(
    composition: Composition, topology: Topology | None, process: tuple[int, socket.socket], work: Work
) -> int:
    """Start the stack, do its work until it ends, a server fails or a signal comes, and stop."""
    from nemo_gym._util.tasks import on_stop_signal, until_failure
    from nemo_gym.cli.sandbox_check import check_sandbox
    from nemo_gym.stack.stack import running_stack
    from nemo_gym.stack.supervisor import stop_nursery

    current = asyncio.current_task()
    assert current is not None
    supervisor: Supervisor | None = None
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping:
            if supervisor is not None:
                supervisor.kill()
            # If the stack is not complete yet, the guardian kills the remaining processes.
            os._exit(command.EXIT_INTERRUPTED)
        is_stopping = True
        current.cancel()
        say("stopping; once more to kill")

    on_stop_signal(on_signal)
    try:
        # In a separate thread: querying a sandbox provider takes time, and the servers can start meanwhile.
        checked = asyncio.create_task(asyncio.to_thread(check_sandbox, composition, topology))
        # If the stack fails first, nobody else retrieves the check's exception.
        checked.add_done_callback(lambda done: done.cancelled() or done.exception())
        async with running_stack(composition, process, say) as supervisor:
            await checked
            return await until_failure(work(supervisor), supervisor.failure)
    except asyncio.CancelledError:
        if not is_stopping:
            raise
        joins = composition.values.get("join") is not None
        stays = not composition.has_run and composition.values.get("dispatch") == "ray"
        serves = work is _serve or composition.serves or joins or stays
        return command.EXIT_OK if serves else command.EXIT_INTERRUPTED
    finally:
        # If the stack was never set up, nothing else has stopped the nursery.
        stop_nursery(process[0])


async def _serve(supervisor: Supervisor) -> int:
    """Keep the servers running until a signal."""
    _print_table(supervisor)
    await asyncio.Event().wait()
    return command.EXIT_OK


def _joining(composition: Composition, service: str) -> Work:
    capacity = (composition.values.get("agent_caps") or {}).get(composition.chosen.get("agent", ""))

    async def lend_servers(supervisor: Supervisor) -> int:
        from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE
        from nemo_gym.contract.credentials import Role, StackKeys
        from nemo_gym.service.client import AsyncRolloutClient
        from nemo_gym.stack.stack import PIPELINE

        _print_table(supervisor)
        stack = supervisor.stack()
        keys = StackKeys.from_hex(stack.root_key)
        async with AsyncRolloutClient(service) as client:
            lent = []
            for server in stack.servers:
                if server.server_type not in (AGENT_TYPE, ENVIRONMENT_TYPE):
                    continue
                registration = await client.register_server(
                    server.instance,
                    server.url,
                    capacity=capacity if server.server_type == AGENT_TYPE else None,
                    credential=keys.caller(Role.PIPELINE, PIPELINE, server.instance),
                )
                lent.append(str(registration["server_id"]))
            print(f"lent to {service}: {', '.join(lent)}", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                # From here on these servers get no new jobs, and their unfinished jobs move to other servers.
                for server_id in lent:
                    await client.remove_server(server_id)
        return command.EXIT_OK

    return lend_servers


def _serving(composition: Composition) -> Work:
    from nemo_gym.cli.collect_rollouts import serve_jobs
    from nemo_gym.config.pipeline import ServiceConfig

    values = composition.serve_values()
    if "agent" in composition.chosen:
        values.setdefault("agent_name", composition.chosen["agent"])
    config = ServiceConfig.parse(values)

    async def serve_rollouts(supervisor: Supervisor) -> int:
        _print_table(supervisor)
        return await serve_jobs(supervisor.stack(), config, say)

    return serve_rollouts


def _collecting(composition: Composition, config: RolloutRunConfig, outlook: RunOutlook) -> Work:
    async def collect_rollouts(supervisor: Supervisor) -> int:
        from nemo_gym.cli.collect_rollouts import collect
        from nemo_gym.config.hosts import Hosts
        from nemo_gym.stack.ports import wait_for_others

        _print_table(supervisor)
        if (hosts := Hosts.of(composition)) is not None:
            await wait_for_others(hosts, supervisor.settings.startup_timeout_s, say)
        return await collect(supervisor.stack(), config, outlook.inputs)

    return collect_rollouts


def _print_table(supervisor: Supervisor) -> None:
    stack = supervisor.stack()
    command.print_columns(
        ("INSTANCE", "TYPE", "IMPLEMENTATION", "URL", "PID"),
        [(s.instance, s.server_type, s.implementation, s.url, str(s.pid)) for s in stack.servers],
    )
    count = len(stack.servers)
    print(f"All {count} / {count} servers ready! run_dir={stack.run_dir}", flush=True)
