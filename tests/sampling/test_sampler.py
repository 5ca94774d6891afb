"""The sampler over the real dispatcher and job store, on a simulated clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from campaigns.bench.sampling import sampled, simulated_sampler
from campaigns.bench.workloads import SamplingWorkload, SimulatedStage, SimulatedStages, Timeless, simulate
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.rollouts.interfaces import JobAttempt, JobRecord, JobSelector, JobState, SameFailureError
from nemo_gym.rollouts.store import SqlJobStore
from nemo_gym.sampling import Batch, MixedOutcomes, NoEffectiveGroupsError, ValidSamples
from nemo_gym.sampling.ledger import GroupRecord, SamplerLedger
from nemo_gym.sampling.loader import RowFile

MIXED, SOLVED, UNSOLVED = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


def task(name: str, rewards: tuple[float, ...] = MIXED, seconds: Iterable[float] = (10.0, 10.0), **row: Any) -> Any:
    return {"id": name, "rewards": rewards, "seconds": [*seconds], **row}


def names(batch: Batch) -> list[str]:
    return [group.row["id"] for group in batch.groups]


class Breaking(SimulatedStage):
    """Loses its engine on the samples that a row's ``breaks`` lists, ``times`` times each."""

    times = 99

    def __init__(self, workers: int) -> None:
        plain = SimulatedStages.of(workers).run
        super().__init__(StageName.RUN, workers, plain._seconds)
        self.tries: dict[str, int] = {}

    async def run(self, attempt: JobAttempt) -> bytes:
        spec = attempt.job.spec
        tried = self.tries[spec.job_id] = self.tries.get(spec.job_id, 0) + 1
        if spec.sample_index in orjson.loads(spec.row).get("breaks", ()) and tried <= self.times:
            raise ConnectionError("the engine is gone")
        return await super().run(attempt)

    def classify(self, error: BaseException) -> StageFailure:
        return StageFailure(StageName.RUN, FailureKind.MODEL_UNREACHABLE, str(error))


def breaking(workers: int = 8, times: int = 99) -> SimulatedStages:
    stages = replace(SimulatedStages.of(workers), run=(stage := Breaking(workers)))
    stage.times = times
    return stages


# -------------------------------------------------------------------------------------------------------- filters


def test_batch_holds_the_oldest_effective_groups_and_says_why_others_are_left_out() -> None:
    async def work(directory: Path) -> None:
        rows = [task("a", SOLVED), task("b"), task("c", UNSOLVED), task("d", seconds=(90, 90)), task("e")]
        async with simulated_sampler(directory, rows, SimulatedStages.of(10), samples_per_group=2) as sampler:
            first = await sampler.next_batch(2)
            assert names(first) == ["b", "e"]
            assert first.left_out == {"all samples have the same reward": 2}
            assert [sample.reward for sample in first.samples] == [1.0, 0.0] * 2
            assert names(await sampler.next_batch(1)) == ["b"]  # of the second epoch, and before the slow one

    simulate(work)


def test_group_with_a_sample_that_the_infrastructure_lost_is_left_out_and_never_read_as_zero() -> None:
    async def work(directory: Path) -> None:
        rows = [task("a", SOLVED, breaks=[1]), task("b")]
        async with simulated_sampler(
            directory, rows, breaking(), {"max_attempts": 2, "retry_delay_s": 0}, samples_per_group=2, epochs=1
        ) as sampler:
            batch = await sampler.next_batch(2)
            assert (names(batch), batch.exhausted) == (["b"], True)
            assert batch.left_out == {"too few valid samples": 1}

    simulate(work)


def test_masked_samples_stay_without_a_reward_where_fewer_valid_ones_are_enough() -> None:
    async def work(directory: Path) -> None:
        rows = [task("a", (1.0, 0.0, 1.0), (1, 1, 1), breaks=[2]), task("b", (1.0, 1.0, 0.0), (1, 1, 1), breaks=[2])]
        filters = (ValidSamples(at_least=2), MixedOutcomes(solved_from=1.0))
        keys = {"max_attempts": 1}
        async with simulated_sampler(
            directory, rows, breaking(), keys, filters, samples_per_group=3, epochs=1
        ) as sampler:
            batch = await sampler.next_batch(2)
            assert names(batch) == ["a"]
            assert [sample.reward for sample in batch.samples] == [1.0, 0.0, None]
            assert [row["mask_sample"] for row in batch.rows() if row.get("failure_kind")] == [True]
            assert batch.left_out == {"all samples are right": 1}

    simulate(work)


