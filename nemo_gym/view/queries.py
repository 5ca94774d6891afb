"""Queries of an index: tables, sums and single rows of a result file, each in a fraction of a second."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self, TypeVar

import orjson
import yaml

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError
from nemo_gym.reward_profile import pass_rates
from nemo_gym.view.index import ResultIndex, ViewError
from nemo_gym.view.lines import COLUMNS, NoResultRow, load_row

SORTS = {
    "worst": "rank, task_index, sample_index",
    "task": "task_index, sample_index",
    **{name: f"{name}, task_index, sample_index" for name in COLUMNS if name not in ("way", "label", "log", "rank")},
}
REWARDS = {"none": "reward IS NULL", "0": "reward <= 0", ">0": "reward > 0", "1": "reward >= 1", "<1": "reward < 1"}
MAX_ROWS = 1000
_TOKENS = ", ".join(f"CAST(total({name}) AS INTEGER) AS {name}" for name in ("tokens_in", "tokens_out"))
"""Harnesses report these numbers, and ``sum`` refuses those that are too large together."""
_WORD = re.compile(r"\w+")
_BOUND = re.compile(r"\s*([<>]=?)?\s*(\d{1,12}(?:\.\d{1,6})?)\s*")
_Task = TypeVar("_Task")
Z95 = 1.959964


# The uncertainty of figures: intervals of means over tasks, and two runs compared task by task.
#
# Samples of one task resemble each other, so the tasks are counted: a mean is the mean of the tasks' means, and its
# standard error is that of the tasks' means.


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval; without an interval if there is only one task."""

    value: float
    std_err: float | None
    tasks: int

    @property
    def low(self) -> float | None:
        return None if self.std_err is None else self.value - Z95 * self.std_err

    @property
    def high(self) -> float | None:
        return None if self.std_err is None else self.value + Z95 * self.std_err


def mean_of_tasks(rewards: Sequence[Sequence[float]]) -> Mean | None:
    """Return the mean over tasks of the mean reward; ``None`` without rewards. ``rewards[i]`` are those of task i."""
    means = [fmean(of_task) for of_task in rewards if of_task]
    if not means:
        return None
    spread = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Mean(fmean(means), spread, len(means))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A, over the tasks that have a reward in both."""

    tasks: int
    wins: int
    """Tasks whose mean reward is higher in B."""
    losses: int
    ties: int
    gained: int
    """Tasks that B solves and A does not. A task is solved if a sample has at least the reward 1."""
    lost: int
    difference: Mean | None
    """The difference of the tasks' mean rewards, B − A."""
    p_value: float
    """The p-value of the exact two-sided sign test: how often chance alone gives as many wins, or as many losses."""


