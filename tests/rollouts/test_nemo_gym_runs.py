"""Runs over files that NeMo Gym wrote, and files that it goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.collection import check_run, run_collection
from tests.rollouts.conftest import Chain

MakeChain = Callable[..., Chain]
AGENT = {"name": "trivial"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def given(chain: Chain) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (chain.directory / "in.jsonl").read_text().splitlines()]


def materialized(chain: Chain, repeats: int) -> list[dict[str, Any]]:
    """As NeMo Gym numbers rows: in its own order of keys, the agent by its name alone."""
    return [
        {**row, "agent_ref": AGENT, "_ng_task_index": task, "_ng_rollout_index": rollout}
        for task, row in enumerate(given(chain))
        for rollout in range(repeats)
    ]


def result(row: dict[str, Any], reward: float | None, **extra: Any) -> dict[str, Any]:
    """What a verify response of NeMo Gym's holds: the row, the response, the reward, then the run's numbers."""
    said = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": []}
    response = {"id": "resp", "object": "response", "created_at": 1.0, "model": "m", "output": [said], "tools": []}
    return {**row, "response": response, "reward": reward, "extracted_answer": "B", **extra}


def begin(chain: Chain, *, tasks: int = 3, repeats: int = 2, done: int = 3, **extra: Any) -> list[dict[str, Any]]:
    """A run of which NeMo Gym finished so many rollouts, with rewards that this stack would not give."""
    chain.write_rows(tasks, **extra)
    rows = materialized(chain, repeats)
    write_lines(chain.directory / "out_materialized_inputs.jsonl", rows)
    write_lines(chain.output, [result(row, 0.25) for row in rows[:done]])
    return rows


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    keyed = {(row["_ng_task_index"], row["_ng_rollout_index"]): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


async def test_what_nemo_gym_finished_is_kept_and_the_rest_is_run(make_chain: MakeChain) -> None:
    chain = make_chain()
    begin(chain)
    before = by_key(chain.results())
    ended = await run_collection(chain.client(), chain.run_keys(num_repeats=2))
    after = by_key(chain.results())
    assert set(after) == {(task, rollout) for task in range(3) for rollout in range(2)}
    assert (ended.valid, ended.invalid, ended.rollouts) == (6, 0, 6)
    for key, row in before.items():
        assert row.items() <= after[key].items()
        assert after[key]["_ng_rollout_id"] == f"{ended.run_id}.{key[0]}-{key[1]}"
    ran = {rollout_id.removeprefix(f"{ended.run_id}.") for rollout_id, _ in chain.notes("seed")}
    assert ran == {"1-1", "2-0", "2-1"}
    (aggregate,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    rewards = [row["reward"] for row in after.values()]
    assert aggregate["key_metrics"]["mean/reward"] == pytest.approx(sum(rewards) / 6)
    # By now it is a run of this pipeline: the same command finds nothing left to do.
    again = await run_collection(chain.client(), chain.run_keys(num_repeats=2))
    assert (again.seconds, again.run_id, len(chain.notes("seed"))) == (None, ended.run_id, 3)


async def test_run_over_rows_of_an_earlier_run_is_continued(make_chain: MakeChain) -> None:
    chain = make_chain()
    begin(chain, mask_sample=False, _ng_no_persist=False, reward=1.0)
    ended = await run_collection(chain.client(), chain.run_keys(num_repeats=2))
    assert (ended.valid, ended.invalid) == (6, 0)


async def test_nemo_gym_finds_in_the_files_what_it_resumes_by(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t2": 9}})
    rows = begin(chain, repeats=1, done=1)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert by_key(chain.results("out_materialized_inputs.jsonl")).keys() == by_key(rows).keys()
    assert by_key(chain.results()).keys() == {(0, 0), (1, 0)}
    (failed,) = chain.results("out_failures.jsonl")
    assert (failed["_ng_task_index"], failed["_ng_rollout_index"], failed["_ng_failure_class"]) == (
        *(2, 0),
        "agent_crashed",
    )


async def test_lines_that_nemo_gym_appends_to_our_run_are_kept(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t1": 1}})
    chain.write_rows(2)
    first = await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert (first.valid, first.invalid) == (1, 1)
    row = by_key(chain.results("out_materialized_inputs.jsonl"))[(1, 0)]
    with chain.output.open("ab") as output:
        output.write(orjson.dumps(result(row, 0.25)) + b"\n")
    again = await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert (again.valid, again.invalid, again.seconds) == (2, 0, None)
    assert by_key(chain.results())[(1, 0)]["reward"] == 0.25
    assert chain.results("out_failures.jsonl") == []


async def test_failures_that_nemo_gym_tries_again_are_tried_again(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, tasks=4, repeats=1, done=1)
    failure = {"_ng_failure_class": "agent_request_failed", "_ng_failure_message": "the connection broke"}
    terminal = {"_ng_failure_class": "skipped", "_ng_failure_terminal": True, "error": "too long"}
    failures = [{**rows[1], **failure}, {**rows[2], **failure}, {**rows[2], **terminal}]
    write_lines(chain.directory / "out_failures.jsonl", failures)
    ended = await run_collection(chain.client(), chain.run_keys())
    assert (ended.valid, ended.invalid) == (3, 1)
    assert by_key(chain.results()).keys() == {(0, 0), (1, 0), (3, 0)}
    (failed,) = chain.results("out_failures.jsonl")
    assert terminal.items() <= failed.items()
    assert (failed["failure_reason"], failed["valid"], failed["mask_sample"]) == ("too long", False, True)
    again = await run_collection(chain.client(), chain.run_keys(retry_failed=True))
    assert (again.valid, again.invalid) == (4, 0)


async def test_terminal_failures_are_tried_again_when_asked(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, tasks=2, repeats=1, done=1)
    write_lines(
        chain.directory / "out_failures.jsonl",
        [{**rows[1], "_ng_failure_class": "skipped", "_ng_failure_terminal": True}],
    )
    ended = await run_collection(chain.client(), chain.run_keys(retry_failed=True))
    assert (ended.valid, ended.invalid) == (2, 0)
    assert chain.results("out_failures.jsonl") == []


async def test_line_whose_reward_counts_is_kept_with_its_remark(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, repeats=1, done=0)
    remark = {"mask_sample": False, "failure_kind": "judge_unparseable"}
    write_lines(chain.output, [result(rows[0], 0.5, **remark)])
    ended = await run_collection(chain.client(), chain.run_keys())
    assert (ended.valid, ended.invalid, len(chain.notes("seed"))) == (3, 0, 2)
    kept = by_key(chain.results())[(0, 0)]
    assert (kept["reward"], kept["failure_kind"]) == (0.5, "judge_unparseable")


async def test_lines_without_a_usable_reward_are_failures_and_not_run_again(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, repeats=1, done=0)
    write_lines(chain.output, [result(rows[0], 1.0, mask_sample=True), result(rows[1], None)])
    ended = await run_collection(chain.client(), chain.run_keys())
    assert (ended.valid, ended.invalid, len(chain.notes("seed"))) == (1, 2, 1)
    failed = by_key(chain.results("out_failures.jsonl"))
    assert failed.keys() == {(0, 0), (1, 0)}
    assert all(row["reward"] is None and row["_ng_failure_terminal"] for row in failed.values())


async def test_torn_last_line_of_a_killed_nemo_gym_is_run(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, repeats=1, done=1)
    with chain.output.open("ab") as output:
        output.write(orjson.dumps(result(rows[1], 1.0))[:40])
    ended = await run_collection(chain.client(), chain.run_keys())
    assert (ended.valid, len(chain.notes("seed"))) == (3, 2)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"num_repeats": 1}, "task 0, rollout 1 is not part of this run"),
        ({"num_repeats": 3}, "it has 6 rollouts, this one 9"),
        ({"num_repeats": 2, "temperature": 0.5}, "task 0, rollout 0 has other fields or another agent"),
        ({"num_repeats": 2, "resume": False}, "leave resume=false out"),
        ({"num_repeats": 2, "validation": "gold"}, "leave 'validation' out"),
    ],
)
async def test_another_run_than_nemo_gym_began_is_refused(
    make_chain: MakeChain, keys: dict[str, Any], problem: str
) -> None:
    chain = make_chain()
    begin(chain)
    files = {path.name: path.read_bytes() for path in chain.directory.iterdir() if path.suffix == ".jsonl"}
    with pytest.raises(ConfigError, match=problem):
        await check_run(RolloutRunConfig.parse(chain.run_keys(**keys)), chain.stack, keep=True)
    with pytest.raises(ConfigError, match=problem):
        await run_collection(chain.client(), chain.run_keys(**keys))
    assert files == {path.name: path.read_bytes() for path in chain.directory.iterdir() if path.suffix == ".jsonl"}
    assert chain.notes("seed") == []


async def test_rows_that_nemo_gym_numbered_otherwise_go_on_from_its_own_file(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, tasks=2, repeats=1, done=0)
    for row in rows:  # as where two rows are alike: it counts them as one task
        row |= {"_ng_task_index": 0, "_ng_rollout_index": row["_ng_task_index"]}
    write_lines(chain.directory / "out_materialized_inputs.jsonl", rows)
    write_lines(chain.output, [result(rows[0], 0.25)])
    with pytest.raises(ConfigError, match=r"input=.*out_materialized_inputs\.jsonl"):
        await run_collection(chain.client(), chain.run_keys())
    own = str(chain.directory / "out_materialized_inputs.jsonl")
    ended = await run_collection(chain.client(), chain.run_keys(input=own))
    assert (ended.valid, len(chain.notes("seed"))) == (2, 1)


async def test_run_of_which_nemo_gym_finished_nothing_is_continued(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = begin(chain, repeats=1, done=0)
    terminal = {"_ng_failure_class": "skipped", "_ng_failure_terminal": True, "error": "too long"}
    write_lines(chain.directory / "out_failures.jsonl", [{**rows[1], **terminal}])
    ended = await run_collection(chain.client(), chain.run_keys())
    assert (ended.valid, ended.invalid, len(chain.notes("seed"))) == (2, 1, 2)
    (failed,) = chain.results("out_failures.jsonl")
    assert terminal.items() <= failed.items()


@pytest.mark.parametrize(
    ("name", "done"),
    [
        *(("out_config.yaml", 0), ("out_config.yaml", 1), ("out_failures.jsonl", 0)),
        *(("out_materialized_inputs.jsonl", 0), ("out_materialized_inputs.jsonl", 1)),
    ],
)
async def test_files_that_nemo_gym_did_not_write_stay_as_they_are(make_chain: MakeChain, name: str, done: int) -> None:
    chain = make_chain()
    begin(chain, repeats=1, done=done)
    path = chain.directory / name
    path.write_text('{"precious": true}\n')
    with pytest.raises(ConfigError, match="overwrite=true"):
        await check_run(RolloutRunConfig.parse(chain.run_keys()), chain.stack, keep=True)
    assert path.read_text() == '{"precious": true}\n'


async def test_run_of_which_nemo_gym_finished_nothing_goes_on_from_its_own_file(make_chain: MakeChain) -> None:
    chain = make_chain()
    begin(chain, done=0)
    chain.output.unlink()
    source = chain.directory / "out_materialized_inputs.jsonl"
    keys = {**chain.run_keys(), "input": source}
    with pytest.raises(ConfigError, match=r"'input' .* is a file that the run itself writes"):
        await run_collection(chain.client(), {**keys, "overwrite": True})
    assert (await run_collection(chain.client(), keys)).rollouts == 6


async def test_results_without_the_rows_of_their_run_are_refused(make_chain: MakeChain) -> None:
    chain = make_chain()
    begin(chain)
    (chain.directory / "out_materialized_inputs.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"restore 'out_materialized_inputs\.jsonl'"):
        await run_collection(chain.client(), chain.run_keys(num_repeats=2))
    ended = await run_collection(chain.client(), chain.run_keys(num_repeats=2, overwrite=True))
    assert (ended.valid, len(chain.notes("seed"))) == (6, 6)
