"""Trajectories in the real TransferQueue while one of its storage units is killed.

    .trainers/verl/bin/python -m campaigns.faults.transfer_queue --json

(``scripts/install-trainers verl`` makes that environment.) A unit is killed when half of the trajectories are written;
the rest is written as before. Bars: every call ends within 30 s, trajectories that were lost with the unit are written
again from the archive under the same keys, and all can be read at the end, each with its own tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gym.framework.samples import TrajectoryRow
from nemo_gym.framework.transfer_queue import TrajectoryArchive, TransferQueueSink

MOST_S = 30.0
TOKENS = 1000
SESSIONS_AT_ONCE = 16


def row_of(number: int) -> TrajectoryRow:
    """Return a trajectory whose tokens follow from its number."""
    chance = random.Random(number)
    prompt, response = chance.randint(20, TOKENS // 2), chance.randint(20, TOKENS // 2)
    ids = (np.arange(prompt + response, dtype=np.int64) * 7 + number) % 150_000
    mask = np.ones(response, dtype=np.int64)
    scores = np.zeros(response, dtype=np.float32)
    scores[-1] = number % 2
    fields = {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(len(ids), dtype=np.int64),
        "response_mask": mask,
        "loss_mask": mask.copy(),
        "rm_scores": scores,
        "rollout_log_probs": -np.ones(response, dtype=np.float32),
        "num_turns": 2,
        "uid": f"u{number}",
        "raw_prompt": [{"role": "user", "content": f"prompt {number}"}],
        "extra_info": {"index": number},
    }
    tag = {"status": "success", "uid": f"u{number}", "seq_len": len(ids)}
    return TrajectoryRow(f"u{number}_0_0", fields, tag)


class Timed:
    """Records how long the longest call took, and which calls failed."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.failed: list[str] = []

    async def __call__(self, work: Any) -> Any:
        began = time.monotonic()
        try:
            return await work
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:300])
            return None
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began)


async def run(count: int, units: int, folder: Path) -> dict[str, Any]:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    conf = OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}})
    archive = TrajectoryArchive(folder / "archive.sqlite")
    sink = TransferQueueSink(archive, conf=conf)
    timed = Timed()
    began = time.monotonic()

    async def write(numbers: range) -> None:
        waiting = iter(numbers)

        async def worker() -> None:
            for number in waiting:
                await timed(sink.put("train", [row_of(number)]))
                await timed(sink.tag("train", f"u{number}", {"status": "finished"}))

        await asyncio.gather(*(worker() for _ in range(SESSIONS_AT_ONCE)))

    await write(range(count // 2))
    half_s = time.monotonic() - began
    unit = transfer_queue.interface._TQ_STORAGE["SimpleStorage"]["TransferQueueStorageUnit#0"]
    ray.kill(unit)
    killed = time.monotonic()
    await write(range(count // 2, count))
    rest_s = time.monotonic() - killed
    wrong: list[str] = []
    readable = 0
    for at in range(0, count, 250):
        rows = [row_of(number) for number in range(at, min(at + 250, count))]
        got = await timed(sink.get("train", [row.key for row in rows], ["input_ids", "rm_scores", "response_mask"]))
        if got is None:
            continue
        for row, ids, scores in zip(rows, got["input_ids"], got["rm_scores"], strict=True):
            same = (
                ids.tolist() == row.fields["input_ids"].tolist()
                and scores.tolist() == row.fields["rm_scores"].tolist()
            )
            readable += same
            if not same:
                wrong.append(row.key)
    states = (await sink._tq.async_kv_list(partition_id="train"))["train"]
    finished = sum(states.get(f"u{number}", {}).get("status") == "finished" for number in range(count))
    await sink.aclose()
    transfer_queue.close()
    return {
        "transfer_queue": "0.1.11",
        "trajectories": count,
        "storage_units": units,
        "readable": readable,
        "wrong": wrong[:5],
        "prompts_with_a_state": finished,
        "written_again": sink.rewritten,
        "failed_calls": len(timed.failed),
        "why": timed.failed[:2],
        "longest_call_s": round(timed.longest_s, 2),
        "first_half_s": round(half_s, 1),
        "second_half_with_recovery_s": round(rest_s, 1),
        "written_per_s": round(count / 2 / half_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # TransferQueue's controller and each unit reserve a CPU, whether they use it or not.
    ray.init("local", num_cpus=arguments.units + 6, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory(prefix="ng-tq-") as folder:
            result = asyncio.run(run(arguments.trajectories, arguments.units, Path(folder)))
    finally:
        ray.shutdown()
    count = arguments.trajectories
    bars = {
        "every_call_within_30_s": result["longest_call_s"] <= MOST_S,
        "all_readable": result["readable"] == count and not result["wrong"],
        "all_prompts_have_a_state": result["prompts_with_a_state"] == count,
        "lost_ones_written_again": result["written_again"] > 0,
    }
    result["bars"] = bars
    print(json.dumps(result, indent=None if arguments.json else 2))
    sys.exit(0 if all(bars.values()) else 1)


if __name__ == "__main__":
    main()
