"""From files to files, without servers: ``ng eval profile``, ``ng eval aggregate``, ``ng dataset render``,
``ng_export_trajectories`` and ``ng_report``."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.files import finished_lines, write_whole
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import AGENT_REF_KEY, ROLLOUT_ID_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY, without

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens import Trajectory
    from nemo_gym.rollouts.reverify import Inputs
    from nemo_gym.view.queries import Prices

EXPORT_KEYS = ("input", "output")
FORMATS = (".jsonl", ".npz")
REPORT = "ng_report"
REPORT_KEYS = ("format", "file", "prices", "export", "to")
REPORT_FORMATS = ("html", "md")


def profile(argv: Sequence[str]) -> int:
    """Write NeMo Gym's two files: ``<stem>_reward_profiling.jsonl``, with a line for each task and its row as
    ``sample`` (if the materialized inputs are there), and ``<stem>_agent_metrics.json``, with an object per agent."""
    parser = command.parser("ng eval profile", "Metrics of each task and of each agent of a result file.")
    parser.add_argument("--inputs", help="the run's materialized inputs (default: those beside the result file)")
    parser.add_argument("--rollouts", "-i", help="the result file")
    arguments = parser.parse_intermixed_args(argv)
    # The last one does nothing: partial results are always profiled.
    keys = ("input", "materialized_inputs_jsonl_fpath", "rollouts_jsonl_fpath", "allow_partial_rollouts")
    given = command.settings_of(arguments.settings, keys)
    source = arguments.rollouts or given.get("rollouts_jsonl_fpath") or given.get("input")
    if not source:
        raise ConfigError("say which results: ng eval profile --rollouts results/rollouts.jsonl", key="rollouts")
    path = Path(source).expanduser()
    inputs = arguments.inputs or given.get("materialized_inputs_jsonl_fpath")
    given_rows = Path(inputs).expanduser() if inputs else None
    reports = _reports(_files([path]), given_rows)
    dataset = _inputs_of(path, given_rows)
    tasks = path.with_name(f"{path.stem}_reward_profiling.jsonl")
    agents = path.with_name(f"{path.stem}_agent_metrics.json")
    lines = [
        {"agent_ref": report["agent_ref"], **group, **_sample(dataset, group[TASK_INDEX_KEY])}
        for report in reports
        for group in report["group_level_metrics"]
    ]
    _write(tasks, "".join(json.dumps(line) + "\n" for line in lines))
    # The key metrics are some of these.
    agent_metrics = [{**report["agent_metrics"], "agent_ref": report["agent_ref"]} for report in reports]
    _write(agents, json.dumps(agent_metrics, indent=2))
    _print(reports)
    print(f"tasks: {tasks}\nagents: {agents}")
    return command.EXIT_OK


def aggregate(argv: Sequence[str]) -> int:
    """Write the metrics of all rows of several result files and, as NeMo Gym does, these rows to one file."""
    parser = command.parser("ng eval aggregate", "Metrics over several result files.", words="FILE.jsonl")
    parser.add_argument("--input-glob", help="result files by a pattern, or by several with commas between")
    parser.add_argument(
        "--output",
        "-o",
        help="ALL.jsonl for all rows, with ALL_aggregate_metrics.json beside it, or METRICS.json for the metrics alone"
        " (default: aggregate_metrics.json beside the first file)",
    )
    arguments = parser.parse_intermixed_args(argv)
    from nemo_gym.rollouts.results import RunFiles

    # The last one does nothing: no servers are asked.
    keys = ("input_glob", "output_jsonl_fpath", "merge_shards", "config_paths")
    words = [word for word in arguments.settings if word.startswith("+") or command.key_of(word) in keys]
    given = command.settings_of(words, keys)
    target = arguments.output or given.get("output_jsonl_fpath")
    output = Path(target).expanduser() if target else None
    of_rows = output is not None and output.suffix == ".jsonl"
    merged = output if of_rows and given.get("merge_shards", "").lower() != "false" else None
    paths = [Path(word).expanduser() for word in arguments.settings if word not in words]
    if pattern := arguments.input_glob or given.get("input_glob"):
        paths += _matches(pattern, merged)
    if not paths:
        raise ConfigError("say which results: ng eval aggregate a.jsonl b.jsonl", key="input")
    metrics = output or paths[0].with_name("aggregate_metrics.json")
    if of_rows:
        metrics = metrics.with_name(f"{metrics.stem}_aggregate_metrics.json")
    require_another_file("output", merged or metrics, paths)
    is_of_a_run = output is not None and of_rows and RunFiles(output).materialized_inputs.exists()
    if is_of_a_run or (merged and merged.exists() and not metrics.exists()):
        raise ConfigError(f"output: '{output}' was not written by this command; choose another file", key="output")
    files = _files(paths)
    reports = _reports(files)
    if merged is not None:
        with suppress(OSError):  # the metrics' error says it
            merged.parent.mkdir(parents=True, exist_ok=True)
    _write(metrics, json.dumps(reports, indent=2))
    if merged is not None:
        _merge(files, merged)
        print(f"rows: {merged}")
    _print(reports)
    print(f"metrics: {metrics}")
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


def _inputs_of(path: Path, given: Path | None) -> Inputs | None:
    """The rows of the run of a result file: those that are given, else those beside it."""
    from nemo_gym.rollouts.results import RunFiles
    from nemo_gym.rollouts.reverify import Inputs

    beside = RunFiles(path).materialized_inputs
    rows = given or (beside if beside.is_file() else None)
    return None if rows is None else Inputs(rows)


def _sample(dataset: Inputs | None, task: int) -> dict[str, Any]:
    row = dataset.row(task, 0) if dataset is not None else None
    return {} if row is None else {"sample": without(row, (TASK_INDEX_KEY, ROLLOUT_INDEX_KEY))}


@dataclass(frozen=True, slots=True)
class _Results:
    """A result file."""

    path: Path
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    """Those of the failures file beside it, for rollouts without a result."""
    numbers: dict[int, int]
    """Each task's number among the tasks of all files."""


