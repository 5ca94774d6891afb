"""Dataset rows: read, checked, numbered and written out as the run's materialized inputs.

Every problem is reported before any task runs, with its file, line and column.
"""

from __future__ import annotations

import hashlib
import shutil
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import orjson

from nemo_gym._util.exact_json import require_exact_integers
from nemo_gym._util.suggest import nearest
from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.config.run import PromptConfig, RolloutRunConfig, apply_prompt_to_row
from nemo_gym.contract.errors import ConfigError, InvalidBodyError, RowError
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    PARAMS_KEY,
    ROLLOUT_INDEX_KEY,
    SESSION_KEY,
    TASK_INDEX_KEY,
    group_id_of,
    has_prompt,
    named_agent,
    rollout_id_of,
    task_id_of,
    without_earlier_verdict,
)
from nemo_gym.http.requests import require_shallow
from nemo_gym.rollouts.interfaces import JobSpec
from nemo_gym.rollouts.results import existing_folder, replaced
from nemo_gym.rollouts.store.sql import store_error

MAX_INDEX = 2**31 - 1
"""The largest task index and sample index."""
MAX_LISTED = 10
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Promptless:
    """A row without a prompt; its environment may write one."""

    agent: str
    rollouts: range
    """The row's lines in the materialized inputs."""


@dataclass(frozen=True, slots=True)
class MaterializedInputs:
    """The rollouts that a run will do, as lines of a file: one per rollout."""

    tasks: int
    rollouts: int
    agents: tuple[str, ...]
    digest: str
    """The digest of all lines, including those left out for lack of a prompt; a resumed run must have the same one."""
    bad_rows: tuple[RowError, ...] = ()
    """The errors of the rows that were left out because of ``skip_bad_rows``."""
    without_prompt: Mapping[int, Promptless] = field(default_factory=dict)
    """The rows without a prompt, by their line numbers in the input."""
    replaced_agents: tuple[str, ...] = ()
    """Agents that rows name and that do not run them, because the run names one for all rows."""
    left_out: frozenset[int] = frozenset()
    lines: IO[bytes] | None = None
    """An unnamed file that ends with this process; ``None`` if the rows were only checked."""

    def write(self, target: Path) -> None:
        """Write the lines to ``target``; raise `StoreError` if that fails."""
        assert self.lines is not None
        self.lines.seek(0)
        try:
            with replaced(target) as out:
                if self.left_out:
                    out.writelines(line for at, line in enumerate(self.lines) if at not in self.left_out)
                else:
                    shutil.copyfileobj(self.lines, out, COPY_BYTES)
        except OSError as error:
            raise store_error(target, error) from error

    def close(self) -> None:
        if self.lines is not None:
            self.lines.close()


def read_row(line: bytes, path: Path | str, number: int) -> dict[str, Any]:
    """Return one line of ``path`` as a row with exactly the values that are written there. Raises `RowError` for a
    line that is no JSON object, is nested too deeply to be passed on, or holds an integer that would be rounded."""
    line = line.removeprefix(BOM_UTF8)
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise row_error(path, number, *_why_not_json(line, error)) from None
    if not isinstance(row, dict):
        raise row_error(path, number, 1, f"a row is one JSON object, this is a {type(row).__name__}")
    if line.count(b"[") + line.count(b"{") > _FEW_LEVELS:
        try:
            require_shallow(row, "the row")
        except InvalidBodyError as error:
            raise row_error(path, number, None, error.message) from None
    try:
        require_exact_integers(line)
    except ValueError as error:
        raise row_error(path, number, None, str(error)) from None
    return row


def row_error(path: Path | str, number: int, column: int | None, problem: str) -> RowError:
    where = ":".join(str(each) for each in (path, number, column) if each)
    return RowError(f"{where}: {problem}", path=str(path), line=number, column=column)


def worded(row: dict[str, Any], prompt: PromptConfig, path: Path | str, number: int) -> dict[str, Any]:
    """Return the row with the input that a template writes. Raises `RowError` for a row that already has an input or
    that the template does not fit."""
    params = row.get(PARAMS_KEY)
    if not isinstance(params, dict | None):
        raise row_error(path, number, None, f"'{PARAMS_KEY}' must be an object, got {type(params).__name__}")
    if params and params.get("input"):
        why = f"already has '{PARAMS_KEY}.input', which prompt_config would replace; leave one of them out"
        raise row_error(path, number, None, why)
    try:
        return apply_prompt_to_row(row, prompt)
    except KeyError as error:
        raise row_error(path, number, None, str(error.args[0])) from error
    except ConfigError as error:
        raise row_error(path, number, None, error.message) from error