def test_failure_that_a_retry_mends_does_not_cost_the_group() -> None:
    async def work(directory: Path) -> None:
        keys = {"retry_delay_s": 0}
        async with simulated_sampler(
            directory, [task("a", breaks=[0])], breaking(times=1), keys, samples_per_group=2
        ) as sampler:
            batch = await sampler.next_batch(1)
            assert [sample.attempt for sample in batch.samples] == [2, 1]

    simulate(work)


# --------------------------------------------------------------------------------- look-ahead and early termination


def test_full_batch_is_handed_out_while_others_run_and_they_go_on_for_the_next() -> None:
    async def work(directory: Path) -> None:
        rows = [task("slow", seconds=(10, 500)), task("fast"), task("late", seconds=(40, 40))]
        stages = SimulatedStages.of(4)
        async with simulated_sampler(directory, rows, stages, samples_per_group=2, epochs=1) as sampler:
            clock = asyncio.get_running_loop().time
            first = await sampler.next_batch(1)
            assert (names(first), clock()) == (["fast"], 10.0)
            carried = {each.rollout_id: each for each in first.carried}
            assert set(carried) == {"run.0-1", "run.2-0", "run.2-1"}
            assert (carried["run.0-1"].attempt, carried["run.0-1"].weights_version) == (1, 0)
            await asyncio.sleep(690)  # the trainer's step
            second = await sampler.next_batch(2)
            assert (names(second), clock()) == (["slow", "late"], 700.0)
            assert [sample.attempt for sample in second.samples] == [1, 1, 1, 1]

    simulate(work)


def test_older_groups_are_served_first_whatever_was_submitted_since() -> None:
    async def work(directory: Path) -> None:
        rows = (task(f"t{number}", seconds=(10, 10 + number)) for number in range(100))
        async with simulated_sampler(directory, rows, SimulatedStages.of(4), samples_per_group=2) as sampler:
            seen = [name for _ in range(5) for name in names(await sampler.next_batch(2))]
            assert seen == [f"t{number}" for number in range(10)]

    simulate(work)


def test_no_worker_is_idle_while_a_batch_is_asked_for() -> None:
    workload = SamplingWorkload(seed=5, batch=8, workers=16, batches=3)
    found = simulate(lambda directory: sampled(workload, directory))
    # What is unfinished at the end is work as well, and counts in neither.
    assert found["busy"] > 0.85


def test_published_replenishment_adds_one_group_when_no_rollout_waits() -> None:
    async def work(directory: Path) -> None:
        rows = (task(f"t{number}", seconds=(10, 13)) for number in range(100))
        stages = SimulatedStages.of(3)
        async with simulated_sampler(directory, rows, stages, samples_per_group=2, look_ahead=False) as sampler:
            for _ in range(8):
                batch = await sampler.next_batch(1)
                assert sum(each.attempt == 0 for each in batch.carried) <= 2

    simulate(work)


def test_look_ahead_prepares_as_much_as_run_workers_need_where_other_stages_take_time() -> None:
    async def work(directory: Path, **options: Any) -> float:
        rows = (task(f"t{number}") for number in range(1000))
        stages = replace(SimulatedStages.of(4), init=SimulatedStage(StageName.INIT, 16, lambda row, sample: 30.0))
        keys = {"init_workers": 16, "ready_buffer": 4}
        async with simulated_sampler(directory, rows, stages, keys, samples_per_group=2, **options) as sampler:
            for _ in range(5):
                await sampler.next_batch(20)
            return stages.run.busy_s / 4 / asyncio.get_running_loop().time()

    assert simulate(work) > 0.85
    assert simulate(lambda directory: work(directory, look_ahead=False)) < 0.5


def test_no_more_is_submitted_than_the_bound_on_staleness_lets_be_used() -> None:
    async def work(directory: Path) -> None:
        rows = (task(f"t{number}") for number in range(1000))
        async with simulated_sampler(
            directory, rows, SimulatedStages.of(400), samples_per_group=2, max_weights_lag=0
        ) as sampler:
            for _ in range(5):
                batch = await sampler.next_batch(4)
            assert len(batch.carried) <= 2 * 3  # every group of these rows is effective, which the sampler has learned

    simulate(work)


def test_rows_that_yield_nothing_end_the_call_with_their_reasons_where_a_limit_is_set() -> None:
    async def work(directory: Path) -> None:
        rows = [task("a", SOLVED), task("b", UNSOLVED)]
        async with simulated_sampler(
            directory, rows, SimulatedStages.of(4), samples_per_group=2, max_groups_per_batch=6
        ) as sampler:
            with pytest.raises(NoEffectiveGroupsError, match=r"0 of 3 are effective \(\d+: all samples have the same"):
                await sampler.next_batch(3)

    simulate(work)


