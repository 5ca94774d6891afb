"""``ng_serve_rollouts``: compose and start servers as ``ng_run`` does, and take rollouts as jobs over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

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
        return _attach(attached[-1], [word for word in words if not word.startswith("attach=")])
    from nemo_gym.cli.run import compose_stack, with_stack

    return with_stack(lambda: compose_stack(words, serves=True))


@command.outlasts_output()
def _attach(run_dir: str, words: Sequence[str]) -> int:
    import uvloop

    from nemo_gym._util.tasks import until_signal
    from nemo_gym.cli.collect_rollouts import serve_jobs
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