_FEW_LEVELS = 200
"""A row with fewer brackets cannot be nested too deeply."""


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> tuple[int | None, str]:
    """Return the column and the reason."""
    try:
        line.decode()
    except UnicodeDecodeError as found:
        byte = f"0x{line[found.start]:02x}"
        return found.start + 1, f"not UTF-8 (byte {byte}); convert the file, for example with iconv -f LATIN1 -t UTF-8"
    return error.colno, f"not a JSON value ({error.msg})"


@dataclass(slots=True)
class RowChecker:
    """Checks rows one by one; errors name ``path`` and the row's number. Number 0 stands for a row that has no
    number."""

    path: Path
    config: PipelineConfig
    agents: Collection[str]
    prompt: PromptConfig | None = None
    """Writes the input of every row."""
    replaced: set[str] = field(default_factory=set)
    """The agents that rows named in vain."""

    def row_and_agent(self, number: int, line: bytes) -> tuple[dict[str, Any], str]:
        """Return one line as a row with the run's request parameters, and its agent. Raises `RowError`."""
        row = self._parsed(number, line)
        return row, self._agent(number, row)

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        row = read_row(line, self.path, number)
        if self.prompt is not None:
            row = worded(row, self.prompt, self.path, number)
        # A dataset in its original format has no request parameters: its environment writes the prompt when seeded.
        params = row.get("responses_create_params", {} if self.config.overrides else None)
        if "responses_create_params" in row and (not isinstance(params, dict) or "input" not in params):
            raise self._error(
                number, None, "'responses_create_params' must be an object with 'input' (what the agent is asked)"
            )
        if SESSION_KEY in row:
            raise self._error(number, None, f"'{SESSION_KEY}' is written by the pipeline; leave it out")
        row = without_earlier_verdict(row)
        if params is not None:
            row["responses_create_params"] = {**params, **self.config.overrides}
        return row

    def _agent(self, number: int, row: dict[str, Any]) -> str:
        ref, name = row.get(AGENT_REF_KEY), named_agent(row)
        if name is not None and not isinstance(name, str):
            raise self._error(number, None, f"'{AGENT_REF_KEY}' must be an agent's name or an object with a 'name'")
        agent = self.config.agent_of_all or name or self.config.agent_name
        agent = agent or (next(iter(self.agents)) if len(self.agents) == 1 else None)
        if agent is None:
            raise self._error(
                number, None, f"no agent: give the row 'agent_ref' or the run 'agent_name' (one of {self._choices()})"
            )
        if self.agents and agent not in self.agents:
            unknown = f"unknown agent '{agent}'{nearest(agent, self.agents)}; running: {self._choices()}"
            is_rows_own = agent == name and isinstance(self.config, RolloutRunConfig)
            other_way = "; agent_name= names one for all rows" if is_rows_own else ""
            raise self._error(number, None, unknown + other_way)
        if name is not None and name != agent:
            self.replaced.add(name)
        row[AGENT_REF_KEY] = {**(ref if isinstance(ref, dict) else {"type": "responses_api_agents"}), "name": agent}
        return agent

    def _choices(self) -> str:
        return ", ".join(sorted(self.agents)) or "none"

    def _error(self, number: int, column: int | None, problem: str) -> RowError:
        return row_error(self.path, number, column, problem)


@dataclass(slots=True)
class RunRowChecker(RowChecker):
    """Checks the rows of a run, which are numbered."""

    config: RolloutRunConfig
    seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def check(self, number: int, line: bytes, position: int) -> tuple[int, list[int], str, dict[str, Any]]:
        """Return task index, rollout indices, agent and row of one line. Raises `RowError`."""
        row, agent = self.row_and_agent(number, line)
        task_index = self._index(number, row, TASK_INDEX_KEY, position)
        if self.config.num_repeats == 1:
            samples = [self._index(number, row, ROLLOUT_INDEX_KEY, 0)]
        else:
            samples = list(range(self.config.num_repeats))
        for sample in samples:
            first = self.seen.setdefault((task_index, sample), number)
            if first != number:
                raise self._error(
                    number,
                    None,
                    f"{TASK_INDEX_KEY} {task_index}, {ROLLOUT_INDEX_KEY} {sample} is line {first} as well",
                )
        return task_index, samples, agent, row

    def _index(self, number: int, row: dict[str, Any], key: str, default: int) -> int:
        value = row.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INDEX:
            raise self._error(number, None, f"'{key}' must be a whole number from 0 to {MAX_INDEX}, got {value!r}")
        return value