def _files(paths: Sequence[Path]) -> list[_Results]:
    """Read result files, each rollout once. A file whose tasks have the numbers of others' gets new ones: those that
    tasks of the same names have in an earlier file, or else numbers of their own."""
    from nemo_gym.rollouts.results import RunFiles

    failures_files = {RunFiles(path).failures.resolve() for path in paths}
    once = {path.resolve(): path for path in paths}
    read = [(path, *_rows(path)) for resolved, path in once.items() if resolved not in failures_files]
    seen: set[Any] = set()
    for rows in (rows for _, rows, _ in read):
        rows[:] = [row for row in rows if not _is_repeated(row, seen)]
    with_result = {_identity(row) for _, rows, _ in read for row in rows} - {None}
    for failures in (failures for _, _, failures in read):
        failures[:] = [row for row in failures if not _is_repeated(row, seen) and _identity(row) not in with_result]
    names: dict[int, str] = {}
    numbers_of: dict[tuple[str, int], int] = {}
    next_number = 0
    files = []
    for path, rows, failures in read:
        tasks: dict[int, str] = {}
        for row in (*rows, *failures):
            tasks.setdefault(row[TASK_INDEX_KEY], str(row.get("task_id", row[TASK_INDEX_KEY])))
        differ = any(names.get(number, name) != name for number, name in tasks.items())
        places: Counter[str] = Counter()
        numbers: dict[int, int] = {}
        for number, name in sorted(tasks.items()):
            key = (name, places[name])
            places[name] += 1
            numbers[number] = numbers_of.get(key, next_number) if differ else number
            next_number = max(next_number, numbers[number] + 1)
            names[numbers[number]] = name
            numbers_of.setdefault(key, numbers[number])
        files.append(_Results(path, rows, failures, numbers))
    return files


