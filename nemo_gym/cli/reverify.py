"""``ng_reverify``: grade the stored rollouts of a run once more, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.cli.run import Work
    from nemo_gym.config.composition import Composition
    from nemo_gym.rollouts.results import RunFiles
    from nemo_gym.rollouts.reverify import Reverification
    from nemo_gym.stack.supervisor import Supervisor

NAME = "ng_reverify"
_COMPOSING = frozenset({"environment", "agent", "config_paths"})
"""Settings that choose a composition; without any of them, the run's own configuration is used."""


def main() -> None:
    command.run(NAME, reverify_command)


def reverify_command(argv: Sequence[str]) -> int:
    """Return 0 if every verdict is the same, 1 if one differs or is missing, 2 for bad input."""
    parser = command.parser(
        NAME,
        "Grade the rollouts of the result file OUTPUT again, with an operator's credential, through environment"
        " servers that are started for it: those of the run's own configuration, which lies beside OUTPUT, or of the"
        " settings. Writes the comparison beside OUTPUT.",
        words="OUTPUT [key=value",
    )
    parser.add_argument("--concurrency", type=int, default=4, help="rollouts graded at once (default 4)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one verdict (default 3600)")
    arguments = parser.parse_args(argv)
    if not arguments.settings or "=" in arguments.settings[0]:
        raise ConfigError(f"say which results to grade again: {NAME} results/rollouts.jsonl", key="output")
    if arguments.concurrency < 1 or arguments.timeout <= 0:
        raise ConfigError("--concurrency and --timeout are positive numbers", key="concurrency")
    from nemo_gym.cli.run import with_stack
    from nemo_gym.rollouts.results import RunFiles
    from nemo_gym.rollouts.reverify import stored_work

    output, *words = arguments.settings
    files = RunFiles(Path(output).expanduser())
    _require_graded(files)
    agents = {work.agent for work in stored_work(files.output)}
    if not agents:
        raise ConfigError(f"result file '{files.output}' holds no rollouts", key="output")
    with ExitStack() as temporary:
        composition, environments = _environments(_settings(files, words, temporary), agents)
        work = _work(files, environments, arguments.concurrency, arguments.timeout)
        return with_stack(lambda: (composition, None, work))


def _require_graded(files: RunFiles) -> None:
    """Raise `ConfigError` if the run has rollouts, and none of them has a verdict."""
    if not _holds_rows(files.output) and _holds_rows(files.failures):
        raise ConfigError(
            f"no rollout of this run has been graded: those of {files.failures} ended without a verdict. Mend the"
            " cause (ng_why names it) and give the run's command again with retry_failed=true",
            key="output",
        )


