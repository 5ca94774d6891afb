"""Reads the trajectories of a run's result rows, each with its rollout's identity and the reward of its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.files import finished_lines
from nemo_gym.contract.errors import RowError
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    ATTEMPT_INDEX_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
    decide_validity,
    declares_failure,
)
from nemo_gym.gateway.tokens.trajectories import Trajectory, from_row

TRAJECTORY_KEY = "ng_trajectory"


def trajectories_of_rows(path: str | Path) -> Iterator[list[Trajectory]]:
    """Yield the trajectories of each row of a result file or failures file, in order; an empty list for a row without.

    The reward comes from the row's verdict, not from the stored trajectory; it is ``None`` for an invalid verdict.
    Raises `RowError` naming a line that is no result row of this suite, or whose trajectory has no token ids.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(finished_lines(file), 1):
            if not line.strip():
                continue
            try:
                yield _of_row(line)
            except RowError as error:
                raise RowError(f"{path}, line {number}: {error.message}", path=str(path), line=number) from error


def _of_row(line: bytes) -> list[Trajectory]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RowError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    entries = row.get(TRAJECTORY_KEY)
    if entries is None:
        entries = []
    if not isinstance(entries, list):
        raise RowError(f"'{TRAJECTORY_KEY}' is not a list")
    reward, identity = _reward(row), _identity(row)
    trajectories = []
    for index, each in enumerate(entries):
        where = f"'{TRAJECTORY_KEY}[{index}]'"
        if not isinstance(each, dict):
            raise RowError(f"{where} is no JSON object")
        if each.get("messages") is not None and not each.get("prompt_ids"):
            raise RowError(f"{where} holds text and no token ids: the model behind it takes and returns text only")
        try:
            trajectories.append(replace(from_row(each), reward=reward, identity=identity))
        except RowError as error:
            raise RowError(f"{where}: {error.message}") from error
    return trajectories


def _reward(row: Mapping[str, Any]) -> float | None:
    if declares_failure(row):
        return None
    reward = decide_validity(row).reward
    if reward is None or isinstance(row["reward"], bool):
        raise RowError("'reward' is not a finite number, although the verdict is valid")
    return reward


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    agent = row.get(AGENT_REF_KEY)
    fields = {
        "rollout_id": row.get(ROLLOUT_ID_KEY),
        "task_id": row.get("task_id"),
        "task_index": row.get(TASK_INDEX_KEY),
        "rollout_index": row.get(ROLLOUT_INDEX_KEY),
        "attempt_index": row.get(ATTEMPT_INDEX_KEY),
        "agent": agent.get("name") if isinstance(agent, Mapping) else None,
    }
    return {name: value for name, value in fields.items() if value is not None}
