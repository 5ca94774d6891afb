"""A tiny engine as a process, for stacks that reach it over its socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tiny_engine(folder: Path, script: str) -> Iterator[str]:
    """The URL of an engine that answers by ``script``; its policy is made in ``folder / "policy"``."""
    (folder / "script.yaml").write_text(script)
    policy = str(folder / "policy")
    command = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny", "--make", "chatml_think", policy]
    command += ["--policy", policy, "--script", str(folder / "script.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
