"""A run for other tools: MLflow, Weights & Biases, and OpenTelemetry.

MLflow's and W&B's own packages write their directories, offline; they are imported only when they are needed. Spans go
to an OTLP endpoint, or into a file with one OTLP/JSON request per line, as a collector's file receiver reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson

from nemo_gym.config.observability import TracesConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.observability import ENCODINGS, Collector, RefusedError
from nemo_gym.http.telemetry import Span, SpanContext, SpanKind, context_of_attempt
from nemo_gym.view.index import ResultIndex
from nemo_gym.view.lines import NoResultRow, float_of, int_of, list_of, load_row, mapping_of
from nemo_gym.view.queries import Prices, summary

EXPERIMENT = "nemo-gym"
SPANS_AT_ONCE = 512
POST_TIMEOUT_S = 30.0
MAX_STAGE_S = 1e8
"""A row may claim any duration; a span that begins before 1970 cannot be written."""
COLUMNS = (
    *("task_id", "sample_index", "rollout_id", "agent", "reward", "outcome", "findings"),
    *("turns", "seconds", "tokens_in", "tokens_out", "attempts", "reason"),
)
"""The columns of a rollout in other tools' tables. Prompts and answers stay in the result file."""


def export_mlflow(indexes: Sequence[ResultIndex], target: str, prices: Prices | None) -> str:
    """Write one MLflow run per result file below the directory ``target``; return its URI."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user asks for a directory
    mlflow = _package("mlflow")
    uri = Path(target).absolute().as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    existing = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if existing is None else existing.experiment_id
    for index in indexes:
        run = client.create_run(experiment, run_name=index.files.output.stem).info.run_id
        for key, value in _parameters(index).items():
            client.log_param(run, key, value)
        for name, figure in _figures(index, prices).items():
            client.log_metric(run, _metric_name(name), figure)
        table = {"columns": [*COLUMNS], "data": _rollouts(index)}
        client.log_text(run, orjson.dumps(table, option=orjson.OPT_INDENT_2).decode(), "rollouts.json")
        client.set_terminated(run)
    return uri


def export_wandb(indexes: Sequence[ResultIndex], target: str, prices: Prices | None) -> str:
    """Write one offline W&B run per result file below the directory ``target``; return the runs' folder."""
    wandb = _package("wandb")
    folder = Path(target).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        pass  # or else W&B would write to a temporary directory instead
    for index in indexes:
        run = wandb.init(
            mode="offline",
            dir=str(folder),
            project=EXPERIMENT,
            name=index.files.output.stem,
            config=_parameters(index),
            reinit="finish_previous",
        )
        run.summary.update(_figures(index, prices))
        run.log({"rollouts": wandb.Table(columns=[*COLUMNS], data=_rollouts(index))})
        run.finish()
    return str(folder / "wandb")


def export_otel(indexes: Sequence[ResultIndex], target: str, prices: Prices | None) -> str:
    """Export every rollout as a trace, to an endpoint if ``target`` is a URL, else into that file; return which."""
    del prices
    if "://" in target:
        url = TracesConfig(endpoint=target).url
        encoding = ENCODINGS["http/protobuf"]
        with closing(Collector(url, headers={}, encoding=encoding, timeout_s=POST_TIMEOUT_S)) as collector:
            for resource, spans in _batches(indexes, encoding.span):
                try:
                    collector.post(resource, spans)
                except (RefusedError, OSError, HTTPException) as error:
                    said = str(error) or type(error).__name__
                    raise ConfigError(f"to=: '{url}' does not take the spans: {said}", key="to") from error
        return url
    encoding = ENCODINGS["http/json"]
    with Path(target).open("wb") as file:
        for resource, spans in _batches(indexes, encoding.span):
            file.write(encoding.request(resource, spans) + b"\n")
    return target


EXPORTERS: Mapping[str, Callable[[Sequence[ResultIndex], str, Prices | None], str]] = {
    "mlflow": export_mlflow,
    "wandb": export_wandb,
    "otel": export_otel,
}
"""Each raises `OSError` if the target cannot be written, and `ConfigError` for anything else."""


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        message = f"export={name} needs the package {name} ({error}): pip install 'nemo-gym-suite[{name}]'"
        raise ConfigError(message, key="export") from error


def _parameters(index: ResultIndex) -> dict[str, str]:
    agents = ", ".join(str(agent["agent"]) for agent in summary(index)["agents"])
    return {"output": str(index.files.output), "agents": agents}