def test_pipeline_that_stopped_is_raised_by_the_call_that_waits() -> None:
    async def work(directory: Path) -> None:
        rows = (task(f"t{number}", breaks=[0, 1]) for number in range(100))
        keys = {"stop_after_same_failure": 5, "retry_delay_s": 0}
        async with simulated_sampler(directory, rows, breaking(), keys, samples_per_group=2) as sampler:
            with pytest.raises(SameFailureError, match="the engine is gone"):
                await sampler.next_batch(3)

    simulate(work)


# ------------------------------------------------------------------------------------------------------- staleness


def test_samples_tell_the_weights_they_began_and_ended_with() -> None:
    async def work(directory: Path) -> None:
        rows = [task("fast"), task("slow", seconds=(10, 500))]
        async with simulated_sampler(directory, rows, SimulatedStages.of(4), samples_per_group=2, epochs=1) as sampler:
            await sampler.next_batch(1)
            batch = await sampler.next_batch(1, weights_version=3)
            told = [(row["weights_version_start"], row["weights_version_end"]) for row in batch.rows()]
            assert told == [(0, 0), (0, 3)]
            assert {row["staleness"] for row in batch.rows()} == {3}

    simulate(work)


@pytest.mark.parametrize("when_stale", ["drop", "rerun"])
def test_group_that_runs_longer_than_the_bound_is_stopped_and_dropped_or_run_again(when_stale: str) -> None:
    async def work(directory: Path) -> None:
        others = [task(f"t{number}") for number in range(6)]
        rows = [task("slow", seconds=(10, 5000)), task("fast"), *others]
        stages = SimulatedStages.of(4)
        options = {"samples_per_group": 2, "epochs": 1, "max_weights_lag": 0, "when_stale": when_stale}
        async with simulated_sampler(directory, rows, stages, **options) as sampler:
            assert names(await sampler.next_batch(1)) == ["fast"]
            batch = await sampler.next_batch(7)  # all that are left
            assert {batch.staleness(sample) for sample in batch.samples} == {0}
            # Of the others, up to two began just before the batch was full.
            assert 1 <= batch.left_out["too old"] <= 3
            if when_stale == "rerun":
                assert sorted(names(batch)) == ["slow", *(row["id"] for row in others)]
            else:
                assert batch.exhausted
                assert len(batch.groups) == 7 - batch.left_out["too old"]
                assert "slow" not in names(batch)
            assert stages.run.busy_s < 10_000  # the rollout that was stopped did not run to its end

    simulate(work)


def test_rollouts_that_are_too_old_are_stopped_all_at_once_without_reading_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way: list[str] = []
    reads: list[JobSelector] = []
    iterate = SqlJobStore.iterate

    def counted(store: SqlJobStore, selector: JobSelector) -> AsyncIterator[JobRecord]:
        reads.append(selector)
        return iterate(store, selector)

    most = 0

    class Boxed(SimulatedStage):
        """Each rollout holds a box, whose release takes a while."""

        async def run(self, attempt: JobAttempt) -> bytes:
            async def release() -> None:
                nonlocal most
                under_way.append(attempt.job.job_id)
                most = max(most, len(under_way))
                await asyncio.sleep(10)
                under_way.remove(attempt.job.job_id)

            attempt.closers["box"] = release
            return await super().run(attempt)

    async def work(directory: Path) -> None:
        rows = [task(f"t{number}", seconds=(500, 500)) for number in range(4)]
        plain = SimulatedStages.of(8)
        stages = replace(plain, run=Boxed(StageName.RUN, 8, plain.run._seconds))
        options: dict[str, Any] = {"samples_per_group": 2, "epochs": 1, "max_weights_lag": 0}
        async with simulated_sampler(directory, rows, stages, **options) as sampler:
            waiting = asyncio.create_task(sampler.next_batch(4))
            await asyncio.sleep(5)
            monkeypatch.setattr(SqlJobStore, "iterate", counted)
            await sampler.set_weights_version(1)
            assert (most, under_way) == (8, [])  # a trainer would wait for every group in turn
            assert not reads  # rows with images take seconds, and memory
            assert (await waiting).left_out == {"too old": 4}

    simulate(work)


