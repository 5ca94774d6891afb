"""What several test files of swe_bench need."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym.sandbox.base import ExecOutcome


@pytest.fixture
def this_host() -> Any:
    """A provider whose commands run on this machine, without a box."""

    async def run(
        handle: object, command: Sequence[str], *, cwd: str, env: Mapping[str, str], timeout_s: float
    ) -> SimpleNamespace:
        done = await asyncio.to_thread(
            lambda: subprocess.run(command, cwd=cwd, env=env, timeout=timeout_s, capture_output=True, check=False)
        )
        said, errors = (output.decode("utf-8", "replace") for output in (done.stdout, done.stderr))
        return SimpleNamespace(outcome=ExecOutcome.EXITED, return_code=done.returncode, stdout=said, stderr=errors)

    return SimpleNamespace(exec=run)