def _figures(index: ResultIndex, prices: Prices | None) -> dict[str, float]:
    """Return the run's numeric figures, by their names in the report."""
    totals = summary(index, prices)
    mean = totals["reward"]
    figures = {
        **{name: totals[name] for name in ("rollouts", "valid", "with_findings", "tasks", "solved", "retried")},
        **{name: totals[name] for name in ("tokens_in", "tokens_out", "seconds", "cost")},
        **totals["pass_rates"],
        "mean_reward": None if mean is None else mean["value"],
        "mean_reward_std_err": None if mean is None else mean["std_err"],
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def _metric_name(name: str) -> str:
    """Return a name that MLflow accepts for a metric."""
    return name.replace("@", "_at_").replace("/", "_")  # its file store makes folders of slashes


def _rollouts(index: ResultIndex) -> list[list[Any]]:
    """Return the values of `COLUMNS` of every rollout."""
    query = f"SELECT {', '.join(COLUMNS)} FROM rollouts ORDER BY task_index, sample_index"
    return [[*row] for row in index.connection().execute(query)]


# -- Spans ---------------------------------------------------------------------------------------------------------


def _batches(
    indexes: Sequence[ResultIndex], encode: Callable[[Span], bytes]
) -> Iterator[tuple[Mapping[str, Any], Sequence[bytes]]]:
    """Yield a run's resource and up to about `SPANS_AT_ONCE` encoded spans."""
    for index in indexes:
        resource = {"service.name": "nemo_gym", "service.namespace": "nemo_gym", "output": str(index.files.output)}
        batch: list[bytes] = []
        query = "SELECT source, offset, length FROM rollouts ORDER BY task_index, sample_index"
        finished_ns = max((path.stat().st_mtime_ns for path in index.paths if path.exists()), default=0)
        for source, offset, length in index.connection().execute(query):
            try:
                row = load_row(index.line(source, offset, length))
            except NoResultRow:
                continue  # its columns could be read, and it as a whole cannot
            batch += map(encode, spans_of_row(row, finished_ns))
            if len(batch) >= SPANS_AT_ONCE:
                yield resource, batch
                batch = []
        if batch:
            yield resource, batch


def spans_of_row(row: Mapping[str, Any], finished_ns: int) -> Iterator[Span]:
    """Yield a result row's trace: the rollout, its stages, the agent with its usage, and each call of a tool.

    A row has durations but no timestamps, so the trace ends at ``finished_ns``. The ids are those that the run's own
    spans would have, so that a rollout is found by either.
    """
    rollout_id, task_id = str(row.get("_ng_rollout_id") or ""), str(row.get("task_id") or "")
    attempt = (int_of(row.get("_ng_attempt_index")) or 0) + 1
    root = context_of_attempt(rollout_id.rpartition(".")[0], rollout_id, attempt)
    timings = mapping_of(row.get("timings"))
    seconds = {stage: float_of(timings.get(f"{stage}_s")) or 0.0 for stage in ("init", "run", "eval")}
    lengths_ns = {stage: int(min(max(0.0, each), MAX_STAGE_S) * 1e9) for stage, each in seconds.items()}
    start_ns = finished_ns - sum(lengths_ns.values())
    agent = str(mapping_of(row.get("agent_ref")).get("name") or "agent")
    is_valid = row.get("valid") is not False
    identity = {"rollout_id": rollout_id, "attempt": attempt}

    def span(name: str, number: int, parent: SpanContext | None, start: int, end: int, **attributes: Any) -> Span:
        context = root if parent is None else SpanContext(root.trace_id, f"{int(root.span_id, 16) ^ number:016x}")
        parent_id = None if parent is None else parent.span_id
        return Span(name, context, parent_id, SpanKind.INTERNAL, start, {**identity, **attributes}, end)

    rollout_span = span(
        *("rollout", 0, None, start_ns, finished_ns),
        task_id=task_id,
        agent=agent,
        reward=float_of(row.get("reward")),
        outcome=_text_of(row.get("outcome")),
    )
    if not is_valid:
        rollout_span.attributes["error.type"] = str(row.get("failure_kind") or "invalid")
        rollout_span.error = str(row.get("failure_reason") or "without a verdict")
    yield rollout_span
    stage_start_ns = start_ns
    for number, (stage, length) in enumerate(lengths_ns.items(), 1):
        end_ns = stage_start_ns + length
        if stage == "run":
            yield from _spans_of_agent(row, agent, root, (stage_start_ns, end_ns), span)
        elif length:
            yield span(stage, number, root, stage_start_ns, end_ns)
        stage_start_ns = end_ns


def _spans_of_agent(
    row: Mapping[str, Any], agent: str, root: SpanContext, time_ns: tuple[int, int], span: Callable[..., Span]
) -> Iterator[Span]:
    response = mapping_of(row.get("response"))
    usage = mapping_of(response.get("usage"))
    agent_span = span(f"invoke_agent {agent}", 2, root, *time_ns)
    agent_span.attributes |= {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "nemo_gym",
        "gen_ai.agent.name": agent,
        "gen_ai.request.model": _text_of(response.get("model")),
        "gen_ai.usage.input_tokens": int_of(usage.get("input_tokens")),
        "gen_ai.usage.output_tokens": int_of(usage.get("output_tokens")),
    }
    yield agent_span
    items = map(mapping_of, list_of(response.get("output")))
    for number, call in enumerate((item for item in items if item.get("type") == "function_call"), 16):
        name = str(call.get("name"))
        tool_span = span(f"execute_tool {name}", number, agent_span.context, time_ns[0], time_ns[0])
        tool_span.attributes |= {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": _text_of(call.get("call_id")),
        }
        yield tool_span


def _text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None
