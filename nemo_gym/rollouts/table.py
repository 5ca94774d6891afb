"""The table at the end of a run: each task's samples, then each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.rollouts.tally import RolloutSummary, Tally

MAX_TABLE_ROWS = 60


def print_table(console: Console, summaries: Sequence[RolloutSummary], *, title: str) -> None:
    """One row per sample, in task order; a long run shows its first rows and says how many more there are."""
    table = Table(title=title, title_justify="left", show_lines=False)
    for name in ("task", "sample", "reward", "outcome"):
        table.add_column(name, justify="right" if name in ("sample", "reward") else "left", overflow="fold")
    for name in ("findings", "turns", "time", "attempts"):
        table.add_column(name, justify="right")
    ordered = sorted(summaries, key=lambda item: (item.task_index, item.sample_index))
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
        )
    console.print(table)
    if len(ordered) > MAX_TABLE_ROWS:
        console.print(f"… and {len(ordered) - MAX_TABLE_ROWS} more in the output file")
    for item in ordered[:MAX_TABLE_ROWS]:
        if item.reward is None and item.reason:
            console.print(Text(f"{item.task_id} #{item.sample_index}: {item.reason}", style="yellow"), soft_wrap=True)


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
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            console.print(Text(f"  {name}: {shown}"), soft_wrap=True)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _reward(item: RolloutSummary) -> Text:
    if item.reward is None:
        return Text("–", style="yellow")
    return Text(f"{item.reward:g}", style="green" if item.reward > 0 else "")
