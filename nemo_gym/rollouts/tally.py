"""What a run came to so far: counts by agent, a summary of each rollout, and the progress bar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import decide_validity
from nemo_gym.rollouts.interfaces import JobEvent, JobState
from nemo_gym.rollouts.result_rows import same_way

WHY_CHARS = 48


@dataclass(frozen=True, slots=True)
class Reason:
    """What several rollouts have in common that ended the same way."""

    label: str
    text: str
    """Of the first of them."""
    rollouts: tuple[str, ...]
    log: str | None
    """Of the first that has one."""

    @classmethod
    def distinct(cls, summaries: Iterable[RolloutSummary]) -> list[Reason]:
        """Every distinct reason, those of rollouts without a verdict first, then by their number."""
        found: dict[tuple[int, str], list[RolloutSummary]] = {}
        for item in summaries:
            if item.label:
                key = same_way(item.label, item.reason, (item.task_id,))
                found.setdefault((item.rank, key), []).append(item)
        ordered = sorted(found.items(), key=lambda pair: (pair[0][0], -len(pair[1])))
        return [
            cls(
                items[0].label,
                items[0].reason or "",
                tuple(f"{item.task_id} #{item.sample_index}" for item in items),
                next((item.log for item in items if item.log), None),
            )
            for _, items in ordered
        ]


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One line of the result table."""

    task_id: str
    task_index: int
    sample_index: int
    agent: str
    reward: float | None
    """``None`` without a verdict."""
    outcome: str
    findings: int
    turns: int | None
    seconds: float | None
    """Of the three stages together, without waiting."""
    attempts: int
    reason: str | None = None
    """Why it has no verdict or no reward, or how its harness ended."""
    kinds: tuple[str, ...] = ()
    """Of the findings."""
    log: str | None = None
    """The file with what its grading printed, as its row names it."""

    @property
    def rank(self) -> int:
        """What needs looking at comes first: no verdict, findings, no reward, the rest."""
        if self.reward is None:
            return 0
        if self.findings:
            return 1
        return 2 if self.reward <= 0 else 3

    @property
    def label(self) -> str:
        """What is to be explained of it; empty where nothing is."""
        if self.reward is None:
            return f"no verdict, {self.outcome}"
        if self.kinds:
            return f"findings {', '.join(self.kinds)}"
        odd = "" if self.outcome == AgentOutcome.COMPLETED else f", {self.outcome}"
        return f"reward {self.reward:g}{odd}" if odd or self.reward <= 0 else ""

    @property
    def why(self) -> str:
        """A word of why, for a table."""
        if self.kinds:
            return self.kinds[0] + (f" +{len(self.kinds) - 1}" if len(self.kinds) > 1 else "")
        if not self.label or not self.reason:
            return ""
        return self.reason if len(self.reason) <= WHY_CHARS else f"{self.reason[: WHY_CHARS - 1]}…"

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> RolloutSummary:
        """From a line of the output or of the failures file."""
        timings = row.get("timings") or {}
        reward = decide_validity(row).reward
        valid = reward is not None
        findings = row.get("findings") or ()
        said = (row.get("reward_reason"), row.get("outcome_detail")) if valid else (row.get("failure_reason"),)
        return cls(
            task_id=str(row.get("task_id", row["_ng_task_index"])),
            task_index=row["_ng_task_index"],
            sample_index=row["_ng_rollout_index"],
            agent=(row.get("agent_ref") or {}).get("name", ""),
            reward=reward,
            outcome=str(row.get("outcome") if valid else row.get("failure_kind")),
            findings=len(findings),
            turns=_turns(row),
            seconds=sum(timings.values()) if timings else None,
            attempts=int(row.get("_ng_attempt_index", 0)) + 1,
            reason="; ".join(dict.fromkeys(str(words) for words in said if words)) or None,
            kinds=tuple(dict.fromkeys(str(each.get("kind")) for each in findings if isinstance(each, Mapping))),
            log=log if isinstance(log := row.get("evaluation_log"), str) else None,
        )


def _turns(row: Mapping[str, Any]) -> int | None:
    for source in (row.get("ng_agent_observations"), row.get("ng_model_session")):
        turns = source.get("turns") if isinstance(source, Mapping) else None
        if isinstance(turns, int):
            return turns
    return None


@dataclass(slots=True)
class AgentTally:
    """Running sums of one agent. Invalid rollouts are counted and leave every average alone."""

    rewards: float = 0.0
    valid: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    findings: int = 0

    @property
    def mean_reward(self) -> float | None:
        return self.rewards / self.valid if self.valid else None

    @property
    def invalid(self) -> int:
        return sum(self.failures.values())


class Tally:
    """Counts by agent."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentTally] = {}
        self.finished = 0

    def add_row(self, agent: str, row: Mapping[str, Any]) -> None:
        tally = self.agents.setdefault(agent, AgentTally())
        self.finished += 1
        if (reward := decide_validity(row).reward) is not None:
            tally.valid += 1
            tally.rewards += reward
        else:
            tally.failures[str(row.get("failure_kind"))] += 1
        tally.findings += bool(row.get("findings"))

    def add(self, event: JobEvent) -> None:
        if event.state is JobState.DONE:
            self.add_row(event.job.spec.agent, event.result or {})
        elif event.state.terminal and event.failure is not None:
            self.add_row(event.job.spec.agent, {"reward": None, "failure_kind": event.failure.kind})

    def describe(self) -> str:
        """``<agent>: reward 0.417 (12), 1 without verdict; …``"""
        parts = []
        for name, tally in self.agents.items():
            mean = "–" if tally.mean_reward is None else f"{tally.mean_reward:.3f}"
            extra = f", {tally.invalid} without verdict" if tally.invalid else ""
            extra += f", {tally.findings} with findings" if tally.findings else ""
            parts.append(f"{name}: reward {mean} ({tally.valid}){extra}")
        return "; ".join(parts)


class RunProgress:
    """A `JobListener` that shows a run on ``console``; ``None`` shows nothing and still counts."""

    def __init__(self, total: int, tally: Tally, console: Console | None) -> None:
        self._total = max(total, 1)
        self._tally = tally
        self._console = console
        self._percent = 100 * tally.finished // self._total
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("rollouts"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[averages]}"),
                console=console,
                refresh_per_second=4,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=self._total, completed=self._tally.finished, averages=self._tally.describe()
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: JobEvent) -> None:
        if not event.state.terminal:
            return
        self._tally.add(event)
        self._show()

    def add_row(self, agent: str, row: Mapping[str, Any]) -> None:
        """A result that came otherwise than as an event."""
        self._tally.add_row(agent, row)
        self._show()

    def _show(self) -> None:
        percent = 100 * self._tally.finished // self._total
        if self._console is None or percent == self._percent:
            return
        self._percent = percent
        if self._bar is not None:
            self._bar.update(self._task, completed=self._tally.finished, averages=self._tally.describe())
        else:
            line = f"{percent:3d}% ({self._tally.finished}/{self._total})  {self._tally.describe()}"
            self._console.print(Text(line), soft_wrap=True)
