"""Result files as tests of the view need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def row(task: int = 0, sample: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "_ng_rollout_id": f"run.{task}-{sample}",
        "_ng_task_index": task,
        "_ng_rollout_index": sample,
        "_ng_attempt_index": 0,
        "task_id": f"task-{task}",
        "agent_ref": {"type": "responses_api_agents", "name": "solver"},
        "responses_create_params": {"input": [{"role": "user", "content": f"How many pears has basket {task}?"}]},
        "response": {
            "output": [said(f"There are {task} pears.")],
            "usage": {"input_tokens": 100, "output_tokens": 10},
        },
        "valid": True,
        "mask_sample": False,
        "reward": float(task % 2),
        "findings": [],
        "outcome": "completed",
        "timings": {"init_s": 0.5, "run_s": 2.0, "eval_s": 1.0},
        **fields,
    }


def failed(task: int = 0, sample: int = 0, kind: str = "model_unreachable", **fields: Any) -> dict[str, Any]:
    given = {
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "failure_kind": kind,
        "failure_reason": "connection refused",
        "failure_stage": "run",
        "failures": [{"stage": "run", "kind": kind, "reason": "connection refused", "details": {}}],
        **fields,
    }
    held = row(task, sample, **given)
    for key in ("response", "responses_create_params", "outcome", "timings"):
        held.pop(key)
    return held


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def write(path: Path, *rows: Any) -> Path:
    """A row is an object, or a line as it stands."""
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def append(path: Path, *rows: Any) -> None:
    with path.open("ab") as file:
        file.write("".join(json.dumps(each) + "\n" for each in rows).encode())
