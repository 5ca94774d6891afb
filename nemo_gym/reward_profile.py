"""Metrics over results: statistics of every numeric field, pass@k, majority votes.

Samples without a valid verdict do not enter any mean; they are counted as ``invalid/count``. The module's
name is NeMo Gym's.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.verdict import ATTEMPT_INDEX_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY, declares_failure

__all__ = [
    "AggregateMetrics",
    "AggregateMetricsMixin",
    "AggregateMetricsRequest",
    "add_avg_sample_std_dev",
    "compute_aggregate_metrics",
    "compute_pass_majority_metrics",
    "compute_subset_metrics",
    "highest_k_metrics",
    "is_valid_sample",
    "numeric_fields",
]

Result = dict[str, Any]
Tasks = list[list[Result]]
"""Results by task: ``tasks[i]`` holds the samples of task *i*."""
ScoreFn = Callable[[Result], Mapping[str, float | bool]]

INVALID_COUNT = "invalid/count"
STD_ERR = "/std_err"
GIVEN_NUMBERS_KEY = "_ng_given_numbers"
"""The key in a result that lists the names of numbers from its dataset row, which are no metrics."""
MAX_FIELDS = 10_000
"""The limit of numeric fields in all results: each has five statistics, for the whole run and for every task."""
_NO_ANSWER = "no_answer"
_NOT_METRICS = frozenset({TASK_INDEX_KEY, ROLLOUT_INDEX_KEY, ATTEMPT_INDEX_KEY, "mask_sample", "valid"})
_SPREAD_SUFFIXES = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


def is_valid_sample(result: Mapping[str, Any]) -> bool:
    """Return whether a result has a verdict that may enter a mean."""
    return not declares_failure(result)


def numeric_fields(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result (booleans as 0 and 1), with its response's token usage."""
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    usage = usage if isinstance(usage, Mapping) else {}
    dataset_numbers = result.get(GIVEN_NUMBERS_KEY) or ()
    fields = {key: value for key, value in result.items() if key not in dataset_numbers}
    return {
        key: int(value) if isinstance(value, bool) else value
        for key, value in {**fields, **usage}.items()
        if isinstance(value, int | float) and key not in _NOT_METRICS and abs(value) <= sys.float_info.max
    }


