"""The report of a finished run: aggregate metrics, computed by its servers, and tables."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym._util.terminal import shown
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.verdict import RESPONSE_KEY, TASK_INDEX_KEY, FailureKind, public_row, public_verdict
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.reward_profile import GIVEN_NUMBERS_KEY, INVALID_COUNT, STD_ERR, compute_aggregate_metrics, pass_rates
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.result_rows import AgentTally, Reason, RolloutSummary, Tally

log = structlog.get_logger(__name__)

SLOW_METRICS_S = 30.0
"""After this time, a sentence says that the run waits for an environment's metrics."""


def for_aggregation(row: Mapping[str, Any], given: bytes | None) -> dict[str, Any]:
    """Return a result row without what metrics do not read: the prompt, the conversation, artifacts and trajectories.

    ``given`` is the dataset row, if it is known. The numbers that the result has from it are listed for
    `agree_on_given`. Token usage is the model server's count, or else the agent's.
    """
    left_out = ("responses_create_params", "response", "artifacts", "ng_trajectory")
    reduced = {key: value for key, value in row.items() if key not in left_out}
    if given is not None:
        reduced[GIVEN_NUMBERS_KEY] = [
            key
            for key, value in orjson.loads(given).items()
            if isinstance(value, int | float) and key != "reward" and reduced.get(key) == value
        ]
    if usage := _usage(row):
        reduced["response"] = {"usage": usage}
    return reduced


def agree_on_given(rows: Sequence[dict[str, Any]]) -> None:
    """Give all rows of `for_aggregation` the same names of numbers from the dataset.

    Numbers of the dataset (an expected answer, a year) are no metrics of the agent's work; environments may still
    group by them. If the verdict of one row has another number of that name, the name is a metric of every row: if it
    were left out where the values happen to be equal, as in rows from an earlier run, means would be of the others."""
    known = [row for row in rows if GIVEN_NUMBERS_KEY in row]
    given = {name for row in known for name in row[GIVEN_NUMBERS_KEY]}
    given -= {
        name
        for row in known
        for name, value in row.items()
        if name in given and name not in row[GIVEN_NUMBERS_KEY] and isinstance(value, int | float)
    }
    for row in rows:
        row.pop(GIVEN_NUMBERS_KEY, None)
        if names := [name for name in row if name in given]:
            row[GIVEN_NUMBERS_KEY] = names