def materialize(config: RolloutRunConfig, agents: Collection[str] = (), *, keep: bool = True) -> MaterializedInputs:
    """Read, check and number the rows, once. ``agents`` are the agent instances that exist; without ``keep`` the rows
    are only checked.

    Raises `ConfigError` for a missing or empty input, `RowError` naming the bad lines unless ``skip_bad_rows``, and
    `StoreError` when the lines cannot be read or stored.
    """
    config.check_input()
    source = config.input
    checker = RunRowChecker(source, config, agents, config.prompt)
    bad: list[RowError] = []
    without_prompt: dict[int, Promptless] = {}
    tasks = rollouts = other_shards = 0
    remainder, shards = config.shard_of
    used: dict[str, None] = {}
    digest = hashlib.sha256()
    with ExitStack() as undo:
        try:
            # Beside the output, because its disk has room for the run's files.
            out = undo.enter_context(TemporaryFile(dir=existing_folder(config.output))) if keep else None
            with source.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1 and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                        raise ConfigError(
                            f"input '{source}' is one JSON array; 'input' takes one object per line: jq -c '.[]'"
                            f" {source} > rows.jsonl",
                            key="input",
                        )
                    position = tasks + other_shards + len(bad)
                    if config.limit is not None and position >= config.limit:
                        break
                    if not line.strip():
                        continue
                    try:
                        task_index, samples, agent, row = checker.check(number, line.rstrip(), position)
                    except RowError as error:
                        bad.append(error)
                        continue
                    if position % shards != remainder:
                        other_shards += 1
                        continue
                    if not has_prompt(row.get(PARAMS_KEY)):
                        without_prompt[number] = Promptless(agent, range(rollouts, rollouts + len(samples)))
                    tasks += 1
                    used[agent] = None
                    row[TASK_INDEX_KEY] = task_index
                    for sample in samples:
                        row[ROLLOUT_INDEX_KEY] = sample
                        data = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
                        digest.update(data)
                        if out is not None:
                            out.write(data)
                        rollouts += 1
        except OSError as error:
            raise store_error(config.output if keep else source, error) from error
        if bad and not config.skip_bad_rows:
            raise _combined_error(bad, source)
        if not tasks:
            raise _no_rows_error(config)
        undo.pop_all()
    return MaterializedInputs(
        *(tasks, rollouts, tuple(used), digest.hexdigest(), tuple(bad), without_prompt),
        replaced_agents=tuple(sorted(checker.replaced)),
        lines=out,
    )


def without_rows(
    config: RolloutRunConfig, inputs: MaterializedInputs, refused: Mapping[int, str]
) -> MaterializedInputs:
    """Return ``inputs`` without the ``refused`` rows, given as line number and reason. Raises `RowError` naming them
    unless ``skip_bad_rows``, and `ConfigError` when no row is left."""
    bad = [
        RowError(f"{config.input}:{number}: {why}", path=str(config.input), line=number)
        for number, why in sorted(refused.items())
    ]
    if bad and not config.skip_bad_rows:
        raise _combined_error(bad, config.input)
    if len(bad) == inputs.tasks:
        raise _no_rows_error(config)
    left_out = inputs.left_out.union(*(inputs.without_prompt[number].rollouts for number in refused))
    return replace(
        inputs,
        tasks=inputs.tasks - len(bad),
        rollouts=inputs.rollouts - len(left_out) + len(inputs.left_out),
        bad_rows=(*inputs.bad_rows, *bad),
        without_prompt={line: row for line, row in inputs.without_prompt.items() if line not in refused},
        left_out=left_out,
    )


def numbered_lines(path: Path, numbers: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with these numbers, in the file's order."""
    if numbers:
        with path.open("rb") as lines:
            yield from ((at, line.removeprefix(BOM_UTF8)) for at, line in enumerate(lines, 1) if at in numbers)


def job_specs(path: Path, run_id: str) -> Iterator[JobSpec]:
    """Yield the jobs of a materialized inputs file. Samples of a task share one row, without the rollout index."""
    with path.open("rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            sample, task_index = row.pop(ROLLOUT_INDEX_KEY), row[TASK_INDEX_KEY]
            yield JobSpec(
                job_id=rollout_id_of(run_id, task_index, sample),
                run_id=run_id,
                task_id=task_id_of(row, task_index),
                group_id=group_id_of(run_id, task_index),
                sample_index=sample,
                task_index=task_index,
                agent=row[AGENT_REF_KEY]["name"],
                row=orjson.dumps(row),
            )


def _no_rows_error(config: RolloutRunConfig) -> ConfigError:
    shard_text = f" for shard {config.shard}" if config.shard else ""
    return ConfigError(f"input '{config.input}' holds no usable rows{shard_text}", key="input")


def _combined_error(bad: list[RowError], path: Path) -> RowError:
    listed = "\n  ".join(error.message for error in bad[:MAX_LISTED])
    more = f"\n  … and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
    return RowError(
        f"{len(bad)} row{'s' * (len(bad) > 1)} of '{path}' cannot be used; nothing was run. Fix them, or leave them"
        f" out with skip_bad_rows=true:\n  {listed}{more}",
        path=str(path),
        line=bad[0].details.get("line"),
        lines=[error.details.get("line") for error in bad],
    )
