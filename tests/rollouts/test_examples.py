"""NeMo Gym's entry points for programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollout_collection import NG_FAILURE_CLASS_KEY, RolloutCollectionHelper
from tests.rollouts.conftest import Chain, wait_until
from tests.rollouts.test_training_fields import read_as_nemo_rl

MakeChain = Callable[..., Chain]


def example(number: int) -> dict[str, Any]:
    return {"id": f"t{number}", "responses_create_params": {"input": "?"}, "expected_answer": "B", "_rowidx": number}


async def test_examples_come_back_with_their_results_as_they_end(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t3": 99}})
    helper = RolloutCollectionHelper(chain.client())
    # The same task twice: a trainer samples a group.
    rows = [example(number) for number in (0, 1, 2, 3, 0)]
    got = [await done for done in helper.run_examples(rows, max_attempts=2, retry_delay_s=0.01)]
    assert sorted(row["_rowidx"] for row, _ in got) == [0, 0, 1, 2, 3]
    for row, result in got:
        assert any(row is given for given in rows)
        if row["id"] == "t3":
            assert (result["reward"], result["mask_sample"], result[NG_FAILURE_CLASS_KEY]) == (
                None,
                True,
                "agent_crashed",
            )
        else:
            assert (result["reward"], result["_rowidx"]) == (1.0, row["_rowidx"])
    await helper.aclose()
    assert not list(chain.directory.glob("*.sqlite*"))


TOKENS = {
    **{"index": 0, "prompt_ids": [1], "response_ids": [2], "response_mask": [1], "logprobs": [-0.5]},
    "turns": [{"start": 0, "end": 1}],
}


@pytest.mark.parametrize(
    ("trajectories", "expected"),
    [
        ([TOKENS], [(1.0, False, None), (1.0, True, "group_mean"), (0.0, True, "group_mean")]),
        ([], [(1.0, False, None), (1.0, False, None), (1.0, False, None)]),
    ],
)
async def test_example_that_lost_its_tokens_is_masked_where_a_trainer_needs_them(
    make_chain: MakeChain, trajectories: list[Any], expected: list[Any]
) -> None:
    chain = make_chain(model={"trajectories": trajectories, "forgets": ["t1", "t2"]})
    helper = RolloutCollectionHelper(chain.client(), masked_reward="group_mean")
    rows = [{**example(number), "_ng_task_index": number // 2} for number in range(3)]
    got = [await done for done in helper.run_examples(rows, concurrency=1)]
    results = [result for _, result in sorted(got, key=lambda pair: pair[0]["_rowidx"])]
    assert [(row["reward"], row["mask_sample"], row.get("reward_source")) for row in results] == expected
    for result in results if trajectories else ():
        assert read_as_nemo_rl(result["response"])[0]
        assert result["valid"] is not result["mask_sample"]
    await helper.aclose()


async def test_examples_under_way_are_cancelled_when_the_helper_is_closed(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    helper = RolloutCollectionHelper(chain.client())
    (pending,) = helper.run_examples([example(0)])
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("act")) == 1, "the act to start")
    await helper.aclose()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert len(chain.notes("close")) == 1


async def test_sessions_are_released_when_the_helper_is_closed_after_the_last_result(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"close_s": 1.0})
    helper = RolloutCollectionHelper(chain.client())
    for done in helper.run_examples([example(number) for number in range(3)]):
        await done
    await helper.aclose()
    assert len(chain.notes("closed")) == 3


async def test_examples_raise_what_is_wrong_with_the_stack(make_chain: MakeChain) -> None:
    chain = make_chain()
    helper = RolloutCollectionHelper(chain.client())
    (pending,) = helper.run_examples([{**example(0), "agent_ref": {"name": "trivail"}}])
    with pytest.raises(ConfigError, match="did you mean 'trivial'"):
        await pending


async def test_agent_that_a_call_names_runs_examples_that_name_another(make_chain: MakeChain) -> None:
    helper = RolloutCollectionHelper(make_chain().client())
    (done,) = helper.run_examples([{**example(0), "agent_ref": {"name": "other"}}], agent_name="trivial")
    _, result = await done
    assert (result["agent_ref"]["name"], result["reward"]) == ("trivial", 1.0)
    await helper.aclose()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"agent_ref": ref}, "'agent_ref' must be an agent's name or an object") for ref in (5, {"name": ["x"]})),
        ({"expected": 2**64}, "a value holds an integer beyond 64 bits; send it as text"),
        ({"text": b"x"}, "Type is not JSON serializable: bytes"),
    ],
)
async def test_example_that_cannot_be_run_is_named(make_chain: MakeChain, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError, match=f"^example 1: .*{said}"):
        RolloutCollectionHelper(make_chain().client()).run_examples([example(0), {**example(1), **fields}])
