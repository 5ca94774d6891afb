"""A trainer killed at any time: each row is sampled once, and no group is in two batches."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from tests.rollouts.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 40
KILLS = 8


def trainer(directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.sampling.killed_trainer", str(directory), str(BATCHES)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def batches_of(directory: Path) -> list[dict[str, Any]]:
    log = directory / "batches"
    lines = log.read_bytes().splitlines() if log.exists() else []
    return [orjson.loads(line) for line in lines if line.endswith(b"}")]


def test_no_group_is_lost_or_handed_out_twice_when_the_trainer_is_killed_at_any_time(tmp_path: Path) -> None:
    draw = random.Random(4)
    for _ in range(KILLS):
        process, before = trainer(tmp_path), len(batches_of(tmp_path))
        wait_until(lambda: process.poll() is not None or len(batches_of(tmp_path)) > before, "a batch")  # noqa: B023
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = trainer(tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said.decode()
    batches = batches_of(tmp_path)
    indices = [batch["batch"] for batch in batches]
    assert indices[-1] == BATCHES
    assert len(set(indices)) == len(indices)
    assert BATCHES - len(indices) <= KILLS  # recorded and not written down: at most one for each kill
    groups = [group for batch in batches for group in batch["groups"]]
    assert all(len(set(rewards)) == 2 for _, _, rewards in groups)
    ids = [name for name, _, _ in groups]
    assert len(set(ids)) == len(ids)
    # Nothing was passed over: every effective row up to the last is in a batch, but for those of batches lost on their
    # way to the file, and those under way at the end.
    last = max(int(name[1:]) for name in ids)
    missing = [number for number in range(last) if number % 3 and f"t{number}" not in ids]
    assert len(missing) <= 3 * (BATCHES - len(indices)) + 8