def _holds_rows(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _settings(files: RunFiles, words: list[str], temporary: ExitStack) -> list[str]:
    """Return the settings; if they choose no composition, put the run's own configuration under them."""
    if any(command.key_of(word) in _COMPOSING for word in words):
        return words
    import tempfile

    import yaml

    from nemo_gym._util.secrets import REDACTED
    from nemo_gym.config.keys import COMPOSITION, HOST, HOSTS, OBSERVABILITY
    from nemo_gym.config.overrides import word_of
    from nemo_gym.config.run import RUN_KEYS

    try:
        stored = yaml.safe_load(files.configuration.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the run's configuration is not there ({files.configuration}: {error.strerror}); name its environment:"
            f" {NAME} {files.output} environment=…",
            key="output",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{files.configuration} cannot be read: {error}", key="output") from error
    if not isinstance(stored, dict):
        raise ConfigError(
            f"{files.configuration} holds no configuration; name its environment: {NAME} {files.output} environment=…",
            key="output",
        )
    of_the_run = {*RUN_KEYS, COMPOSITION, HOST, HOSTS, "run_dir", "run_id"}
    configuration = {key: value for key, value in stored.items() if key not in of_the_run}
    if REDACTED in str(configuration.get(OBSERVABILITY)):  # a collector would refuse every request without its key
        del configuration[OBSERVABILITY]
    # The keys were checked when the run began. In the resolved file, nothing refers to keys such as `script` any more.
    configuration["error_on_unknown_keys"] = False
    folder = temporary.enter_context(tempfile.TemporaryDirectory())
    path = Path(folder, files.configuration.name)
    path.write_text(yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return [word_of("+config_paths", [str(path)]), *words]


def _environments(words: list[str], agents: set[str]) -> tuple[Composition, dict[str, str]]:
    """Return the part of a composition that grades, and the environment of each agent."""
    from nemo_gym.config.check import check_everything
    from nemo_gym.config.compose import compose
    from nemo_gym.config.keys import ENVIRONMENT_TYPE
    from nemo_gym.config.servers import references
    from nemo_gym.config.visibility import call_targets

    composition = compose(words)
    environments: dict[str, str] = {}
    for agent in sorted(agents):
        block = composition.servers.get(agent)
        named = [each.name for each in references(block.values)] if block is not None else []
        candidates = [name for name in named if composition.servers[name].server_type == ENVIRONMENT_TYPE]
        chosen = candidates[0] if candidates else composition.chosen.get("environment")
        if chosen is None:
            raise ConfigError(
                f"which environment graded agent '{agent}'? The configuration defines neither this agent nor a"
                " single environment; choose environment=…",
                key="environment",
            )
        environments[agent] = chosen
    needed = list(dict.fromkeys(environments.values()))
    for name in needed:  # grows while it is read: adds the servers that they call
        needed += [target for target in call_targets(composition, name) if target not in needed]
    left_out = [name for name in composition.servers if name not in needed]
    grading = replace(
        composition,
        values={key: value for key, value in composition.values.items() if key not in left_out},
        unresolved={key: value for key, value in composition.unresolved.items() if key not in left_out},
        servers={name: composition.servers[name] for name in composition.servers if name in needed},
    )
    _require_secrets(grading)
    check_everything(grading)
    return grading, environments


def _require_secrets(composition: Composition) -> None:
    from nemo_gym._util.secrets import REDACTED
    from nemo_gym.config.layers import leaves
    from nemo_gym.config.visibility import named_blocks

    blocks = {".".join(server.path): server.values for server in composition.servers.values()}
    for instance in composition.servers:
        blocks |= named_blocks(composition, instance)
    for where, block in blocks.items():
        for path, value in leaves(block):
            if isinstance(value, str) and REDACTED in value:
                key = ".".join((where, *map(str, path)))
                raise ConfigError(
                    f"{key} is a secret, and runs do not store secrets; give environment=… as in the original run",
                    key=key,
                )


def _work(files: RunFiles, environments: Mapping[str, str], concurrency: int, timeout_s: float) -> Work:
    async def work(supervisor: Supervisor) -> int:
        from nemo_gym.cli.run import say
        from nemo_gym.http.client import close_global_aiohttp_client
        from nemo_gym.http.peers import Peers
        from nemo_gym.rollouts.reverify import require_reverifiable, reverify
        from nemo_gym.stack.stack import operator_client

        names = sorted(set(environments.values()))
        peers = Peers(operator_client(supervisor.stack(), names))
        try:
            for name in await require_reverifiable(peers, names):
                say(f"environment '{name}' does not say whether it can verify without a live session", NAME)
            compared = await reverify(
                peers, files, environments.__getitem__, concurrency=concurrency, timeout_s=timeout_s
            )
        finally:
            await close_global_aiohttp_client()
        return _show(compared)

    return work


def _show(compared: Reverification) -> int:
    from nemo_gym._util.terminal import one_line
    from nemo_gym.contract.verdict import MAX_REASON_CHARS
    from nemo_gym.rollouts.reverify import Outcome

    rows: list[tuple[str, Any]] = [*sorted(compared.counts.items())]
    if len(rows) > 1:
        rows.append(("all", compared.total))
    command.print_columns(
        ("ENVIRONMENT", *(outcome.upper() for outcome in Outcome)),
        [(name, *(str(counts[outcome]) for outcome in Outcome)) for name, counts in rows],
    )
    for reason, count in compared.reasons.most_common(10):
        print(f"{count} × {one_line(reason, MAX_REASON_CHARS)}")
    print(f"Comparison: {compared.path}", flush=True)
    total = compared.total
    if total[Outcome.SKIPPED] == total.total():
        raise ConfigError("none of these rollouts can be graded again", key="output")
    return command.EXIT_OK if compared.is_same else command.EXIT_FAILED