def test_group_whose_failed_samples_wait_to_begin_anew_is_not_too_old() -> None:
    async def work(directory: Path) -> None:
        options: dict[str, Any] = {"samples_per_group": 2, "epochs": 1, "max_weights_lag": 0}
        keys = {"retry_delay_s": 2}  # by the store's clock, which is not simulated
        async with simulated_sampler(
            directory, [task("a", breaks=[0, 1])], breaking(times=1), keys, **options
        ) as sampler:
            waiting = asyncio.create_task(sampler.next_batch(1))
            await asyncio.sleep(5)
            await sampler.set_weights_version(1)
            batch = await waiting
            assert (names(batch), batch.left_out) == (["a"], {})
            assert [batch.staleness(sample) for sample in batch.samples] == [0, 0]

    simulate(work)


@pytest.mark.parametrize(("when_stale", "indices"), [("rerun", [1, 2, 3]), ("drop", [1, 2])])
def test_sample_that_is_too_old_is_run_again_or_left_out_without_its_group(
    when_stale: str, indices: list[int]
) -> None:
    async def work(directory: Path) -> None:
        rows = [task("fast", (1.0, 0.0, 0.0), (10, 10, 10)), task("slow", (1.0, 0.0, 1.0), (900, 50, 50))]
        options = {"max_weights_lag": 1, "stale_unit": "sample", "samples_per_group": 3, "when_stale": when_stale}
        filters = (ValidSamples(at_least=2), MixedOutcomes())
        async with simulated_sampler(
            directory, rows, SimulatedStages.of(4), None, filters, epochs=1, **options
        ) as sampler:
            waiting = asyncio.create_task(sampler.next_batch(1))
            await asyncio.sleep(5)
            await sampler.set_weights_version(1)  # one sample of the slow row began before this, two begin after it
            assert names(await waiting) == ["fast"]
            batch = await sampler.next_batch(1, weights_version=2)
            assert names(batch) == ["slow"]
            assert [sample.sample_index for sample in batch.samples] == indices
            assert [batch.staleness(sample) for sample in batch.samples] == [1, 1, 0][: len(indices)]

    simulate(work)


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_checkpoint_hands_the_later_batches_out_again_with_nothing_run_twice(tmp_path: Path) -> None:
    input_file = tmp_path / "rows.jsonl"
    input_file.write_bytes(b"".join(orjson.dumps(task(f"t{n}")) + b"\n" for n in range(40)))
    kept: dict[str, Any] = {}

    async def before(directory: Path) -> None:
        rows = RowFile(input_file, shuffle_seed=7)
        async with simulated_sampler(tmp_path, rows, SimulatedStages.of(4), samples_per_group=2) as sampler:
            kept["first"] = names(await sampler.next_batch(3))
            kept["state"] = orjson.loads(orjson.dumps(sampler.state_dict()))
            await asyncio.sleep(5)  # what goes on meanwhile is no part of the last batch's state
            assert orjson.loads(orjson.dumps(sampler.state_dict())) == kept["state"]
            kept["second"] = names(await sampler.next_batch(3))

    async def after(directory: Path) -> None:
        stages = SimulatedStages.of(4)
        rows = RowFile(input_file, shuffle_seed=7)
        async with simulated_sampler(tmp_path, rows, stages, samples_per_group=2) as sampler:
            sampler.load_state_dict(kept["state"])
            again = await sampler.next_batch(3)
            assert (names(again), again.index, again.weights_version) == (kept["second"], 2, 1)
            kept["third"] = names(await sampler.next_batch(3))

    async def elsewhere(directory: Path) -> None:
        rows = RowFile(input_file, shuffle_seed=7)
        async with simulated_sampler(directory, rows, SimulatedStages.of(4), samples_per_group=2) as sampler:
            sampler.load_state_dict(kept["state"])
            batch = await sampler.next_batch(3)
            assert (names(batch), batch.index) == (kept["second"], 2)
            assert names(await sampler.next_batch(3)) == kept["third"]

    simulate(before)
    simulate(after)
    simulate(elsewhere)  # without the run's files
    everything = kept["first"] + kept["second"] + kept["third"]
    order = [str(row["id"]) for row in RowFile(input_file, shuffle_seed=7)]
    assert everything == order[:9]