def _is_repeated(row: Mapping[str, Any], seen: set[Any]) -> bool:
    """Whether the same row was seen before, also if a merge has given its task another number. Rollouts of different
    runs may have one id, because a user may choose the run's."""
    if (identity := _identity(row)) is None:
        return False
    from nemo_gym.rollouts.report import for_aggregation

    told = without(for_aggregation(row, None), (TASK_INDEX_KEY,))
    key = (identity, sha256(json.dumps(told, sort_keys=True).encode()).digest())
    is_repeated = key in seen
    seen.add(key)
    return is_repeated


def _identity(row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return a rollout's id, task and agent; ``None`` for rows of other programs, whose ids do not tell samples
    apart."""
    rollout_id = row.get(ROLLOUT_ID_KEY)
    if not isinstance(rollout_id, str) or not re.search(rf"\.\d+-{row[ROLLOUT_INDEX_KEY]}$", rollout_id):
        return None
    return rollout_id, str(row.get("task_id")), _key_of(row)[2]


def _matches(patterns: str, merged: Path | None) -> list[Path]:
    """Return the result files that match, except files that other commands wrote beside them, and except ``merged``,
    the output of an earlier merge."""
    beside = ("_materialized_inputs.jsonl", "_reverified.jsonl", "_reward_profiling.jsonl")
    places = [str(Path(each.strip()).expanduser()) for each in patterns.split(",")]
    found = sorted({Path(name) for each in places for name in glob(each, recursive=True)})  # noqa: PTH207 - any folder
    left_out = None if merged is None else merged.resolve()
    paths = [path for path in found if not path.name.endswith(beside) and path.resolve() != left_out]
    if not paths:
        raise ConfigError(f"input_glob: no result file matches '{patterns}'", key="input_glob")
    return paths


def _merge(files: Sequence[_Results], output: Path) -> None:
    """Write the rows of all files to one, each rollout once and with its task's number."""
    from nemo_gym.rollouts.results import replaced

    seen: set[Any] = set()
    try:
        with replaced(output.resolve()) as merged:
            for each in files:
                for line, row in _lines(each.path) if each.rows else ():
                    number = each.numbers.get(row[TASK_INDEX_KEY], row[TASK_INDEX_KEY])
                    if _is_repeated(row, seen):
                        continue
                    if number != row[TASK_INDEX_KEY]:
                        line = json.dumps({**row, TASK_INDEX_KEY: number}).encode()
                    merged.write(line.rstrip(b"\r\n") + b"\n")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}", key="output") from error


