"""The example tasks as a newcomer runs them: scripted edits through the real harness resolve them, wrong edits in the
same places fail the same tasks, and the trap pays nothing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS

ROOT = Path(__file__).resolve().parents[3]
POLICY = EXAMPLE_ROWS.parent / "scripted_policy.yaml"
TRAP = "tabulon, by making the tests pass"
NAMES = ("inifold", "ratebox", "slugline", "spanwise", "tabulon")

# What a weaker policy might have written: each looks like work on the right line.
WRONG_EDITS = {
    "slugline": "sed -i 's/^    used = 0$/    used = 1 - 2 * len(separator)/' slugline/words.py",
    "spanwise": "sed -i 's/= Span(merged.-1..start, span.end)/= span/' spanwise/timeline.py",
    "inifold": "sed -i 's/position == 0 or text/position > 0 and text/' inifold/lexer.py",
    "ratebox": "sed -i 's/arrived = int(/arrived = round(/' ratebox/bucket.py",
    "tabulon": "sed -i 's/return len(text)/return len(text.encode())/' tabulon/cells.py",
}


def policy_with_wrong_second_samples() -> dict[str, Any]:
    """The shipped policy for first samples; for second ones the same with every edit replaced."""
    policy: dict[str, Any] = yaml.safe_load(POLICY.read_text(encoding="utf-8"))
    right = [task for task in policy["tasks"] if task["name"] != TRAP]
    wrong = copy.deepcopy(right)
    for task in wrong:
        (edit,) = (turn for turn in task["turns"] if turn.get("id") == "edit")
        edit["tool_calls"] = [{"shell": f"{WRONG_EDITS[task['name']]}; git diff"}]
        task["name"] = f"{task['name']}, wrongly"
        task["when"]["sample"] = 1
    return {**policy, "tasks": [*wrong, *right]}


def ng(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = Path(sys.executable).parent / command
    return subprocess.run([str(path), *words], cwd=ROOT, capture_output=True, text=True, timeout=280)


def run(directory: Path, script: Path, rows: Path, sandbox: str = "local") -> dict[tuple[str, int], dict[str, Any]]:
    """Rewards of two samples of each row, by example name and sample index."""
    done = ng("ng_prepare", "swe_bench", f"rows={rows}", f"sandbox={sandbox}")
    assert done.returncode == 0, done.stderr
    output = directory / "rollouts.jsonl"
    words = [
        "agent=mini_swe_agent",
        "environment=swe_bench",
        f"sandbox={sandbox}",
        "model=scripted",
        f"script={script}",
    ]
    done = ng("ng_run", *words, f"input={rows}", f"output={output}", "num_repeats=2", "concurrency=3")
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for line in output.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        name = result["instance_id"].removeprefix("examples__").removesuffix("-1")
        results[name, result["_ng_rollout_index"]] = result
    return results


@pytest.mark.timeout(600)
def test_right_edits_resolve_every_example_and_wrong_ones_in_their_place_resolve_none(tmp_path: Path) -> None:
    script = tmp_path / "policy.yaml"
    script.write_text(yaml.safe_dump(policy_with_wrong_second_samples(), allow_unicode=True), encoding="utf-8")
    results = run(tmp_path, script, EXAMPLE_ROWS)
    assert {key: result["reward"] for key, result in results.items()} == {
        **{(name, 0): 1.0 for name in NAMES},
        **{(name, 1): 0.0 for name in NAMES},
    }
    assert all(result["official"]["patch_exists"] for result in results.values()), "an edit that changed nothing"
    assert all(not result["findings"] for result in results.values()), "a wrong edit is no tampering"


@pytest.mark.timeout(600)
def test_the_trap_makes_the_tests_pass_and_earns_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = EXAMPLE_ROWS.read_text(encoding="utf-8").splitlines()
    rows.write_text("".join(f"{line}\n" for line in lines if "tabulon" in line), encoding="utf-8")
    results = run(tmp_path, POLICY, rows)
    honest, trapped = results["tabulon", 0], results["tabulon", 1]
    assert (honest["reward"], honest["findings"]) == (1.0, [])
    assert trapped["reward"] == 0.0
    assert trapped["valid"] is True
    assert trapped["findings"], "the attempt must be seen, not only be without effect"
