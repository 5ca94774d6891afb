"""``ng_serve_rollouts``: compose and start servers as ``ng_run`` does, and take rollouts as jobs over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_gym.cli import command

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
        return _attach(Path(attached[-1]), [word for word in words if not word.startswith("attach=")])
    from nemo_gym.cli.run import compose_stack, with_stack

    return with_stack(lambda: compose_stack(words, serves=True))


def _attach(run_dir: Path, words: Sequence[str]) -> int:
    import asyncio

    import uvloop

    from nemo_gym.cli.collect_rollouts import stack_telemetry
    from nemo_gym.cli.signals import until_signal
    from nemo_gym.config.overrides import given_values
    from nemo_gym.config.service import ServiceConfig
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.service.routes import host
    from nemo_gym.stack.endpoints import find_stack
    from nemo_gym.stack.stack import pipeline_client

    stack = find_stack(str(run_dir))
    values = given_values(words)
    values |= values.pop("serve", {})
    if "agent" in stack.chosen:
        values.setdefault("agent_name", stack.chosen["agent"])
    config = ServiceConfig.parse(values)

    async def serve() -> int:
        try:
            async with stack_telemetry(stack, lambda text: print(text, flush=True)):
                await host(pipeline_client(stack), config, run_dir, lambda text: print(text, flush=True))
        finally:
            await close_global_aiohttp_client()
        return command.EXIT_OK

    async def stoppable() -> int:
        try:
            return await until_signal(serve())
        except asyncio.CancelledError:
            return command.EXIT_OK

    return uvloop.run(stoppable())