def _reports(files: Sequence[_Results], inputs: Path | None = None) -> list[dict[str, Any]]:
    """Return the metrics of each agent as its run computes them, but for those that only its environment knows."""
    import orjson

    from nemo_gym.reward_profile import compute_aggregate_metrics
    from nemo_gym.rollouts.report import agree_on_given, for_aggregation, with_counts
    from nemo_gym.rollouts.result_rows import RolloutSummary, Tally
    from nemo_gym.view.lines import with_known_types

    summaries, tally = [], Tally()
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in files:
        dataset = _inputs_of(each.path, inputs)
        for row in each.rows:
            # What a run gives to the environment: numbers of the dataset are no metrics.
            task, sample, agent = _key_of(row)
            from_dataset = dataset and dataset.row(task, sample)
            given = None if from_dataset is None else orjson.dumps(from_dataset)
            reduced = for_aggregation(row, given)
            results[agent].append({**reduced, TASK_INDEX_KEY: each.numbers[task]})
        for row in (*each.rows, *each.failures):
            known = {**with_known_types(row), TASK_INDEX_KEY: each.numbers[row[TASK_INDEX_KEY]]}
            known.setdefault("task_id", row[TASK_INDEX_KEY])
            summary = RolloutSummary.of_row(known)
            summaries.append(summary)
            tally.add_row(summary.agent, known)
    reports = []
    for name, counts in tally.agents.items():
        agree_on_given(results[name])
        metrics = compute_aggregate_metrics(results[name]).model_dump(mode="json")
        of_agent = [item for item in summaries if item.agent == name]
        reports.append({"agent_ref": {"name": name}, **with_counts(metrics, counts, of_agent)})
    return reports


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a result file, and those of the failures file beside it for rollouts without a result."""
    from nemo_gym.rollouts.results import RunFiles

    beside = RunFiles(path).failures
    rows = _read(path) if path.exists() or not beside.is_file() else []
    done = {_key_of(row) for row in rows}
    # NeMo Gym writes a line for each attempt that failed.
    last = {_key_of(row): row for row in (_read(beside) if beside.is_file() else ())}
    if not rows and not last:
        raise ConfigError(f"{path} holds no results", key="rollouts")
    return rows, [row for key, row in last.items() if key not in done]


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file without their conversations and tokens, of which a file may have many GB."""
    from nemo_gym.rollouts.report import for_aggregation

    return [for_aggregation(row, None) for _, row in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of a result file that are rows, each with its row."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(finished_lines(file), 1):
                if line.strip():
                    yield line, _row(path, number, line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="rollouts") from error


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}", key="rollouts") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number} is no JSON object", key="rollouts")
    for key in (TASK_INDEX_KEY, ROLLOUT_INDEX_KEY):
        if not isinstance(row.setdefault(key, 0), int):
            raise ConfigError(f"{path}, line {number}: '{key}' must be a whole number", key="rollouts")
    return row


def _key_of(row: Mapping[str, Any]) -> tuple[int, int, str]:
    agent = row.get(AGENT_REF_KEY)
    name = agent.get("name") if isinstance(agent, Mapping) else agent
    return row[TASK_INDEX_KEY], row[ROLLOUT_INDEX_KEY], name if isinstance(name, str) else ""


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


def main_export() -> None:
    command.run("ng_export_trajectories", export)


def export(argv: Sequence[str]) -> int:
    """Write the trajectories of result rows. If a row is not of this suite, exit with 2 and write no file."""
    parser = command.parser(
        "ng_export_trajectories",
        "Write the token trajectories of a run's result rows to a file, as JSON lines or as arrays (npz).\n"
        "Each has the reward of its row's verdict, and none where the verdict is invalid.",
        words="input=ROWS.jsonl output=FILE.(jsonl|npz)",
    )
    source, target = _source_and_target(parser.parse_args(argv).settings)

    from nemo_gym.gateway.tokens.trajectories import write_jsonl, write_npz
    from nemo_gym.rollouts.trajectories import trajectories_of_rows

    rows = with_some = written = rewarded = 0

    def counted() -> Iterator[Trajectory]:
        nonlocal rows, with_some, written, rewarded
        for trajectories in trajectories_of_rows(source):
            rows += 1
            with_some += bool(trajectories)
            written += len(trajectories)
            rewarded += sum(trajectory.reward is not None for trajectory in trajectories)
            yield from trajectories

    if target.suffix == ".npz":
        write_npz(target, [*counted()])
    else:
        write_jsonl(target, counted())
    print(f"{written} trajectories of {with_some} rows in {target} ({rewarded} with a reward)")
    if rows > with_some:
        print(f"{rows - with_some} of {rows} rows hold no trajectories")
    return command.EXIT_OK


def _source_and_target(words: Sequence[str]) -> tuple[Path, Path]:
    given = command.settings_of(words, EXPORT_KEYS)
    if missing := [key for key in EXPORT_KEYS if not given.get(key)]:
        raise ConfigError(f"{missing[0]}=: is missing; give {' '.join(f'{key}=FILE' for key in EXPORT_KEYS)}")
    source, target = (Path(given[key]) for key in EXPORT_KEYS)
    if not source.is_file():
        raise ConfigError(f"input=: '{source}' is not a file")
    if target.suffix not in FORMATS:
        raise ConfigError(f"output=: '{target.name}' must end in {' or '.join(FORMATS)}, which says the format")
    if not target.parent.is_dir():
        raise ConfigError(f"output=: there is no directory '{target.parent}'")
    if target.exists() and target.samefile(source):
        raise ConfigError("output=: is the input itself")
    return source, target


