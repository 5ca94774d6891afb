"""The real CLIs, whose policy is a script, on an example task: the same agent blocks on both sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resources_servers.swe_bench.preparation.example_rows import EXAMPLE_ROWS
from tests.acceptance.clis.place import installed
from tests.docker_engine import docker_engine

__all__ = ["docker_engine"]
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"claude_code": "claude-code", "codex": "codex"}


def ng(command: str, *words: str) -> None:
    path = Path(sys.executable).parent / command
    done = subprocess.run([str(path), *words], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sandbox", ["local", "docker"])
@pytest.mark.parametrize("agent", [*PACKAGES])
def test_cli_solves_an_example_task_in_a_box_without_a_network(
    agent: str, sandbox: str, tmp_path: Path, docker_engine: str
) -> None:
    installed(PACKAGES[agent])
    ng("ng_prepare", "swe_bench", f"rows={EXAMPLE_ROWS}", f"sandbox={sandbox}")
    output = tmp_path / "rollouts.jsonl"
    words = [f"agent={agent}", "environment=swe_bench", f"sandbox={sandbox}", "model=scripted"]
    ng("ng_run", *words, f"input={EXAMPLE_ROWS}", f"output={output}", "limit=1")
    (result,) = (json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    assert (result["reward"], result["outcome"], result["topology"]) == (1.0, "completed", "agent_in_env"), result
    assert result["official"]["resolved"] is True
    seen = result["ng_agent_observations"]
    assert (seen["turns"], seen["tool_calls"], result["ng_model_session"]["turns"]) == (5, 4, 5)
    assert seen["doors"]["model"]["statuses"] == {"200": 5}
    assert set(seen["doors"]) == {"model"}