def _usage(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for source in (row.get("ng_model_session"), row.get("response")):
        usage = source.get("usage") if isinstance(source, Mapping) else None
        if isinstance(usage, Mapping) and any(usage.values()):
            return usage
    return None


async def aggregate(
    peers: Peers, servers: Servers, rows: list[dict[str, Any]], tally: AgentTally, summaries: Sequence[RolloutSummary]
) -> dict[str, Any]:
    """Return one entry of the aggregate file. If a server cannot answer, it holds the error, and the metrics without
    the server's own."""
    answered: dict[str, Any] = {}
    problem: dict[str, str] = {}
    if rows:
        await asyncio.to_thread(agree_on_given, rows)
        answered, problem = await _asked(peers, servers.environment or servers.agent, rows)
        if problem:
            answered = await asyncio.to_thread(_standard_metrics, rows)
        if servers.own_metrics and servers.environment is not None:
            seen = rows if servers.row_access == "full" else [_for_agent(row) for row in rows]
            own, more = await _asked(peers, servers.agent, seen)
            for kind in ("agent_metrics", "key_metrics"):
                answered[kind] = {**(answered.get(kind) or {}), **(own.get(kind) or {})}
            problem = {**more, **problem}
    ref = {"type": "responses_api_agents", "name": servers.agent}
    return {"agent_ref": ref, **with_counts(answered, tally, summaries), **problem}


async def _asked(
    peers: Peers, server: str, rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a server's metrics over ``rows``, and its error if there is one."""
    reminder = asyncio.get_running_loop().call_later(
        SLOW_METRICS_S, lambda: log.warning("waiting for a server's metrics", server=server)
    )
    try:
        reply = await peers.post(server, "/aggregate_metrics", {"verify_responses": rows})
        return dict(reply.json()), {}
    except (PeerError, ValueError, TypeError) as error:
        problem = str(error) if isinstance(error, PeerError) else f"{server}/aggregate_metrics: {error}"
        log.warning("a server's own metrics are missing", error=problem)
        return {}, {"error": problem}
    finally:
        reminder.cancel()


def _for_agent(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an agent may see of a result row; other fields may quote the expected answer."""
    usage = {RESPONSE_KEY: row[RESPONSE_KEY]} if RESPONSE_KEY in row else {}
    return {**public_row(row), **public_verdict(row), **usage}


def _standard_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics that need no environment; none if the rows cannot be summed up."""
    try:
        return compute_aggregate_metrics(rows).model_dump(mode="json")
    except InvalidBodyError as error:
        log.warning("no metrics", error=error.message)
        return {}


def with_counts(answered: Mapping[str, Any], tally: AgentTally, summaries: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return the metrics of one agent: those of its rollouts with a verdict, and counts over all its rollouts."""
    metrics: dict[str, Any] = {
        "agent_metrics": answered.get("agent_metrics") or {},
        "key_metrics": answered.get("key_metrics") or {},
        "group_level_metrics": answered.get("group_level_metrics") or [],
    }
    tasks = _by_task(summaries)
    rates = pass_rates([_rewards(samples) for samples in tasks.values()])
    counts = {
        "rollouts/total": len(summaries),
        "rollouts/valid": tally.valid,
        "rollouts/invalid": tally.invalid,
        **{f"rollouts/invalid/{kind}": count for kind, count in sorted(tally.failures.items())},
        "rollouts/with_findings": tally.findings,
        "tasks/total": len(tasks),
        "tasks/solved": sum(any(reward >= 1 for reward in _rewards(samples)) for samples in tasks.values()),
        "tasks/without_verdict": sum(not _rewards(samples) for samples in tasks.values()),
    }
    for kind in ("agent_metrics", "key_metrics"):
        # The environment received only rollouts with a verdict, so its count of invalid ones is meaningless.
        metrics[kind].pop(INVALID_COUNT, None)
    metrics["agent_metrics"] |= {**rates, **counts}
    headline = {name: counts[name] for name in ("tasks/total", "tasks/solved", "rollouts/total", "rollouts/invalid")}
    metrics["key_metrics"] |= {**_headline(rates), **headline}
    metrics["group_level_metrics"] = _groups(metrics["group_level_metrics"], tasks)
    return metrics


def _by_task(summaries: Sequence[RolloutSummary]) -> dict[int, list[RolloutSummary]]:
    tasks: dict[int, list[RolloutSummary]] = {}
    for item in sorted(summaries, key=lambda item: (item.task_index, item.sample_index)):
        tasks.setdefault(item.task_index, []).append(item)
    return tasks


def _rewards(samples: Sequence[RolloutSummary]) -> list[float]:
    return [item.reward for item in samples if item.reward is not None]


def _headline(rates: Mapping[str, float]) -> dict[str, float]:
    """Return ``pass@1`` and the largest ``pass@k``, with their standard errors."""
    names = [name for name in rates if not name.endswith(STD_ERR)]
    chosen = dict.fromkeys([*names[:1], *names[-1:]])
    return {name: rates[name] for base in chosen for name in (base, base + STD_ERR) if name in rates}


def _groups(answered: Sequence[dict[str, Any]], tasks: Mapping[int, Sequence[RolloutSummary]]) -> list[dict[str, Any]]:
    """Return the environment's metrics of each task, with its id and the number of its rollouts without a verdict."""
    by_index = {group.get(TASK_INDEX_KEY): group for group in answered}
    groups = []
    for index, samples in tasks.items():
        without = sum(item.reward is None for item in samples)
        if index not in by_index and without < len(samples):
            continue
        counts = {"num_rollouts": len(samples), INVALID_COUNT: without}
        groups.append({TASK_INDEX_KEY: index, "task_id": samples[0].task_id, **by_index.get(index, {}), **counts})
    return groups


MAX_TABLE_ROWS = 60
MAX_NAMED = 3
"""How many rollouts are named beside a reason."""
CONTEXT_WARNING_SHARE = 0.05


def print_table(console: Console, summaries: Sequence[RolloutSummary], *, title: str) -> None:
    """Print one row per sample: first those without verdict, with findings, without reward, then the others. Print at
    most `MAX_TABLE_ROWS` of them, and how many more there are."""
    table = Table(show_lines=False)
    for name in ("task", "sample", "reward", "outcome"):
        table.add_column(name, justify="right" if name in ("sample", "reward") else "left", overflow="fold")
    for name in ("findings", "turns", "time", "attempts"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    ordered = sorted(summaries, key=lambda item: (item.rank, item.task_index, item.sample_index))
    for item in ordered[:MAX_TABLE_ROWS]:
        table.add_row(
            Text(shown(item.task_id)),
            str(item.sample_index),
            _reward(item),
            Text(shown(item.outcome), style="" if item.reward is not None else "yellow"),
            Text(str(item.findings), style="bold red") if item.findings else "",
            "" if item.turns is None else str(item.turns),
            "" if item.seconds is None else f"{item.seconds:.1f} s",
            str(item.attempts),
            Text(shown(item.why)),
        )
    print_titled(console, title, table)
    if len(ordered) > MAX_TABLE_ROWS:
        console.print(f"… and {len(ordered) - MAX_TABLE_ROWS} more in the output file")


def print_reasons(console: Console, summaries: Sequence[RolloutSummary], logs: Path) -> None:
    """Print every distinct reason of rollouts without verdict, with findings or without reward, each with the number
    of its rollouts and, if there is one, a log from ``logs``."""
    reasons = Reason.distinct(summaries)
    if not reasons:
        return
    console.print(Text("Why:", style="bold"))
    for reason in reasons:
        details = ", ".join(reason.rollouts[:MAX_NAMED]) + (", …" if len(reason.rollouts) > MAX_NAMED else "")
        text = f"  {len(reason.rollouts)} × {reason.label}" + (f": {reason.text}" if reason.text else "")
        # A dataset row may have its own field of that name.
        shown = reason.log and reason.log.startswith(f"{logs.name}/")
        details += f"; log: {logs.parent / reason.log}" if reason.log and shown else ""
        style = "yellow" if reason.label.startswith("no verdict") else ""
        console.print(Text(f"{text} ({details})", style=style), soft_wrap=True)


def warn_of_context(console: Console, summaries: Sequence[RolloutSummary]) -> None:
    """Warn if many prompts exceed the model's context: otherwise that looks like a policy that fails at the tasks."""
    exceeded = sum(item.outcome == FailureKind.CONTEXT_EXCEEDED for item in summaries)
    if exceeded > CONTEXT_WARNING_SHARE * len(summaries):
        console.print(
            Text(
                f"Warning: the first request of {exceeded} of {len(summaries)} rollouts does not fit the model's"
                " context. Serve the model with a longer one (vLLM: --max-model-len, SGLang: --context-length), or"
                " choose shorter tasks.",
                style="bold yellow",
            ),
            soft_wrap=True,
        )


def print_agents(console: Console, tally: Tally) -> None:
    table = Table()
    for name in ("agent", "mean reward", "with verdict", "without verdict", "with findings"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent, counted in tally.agents.items():
        kinds = ", ".join(f"{kind} {count}" for kind, count in counted.failures.most_common())
        table.add_row(
            Text(agent),
            "–" if counted.mean_reward is None else f"{counted.mean_reward:.3f}",
            str(counted.valid),
            f"{counted.invalid} ({kinds})" if kinds else "0",
            str(counted.findings),
        )
    print_titled(console, "Agents", table)


def print_titled(console: Console, title: str, table: Table) -> None:
    """Print a table under a title, which as the table's own would be padded with blanks to its width."""
    console.print(Text(title, style="table.title"), soft_wrap=True)
    console.print(table)


def print_key_metrics(console: Console, aggregates: Sequence[Mapping[str, Any]]) -> None:
    """Print the key metrics as NeMo Gym does at the end of a run."""
    for aggregate in aggregates:
        console.print(Text(f"Key metrics for {aggregate['agent_ref']['name']}:", style="bold"))
        for name, value in (aggregate.get("key_metrics") or {}).items():
            if name.endswith(STD_ERR):
                continue
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            if (spread := aggregate["key_metrics"].get(name + STD_ERR)) is not None:
                shown += f" ± {spread:.4f}"
            console.print(Text(f"  {name}: {shown}"), soft_wrap=True)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _reward(item: RolloutSummary) -> Text:
    if item.reward is None:
        return Text("–", style="yellow")
    return Text(f"{item.reward:g}", style="green" if item.reward > 0 else "")
