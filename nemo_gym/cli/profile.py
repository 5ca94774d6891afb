"""``ng eval profile``, ``ng eval aggregate`` and ``ng dataset render``: files to files, without servers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym._util.files import write_whole
from nemo_gym.cli import command
from nemo_gym.cli.report import require_another_file
from nemo_gym.contract.errors import ConfigError


def profile(argv: Sequence[str]) -> int:
    """Write ``<stem>_reward_profiling.jsonl`` (a line for each task) and ``<stem>_agent_metrics.json``."""
    parser = command.parser("ng eval profile", "Metrics of each task and of each agent of a result file.")
    parser.add_argument("--inputs", help="accepted: the results hold what is needed of their rows")
    parser.add_argument("--rollouts", "-i", help="the result file")
    arguments = parser.parse_intermixed_args(argv)
    # Some do nothing: the results hold what is needed of their inputs, and partial results are always profiled.
    keys = ("input", "materialized_inputs_jsonl_fpath", "rollouts_jsonl_fpath", "allow_partial_rollouts")
    given = command.settings_of(arguments.settings, keys)
    source = arguments.rollouts or given.get("rollouts_jsonl_fpath") or given.get("input")
    if not source:
        raise ConfigError("say which results: ng eval profile --rollouts results/rollouts.jsonl", key="rollouts")
    path = Path(source).expanduser()
    reports = _metrics(_rows(path))
    tasks = path.with_name(f"{path.stem}_reward_profiling.jsonl")
    agents = path.with_name(f"{path.stem}_agent_metrics.json")
    lines = [
        {"agent_ref": report["agent_ref"], **group} for report in reports for group in report["group_level_metrics"]
    ]
    _write(tasks, "".join(json.dumps(line) + "\n" for line in lines))
    agent_metrics = [{key: report[key] for key in ("agent_ref", "agent_metrics", "key_metrics")} for report in reports]
    _write(agents, json.dumps(agent_metrics, indent=2))
    _print(reports)
    print(f"tasks: {tasks}\nagents: {agents}")
    return command.EXIT_OK


def aggregate(argv: Sequence[str]) -> int:
    """Write the metrics of all rows of several result files."""
    parser = command.parser("ng eval aggregate", "Metrics over several result files.", words="FILE.jsonl")
    parser.add_argument("--output", "-o", help="default: aggregate_metrics.json beside the first file")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.settings:
        raise ConfigError("say which results: ng eval aggregate a.jsonl b.jsonl", key="input")
    paths = [Path(word).expanduser() for word in arguments.settings]
    output = Path(arguments.output).expanduser() if arguments.output else paths[0].with_name("aggregate_metrics.json")
    require_another_file("output", output, paths)
    reports = _metrics([row for path in paths for row in _rows(path)])
    _write(output, json.dumps(reports, indent=2))
    _print(reports)
    print(f"metrics: {output}")
    return command.EXIT_OK


def render(argv: Sequence[str]) -> int:
    """Write rows whose prompts are made from a template."""
    parser = command.parser("ng dataset render", "Word the prompts of rows by a template (YAML: user, system).")
    parser.add_argument("--input", "-i", help="rows without prompts")
    parser.add_argument("--prompt-config", help="the template")
    parser.add_argument("--output", "-o", help="the rows with prompts")
    arguments = parser.parse_intermixed_args(argv)
    given = command.settings_of(arguments.settings, ("input_jsonl_fpath", "output_jsonl_fpath", "prompt_config"))
    source = arguments.input or given.get("input_jsonl_fpath")
    template = arguments.prompt_config or given.get("prompt_config")
    target = arguments.output or given.get("output_jsonl_fpath")
    if not source or not template or not target:
        raise ConfigError("say all of --input, --prompt-config and --output", key="prompt_config")
    from nemo_gym.prompt import materialize_prompts

    try:
        count = materialize_prompts(Path(source).expanduser(), template, Path(target).expanduser())
    except OSError as error:
        place = error.filename or target
        raise ConfigError(f"{place} cannot be read or written: {error.strerror}", key="input") from error
    print(f"{count} rows: {target}")
    return command.EXIT_OK


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="rollouts") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error.msg}", key="rollouts") from error
        if row is not None and not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is no JSON object", key="rollouts")
        rows += [row] if row is not None else []
    if not rows:
        raise ConfigError(f"{path} holds no results", key="rollouts")
    return rows


def _metrics(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    from nemo_gym.reward_profile import compute_aggregate_metrics

    by_agent: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        ref = row.get("agent_ref")
        by_agent[str(ref.get("name")) if isinstance(ref, dict) else ""].append(row)
    return [
        {"agent_ref": {"name": name}, **compute_aggregate_metrics(results).model_dump(mode="json")}
        for name, results in by_agent.items()
    ]


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", key="output") from error


def _print(reports: Sequence[dict[str, Any]]) -> None:
    for report in reports:
        print(f"Key metrics for {report['agent_ref']['name'] or 'all rows'}:")
        for key, value in report["key_metrics"].items():
            print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")
