"""The directory where the user typed the command, which relative paths in configuration start from.

A server works in its plugin's folder, as plugins written for NeMo Gym expect; a path in its configuration was written
by somebody who stood elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

COMMAND_DIRECTORY_VARIABLE = "NEMO_GYM_COMMAND_DIR"
"""Tells servers that `ng_run` starts where it was started; others have a working directory of their own."""


def from_command(path: str | Path) -> Path:
    """An absolute path: ``~`` is the user's home, and a relative path starts where the command was typed. Links are
    kept."""
    start = os.environ.get(COMMAND_DIRECTORY_VARIABLE) or os.getcwd()  # noqa: PTH109 - links stay
    return Path(os.path.abspath(os.path.join(start, os.path.expanduser(path))))  # noqa: PTH100, PTH111, PTH118
