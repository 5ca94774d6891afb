"""``ng_collect_rollouts``: run a dataset's rows against servers that run already. ``ng_status``: which ones run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command
from nemo_gym.config.keys import OBSERVABILITY

if TYPE_CHECKING:
    from nemo_gym.config.pipeline import ServiceConfig
    from nemo_gym.config.run import RolloutRunConfig
    from nemo_gym.rollouts.collection import CollectionResult
    from nemo_gym.rollouts.rows import MaterializedInputs
    from nemo_gym.stack.endpoints import StackEntry

NAME = "ng_collect_rollouts"
STATUS = "ng_status"


def main() -> None:
    command.run(NAME, collect_command)


@command.outlasts_output()
def collect_command(argv: Sequence[str]) -> int:
    """Find the stack, then run."""
    arguments = command.parser(
        NAME,
        "Run the rows of input= against the servers of a running stack and write output=. The stack is the one that"
        " runs, or that of run_dir= or run_id=.",
    ).parse_args(argv)
    import uvloop

    from nemo_gym._util.tasks import until_signal
    from nemo_gym.config.overrides import given_values
    from nemo_gym.config.run import RUN_KEYS, RolloutRunConfig
    from nemo_gym.config.run_defaults import check_dataset_words
    from nemo_gym.contract.errors import reject_unknown_keys
    from nemo_gym.stack.endpoints import find_stack

    values = given_values(arguments.settings)
    # The address of NeMo Gym's head server is not used: the stack is found on this machine.
    values.pop("head_server", None)
    dataset, split = values.pop("dataset", None), values.pop("split", None)
    reject_unknown_keys(values, RUN_KEYS, where="the command line")
    check_dataset_words(dataset, split, has_input=any(values.get(key) for key in ("input", "input_jsonl_fpath")))
    stack = find_stack(values.get("run_dir"), None if values.get("run_dir") else values.get("run_id"))
    if not values.get("run_dir"):
        values.pop("run_id", None)
    if dataset is not None:
        from nemo_gym.config.datasets import DataSet

        values["input"] = DataSet.parse(str(dataset), split, _environment_of(stack)).prepared()
    work = collect(stack, RolloutRunConfig.of_stack(values, stack.chosen))
    return uvloop.run(until_signal(work, stopped=command.EXIT_INTERRUPTED))


def _environment_of(stack: StackEntry) -> Path | None:
    from nemo_gym.config.files import find_plugin

    if "environment" not in stack.chosen:
        return None
    server = stack.server(stack.chosen["environment"])
    return find_plugin(server.server_type, server.implementation)


async def collect(stack: StackEntry, config: RolloutRunConfig, inputs: MaterializedInputs | None = None) -> int:
    """Run the rollouts that ``config`` describes against ``stack``; ``inputs`` are its rows, if they were read
    already. Return 0 if every rollout has a verdict, else 3."""
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.rollouts.collection import run_collection
    from nemo_gym.stack.stack import CONFIG_FILE, pipeline_client

    try:
        async with stack_telemetry(stack, lambda text: print(text, flush=True)):
            result = await run_collection(
                pipeline_client(stack),
                config,
                console=command.result_console(),
                configuration=Path(stack.run_dir, CONFIG_FILE),
                inputs=inputs,
            )
    finally:
        await close_global_aiohttp_client()
    return exit_code_of(result)


async def serve_jobs(stack: StackEntry, config: ServiceConfig, say: Callable[[str], None]) -> int:
    """Serve rollouts over ``stack`` until cancelled; ``say`` gets where the pipeline's metrics are."""
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.service.routes import host
    from nemo_gym.stack.stack import pipeline_client

    try:
        async with stack_telemetry(stack, say):
            await host(pipeline_client(stack), config, Path(stack.run_dir), lambda text: print(text, flush=True))
    finally:
        await close_global_aiohttp_client()
    return command.EXIT_OK


def stack_telemetry(stack: StackEntry, say: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
    """Return the telemetry of the pipeline of ``stack``, as its composition configures it."""
    from nemo_gym.config.observability import ObservabilityConfig
    from nemo_gym.contract.credentials import StackKeys
    from nemo_gym.rollouts.pipeline import pipeline_telemetry

    config = ObservabilityConfig.of({OBSERVABILITY: stack.observability})
    token = StackKeys.from_hex(stack.root_key).metrics_token
    return pipeline_telemetry(config, run_id=stack.run_id, run_dir=Path(stack.run_dir), token=token, say=say)


def exit_code_of(result: CollectionResult) -> int:
    return command.EXIT_OK if result.invalid == 0 else command.EXIT_MASKED


# ng_status: the stacks and servers that run on this machine


def main_status() -> None:
    command.run(STATUS, status)


def status(argv: Sequence[str]) -> int:
    """Print every running stack of this user. Return 1 if a server is not healthy, else 0 (also if nothing runs)."""
    parser = command.parser(STATUS, "Show running stacks and their servers.", words="run_dir=DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    import asyncio

    from nemo_gym.stack.endpoints import find_stack, health_of, pss_mib, public_listing, running_stacks

    given = command.settings_of(arguments.settings, ("run_dir", "run_id"))
    stacks = [find_stack(given.get("run_dir"), given.get("run_id"))] if given else running_stacks()
    report: list[dict[str, Any]] = []
    for stack in stacks:
        health = asyncio.run(health_of(stack))
        servers = public_listing(stack)
        for server in servers:
            server["health"] = health[server["url"]]
            server["pss_mib"] = round(pss_mib([server["pid"]] if server["pid"] else []), 1)
        report.append({"run_id": stack.run_id, "run_dir": stack.run_dir, "pid": stack.pid, "servers": servers})
    if arguments.json:
        print(json.dumps({"stacks": report}, indent=2))
    else:
        _print(report)
    healthy = all(server["health"] == "ok" for stack in report for server in stack["servers"])
    return command.EXIT_OK if healthy else command.EXIT_FAILED


def _print(report: list[dict[str, Any]]) -> None:
    if not report:
        print("no stack runs")
    for stack in report:
        print(f"run {stack['run_id']} (pid {stack['pid']}) in {stack['run_dir']}")
        command.print_columns(
            ("INSTANCE", "TYPE", "IMPLEMENTATION", "URL", "PID", "HEALTH", "PSS MiB", "RESTARTS"),
            [
                (
                    *(server[name] for name in ("instance", "server_type", "implementation", "url")),
                    str(server["pid"] or "-"),
                    server["health"],
                    f"{server['pss_mib']:.1f}",
                    str(server["restarts"]),
                )
                for server in stack["servers"]
            ],
        )
