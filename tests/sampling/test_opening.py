"""Samplers over the servers of a stack, beside what else uses an output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.sampling import BlockingSampler, ValidSamples, open_sampler
from tests.rollouts.conftest import Chain, _no_session_left, make_chain

__all__ = ["_no_session_left", "make_chain"]  # fixtures

MakeChain = Callable[..., Chain]
ANY = (ValidSamples(),)
TWO = {"samples_per_group": 2}


async def test_sampler_drives_the_servers_of_a_stack_and_goes_on_with_its_output(make_chain: MakeChain) -> None:
    trajectory = {"weights_versions": ["0", "1"], "prompt_ids": [1]}
    chain = make_chain(model={"trajectories": [trajectory]})
    chain.write_rows(6)
    names = []
    for _ in range(2):
        async with open_sampler(chain.client(), chain.run_keys(concurrency=4), sampling=TWO, filters=ANY) as sampler:
            batch = await sampler.next_batch(2, weights_version=2)
            names += [group.row["id"] for group in batch.groups]
            # What the engines reported wins over what the sampler saw.
            assert {(sample.weights.first, sample.weights.last) for sample in batch.samples} == {(0, 1)}
            assert {row["staleness"] for row in batch.rows()} == {2}
    assert names == ["t0", "t1", "t2", "t3"]
    done = chain.results()
    assert len({row["_ng_rollout_id"] for row in done}) == len(done) >= 8
    # What was stopped is closed too, except what whoever goes on only has to grade.
    with contextlib.closing(sqlite3.connect(RunFiles(chain.output).store)) as store:
        to_grade = set(store.execute("SELECT job_id, attempt FROM jobs WHERE run_result IS NOT NULL"))
    assert set(chain.notes("seed")) - set(chain.notes("close")) == to_grade


def test_sampler_that_blocks_samples_while_the_trainer_computes(make_chain: MakeChain) -> None:
    chain = make_chain()
    loader = [{"id": f"q{n}", "responses_create_params": {"input": "A or B?"}} for n in range(8)]
    keys = {key: value for key, value in chain.run_keys().items() if key != "input"}
    with BlockingSampler(chain.client(), keys, loader, sampling={**TWO, "epochs": 1}, filters=ANY) as sampler:
        first = sampler.next_batch(requested_batch_size=3)
        state = sampler.state_dict()
        assert len(first.groups) == len(sampler.next_batch(3).groups) == 3
    with BlockingSampler(chain.client(), keys, loader, sampling={**TWO, "epochs": 1}, filters=ANY) as sampler:
        sampler.load_state_dict(state)
        second, last = sampler.next_batch(3), sampler.next_batch(3)
        assert (len(second.groups), len(last.groups), last.exhausted) == (3, 2, True)
    taken = [group.row["id"] for batch in (first, second, last) for group in batch.groups]
    assert sorted(taken) == [row["id"] for row in loader]  # in whatever order they were done
    with pytest.raises(ConfigError, match="is closed"):
        sampler.next_batch(1)


def test_misspelled_option_is_named_and_leaves_no_thread() -> None:
    with pytest.raises(TypeError, match="'samplings'"):
        BlockingSampler(None, {}, samplings=TWO)
    assert "sampler" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("keys", "loader", "said"),
    [
        ({"num_repeats": 4}, None, "num_repeats has no effect here: the sampling key samples_per_group"),
        ({"shard": "1/2"}, None, "shard has no effect here"),
        ({"retry_failed": True}, None, "retry_failed has no effect here"),
        ({"limit": 1}, [{}], "limit has no effect here: leave it out, and give a loader with fewer rows"),
    ],
)
async def test_run_key_that_a_sampler_cannot_obey_is_refused(
    make_chain: MakeChain, keys: dict[str, Any], loader: Any, said: str
) -> None:
    chain = make_chain()
    chain.write_rows(2)
    with pytest.raises(ConfigError, match=said):
        async with open_sampler(chain.client(), chain.run_keys(**keys), loader):
            pass


async def test_agent_that_the_sampler_is_given_runs_rows_that_name_another(make_chain: MakeChain) -> None:
    chain = make_chain()
    rows = [{"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "other"}}]
    keys, once = chain.run_keys(agent_name="trivial"), {**TWO, "epochs": 1}
    async with open_sampler(chain.client(), keys, rows, sampling=once, filters=ANY) as sampler:
        batch = await sampler.next_batch(1)
    assert [row["agent_ref"]["name"] for row in batch.rows()] == ["trivial", "trivial"]


async def test_limit_bounds_the_rows_of_the_input(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(3)
    once = {**TWO, "epochs": 1}
    async with open_sampler(chain.client(), chain.run_keys(limit=2), sampling=once, filters=ANY) as sampler:
        batch = await sampler.next_batch(3)
    assert sorted(group.row["id"] for group in batch.groups) == ["t0", "t1"]


@pytest.mark.parametrize("returned", [True, False, {"why": "x"}])
async def test_filter_that_returns_no_reason_is_named(make_chain: MakeChain, returned: Any) -> None:
    def mine(group: Any) -> Any:
        return returned

    chain = make_chain()
    chain.write_rows(2)
    async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO, filters=(mine,)) as sampler:
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"filters: .*mine.* a filter returns None to keep a group"):
                await sampler.next_batch(1)


async def test_checkpoint_that_is_incomplete_is_refused_and_changes_nothing(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(4)
    async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO, filters=ANY) as sampler:
        first = await sampler.next_batch(1)
        state = sampler.state_dict()
    async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO, filters=ANY) as sampler:
        for wrong, said in (
            ({**state, "batch": "1"}, "incomplete: batch"),
            ({"version": 1, "run_id": "x"}, "incomplete: batch, weights_version, cursor"),
            ([], "its version is None"),
        ):
            with pytest.raises(ConfigError, match=said):
                sampler.load_state_dict(wrong)  # type: ignore[arg-type]
        second = await sampler.next_batch(1)
    assert first.groups[0].row["id"] != second.groups[0].row["id"], "groups end in any order, and none twice"


async def test_agent_that_fails_is_masked_and_gets_no_reward(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 9}})
    chain.write_rows(2)
    async with open_sampler(
        chain.client(), chain.run_keys(max_attempts=2), sampling={**TWO, "epochs": 1}, filters=ANY
    ) as sampler:
        batch = await sampler.next_batch(2)
        assert [group.row["id"] for group in batch.groups] == ["t1"]
        assert batch.left_out == {"too few valid samples": 1}
    assert [row["reward"] for row in chain.results("out_failures.jsonl")] == [None, None]


async def test_agent_that_does_not_exist_is_named_at_once_and_costs_no_earlier_run(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys())
    with pytest.raises(ConfigError, match="no responses_api_agents instance is named 'trivail'"):
        async with open_sampler(chain.client(), chain.run_keys(agent_name="trivail", overwrite=True)):
            pass
    assert len(chain.results()) == 1


async def test_output_of_another_kind_of_run_is_refused_both_ways(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO, filters=ANY) as sampler:
        await sampler.next_batch(1)
        with pytest.raises(ConfigError, match="another collector"):
            async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO):
                pass
    with pytest.raises(ConfigError, match="with other rows"):
        await run_collection(chain.client(), chain.run_keys())
    await run_collection(chain.client(), chain.run_keys(overwrite=True))
    with pytest.raises(ConfigError, match="with other rows"):
        async with open_sampler(chain.client(), chain.run_keys(), sampling=TWO):
            pass
    async with open_sampler(chain.client(), chain.run_keys(overwrite=True), sampling=TWO, filters=ANY) as sampler:
        assert (await sampler.next_batch(1)).index == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "agent_ref": {"name": "trivail"}}, "unknown agent 'trivail'"),
        ({"id": "x", "responses_create_params": {}}, "must be an object with 'input'"),
        ({"id": {1, 2}}, "row 1 of the data loader is not JSON"),
    ],
)
async def test_row_of_a_loader_that_cannot_be_used_is_named_or_passed_over(
    make_chain: MakeChain, row: dict[str, Any], said: str
) -> None:
    chain = make_chain()
    good = {"id": "good", "responses_create_params": {"input": "A or B?"}}
    options: dict[str, Any] = {"sampling": {**TWO, "epochs": 1}, "filters": ANY}
    async with open_sampler(chain.client(), chain.run_keys(), [row, good], **options) as sampler:
        with pytest.raises(RowError, match=said):
            await sampler.next_batch(1)
    keys = chain.run_keys(skip_bad_rows=True, overwrite=True)
    async with open_sampler(chain.client(), keys, [row, good], **options) as sampler:
        async with asyncio.timeout(60):
            assert [group.row["id"] for group in (await sampler.next_batch(1)).groups] == ["good"]


async def test_rows_that_can_none_be_used_are_named_and_hold_nothing_up(make_chain: MakeChain) -> None:
    chain = make_chain()
    misspelt = {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "trivail"}}
    keys = chain.run_keys(skip_bad_rows=True)
    async with open_sampler(chain.client(), keys, [misspelt] * 3, sampling=TWO, filters=ANY) as sampler:
        with pytest.raises(ConfigError, match="input holds no usable rows"):
            await sampler.next_batch(1)
    async with open_sampler(chain.client(), keys, itertools.repeat(misspelt), sampling=TWO, filters=ANY) as sampler:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.next_batch(1), 0.1)


async def test_rows_that_cannot_be_used_are_passed_over_in_every_pass(make_chain: MakeChain) -> None:
    chain = make_chain()
    row = {"responses_create_params": {"input": "A or B?"}}
    rows = [{**row, "agent_ref": {"name": "trivail"}}, {**row, "id": "good"}]
    keys = chain.run_keys(skip_bad_rows=True)
    async with open_sampler(chain.client(), keys, rows, sampling=TWO, filters=ANY) as sampler:
        batch = await sampler.next_batch(4)
    assert [group.row["id"] for group in batch.groups] == ["good"] * 4
