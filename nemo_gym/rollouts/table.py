"""What a run shows at its end: each task's samples, every distinct reason, then each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.contract.verdict import FailureKind
from nemo_gym.reward_profile import STD_ERR
from nemo_gym.rollouts.tally import Reason, RolloutSummary, Tally

MAX_TABLE_ROWS = 60
MAX_NAMED = 3
"""Rollouts named beside a reason."""
CONTEXT_WARNING_SHARE = 0.05


def print_table(console: Console, summaries: Sequence[RolloutSummary], *, title: str) -> None:
    """One row per sample: without verdict, with findings, without reward, then the rest. A long run shows the first of
    them, and how many more there are."""
    table = Table(title=title, title_justify="left", show_lines=False)
    for name in ("task", "sample", "reward", "outcome"):
        table.add_column(name, justify="right" if name in ("sample", "reward") else "left", overflow="fold")
    for name in ("findings", "turns", "time", "attempts"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    ordered = sorted(summaries, key=lambda item: (item.rank, item.task_index, item.sample_index))
    for item in ordered[:MAX_TABLE_ROWS]:
        table.add_row(
            Text(item.task_id),
            str(item.sample_index),
            _reward(item),
            Text(item.outcome, style="" if item.reward is not None else "yellow"),
            Text(str(item.findings), style="bold red") if item.findings else "",
            "" if item.turns is None else str(item.turns),
            "" if item.seconds is None else f"{item.seconds:.1f} s",
            str(item.attempts),
            Text(item.why),
        )
    console.print(table)
    if len(ordered) > MAX_TABLE_ROWS:
        console.print(f"… and {len(ordered) - MAX_TABLE_ROWS} more in the output file")


def print_reasons(console: Console, summaries: Sequence[RolloutSummary], logs: Path) -> None:
    """Every distinct reason of a rollout without verdict, with findings or without reward, with its number, however
    long the run, and a log of ``logs`` that shows it."""
    reasons = Reason.distinct(summaries)
    if not reasons:
        return
    console.print(Text("Why:", style="bold"))
    for reason in reasons:
        which = ", ".join(reason.rollouts[:MAX_NAMED]) + (", …" if len(reason.rollouts) > MAX_NAMED else "")
        text = f"  {len(reason.rollouts)} × {reason.label}" + (f": {reason.text}" if reason.text else "")
        # A row may have a field of that name of its own.
        shown = reason.log and reason.log.startswith(f"{logs.name}/")
        which += f"; log: {logs.parent / reason.log}" if reason.log and shown else ""
        style = "yellow" if reason.label.startswith("no verdict") else ""
        console.print(Text(f"{text} ({which})", style=style), soft_wrap=True)


def warn_of_context(console: Console, summaries: Sequence[RolloutSummary]) -> None:
    """A model server that is too small for the tasks looks like a policy that cannot do them."""
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
    table = Table(title="Agents", title_justify="left")
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
    console.print(table)


def print_key_metrics(console: Console, aggregates: Sequence[Mapping[str, Any]]) -> None:
    """NeMo Gym's closing lines."""
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