def compare(first: Mapping[_Task, Sequence[float]], second: Mapping[_Task, Sequence[float]]) -> Comparison:
    """Compare rewards by task, of run A and of run B."""
    both = [task for task, rewards in first.items() if rewards and second.get(task)]
    differences = [fmean(second[task]) - fmean(first[task]) for task in both]
    wins = sum(each > 1e-12 for each in differences)
    losses = sum(each < -1e-12 for each in differences)
    solved = [(max(first[task]) >= 1, max(second[task]) >= 1) for task in both]
    return Comparison(
        tasks=len(both),
        wins=wins,
        losses=losses,
        ties=len(both) - wins - losses,
        gained=sum(after and not before for before, after in solved),
        lost=sum(before and not after for before, after in solved),
        difference=mean_of_tasks([[each] for each in differences]),
        p_value=sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Return the probability that fair coins fall at least this unevenly, to either side."""
    count, fewer = wins + losses, min(wins, losses)
    if count == 0:
        return 1.0
    # In logarithms: for 100,000 coins, the powers alone would not fit a float.
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(fewer + 1)]
    tail = sum(math.exp(each - count * math.log(2)) for each in logs)
    return min(1.0, 2 * tail)


# Tables


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The filters, the order and the page of a table. An empty filter matches every row."""

    q: str = ""
    """Beginnings of words that are all in the prompt or the answer; a part of the task's name; or a rollout's id."""
    task: str = ""
    """A part of the task's name."""
    agent: str = ""
    outcome: str = ""
    """How the harness ended, or the kind of failure."""
    reward: str = ""
    """A key of `REWARDS`."""
    findings: str = ""
    """``1``: with findings; else a part of their kinds."""
    turns: str = ""
    """A number, or a bound such as ``>20``."""
    seconds: str = ""
    """As ``turns``, for the seconds that a rollout took."""
    way: str = ""
    """Rows that failed the same way."""
    sort: str = "worst"
    descending: bool = False
    offset: int = 0
    limit: int = 100

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Self:
        """Parse texts. Raises `ConfigError` for unknown filters and wrong values."""
        names = {field.name for field in fields(cls)}
        for name in words:
            if name not in names:
                raise ConfigError(
                    f"'{name}' is not a filter{nearest(name, sorted(names))}; there are: {_listed(names)}"
                )
        given: dict[str, Any] = dict(words)
        for name in ("offset", "limit"):
            if name in given:
                if not str(given[name]).isdecimal():
                    raise ConfigError(f"{name}={given[name]}: not a number")
                given[name] = min(int(given[name]), 10**12)
        given["descending"] = str(given.get("descending", "")).lower() in ("1", "true", "yes")
        query = cls(**given)
        if query.sort not in SORTS:
            raise ConfigError(f"sort={query.sort}{nearest(query.sort, sorted(SORTS))}; there are: {_listed(SORTS)}")
        if query.reward and query.reward not in REWARDS:
            raise ConfigError(f"reward={query.reward}: must be one of {_listed(REWARDS)}")
        for name, bound in (("turns", query.turns), ("seconds", query.seconds)):
            if bound and not _BOUND.fullmatch(bound):
                raise ConfigError(f"{name}={bound}: must be a number, or a bound such as >20 or <5")
        return replace(query, limit=min(query.limit, MAX_ROWS))

    def where(self) -> tuple[str, list[Any]]:
        clauses: list[str] = ["1"]
        values: list[Any] = []
        for column, part in (("task_id", self.task), ("kinds", "" if self.findings == "1" else self.findings)):
            if part:
                clauses.append(f"instr(lower({column}), ?)")
                values.append(part.lower())
        for column, whole in (("agent", self.agent), ("outcome", self.outcome), ("way", self.way)):
            if whole:
                clauses.append(f"{column} = ?")
                values.append(whole)
        if self.reward:
            clauses.append(REWARDS[self.reward])
        for column, text in (("turns", self.turns), ("seconds", self.seconds)):
            if bound := _BOUND.fullmatch(text):
                clauses.append(f"{column} {bound[1] or '='} ?")
                values.append(float(bound[2]))
        if self.findings == "1":
            clauses.append("findings > 0")
        if self.q.strip():
            words = " AND ".join(f'"{word}" *' for word in _WORD.findall(self.q.lower()))
            condition = "instr(lower(task_id), ?) OR rollout_id = ?"
            values += [self.q.strip().lower(), self.q.strip()]
            if words:
                condition += "".join(
                    f" OR id IN (SELECT rowid FROM texts_{source} WHERE texts_{source} MATCH ?)" for source in (0, 1)
                )
                values += [words, words]
            clauses.append(f"({condition})")
        return " AND ".join(clauses), values

    def order(self) -> str:
        if not self.descending:
            return SORTS[self.sort]
        first, _, rest = SORTS[self.sort].partition(", ")
        return f"{first} DESC" + (f", {rest}" if rest else "")


def table(index: ResultIndex, query: TableQuery) -> dict[str, Any]:
    """Return ``total`` and the ``rows`` of one page."""
    where, values = query.where()
    (total,) = index.connection().execute(f"SELECT count(*) FROM rollouts WHERE {where}", values).fetchone()
    rows = index.rows(
        f"SELECT id, source, {', '.join(COLUMNS)} FROM rollouts WHERE {where} ORDER BY {query.order()}"
        " LIMIT ? OFFSET ?",
        (*values, query.limit, query.offset),
    )
    return {"total": total, "rows": rows}


def tasks(index: ResultIndex, query: TableQuery) -> dict[str, Any]:
    """Return tasks, those with the lowest mean reward first, each with its samples."""
    where, values = query.where()
    counted = f"SELECT count(DISTINCT task_index) FROM rollouts WHERE {where}"
    (total,) = index.connection().execute(counted, values).fetchone()
    found = index.rows(
        "SELECT task_index, min(task_id) AS task_id, count(*) AS rollouts, count(reward) AS valid,"
        " avg(reward) AS mean, sum(findings > 0) AS findings"
        f" FROM rollouts WHERE {where} GROUP BY task_index ORDER BY mean IS NOT NULL, mean, task_index"
        " LIMIT ? OFFSET ?",
        (*values, query.limit, query.offset),
    )
    for task in found:
        task["samples"] = index.rows(
            f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE task_index = ? AND {where}"
            " ORDER BY agent, sample_index LIMIT 64",
            (task["task_index"], *values),
        )
    return {"total": total, "rows": found}


def reasons(index: ResultIndex, limit: int = 50) -> list[dict[str, Any]]:
    """Group rollouts that failed the same way: those without a verdict first, then the largest groups first. Solved
    ones that ended at a limit have a way, too, but did not fail."""
    groups = index.rows(
        "SELECT way, label, reason, rank, count(*) AS rollouts, min(id) AS first, outcome, log"
        " FROM rollouts WHERE way IS NOT NULL AND rank < 3 GROUP BY rank, way ORDER BY rank, count(*) DESC LIMIT ?",
        (limit,),
    )
    for group in groups:
        group["named"] = index.rows(
            "SELECT rollout_id, task_id, sample_index FROM rollouts WHERE rank = ? AND way = ? ORDER BY id LIMIT 3",
            (group["rank"], group["way"]),
        )
    return groups


def rewards_by_task(index: ResultIndex) -> dict[tuple[str, int], list[float]]:
    """Return the rewards of each task; a task without rewards has an empty list. Within a run, the index identifies a
    task. Other runs may number tasks differently, so the keys here are a task's name and its place among the tasks of
    that name."""
    tasks: dict[int, tuple[str, list[float]]] = {}
    for task_index, name, reward in index.connection().execute(
        "SELECT task_index, task_id, reward FROM rollouts ORDER BY task_index, sample_index"
    ):
        _, of_task = tasks.setdefault(task_index, (name, []))
        if reward is not None:
            of_task.append(reward)
    places: Counter[str] = Counter()
    rewards: dict[tuple[str, int], list[float]] = {}
    for name, of_task in tasks.values():
        rewards[name, places[name]] = of_task
        places[name] += 1
    return rewards


def summary(index: ResultIndex, prices: Prices | None = None) -> dict[str, Any]:
    """Return the figures of a run so far."""
    (totals,) = index.rows(
        "SELECT count(*) AS rollouts, count(reward) AS valid, sum(findings > 0) AS with_findings,"
        f" {_TOKENS}, sum(seconds) AS seconds,"
        " sum(chains) AS chains, avg(turns) AS turns, sum(attempts > 1) AS retried FROM rollouts"
    )
    agents = index.rows(
        "SELECT agent, count(*) AS rollouts, count(reward) AS valid, avg(reward) AS reward,"
        f" sum(findings > 0) AS with_findings, {_TOKENS}"
        " FROM rollouts GROUP BY agent ORDER BY agent"
    )
    outcomes = index.rows(
        "SELECT outcome, count(*) AS rollouts, reward IS NULL AS invalid FROM rollouts"
        " GROUP BY outcome, reward IS NULL ORDER BY invalid DESC, count(*) DESC LIMIT 40"
    )
    rewards = rewards_by_task(index)
    return {
        **{name: value or 0 for name, value in totals.items()},
        "tasks": len(rewards),
        "solved": sum(any(reward >= 1 for reward in of_task) for of_task in rewards.values()),
        "reward": _interval(mean_of_tasks([*rewards.values()])),
        "pass_rates": pass_rates([*rewards.values()]),
        "agents": agents,
        "outcomes": outcomes,
        "cost": None if prices is None else prices.cost(agents),
        "notes": notes(index),
    }


def histogram(index: ResultIndex, column: str, bins: int = 20) -> list[tuple[float, float, int]]:
    """``(from, to, count)`` of a column's values, in bins of the same width."""
    if column not in ("reward", "seconds", "turns", "tokens_out"):
        raise ViewError(f"there is no histogram of '{column}'")
    connection = index.connection()
    low, high = connection.execute(f"SELECT min({column}), max({column}) FROM rollouts").fetchone()
    if low is None:
        return []
    if column == "reward":  # otherwise a single reward would be at the left, whatever its value
        low, high = min(0.0, low), max(1.0, high)
    width = (high - low) / bins or 1.0
    counts = dict(
        connection.execute(
            f"SELECT min(CAST(({column} - ?) / ? AS INTEGER), ?) AS bin, count(*) FROM rollouts"
            f" WHERE {column} IS NOT NULL GROUP BY bin",
            (low, width, bins - 1),
        ).fetchall()
    )
    return [(low + place * width, low + (place + 1) * width, counts.get(place, 0)) for place in range(bins)]


def notes(index: ResultIndex) -> list[str]:
    """Return a sentence for each thing in the files that is not shown, or not shown as it is."""
    connection = index.connection()
    sentences = []
    for source, path in enumerate(index.paths):
        odd = connection.execute(
            "SELECT count(*) AS lines, min(line) AS line, why FROM odd_lines WHERE source = ?", (source,)
        ).fetchone()
        if odd["lines"]:
            lines = f"{odd['lines']} lines of {path.name} are not result rows"
            if odd["lines"] == 1:
                lines = f"a line of {path.name} is not a result row"
            sentences.append(f"{lines} (line {odd['line']}: {odd['why']}); the others are shown.")
    (foreign,) = connection.execute("SELECT coalesce(sum(foreign_rows), 0) FROM files").fetchone()
    if foreign:
        sentences.append(
            f"{foreign} rows lack 'valid' or '_ng_rollout_id', as rows of NeMo Gym or of another version do; what they"
            " hold is shown."
        )
    if torn := index.torn_bytes:
        sentences.append(f"The last line has no end ({torn} bytes) and is left out until it has one.")
    if index.path.parent != index.files.output.parent:
        sentences.append(
            "The folder of the result file cannot be written to: its index is kept for this process only."
        )
    return sentences


@dataclass(frozen=True, slots=True)
class FoundRow:
    """One rollout's row and its position in the files."""

    columns: dict[str, Any]
    source: int
    line: int
    raw: bytes
    row: dict[str, Any]
    """Empty where the line cannot be read as a whole; ``raw`` can be shown as text."""


def find_row(index: ResultIndex, rollout: str) -> FoundRow:
    """Find a rollout's row by its id, by ``task#sample``, or by a task's name (then the worst of its rollouts). If the
    row occurs twice, the last one counts. Raises `ViewError`."""
    task, is_sample, sample = rollout.rpartition("#")
    ways: list[tuple[str, tuple[str | int, ...]]] = [("rollout_id = ? ORDER BY source, id DESC", (rollout,))]
    if is_sample and sample.isdecimal() and len(sample) < 19:  # a longer number is too large for SQLite
        ways.append(("task_id = ? AND sample_index = ? ORDER BY source, id DESC", (task.strip(), int(sample))))
    ways.append(("task_id = ? ORDER BY rank, sample_index", (rollout,)))
    found = (index.rows(f"SELECT * FROM rollouts WHERE {condition} LIMIT 1", values) for condition, values in ways)
    record = next((rows[0] for rows in found if rows), None)
    if record is None:
        names = [row["task_id"] for row in index.rows("SELECT DISTINCT task_id FROM rollouts LIMIT 2000")]
        raise ViewError(
            f"there is no rollout '{rollout}' in {index.files.output.name}{nearest(task or rollout, names)}; name it"
            " by its id, or as task#sample"
        )
    raw = index.line(record["source"], record["offset"], record["length"])
    try:
        row = load_row(raw)
    except NoResultRow:
        row = {}
    columns = {name: record[name] for name in COLUMNS}
    return FoundRow(columns, record["source"], record["line"], raw, row)


def neighbours(index: ResultIndex, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The other samples of a rollout's task, and the rollouts before and after it in the order worst first."""
    found: dict[str, Any] = {
        "samples": index.rows(
            "SELECT rollout_id, sample_index, agent, reward, outcome, findings FROM rollouts WHERE task_index = ?"
            " ORDER BY agent, sample_index LIMIT 256",
            (columns["task_index"],),
        )
    }
    place = (columns["rank"], columns["task_index"], columns["sample_index"])
    for name, sign, way in (("previous", "<", "DESC"), ("next", ">", "ASC")):
        rows = index.rows(
            f"SELECT rollout_id FROM rollouts WHERE (rank, task_index, sample_index) {sign} (?, ?, ?)"
            f" ORDER BY rank {way}, task_index {way}, sample_index {way} LIMIT 1",
            place,
        )
        found[name] = rows[0]["rollout_id"] if rows else None
    return found


def compared(first: ResultIndex, second: ResultIndex, *, changed_only: bool = False) -> dict[str, Any]:
    """Compare two runs task by task: figures, and a row for each task in both runs, the largest changes first."""
    before, after = rewards_by_task(first), rewards_by_task(second)
    figures: Comparison = compare(before, after)
    rows: list[dict[str, Any]] = []
    for task, rewards in before.items():
        second_rewards = after.get(task)
        if second_rewards is None:
            continue
        means = [sum(each) / len(each) if each else None for each in (rewards, second_rewards)]
        difference = None if means[0] is None or means[1] is None else means[1] - means[0]
        if not changed_only or difference:
            rows.append({"task_id": task[0], "a": rewards, "b": second_rewards, "difference": difference})
    rows.sort(key=lambda row: (row["difference"] is None, -abs(row["difference"] or 0), row["task_id"]))
    return {
        **asdict(figures),
        "difference": _interval(figures.difference),
        "only_a": sum(task not in after for task in before),
        "only_b": sum(task not in before for task in after),
        "rows": rows,
    }


@dataclass(frozen=True, slots=True)
class Prices:
    """What a million tokens cost, by agent instance; ``default`` is for all others."""

    of_agent: Mapping[str, tuple[float, float]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read YAML: ``{default: {input: 3.0, output: 15.0}}``. Raises `ConfigError`."""
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            prices = {str(name): (float(each["input"]), float(each["output"])) for name, each in loaded.items()}
        except OSError as error:
            raise ConfigError(f"prices: cannot read '{path}': {error.strerror}") from error
        except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"prices: '{path}' is not of the form 'default: {{input: 3.0, output: 15.0}}', the price of a million"
                f" tokens by agent ({error})"
            ) from error
        return cls(prices)

    def cost(self, agents: Sequence[Mapping[str, Any]]) -> float:
        """Return the cost of all rollouts together."""
        total = 0.0
        for agent in agents:
            of_input, of_output = self.of_agent.get(agent["agent"]) or self.of_agent.get("default") or (0.0, 0.0)
            total += ((agent["tokens_in"] or 0) * of_input + (agent["tokens_out"] or 0) * of_output) / 1e6
        return total


def aggregate_metrics(index: ResultIndex) -> list[dict[str, Any]]:
    """Return the key metrics that the run's servers computed; empty while the run goes on."""
    try:
        metrics = orjson.loads(index.files.aggregate_metrics.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return []
    return [each for each in metrics if isinstance(each, dict)] if isinstance(metrics, list) else []


def _interval(mean: Mean | None) -> dict[str, Any] | None:
    return None if mean is None else {**asdict(mean), "low": mean.low, "high": mean.high}


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def reason_text(row: Mapping[str, Any]) -> str:
    """What a table's row says of a rollout without a full reward or with findings; empty if nothing needs a word."""
    return str(row["kinds"] or (row["label"] and (row["reason"] or row["label"])) or "")
