from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack.stacks import write_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an environment, an agent and a model that the core has never seen."""
    return write_root(tmp_path)
