"""The SQLite job store: durable, fenced, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.rollouts.interfaces import JobSelector, JobSpec, JobState, JobStore, StageResult, StoreError
from nemo_gym.rollouts.result_rows import failure_row
from nemo_gym.rollouts.store import SqliteJobStore

LOST = StageFailure(StageName.RUN, FailureKind.AGENT_LOST, "gone")


def spec(number: int, *, row: bytes = b'{"a":1}', priority: int = 0) -> JobSpec:
    return JobSpec(f"run.{number}-0", "run", f"t{number}", f"run.{number}", 0, number, "agent", row, priority)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteJobStore]:
    made = SqliteJobStore(tmp_path / "store.sqlite")
    yield made
    await made.aclose()


def test_store_keeps_its_protocol() -> None:
    assert issubclass(SqliteJobStore, JobStore)


async def test_submit_again_is_the_same_job(store: SqliteJobStore) -> None:
    assert await store.submit([spec(0), spec(1)]) == 2
    assert await store.submit([spec(1), spec(2), spec(2)]) == 1
    assert (await store.counts())[JobState.QUEUED] == 3


async def test_submit_is_refused_when_a_known_id_has_another_content(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    with pytest.raises(ContractError, match=r"run\.0-0"):
        await store.submit([spec(1), spec(0, row=b'{"a":2}')])
    assert (await store.counts())[JobState.QUEUED] == 1  # nothing of the refused call


async def test_claims_never_overlap_and_follow_priority(store: SqliteJobStore) -> None:
    await store.submit([spec(number, priority=int(number == 7)) for number in range(40)])
    first = await store.claim("w", 1, 60)
    assert first[0].spec.task_index == 7
    claims = await asyncio.gather(*(store.claim(f"w{worker}", 3, 60) for worker in range(16)))
    ids = [job.job_id for jobs in claims for job in jobs]
    assert len(ids) == len(set(ids)) == 39
    assert {job.attempt for jobs in claims for job in jobs} == {1}


async def test_late_result_is_fenced_when_the_lease_ran_out(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    (old,) = await store.claim("slow", 1, 0.0)
    (new,) = await store.claim("fast", 1, 60)
    assert (old.attempt, new.attempt) == (1, 2)
    with pytest.raises(FencedError):
        await store.complete(old, b'{"from":"slow"}')
    await store.complete(new, b'{"from":"fast"}')
    with pytest.raises(FencedError):
        await store.complete(new, b'{"from":"fast again"}')
    records = [record async for record in store.iterate(JobSelector())]
    assert [(record.state, record.result) for record in records] == [(JobState.DONE, b'{"from":"fast"}')]


async def test_renewed_lease_keeps_the_job(store: SqliteJobStore) -> None:
    await store.submit([spec(0), spec(1)])
    jobs = await store.claim("w", 2, 0.0)
    assert await store.renew("w", 60) == {job.job_id for job in jobs}
    assert await store.claim("other", 2, 60) == []
    assert await store.renew("other", 60) == frozenset()


async def test_requeue_keeps_attempt_and_artifact_when_only_eval_failed(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.record_stage(job, StageResult(StageName.RUN, b'{"patch":1}', 1.0))
    grader = StageFailure(StageName.EVAL, FailureKind.VERIFIER_FAILED, "broke", new_attempt=False)
    await store.requeue(job, grader)
    (again,) = await store.claim("w", 1, 60)
    assert (again.stage, again.attempt, again.run_result, again.eval_tries) == (StageName.EVAL, 1, b'{"patch":1}', 1)
    assert again.failures == (grader,)
    await store.requeue(again, LOST)
    (anew,) = await store.claim("w", 1, 60)
    assert (anew.stage, anew.attempt, anew.run_result) == (StageName.INIT, 2, None)


async def test_delayed_job_is_not_claimed_before_its_time(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.requeue(job, LOST, delay_s=1000)
    assert await store.claim("w", 1, 60) == []
    due_s = await store.next_due_s()
    assert due_s is not None
    assert 900 < due_s <= 1000


async def test_jobs_and_results_are_there_after_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = SqliteJobStore(path)
    await store.open_run({"run_id": "first"})
    await store.submit([spec(0), spec(1)])
    first, second = await store.claim("w", 2, 60)
    await store.complete(first, b"{}")
    await store.record_stage(second, StageResult(StageName.RUN, b"{}", 0.1))
    await store.aclose()
    again = SqliteJobStore(path)
    assert (await again.open_run({"run_id": "second"}))["run_id"] == "first"
    assert await again.release() == 1
    (job,) = await again.claim("w", 5, 60)
    assert (job.job_id, job.stage, job.attempt) == (second.job_id, StageName.EVAL, 1)
    await again.aclose()


async def test_cancel_records_queued_jobs_of_the_selection_only(store: SqliteJobStore) -> None:
    await store.submit([spec(number) for number in range(4)])
    reason = StageFailure(StageName.INIT, FailureKind.CANCELLED, "not needed", retryable=False)
    cancelled = await store.cancel(JobSelector(job_ids=frozenset({"run.1-0", "run.2-0"})), reason, failure_row)
    assert [job.job_id for job in cancelled] == ["run.1-0", "run.2-0"]
    counts = await store.counts()
    assert (counts[JobState.CANCELLED], counts[JobState.QUEUED]) == (2, 2)


async def test_reset_queues_terminal_jobs_and_goes_on_counting_attempts(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.fail(job, LOST, b'{"reward":null}')
    assert await store.reset(JobSelector(states=frozenset({JobState.FAILED}))) == 1
    (again,) = await store.claim("w", 1, 60)
    assert (again.attempt, again.failures) == (2, ())


async def test_waiters_share_one_commit(tmp_path: Path) -> None:
    batches: list[int] = []
    store = SqliteJobStore(tmp_path / "store.sqlite", sink=lambda rows: batches.append(len(rows)))
    await store.submit([spec(number) for number in range(200)])
    jobs = await store.claim("w", 200, 60)
    await asyncio.gather(*(store.complete(job, b"{}") for job in jobs))
    await store.aclose()
    assert sum(batches) == 200
    assert len(batches) < 50


async def test_store_stops_for_good_when_its_sink_cannot_write(tmp_path: Path) -> None:
    def sink(rows: list[tuple[str, bytes]]) -> None:
        raise OSError(28, "No space left on device")

    store = SqliteJobStore(tmp_path / "store.sqlite", sink=sink)
    await store.submit([spec(0), spec(1)])
    first, second = await store.claim("w", 2, 60)
    with pytest.raises(StoreError, match="no space left"):
        await store.complete(first, b"{}")
    with pytest.raises(StoreError, match="no space left"):
        await store.complete(second, b"{}")
    await store.aclose()


async def test_store_is_readable_by_its_owner_only(store: SqliteJobStore) -> None:
    await store.submit([spec(0)])
    assert [path.stat().st_mode & 0o077 for path in store.path.parent.glob("store.sqlite*")] == [0, 0, 0]


async def test_store_names_the_fix_when_the_file_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"something else entirely, long enough to be read as a header" * 10)
    store = SqliteJobStore(path)
    with pytest.raises(StoreError, match="not a run database"):
        await store.counts()
    await store.aclose()
