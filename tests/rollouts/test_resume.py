"""One output, one run: who may work on it, how it goes on, and what a new run replaces."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from rich.console import Console

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollouts.collection import run_collection
from tests.rollouts.conftest import Chain, wait_until

MakeChain = Callable[..., Chain]


@pytest.mark.parametrize("name", ["runs.sqlite", "out_store.sqlite"])
async def test_second_collector_on_the_same_store_is_refused(make_chain: MakeChain, name: str) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    chain.write_rows(2)
    store = str(chain.directory / name)
    named = {} if name == "out_store.sqlite" else {"store": store}  # the one beside the output need not be named
    first = asyncio.create_task(run_collection(chain.client(), chain.run_keys(**named)))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) == 1, "a result")
    other = str(chain.directory / "other.jsonl")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"another collector .*\.sqlite'.*another 'store'"):
            await run_collection(chain.client(), chain.run_keys(store=store, output=other, overwrite=overwrite))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(chain.notes("act")) == 2


async def test_store_and_output_may_share_a_lock_by_different_paths(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain()
    chain.write_rows(1)
    output = chain.output.resolve()
    monkeypatch.chdir(output.parent)
    result = await run_collection(chain.client(), chain.run_keys(store=output.stem, output=str(output)))
    assert result.valid == 1


async def test_second_collector_on_the_same_output_is_refused(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    chain.write_rows(2)
    first = asyncio.create_task(run_collection(chain.client(), chain.run_keys()))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) == 1, "a result")
    with pytest.raises(ConfigError, match="another collector"):
        await run_collection(chain.client(), chain.run_keys(resume=True))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("cancelled")) == 1, "the agent sees the cancel")
    assert set(chain.notes("seed")) == set(chain.notes("close"))


async def test_cancelled_run_continues_where_it_stopped(make_chain: MakeChain, tmp_path: Path) -> None:
    chain = make_chain(agent={"hang": ["t3"]})
    chain.write_rows(8)
    first = asyncio.create_task(run_collection(chain.client(), chain.run_keys(concurrency=2)))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) >= 5, "five results")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ConfigError, match=r"unfinished run \(\d of 8 rollouts left\)"):
        await run_collection(chain.client(), chain.run_keys(resume=False))
    kept = {row["_ng_rollout_id"] for row in chain.results()}
    agent = chain.servers["agent"]
    agent.kill()
    agent.restart(hang=[])
    shown = io.StringIO()
    await run_collection(chain.client(), chain.run_keys(), console=Console(file=shown, width=120))
    assert re.search(rf"8 rollouts of 8 tasks in [\d.]+ s, {len(kept)} of them finished before", shown.getvalue())
    ids = [row["_ng_rollout_id"] for row in chain.results()]
    assert len(ids) == len(set(ids)) == 8
    assert kept <= set(ids)


async def stopped_while_graded(chain: Chain, rows: int, note: str = "verify") -> None:
    """Stop a run when it has come to the grading of each of its rows."""
    chain.write_rows(rows)
    keys = chain.run_keys(concurrency=rows, eval_workers=rows, retry_delay_s=60)
    first = asyncio.create_task(run_collection(chain.client(), keys))
    await asyncio.to_thread(wait_until, lambda: len(chain.notes(note)) == rows, "all to be graded")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("status", [0, 403])
async def test_work_that_new_servers_cannot_grade_is_done_again_at_no_cost_and_once(
    make_chain: MakeChain, status: int
) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    await stopped_while_graded(chain, 6)
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(key="another", verify_failures=0, verify_status=status)
    keys = chain.run_keys(max_attempts=1, stop_after_same_failure=0 if status else 3)
    with structlog.testing.capture_logs() as logs:
        result = await run_collection(chain.client(), keys)
    assert (result.valid, result.invalid) == ((0, 6) if status else (6, 0))
    attempts = [(f"{result.run_id}.{number}-0", attempt) for number in range(6) for attempt in (1, 2)]
    assert sorted(chain.notes("act")) == sorted(set(chain.notes("close"))) == attempts
    assert set(chain.notes("abort")) >= {each for each in attempts if each[1] == 1}
    assert "release failed" not in [entry["event"] for entry in logs]


async def test_known_verdict_outlives_servers_that_know_nothing_of_its_attempt(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"overrides_run": True}, model={"end_s": 60})
    await stopped_while_graded(chain, 1, "finalize")
    for role, options in (("environment", {"key": "another"}), ("model", {"end_s": 0, "end_status": 401})):
        chain.servers[role].kill()
        chain.servers[role].restart(**options)
    result = await run_collection(chain.client(), chain.run_keys())
    assert (result.valid, [row["reward"] for row in chain.results()]) == (1, [0.5])
    assert len(chain.notes("run")) == len(chain.notes("close")) == 1


async def test_resume_is_refused_when_the_run_is_another(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    chain.write_rows(3)
    with pytest.raises(ConfigError, match="overwrite=true"):
        await run_collection(chain.client(), chain.run_keys(resume=True))


async def test_retry_failed_gives_a_new_budget_and_withdraws_the_failure(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_status": 500})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert len(chain.results("out_failures.jsonl")) == 2
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(verify_status=0)
    shown = io.StringIO()
    keys = chain.run_keys(resume=True, retry_failed=True)
    result = await run_collection(chain.client(), keys, console=Console(file=shown, width=120))
    assert (result.valid, result.invalid) == (2, 0)
    assert chain.results("out_failures.jsonl") == []
    assert "Failures:" not in shown.getvalue()
    assert {row["_ng_attempt_index"] for row in chain.results()} == {1}


async def test_metrics_from_before_a_retry_are_gone_while_its_rollouts_run_and_until_it_has_its_own(
    make_chain: MakeChain, tmp_path: Path
) -> None:
    metrics = tmp_path / "out_aggregate_metrics.json"
    chain = make_chain(environment={"verify_status": 500})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    await run_collection(chain.client(), chain.run_keys(disable_aggregation=True))  # finished: the file stays
    assert json.loads(metrics.read_text())[0]["key_metrics"]["rollouts/invalid"] == 2
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(verify_status=0, metrics_s=60)
    retry = asyncio.create_task(run_collection(chain.client(), chain.run_keys(retry_failed=True)))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) == 2, "both verdicts")
    assert not metrics.exists()
    retry.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retry
    environment.kill()
    environment.restart(metrics_s=None)
    (entry,) = (await run_collection(chain.client(), chain.run_keys())).aggregates
    assert entry["key_metrics"]["rollouts/invalid"] == 0
    assert json.loads(metrics.read_text()) == [entry]
    assert len(chain.notes("seed")) == 4


async def test_finished_run_stays_as_it_is_and_says_so_when_started_again(
    make_chain: MakeChain, tmp_path: Path
) -> None:
    chain = make_chain()
    chain.write_rows(2)
    first = await run_collection(chain.client(), chain.run_keys())
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*.json*")}
    shown = io.StringIO()
    second = await run_collection(chain.client(), chain.run_keys(), console=Console(file=shown, width=120))
    assert second.run_id == first.run_id
    assert second.aggregates == first.aggregates
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*.json*")} == before
    assert len(chain.notes("seed")) == 2
    assert "2 rollouts of 2 tasks, finished before" in shown.getvalue()
    assert "This run is finished, and nothing was run again." in shown.getvalue()


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"limit": 1}, r"parameters \(it has 2 rollouts, this command 1\): choose"),
        ({"num_repeats": 2}, r"\(it has 2 rollouts, this command 4\)"),
        ({"temperature": 0.5}, r"\(task 0, rollout 0 has another 'responses_create_params\.temperature'\)"),
        ({"top_k": 7}, r"other 'top_k' \(it has None, this command 7\): choose another 'output'"),
        ({"stop": "x"}, r"other 'stop' \(it has None, this command \['x'\]\)"),
        ({"num_repeats_add_seed": True}, r"other 'seed' \(it has None, this command 0\)"),
        ({"resume": False}, "resume=false"),
    ],
)
async def test_finished_run_is_not_replaced_by_another_one_and_the_difference_is_named(
    make_chain: MakeChain, tmp_path: Path, changed: dict[str, Any], difference: str
) -> None:
    chain = make_chain()
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*.json*")}
    with pytest.raises(ConfigError, match=difference):
        await run_collection(chain.client(), chain.run_keys(**changed))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*.json*")} == before


async def test_run_goes_on_with_its_own_sampling_and_other_limits_are_named(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"limits": ["max_turns"]}, environment={"verify_status": 500})
    chain.write_rows(1)
    keys: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "stop": "x", "seed": 0, "max_turns": 9}
    await run_collection(chain.client(), chain.run_keys(**keys, max_attempts=1))
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(verify_status=0)
    # The materialized rows hold the temperature; what they do not hold must be given.
    keys |= {"input": str(chain.directory / "out_materialized_inputs.jsonl"), "stop": ["x"], "max_turns": 2}
    del keys["temperature"]
    for other in ({"top_k": None}, {"seed": 1}):
        with pytest.raises(ConfigError, match=f"other '{next(iter(other))}'"):
            await run_collection(chain.client(), chain.run_keys(**{**keys, **other}, retry_failed=True))
    shown = io.StringIO()
    await run_collection(
        chain.client(), chain.run_keys(**keys, retry_failed=True), console=Console(file=shown, width=120)
    )
    assert "began with other values of max_turns" in shown.getvalue()
    assert [row["reward"] for row in chain.results()] == [1.0]


async def test_run_of_an_earlier_version_which_recorded_no_sampling_goes_on(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys())
    with contextlib.closing(sqlite3.connect(chain.directory / "out_store.sqlite")) as store, store:
        store.execute("UPDATE run SET info = json_remove(CAST(info AS TEXT), '$.sampling', '$.limits')")
    await run_collection(chain.client(), chain.run_keys(top_k=7))
    assert len(chain.notes("seed")) == 1


async def test_finished_run_is_replaced_when_overwrite_is_asked_for(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    first = await run_collection(chain.client(), chain.run_keys())
    second = await run_collection(chain.client(), chain.run_keys(overwrite=True, limit=1))
    assert first.run_id != second.run_id
    assert {row["_ng_rollout_id"].split(".")[0] for row in chain.results()} == {second.run_id}
    assert len(chain.results("out_materialized_inputs.jsonl")) == 1


async def test_finished_run_outlives_an_overwrite_whose_rows_are_bad(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    (chain.directory / "in.jsonl").write_text("{broken\n")
    with pytest.raises(RowError):
        await run_collection(chain.client(), chain.run_keys(overwrite=True))
    assert len(chain.results()) == 2


async def test_foreign_output_is_not_overwritten_unasked(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    chain.output.write_text('{"precious": true}\n')
    with pytest.raises(ConfigError, match="overwrite=true"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.output.read_text() == '{"precious": true}\n'


async def test_new_run_removes_no_file(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    index = chain.directory / "out_index.sqlite"
    index.write_text("another program's")
    assert (await run_collection(chain.client(), chain.run_keys())).valid == 1
    assert index.read_text() == "another program's"


@pytest.mark.parametrize("torn", ['{"_ng_rollout_id": "x', None], ids=["torn last line", "missing lines"])
async def test_resume_mends_the_output_file(make_chain: MakeChain, torn: str | None) -> None:
    chain = make_chain()
    chain.write_rows(4)
    await run_collection(chain.client(), chain.run_keys())
    lines = chain.output.read_text().splitlines(keepends=True)
    chain.output.write_text("".join(lines[:2]) + (torn or ""))
    await run_collection(chain.client(), chain.run_keys(resume=True))
    assert sorted(row["task_id"] for row in chain.results()) == ["t0", "t1", "t2", "t3"]
    assert len(chain.notes("act")) == 4  # nothing was run again