def _statistics(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return ``mean|max|min|median|std/<field>`` over the samples that have the field; ``std`` of one sample is 0."""
    columns: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for key, value in sample.items():
            columns[key].append(value)
    if len(columns) > MAX_FIELDS:
        raise InvalidBodyError(f"'verify_responses': there are {len(columns)} numeric fields, of at most {MAX_FIELDS}")
    return {
        f"{name}/{key}": _finite(of, values, key)
        for name, of in _STATISTICS.items()
        for key, values in columns.items()
    }


_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "max": max,
    "min": min,
    "median": median,
    "std": lambda values: stdev(values) if len(values) > 1 else 0.0,
}


def _finite(of: Callable[[list[float]], float], values: list[float], key: str) -> float:
    try:
        if math.isfinite(value := of(values)):
            return value
    except OverflowError:
        pass
    raise InvalidBodyError(f"'verify_responses': the numbers of '{key}' are too large to be summed up", field=key)


def pass_at_k(values: Sequence[float], k: int) -> float:
    """Return the probability that one of ``k`` samples drawn from ``values`` is right; the best of the first ``k`` if
    values are not binary."""
    if all(value in (0, 1) for value in values):
        wrong = sum(1 for value in values if not value)
        return 1.0 - math.comb(wrong, k) / math.comb(len(values), k)
    return max(values[:k])


def pass_rates(tasks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return ``pass@k`` in percent for every *k* up to the largest number of samples of a task, with ``/std_err``, the
    standard error over the tasks that have *k* samples. ``tasks[i]`` holds the rewards of task *i*; the result is
    empty unless all rewards are 0 or 1."""
    if any(reward not in (0, 1) for rewards in tasks for reward in rewards):
        return {}
    rates: dict[str, float] = {}
    for k in range(1, max(map(len, tasks), default=0) + 1):
        values = [100.0 * pass_at_k(rewards, k) for rewards in tasks if len(rewards) >= k]
        rates[f"pass@{k}"] = fmean(values)
        if len(values) > 1:
            rates[f"pass@{k}{STD_ERR}"] = stdev(values) / math.sqrt(len(values))
    return rates


def _majority(answers: Sequence[Any], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer, or the mean over answers that tie."""
    votes = Counter((answer, score) for answer, score in zip(answers, scores, strict=True) if answer is not None)
    if not votes:
        return 0.0
    max_count = max(votes.values())
    return fmean(score for (_, score), count in votes.items() if count == max_count)


def compute_pass_majority_metrics(
    tasks: Tasks, score_fn: ScoreFn | None = None, answer_key: str | None = None
) -> tuple[dict[str, Any], list[list[dict[str, float]]], list[str], int]:
    """Compute percentages per score over tasks, for every *k* up to the largest number of samples:

    - ``pass@k/<score>``: probability that *k* samples include a right one (for scores that are not binary, the best of
      the first *k*)
    - ``pass@1[avg-of-k]/<score>``: mean of the first *k* samples, with ``/std_dev_across_runs`` and
      ``/std_err_across_runs`` for *k* > 1
    - ``majority@k/<score>``: the most frequent answer's score, with ``answer_key``; samples without an answer are
      also counted as the score ``no_answer``
    - ``per_sample_aggregate``: per score, the mean over tasks of the *i*-th sample

    ``score_fn`` maps a result to named scores; default ``{"accuracy": reward}``. Returns the metrics, the scores by
    task and sample, the names of the scores, and the largest *k*.
    """
    if not tasks:
        return {}, [], [], 0
    score_of: ScoreFn = score_fn or (lambda result: {"accuracy": result["reward"]})
    scores: list[list[dict[str, float]]] = []
    for samples in tasks:
        of_task = []
        for result in samples:
            by_name = {name: int(v) if isinstance(v, bool) else v for name, v in score_of(result).items()}
            if answer_key is not None:
                by_name[_NO_ANSWER] = int(result.get(answer_key) is None)
            of_task.append(by_name)
        scores.append(of_task)
    names = sorted({name for of_task in scores for by_name in of_task for name in by_name})
    max_k = max(len(samples) for samples in tasks)

    metrics: dict[str, Any] = {}
    for k in range(1, max_k + 1):
        for name in names:
            columns = [[by_name[name] for by_name in of_task if name in by_name] for of_task in scores]
            _put_percentage(metrics, f"pass@{k}/{name}", [pass_at_k(v, k) for v in columns if len(v) >= k])
            firsts = [[by_name[name] for by_name in of_task[:k] if name in by_name] for of_task in scores]
            _put_percentage(metrics, f"pass@1[avg-of-{k}]/{name}", [fmean(head) for head in firsts if head])
            if answer_key is not None:
                votes = []
                for samples, of_task in zip(tasks, scores, strict=True):
                    pairs = [
                        (result.get(answer_key), by_name[name])
                        for result, by_name in zip(samples[:k], of_task[:k], strict=True)
                        if name in by_name
                    ]
                    votes.append(_majority([answer for answer, _ in pairs], [score for _, score in pairs]))
                _put_percentage(metrics, f"majority@{k}/{name}", votes)

    by_run = {name: _run_means(scores, name, max_k) for name in names}
    metrics["per_sample_aggregate"] = {name: means for name, means in by_run.items() if means}
    for k in range(2, max_k + 1):
        for name in names:
            means = by_run[name][:k]
            if len(means) >= 2:
                spread = stdev(means)
                metrics[f"pass@1[avg-of-{k}]/{name}/std_dev_across_runs"] = spread
                metrics[f"pass@1[avg-of-{k}]/{name}/std_err_across_runs"] = spread / math.sqrt(len(means))
    return metrics, scores, names, max_k


def _put_percentage(metrics: dict[str, Any], key: str, values: Sequence[float]) -> None:
    if values:
        metrics[key] = 100.0 * fmean(values)


def _run_means(scores: list[list[dict[str, float]]], name: str, max_k: int) -> list[float]:
    """Return the mean percentage of the *i*-th sample, for each *i*, over all tasks that have this sample."""
    means = []
    for index in range(max_k):
        run = [of_task[index][name] for of_task in scores if index < len(of_task) and name in of_task[index]]
        if run:
            means.append(100.0 * fmean(run))
    return means


def add_avg_sample_std_dev(
    metrics: dict[str, Any], all_score_dicts: list[list[dict[str, float]]], score_names: list[str], max_k: int
) -> None:
    """Add ``pass@1[avg-of-k]/<score>/avg_sample_std_dev``: the mean over tasks of the spread within a task."""
    for k in range(2, max_k + 1):
        for name in score_names:
            firsts = [[by_name[name] for by_name in of_task[:k] if name in by_name] for of_task in all_score_dicts]
            spreads = [stdev(head) for head in firsts if len(head) >= 2]
            if spreads:
                metrics[f"pass@1[avg-of-{k}]/{name}/avg_sample_std_dev"] = fmean(spreads)


def compute_subset_metrics(
    tasks: Tasks, subset_key: str, score_fn: ScoreFn | None = None, answer_key: str | None = None
) -> dict[str, Any]:
    """Compute `compute_pass_majority_metrics` per value of a field of the tasks, as ``<value>/<metric>``."""
    subsets: dict[Any, Tasks] = defaultdict(list)
    for samples in tasks:
        if samples and (value := samples[0].get(subset_key)):
            subsets[value].append(samples)
    return {
        f"{value}/{key}": metric
        for value, subset in subsets.items()
        for key, metric in compute_pass_majority_metrics(subset, score_fn, answer_key)[0].items()
        if key != "per_sample_aggregate"
    }


def highest_k_metrics(
    agent_metrics: Mapping[str, Any],
    pattern: str,
    score_names: Sequence[str] | None = None,
    exclude_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the metrics that match ``pattern`` (such as ``pass@{k}``) at the largest *k*.

    ``score_names`` keeps only these scores, ``exclude_names`` drops some. Spread figures are never included.
    """
    before, separator, after = pattern.partition("{k}")
    if not separator:
        raise ValueError(f"pattern '{pattern}' has no '{{k}}'")
    regex = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}/(.+)")
    by_k: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in agent_metrics.items():
        match = regex.fullmatch(key)
        if match is None:
            continue
        score = match[2]
        if score.endswith(_SPREAD_SUFFIXES) or (score_names is not None and score not in score_names):
            continue
        if exclude_names is None or score not in exclude_names:
            by_k[int(match[1])][key] = value
    return by_k[max(by_k)] if by_k else {}


class AggregateMetricsMixin:
    """Methods that a server may override to define its metrics."""

    def compute_metrics(self, tasks: Tasks) -> dict[str, Any]:
        """Compute metrics that need all valid results at once. ``per_task_metrics`` (a list of dicts with the task
        index) goes to the group level; everything else goes to the agent level."""
        return {}

    def compute_repeat_metrics(self, tasks: Tasks) -> dict[str, Any]:
        """Compute the metrics of one repeat; ``tasks`` holds one list with a single result for each task."""
        return {}

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the most important metrics; by default every mean, and the number of invalid samples."""
        return default_key_metrics(agent_metrics)


def default_key_metrics(agent_metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in agent_metrics.items() if key.startswith("mean/") or key == INVALID_COUNT}


def compute_aggregate_metrics(
    verify_responses: Sequence[Result],
    compute_metrics_fn: Callable[[Tasks], dict[str, Any]] | None = None,
    get_key_metrics_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    compute_repeat_metrics_fn: Callable[[Tasks], dict[str, Any]] | None = None,
) -> AggregateMetrics:
    """Compute metrics per task and over all tasks, from the results of one agent. Raises `InvalidBodyError` naming the
    field if results are malformed."""
    if not verify_responses:
        return AggregateMetrics()
    by_task: dict[int, list[Result]] = defaultdict(list)
    for result in verify_responses:
        if not isinstance(result, dict):
            raise InvalidBodyError(f"'verify_responses' is a list of result rows, and holds a {type(result).__name__}")
        for key in (TASK_INDEX_KEY, ROLLOUT_INDEX_KEY):
            if not isinstance(index := result.get(key, 0), int):
                raise InvalidBodyError(f"'verify_responses': '{key}' is a number, not {type(index).__name__}")
        by_task[result.get(TASK_INDEX_KEY, 0)].append(result)
    for results in by_task.values():
        results.sort(key=lambda result: int(result.get(ROLLOUT_INDEX_KEY, 0)))  # a file has them as they ended
    groups = {index: _group(index, by_task[index]) for index in sorted(by_task)}
    valid = [result for result in verify_responses if is_valid_sample(result)]
    metrics: dict[str, Any] = dict(_statistics([numeric_fields(result) for result in valid]))
    metrics[INVALID_COUNT] = len(verify_responses) - len(valid)

    if compute_metrics_fn is not None:
        valid_by_task = [[r for r in by_task[index] if is_valid_sample(r)] for index in sorted(by_task)]
        custom = compute_metrics_fn([samples for samples in valid_by_task if samples])
        for of_task in custom.pop("per_task_metrics", None) or ():
            if (index := of_task.get(TASK_INDEX_KEY)) in groups:
                groups[index].update(of_task)
        metrics.update(custom)

    repeats = _repeats(valid, compute_repeat_metrics_fn) if compute_repeat_metrics_fn is not None else []
    for name in {name: None for repeat in repeats for name in numeric_fields(repeat)}:
        values = [repeat[name] for repeat in repeats if name in repeat]
        metrics[f"mean_across_repeats/{name}"] = sum(values) / len(values)

    return AggregateMetrics(
        group_level_metrics=list(groups.values()),
        repeat_level_metrics=repeats,
        agent_metrics=metrics,
        key_metrics=(get_key_metrics_fn or default_key_metrics)(metrics),
    )


def _repeats(results: Sequence[Result], compute: Callable[[Tasks], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that ``compute`` gives for each repeat, or none if there is only one repeat. A metric that is
    unknown (``None``) in one repeat is left out of all, because repeats are meant to be compared."""
    by_repeat: dict[int, list[list[Result]]] = defaultdict(list)
    for result in results:
        by_repeat[result.get(ROLLOUT_INDEX_KEY, 0)].append([result])
    if len(by_repeat) < 2:
        return []
    by_index = {index: metrics for index in sorted(by_repeat) if (metrics := compute(by_repeat[index]))}
    unknown = {name for metrics in by_index.values() for name, value in metrics.items() if value is None}
    return [
        {ROLLOUT_INDEX_KEY: index, **{name: value for name, value in metrics.items() if name not in unknown}}
        for index, metrics in by_index.items()
    ]


def _group(index: int, results: Sequence[Result]) -> dict[str, Any]:
    valid = [result for result in results if is_valid_sample(result)]
    return {
        TASK_INDEX_KEY: index,
        **_statistics([numeric_fields(result) for result in valid]),
        "num_rollouts": len(results),
        INVALID_COUNT: len(results) - len(valid),
        "rollout_infos": [_rollout_info(index, result) for result in results],
    }


def _rollout_info(index: int, result: Result) -> dict[str, Any]:
    sample = result.get(ROLLOUT_INDEX_KEY, 0)
    info: dict[str, Any] = {
        "rollout_id": f"{index}:{sample}",
        TASK_INDEX_KEY: index,
        ROLLOUT_INDEX_KEY: sample,
        **numeric_fields(result),
    }
    if not is_valid_sample(result):
        info.update(reward=None, mask_sample=True)
    return info
