"""``ng_validate``: compose and check a configuration without running anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

from nemo_gym._util.terminal import shown
from nemo_gym.cli import command
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.verdict import without

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

NAME = "ng_validate"


def main() -> None:
    command.run(NAME, validate)


def validate(argv: Sequence[str]) -> int:
    """Print what would run, or what is wrong. ``--json`` prints one object, also for errors."""
    parser = command.parser(NAME, "Compose a configuration and check it without running anything.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dump", action="store_true", help="print the whole configuration, secrets removed")
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="run the environment's gold solutions and none, and mark it as verified (verified.yaml in its folder)",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.oracle:
        from nemo_gym.cli.oracle_check import check_with_oracle

        problems = check_with_oracle(arguments.settings)
        for problem in problems:
            print(shown(problem), file=sys.stderr)
        print("not verified" if problems else "verified: gold was rewarded and nothing was not")
        return command.EXIT_FAILED if problems else command.EXIT_OK
    try:
        composition, report = inspect(arguments.settings)
    except NemoGymError as error:
        if not arguments.json:
            raise
        message = command.without_secrets(error.message, arguments.settings)
        _print_json({"valid": False, "error": message, "details": error.details})
        return command.exit_code_of(error)
    if arguments.dump:
        from nemo_gym._util.secrets import redact

        report["configuration"] = redact(_as_file(composition))
    if arguments.json:
        _print_json(report)
        return command.EXIT_OK
    if arguments.dump:
        import yaml

        print(yaml.safe_dump(report["configuration"], sort_keys=False), end="")
    # The dump alone is standard output, so that a file of it is a configuration.
    with redirect_stdout(sys.stderr) if arguments.dump else nullcontext():
        _print_report(composition, report)
    return command.EXIT_OK


def _as_file(composition: Composition) -> dict[str, Any]:
    """Return the configuration as a file that composes the same: without what the composition itself sets and keys
    that only interpolations read, which are resolved, and with the topology."""
    from nemo_gym.config.keys import COMPOSITION, TOPOLOGY
    from nemo_gym.config.strict import known_keys, unread

    values, chosen = composition.values, composition.chosen
    file = without(values, {COMPOSITION, *unread(values, composition.servers, known_keys())})
    if TOPOLOGY in chosen:
        file[TOPOLOGY] = chosen[TOPOLOGY]
    return file


def _print_report(composition: Composition, report: Mapping[str, Any]) -> None:
    from nemo_gym.rollouts.report import counted

    for server in report["servers"]:
        print(f"{server['instance']}: {server['type']}.{server['implementation']} ({server['source']})")
    if report["topology"]:
        print(f"topology: {report['topology']}")
    if run := report["run"]:
        left = "finished" if run["finished"] else f"{run['left']} left to run"
        print(f"run: {counted(run['rollouts'], 'rollout')} of {counted(run['tasks'], 'task')}, {left}")
    if "environment" in composition.chosen:
        from nemo_gym.cli.oracle_check import sentence

        print(f"verified: {sentence(report['verified'])}")
    for notice in report["notices"]:
        print(f"notice: {notice}")
    print(f"valid: {counted(len(report['servers']), 'server')}")


def inspect(words: Sequence[str]) -> tuple[Composition, dict[str, Any]]:
    """Compose ``words`` and check everything that can be checked without starting a server."""
    from nemo_gym.cli.oracle_check import marker_of
    from nemo_gym.cli.run import is_a_whole_run
    from nemo_gym.cli.sandbox_check import check_sandbox
    from nemo_gym.config.check import check_everything, notices
    from nemo_gym.config.compose import compose
    from nemo_gym.config.ray import RayConfig
    from nemo_gym.config.run_defaults import complete_run
    from nemo_gym.stack.ports import check_addresses

    composition = compose(words)
    on_ray = RayConfig.of(composition)
    complete_run(composition, wanted=is_a_whole_run(composition))
    topology = check_everything(composition)
    if on_ray is None:
        check_addresses(composition)
    check_sandbox(composition, topology)
    return composition, {
        "valid": True,
        "run": _outlook(composition) if composition.has_run else None,
        "servers": [
            {
                "instance": server.instance,
                "type": server.server_type,
                "implementation": server.implementation,
                "source": server.source,
            }
            for server in composition.servers.values()
        ],
        "composition": composition.chosen,
        "topology": topology and str(topology),
        "verified": marker_of(composition),
        "notices": notices(composition),
    }


def _outlook(composition: Composition) -> dict[str, Any]:
    from nemo_gym.cli.run import check_rollout_run

    _, outlook = check_rollout_run(composition, keep=False)
    recorded = outlook.recorded
    return {
        "tasks": outlook.inputs.tasks,
        "rollouts": outlook.inputs.rollouts,
        "finished": outlook.finished,
        "left": recorded.left if recorded is not None else outlook.inputs.rollouts,
    }


def _print_json(value: Any) -> None:
    import json

    json.dump(value, sys.stdout, indent=2, default=str)
    print()
