"""opencode itself solves an example task of swe_bench in a box without a network, with a scripted policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DATA = ROOT / "resources_servers" / "swe_bench" / "data" / "example.jsonl"
AGENT = "opencode"


def run(command: str, *words: str) -> None:
    entry = [sys.executable, "-c", f"from nemo_gym.cli.{command} import main; main()"]
    done = subprocess.run([*entry, *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_example_task_is_solved_in_its_world(tmp_path: Path) -> None:
    output = tmp_path / "rollouts.jsonl"
    run("prepare", "agents", f"agents={AGENT}")
    run("prepare", "swe_bench", f"rows={DATA}", "sandbox=local")
    run(
        "run",
        *(f"agent={AGENT}", "environment=swe_bench", "sandbox=local", "model=scripted", f"input={DATA}", "limit=1"),
        f"output={output}",
    )
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert row["reward"] == 1.0
    items: list[dict[str, Any]] = row["response"]["output"]
    assert sum(item["type"] == "function_call" for item in items) == 4
