"""Which files of an agent's folder are its work: not those that its harness keeps there."""

from __future__ import annotations

from pathlib import Path

_RECORDS = ("history.json", "history.pkl", "inprogress_history.json")
_INPUTS = ("metadata.json", "reference_files")
IGNORE_FILES = frozenset({*_RECORDS, *_INPUTS, "finish_params.json", "log.txt"})


def is_deliverable(path: Path) -> bool:
    """Whether ``path`` is a file that the agent made: none of the harness's, nor hidden."""
    return path.is_file() and path.name not in IGNORE_FILES and not path.name.startswith(".")
