"""What looking at a large run costs: indexing, the first table, a filter, memory, and a long chain of tokens.

python -m campaigns.bench.view [--rows 100000] [--keep DIRECTORY] [--json]

The result file is made up: rows of 20 kB in the median, with prompts, tool calls, diffs and test lists in the form of
SWE-bench rows, one in a thousand with token chains, one of them of 65,536 tokens. It is indexed and served by
`ng_view` as a process of its own. The figures of a page are taken in a headless Chromium, where there is one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import orjson

ROWS = 100_000
MEDIAN_BYTES = 20_000
CHAIN_TOKENS = 65_536
LONG_ROW = 777
SAMPLES = 4
FILTERS = (
    {"q": "interval overflow"},
    {"q": "serendipity"},
    {"outcome": "max_turns"},
    {"reward": "0", "sort": "seconds", "descending": "1"},
    {"findings": "1"},
    {"task": "project-12"},
)


def rows(count: int, seed: int = 1) -> Iterator[bytes]:
    """Lines of a result file."""
    chance = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 11))) for _ in range(20_000)]
    words += ["interval", "overflow", "off", "by", "one", "test", "fails"]
    weights = [1 / (place + 10) for place in range(len(words))]
    text = " ".join(chance.choices(words, weights, k=400_000))

    def some(length: int) -> str:
        at = chance.randrange(len(text) - length)
        return text[at : at + length]

    for index in range(count):
        size = max(3_000, min(400_000, int(chance.lognormvariate(0, 0.5) * MEDIAN_BYTES)))
        yield orjson.dumps(_row(index, size, chance, some)) + b"\n"


def _row(index: int, size: int, chance: random.Random, some: Any) -> dict[str, Any]:
    task, sample = divmod(index, SAMPLES)
    turns = chance.randint(3, 30)
    of_turn = max(40, int(size * 0.5) // turns)
    output: list[dict[str, Any]] = []
    for turn in range(turns):
        call = f"call_{index}_{turn}"
        command = json.dumps({"command": some(of_turn // 5)})
        output += [
            {"type": "function_call", "call_id": call, "name": "bash", "arguments": command, "id": call},
            {"type": "function_call_output", "call_id": call, "output": some(of_turn * 4 // 5)},
        ]
    said = some(300) + (" serendipity" if index % 5000 == 17 else "")
    output.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]})
    reward = float(chance.random() < 0.4)
    failed = ["tests/test_a.py::test_" + some(8).replace(" ", "_")] if not reward else []
    finding = {"kind": "values_not_confirmed", "detail": "d", "evidence": {}}
    row: dict[str, Any] = {
        "instance_id": f"project-{task}",
        "problem_statement": (prompt := some(int(size * 0.1))),
        "patch": some(int(size * 0.1)),
        "test_patch": some(int(size * 0.1)),
        "PASS_TO_PASS": json.dumps([f"tests/test_a.py::test_{n}" for n in range(size // 200)]),
        "agent_ref": {"type": "responses_api_agents", "name": ("mini", "codex")[index % 2]},
        "_ng_task_index": task,
        "_ng_rollout_index": sample,
        "response": {"id": f"resp_{index}", "object": "response", "output": output},
        "valid": True,
        "reward": reward,
        "failure_kind": None,
        "failure_reason": None,
        "findings": [] if chance.random() > 0.01 else [finding],
        "mask_sample": False,
        "reward_reason": None if reward else f"{chance.randint(1, 9)} of 12 tests fail",
        "official": {"resolved": bool(reward), "tests_status": {"FAIL_TO_PASS": {"success": [], "failure": failed}}},
        "ng_model_session": {
            "session_id": f"s{index}",
            "turns": turns,
            "usage": {"input_tokens": size * turns // 8, "output_tokens": size // 4},
        },
        "_ng_rollout_id": f"20261122-000000-abcdef.{task}-{sample}",
        "_ng_attempt_index": 0,
        "task_id": f"project-{task}",
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "outcome": "max_turns" if turns > 28 else "completed",
        "timings": {"init_s": chance.random(), "run_s": chance.random() * 300, "eval_s": chance.random() * 30},
        "topology": "agent_in_env",
    }
    if index % 1000 == LONG_ROW:
        row["ng_trajectory"] = [_chain(CHAIN_TOKENS if index == LONG_ROW else 2048, chance)]
    return row


def _chain(tokens: int, chance: random.Random) -> dict[str, Any]:
    prompt = tokens // 16
    response = tokens - prompt
    mask = bytes((place // 200) % 2 for place in range(response))
    turns = [
        {
            "start": start,
            "end": min(start + 200, response),
            "finish_reason": "stop",
            "weights_version": "1",
            "details": {},
        }
        for start in range(200, response, 400)
    ]
    return {
        "session_id": "s",
        "index": 0,
        "turns": turns,
        "split_reason": "initial",
        "split_detail": None,
        "message_count": len(turns),
        "reward": 1.0,
        "reward_info": {},
        "multimodal": [],
        "prompt_ids": [chance.randrange(150_000) for _ in range(prompt)],
        "response_ids": [chance.randrange(150_000) for _ in range(response)],
        "response_mask": list(mask),
        "logprobs": [-chance.expovariate(1) if bit else 0.0 for bit in mask],
    }
