"""Returns the paths of a run's other files, given the path of its results. The module's name is NeMo Gym's."""

from __future__ import annotations

from pathlib import Path


def failures_path_for(output_fpath: Path) -> Path:
    return _beside(output_fpath, "_failures.jsonl")


def materialized_path_for(output_fpath: Path) -> Path:
    return _beside(output_fpath, "_materialized_inputs.jsonl")


def aggregate_metrics_path_for(output_fpath: Path) -> Path:
    return _beside(output_fpath, "_aggregate_metrics.json")


def _beside(output: Path, ending: str) -> Path:
    output = Path(output)
    return output.with_name(output.stem + ending)
