"""``ng_serve_rollouts``: compose and start servers as ``ng_run`` does, and take rollouts as jobs over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.cli import command

if TYPE_CHECKING:
    from nemo_gym.config.service import ServiceConfig
    from nemo_gym.stack.endpoints import StackEntry

NAME = "ng_serve_rollouts"


def main() -> None:
    command.run(NAME, serve_command)


def serve_command(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    parser = command.parser(
        NAME,
        "Start the servers of a composition and serve rollouts: jobs come over HTTP, and results are kept in a store"
        " that outlives this process. The keys of its serve block are serve.port=, serve.store=, …; attach=DIR serves"
        " over the stack that runs in a run directory, and starts no server.",
    )
    words = parser.parse_args(argv).settings
    attached = [word.partition("=")[2] for word in words if word.startswith("attach=")]
    if attached:
        return _attach(attached[-1], [word for word in words if not word.startswith("attach=")])
    from nemo_gym.cli.run import compose_stack, with_stack

    return with_stack(lambda: compose_stack(words, serves=True))


def _attach(run_dir: str, words: Sequence[str]) -> int:
    import uvloop

    from nemo_gym.cli.signals import until_signal
    from nemo_gym.config.overrides import given_values
    from nemo_gym.config.service import ServiceConfig
    from nemo_gym.stack.endpoints import find_stack

    stack = find_stack(run_dir)
    values = given_values(words)
    values |= values.pop("serve", {})
    if "agent" in stack.chosen:
        values.setdefault("agent_name", stack.chosen["agent"])
    serving = serve_jobs(stack, ServiceConfig.parse(values), lambda text: print(text, flush=True))
    return uvloop.run(until_signal(serving, stopped=command.EXIT_OK))


async def serve_jobs(stack: StackEntry, config: ServiceConfig, say: Callable[[str], None]) -> int:
    """Serve rollouts over ``stack`` until cancelled; ``say`` gets where the pipeline's metrics are."""
    from nemo_gym.cli.collect_rollouts import stack_telemetry
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.service.routes import host
    from nemo_gym.stack.stack import pipeline_client

    try:
        async with stack_telemetry(stack, say):
            await host(pipeline_client(stack), config, Path(stack.run_dir), lambda text: print(text, flush=True))
    finally:
        await close_global_aiohttp_client()
    return command.EXIT_OK
