"""A trainer that takes batches until it is killed: ``python -m tests.sampling.killed_trainer DIRECTORY BATCHES``.

Appends one line per batch, with what it holds, to ``DIRECTORY/batches``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from campaigns.bench.sampling import simulated_sampler
from campaigns.bench.workloads import SimulatedStages


def rows() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        rewards = (1.0, 0.0) if number % 3 else (1.0, 1.0)
        yield {"id": f"t{number}", "rewards": rewards, "seconds": [0.002 * (number % 5), 0.01]}
        number += 1


async def train(directory: Path, batches: int) -> None:
    async with simulated_sampler(directory, rows(), SimulatedStages.of(4), samples_per_group=2) as sampler:
        with (directory / "batches").open("ab", buffering=0) as log:
            while True:
                batch = await sampler.next_batch(3)
                groups = [[group.row["id"], group.group_id, group.rewards] for group in batch.groups]
                log.write(orjson.dumps({"batch": batch.index, "groups": groups}) + b"\n")
                if batch.index >= batches:
                    return


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1]), int(sys.argv[2])))