# ng_report: one or several runs as a file for a colleague


def main_report() -> None:
    command.run(REPORT, write_report)


def write_report(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = command.plain_parser(
        REPORT,
        "Write a report of one or several runs: figures with intervals, plots, failures with what helps, the rollouts,"
        " the configuration and versions; later runs are compared with the first. format= is html (default) or md,"
        " file= its path (default: beside the first result file), prices= what a million tokens cost, as YAML."
        " export= gives the runs to another tool instead: mlflow, wandb (offline, into the directory to=) or otel (to"
        " the file or the OTLP endpoint that to= names).",
    )
    parser.add_argument("words", nargs="+", metavar="OUTPUT|key=value", help="result files and settings")
    arguments = parser.parse_args(argv)
    from nemo_gym.cli.show import open_shown
    from nemo_gym.view.queries import Prices
    from nemo_gym.view.report import report

    outputs = [word for word in arguments.words if "=" not in word or not word.partition("=")[0].isidentifier()]
    given = command.settings_of((word for word in arguments.words if word not in outputs), REPORT_KEYS)
    form = given.get("format", "html")
    if form not in REPORT_FORMATS:
        raise ConfigError(f"format={form}: must be one of {', '.join(REPORT_FORMATS)}", key="format")
    if not outputs:
        raise ConfigError("name a result file")
    prices = Prices.read(Path(given["prices"])) if given.get("prices") else None
    first = Path(outputs[0])
    if "export" in given:
        print(_export(outputs, given, prices))
        return command.EXIT_OK
    if "to" in given:
        raise ConfigError(f"to={given['to']} works only with export=; for a report use file=", key="to")
    path = Path(given.get("file") or first.with_name(f"{first.stem}_report.{form}"))
    require_another_file("file", path, outputs)
    text = report([open_shown(each) for each in outputs], form, prices)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"file=: cannot write '{path}': {error.strerror}", key="file") from error
    print(path)
    return command.EXIT_OK


def require_another_file(key: str, path: Path, outputs: Sequence[str | Path]) -> None:
    """Raise `ConfigError` if ``path`` would replace a file that a run wrote."""
    from nemo_gym.rollouts.results import RunFiles

    for files in (RunFiles(Path(each)) for each in outputs):
        for kept in (files.output, files.failures, files.store, files.materialized_inputs, files.configuration):
            with suppress(OSError):  # a missing file is another one; what cannot be written is said when it is
                if path.samefile(kept):
                    raise ConfigError(f"{key}=: '{path}' is a file of the run itself", key=key)


def _export(outputs: Sequence[str], given: Mapping[str, str], prices: Prices | None) -> str:
    """Give the runs to another tool; returns where they are."""
    from nemo_gym.cli.show import open_shown
    from nemo_gym.view.export import EXPORTERS

    if unused := {"format", "file"} & set(given):
        raise ConfigError(
            f"{unused.pop()}= applies to reports only; with export=, give the destination as to=", key="export"
        )
    name = given["export"]
    if name not in EXPORTERS:
        raise ConfigError(f"export={name}: must be one of {', '.join(EXPORTERS)}", key="export")
    first = Path(outputs[0])
    ending = ".jsonl" if name == "otel" else ""
    target = given.get("to") or str(first.with_name(f"{first.stem}_{name}{ending}"))
    require_another_file("to", Path(target), outputs)
    indexes = [open_shown(each) for each in outputs]
    try:
        return EXPORTERS[name](indexes, target, prices)
    except OSError as error:
        raise ConfigError(f"to=: cannot write '{target}': {error.strerror or error}", key="to") from error