def test_rollouts_that_were_dropped_before_a_crash_are_cancelled_after_it(tmp_path: Path) -> None:
    rows = [task("slow", seconds=(10, 5000)), task("fast"), *(task(f"t{number}") for number in range(4))]

    async def before(directory: Path) -> None:
        async with simulated_sampler(tmp_path, rows, SimulatedStages.of(4), samples_per_group=2) as sampler:
            assert names(await sampler.next_batch(1)) == ["fast"]

    async def after(directory: Path) -> None:
        async with simulated_sampler(tmp_path, rows, SimulatedStages.of(4), samples_per_group=2, epochs=1) as sampler:
            batch = await sampler.next_batch(4)
            assert names(batch) == [f"t{number}" for number in range(4)]
            left_out = sampler._store.iterate(JobSelector(group_id="run.0"))
            assert [record.state for record in [each async for each in left_out]][1] is JobState.CANCELLED

    simulate(before)
    with sqlite3.connect(tmp_path / "sampler.sqlite") as ledger:  # as a crash between the two writes leaves it
        ledger.execute("UPDATE groups SET state = 'left_out' WHERE serial = 0")
    ledger.close()
    simulate(after)


def test_nothing_runs_before_a_sampler_opened_again_knows_the_weights(tmp_path: Path) -> None:
    rows = [task(f"t{number}", seconds=(50, 50)) for number in range(4)]

    async def before(directory: Path) -> None:
        async with simulated_sampler(tmp_path, rows, SimulatedStages.of(4), samples_per_group=2, epochs=1) as sampler:
            await sampler.next_batch(1, weights_version=4)

    async def after(directory: Path) -> None:
        stages = SimulatedStages.of(4)
        async with simulated_sampler(tmp_path, rows, stages, samples_per_group=2, epochs=1) as sampler:
            await asyncio.sleep(1000)
            assert stages.run.busy_s == 0
            batch = await sampler.next_batch(3, weights_version=5)
            assert names(batch) == ["t1", "t2", "t3"]
            assert {sample.weights.first for sample in batch.samples} <= {4, 5}

    simulate(before)
    simulate(after)


def test_group_whose_jobs_were_not_submitted_before_a_crash_is_sampled_after_it() -> None:
    async def work(directory: Path) -> None:
        ledger = Timeless(SamplerLedger(directory / "sampler.sqlite"))
        await ledger.recall("run", 0)
        await ledger.keep(GroupRecord(0, orjson.dumps(task("kept")), "simulated", [0, 1], 2, 0, 0, 0, taken=1))
        await ledger.aclose()
        rows = [task("kept"), task("next")]
        async with simulated_sampler(directory, rows, SimulatedStages.of(4), samples_per_group=2, epochs=1) as sampler:
            assert names(await sampler.next_batch(2)) == ["kept", "next"]

    simulate(work)


def test_state_of_another_kind_is_refused() -> None:
    async def work(directory: Path) -> None:
        async with simulated_sampler(directory, [task("a")], SimulatedStages.of(4), samples_per_group=2) as sampler:
            with pytest.raises(ConfigError, match="not a sampler state of this release"):
                sampler.load_state_dict({"epoch": 3})
            await sampler.next_batch(1)
            with pytest.raises(ConfigError, match="before the first batch"):
                sampler.load_state_dict(sampler.state_dict())

    simulate(work)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("requested", [0, -1, True, 1.5, "8"])
def test_batch_size_that_is_none_is_refused(requested: Any) -> None:
    async def work(directory: Path) -> None:
        async with simulated_sampler(directory, [task("a")], SimulatedStages.of(4), samples_per_group=2) as sampler:
            with pytest.raises(ConfigError, match="requested_batch_size must be a whole number from 1"):
                await sampler.next_batch(requested)

    simulate(work)


def test_weights_versions_only_grow_and_calls_do_not_overlap() -> None:
    async def work(directory: Path) -> None:
        async with simulated_sampler(directory, [task("a")], SimulatedStages.of(4), samples_per_group=2) as sampler:
            await sampler.next_batch(1, weights_version=4)
            with pytest.raises(ConfigError, match="weights_version=3 is older than 4"):
                await sampler.set_weights_version(3)
            waiting = asyncio.create_task(sampler.next_batch(5))
            await asyncio.sleep(1)
            with pytest.raises(ConfigError, match="one batch is asked for at a time"):
                await sampler.next_batch(1)
            assert len((await waiting).groups) == 5

    simulate(work)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_weight_lag": 1}, "did you mean 'max_weights_lag'"),
        ({"samples_per_group": 1}, "samples_per_group"),
        ({"batches_ahead": 2, "max_weights_lag": 1}, "batches_ahead=2 prepares samples that max_weights_lag=1"),
    ],
)
def test_sampling_keys_that_make_no_sense_are_named(given: dict[str, Any], said: str) -> None:
    from nemo_gym.sampling import SamplingConfig

    with pytest.raises(ConfigError, match=said):
        SamplingConfig.parse(given)
