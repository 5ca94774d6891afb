"""Faults caused for real: killed processes, full disks. What was recorded stays, nothing stands twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_gym.rollouts.collection import run_collection
from nemo_gym.rollouts.interfaces import StoreError
from tests.rollouts.conftest import Chain, wait_until

MakeChain = Callable[..., Chain]


def assert_exactly_once(chain: Chain, count: int) -> None:
    ids = [row["_ng_rollout_id"] for row in chain.results()]
    assert len(ids) == count
    assert len(set(ids)) == count


@pytest.mark.parametrize("kills", [1, 3])
def test_resumed_run_holds_each_result_once_when_the_collector_was_killed(make_chain: MakeChain, kills: int) -> None:
    chain = make_chain(agent={"delay_s": 0.05})
    chain.write_rows(60)
    before: set[str] = set()
    for round_ in range(kills):
        collector = chain.collect(concurrency=4, resume=round_ > 0)
        wait_until(lambda: len(chain.results()) >= len(before) + 8, "results to be recorded")  # noqa: B023 - used now
        collector.send_signal(signal.SIGKILL)
        collector.wait()
        whole = chain.output.read_bytes().rpartition(b"\n")[0].splitlines()
        before |= {json.loads(line)["_ng_rollout_id"] for line in whole}
    final = chain.collect(concurrency=4, resume=True)
    shown, _ = final.communicate(timeout=60)
    assert final.returncode == 0, shown.decode()
    assert_exactly_once(chain, 60)
    assert before <= {row["_ng_rollout_id"] for row in chain.results()}
    # A rollout that was under way is a new attempt; one that had a result was not run again.
    acts = chain.notes("act")
    assert len(acts) == len(set(acts))
    assert 60 <= len(acts) <= 60 + 4 * 4 * kills


def test_collector_says_how_to_resume_when_interrupted(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    chain.write_rows(3)
    collector = chain.collect()
    wait_until(lambda: len(chain.results()) == 2, "the others to finish")
    collector.send_signal(signal.SIGINT)
    shown, _ = collector.communicate(timeout=30)
    assert collector.returncode == 130
    assert "the same command continues" in shown.decode()
    wait_until(lambda: len(chain.notes("cancelled")) == 1, "the act to be cancelled")
    assert set(chain.notes("seed")) == set(chain.notes("close"))
    assert len(chain.notes("abort")) == 1


async def test_rollouts_get_new_attempts_when_the_agent_server_is_killed_in_mid_act(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 0.3})
    chain.write_rows(8)
    run = asyncio.create_task(run_collection(chain.client(), chain.run_keys(concurrency=4)))
    agent = chain.servers["agent"]
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("act")) >= 4, "acts under way")
    agent.kill()
    await asyncio.to_thread(agent.restart, delay_s=0)
    result = await run
    assert (result.valid, result.invalid) == (8, 0)
    assert_exactly_once(chain, 8)
    assert max(row["_ng_attempt_index"] for row in chain.results()) >= 1


async def test_rollout_is_typed_agent_lost_when_its_server_dies_every_time(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 60})
    chain.write_rows(1)
    run = asyncio.create_task(run_collection(chain.client(), chain.run_keys(max_attempts=2)))
    agent = chain.servers["agent"]
    for attempt in (1, 2):
        await asyncio.to_thread(wait_until, lambda n=attempt: len(chain.notes("act")) == n, "the act to start")
        agent.kill()
        await asyncio.to_thread(agent.restart)
    result = await run
    (failure,) = chain.results("out_failures.jsonl")
    assert (result.valid, failure["failure_kind"], failure["reward"]) == (0, "agent_lost", None)


async def test_verify_is_repeated_when_the_environment_is_killed_and_comes_back(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 0.5})
    chain.write_rows(2)
    run = asyncio.create_task(run_collection(chain.client(), chain.run_keys()))
    environment = chain.servers["environment"]
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("act")) == 2, "acts under way")
    environment.kill()
    await asyncio.to_thread(environment.restart)
    result = await run
    assert (result.valid, {row["_ng_attempt_index"] for row in chain.results()}) == (2, {0})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small file system and needs root")
    target = tmp_path / "disk"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(target)], check=True)
    yield target
    subprocess.run(["umount", "-l", str(target)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


async def test_full_disk_stops_the_run_with_one_error_and_resumes_after_room_was_made(
    make_chain: MakeChain, small_disk: Path
) -> None:
    chain = make_chain(model={"trajectories": [{"prompt_ids": [1]}]})
    chain.write_rows(60, filler="x" * 20_000)
    chain.output = small_disk / "out.jsonl"
    with pytest.raises(StoreError) as caught:
        await run_collection(chain.client(), chain.run_keys(concurrency=4))
    message = str(caught.value)
    assert "no space left" in message
    assert str(small_disk) in message
    assert "start the same command again" in message
    grow(small_disk)
    result = await run_collection(chain.client(), chain.run_keys(resume=True))
    assert (result.valid, result.invalid) == (60, 0)
    rows = [json.loads(line) for line in chain.output.read_text().splitlines()]
    assert len(rows) == len({row["_ng_rollout_id"] for row in rows}) == 60
    assert all(row["ng_trajectory"] == [{"prompt_ids": [1]}] for row in rows)
    # It is not known of the last writes whether they took effect, so their attempts stay open, as after a kill.
    assert {attempt for _, attempt in set(chain.notes("seed")) - set(chain.notes("close"))} <= {1}


async def test_full_disk_at_the_metrics_is_one_error_and_the_same_command_writes_them(
    make_chain: MakeChain, small_disk: Path
) -> None:
    chain = make_chain(
        environment={"says": {"t0": {f"one of many numbers, the {number}th": 1 for number in range(9_000)}}}
    )
    chain.write_rows(1)
    chain.output = small_disk / "out.jsonl"
    with pytest.raises(StoreError, match=r"no space left to write .*out_aggregate_metrics\.json.*same command again"):
        await run_collection(chain.client(), chain.run_keys())
    assert len(chain.output.read_text().splitlines()) == 1
    grow(small_disk)
    (entry,) = (await run_collection(chain.client(), chain.run_keys())).aggregates
    assert json.loads((small_disk / "out_aggregate_metrics.json").read_text()) == [entry]
    assert len(chain.notes("seed")) == 1


async def test_full_disk_is_named_before_any_task_when_not_even_the_inputs_fit(
    make_chain: MakeChain, small_disk: Path
) -> None:
    chain = make_chain()
    chain.write_rows(300, filler="x" * 20_000)
    chain.output = small_disk / "out.jsonl"
    with pytest.raises(StoreError, match=r"no space left to write .*out\.jsonl"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.notes("seed") == []
    assert not list(small_disk.glob("*.partial"))
