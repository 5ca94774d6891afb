"""Pipelines that share an input: each task is one's, and keeps its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.rows import job_specs, materialize


def jobs(directory: Path, shard: str | None, **keys: object) -> list[tuple[int, str]]:
    given = {"input": directory / "in.jsonl", "output": directory / "out.jsonl", "num_repeats": 2, **keys}
    config = RolloutRunConfig.parse({**given, **({"shard": shard} if shard else {})})
    inputs = materialize(config, ["solver"])
    inputs.write(directory / "materialized.jsonl")
    inputs.close()
    return [(spec.task_index, spec.job_id) for spec in job_specs(directory / "materialized.jsonl", "run")]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    row = {"responses_create_params": {"input": "?"}}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "n": n}) + "\n" for n in range(10)))
    return tmp_path


def test_shards_together_are_the_whole_run(rows: Path) -> None:
    shares = [jobs(rows, f"{number}/3", limit=8) for number in (1, 2, 3)]
    assert sorted(job for share in shares for job in share) == sorted(jobs(rows, None, limit=8))
    assert [{task for task, _ in share} for share in shares] == [{0, 3, 6}, {1, 4, 7}, {2, 5}]


def test_bad_row_moves_no_other_row_to_another_shard(rows: Path) -> None:
    lines = (rows / "in.jsonl").read_text().splitlines()
    (rows / "in.jsonl").write_text("\n".join([lines[0], "{bad", *lines[2:]]) + "\n")
    shares = [jobs(rows, f"{number}/2", skip_bad_rows=True) for number in (1, 2)]
    assert [{task for task, _ in share} for share in shares] == [{0, 2, 4, 6, 8}, {3, 5, 7, 9}]


@pytest.mark.parametrize("shard", ["3/2", "0/2", "1", "one/2", "1/0"])
def test_shard_that_is_none_is_refused(shard: str, rows: Path) -> None:
    with pytest.raises(ConfigError, match="shard"):
        jobs(rows, shard)


def test_shard_without_rows_is_refused(rows: Path) -> None:
    with pytest.raises(ConfigError, match="no usable rows for shard 11/11"):
        jobs(rows, "11/11")
