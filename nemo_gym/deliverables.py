"""Tells the files that an agent made from those that its harness keeps in the same folder. The module's name is NeMo
Gym's."""

from __future__ import annotations

from pathlib import Path

_RECORDS = ("history.json", "history.pkl", "inprogress_history.json")
_INPUTS = ("metadata.json", "reference_files")
IGNORE_FILES = frozenset({*_RECORDS, *_INPUTS, "finish_params.json", "log.txt"})


def is_deliverable(path: Path) -> bool:
    """Return whether ``path`` is a file that the agent made: neither hidden nor one of the harness's files."""
    return path.is_file() and path.name not in IGNORE_FILES and not path.name.startswith(".")
