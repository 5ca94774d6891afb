"""Job stores: durable, fenced, exactly once. What the protocol promises is tested on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.rollouts.interfaces import JobSelector, JobSpec, JobState, Room, StoreError
from nemo_gym.rollouts.result_rows import failure_row
from nemo_gym.rollouts.store import SqliteJobStore, SqlJobStore
from nemo_gym.rollouts.store.postgres import PostgresJobStore
from nemo_gym.rollouts.store.schema import NEW_COLUMNS
from resources_servers.sandbox.tests.postgres import PostgresServer, running_postgres

LOST = StageFailure(StageName.RUN, FailureKind.AGENT_LOST, "gone")
NOT_NEEDED = StageFailure(StageName.INIT, FailureKind.CANCELLED, "not needed", retryable=False)


def spec(number: int, *, row: bytes = b'{"a":1}', priority: int = 0) -> JobSpec:
    return JobSpec(f"run.{number}-0", "run", f"t{number}", f"run.{number}", 0, number, "agent", row, priority)


OpenStore = Callable[..., SqlJobStore]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Opens the test's one database, as often as asked."""
    url = request.getfixturevalue("postgres").new_database() if request.param == "postgresql" else ""
    opened: list[SqlJobStore] = []

    def make(**options: Any) -> SqlJobStore:
        path = tmp_path / "store.sqlite"
        opened.append(PostgresJobStore(url, **options) if url else SqliteJobStore(path, **options))
        return opened[-1]

    yield make
    for store in opened:
        await store.aclose()


@pytest.fixture
async def store(open_store: OpenStore) -> SqlJobStore:
    return open_store()


async def test_submit_again_is_the_same_job(store: SqlJobStore) -> None:
    assert await store.submit([spec(0), spec(1)]) == 2
    assert await store.submit([spec(1), spec(2), spec(2)]) == 1
    assert (await store.counts())[JobState.QUEUED] == 3


async def test_submit_is_refused_when_a_known_id_has_another_content(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    with pytest.raises(ContractError, match=r"run\.0-0"):
        await store.submit([spec(1), spec(0, row=b'{"a":2}')])
    assert (await store.counts())[JobState.QUEUED] == 1  # nothing of the refused call


async def test_claims_never_overlap_and_follow_priority(store: SqlJobStore) -> None:
    await store.submit([spec(number, priority=int(number == 7)) for number in range(40)])
    first = await store.claim("w", 1, 60)
    assert first[0].spec.task_index == 7
    claims = await asyncio.gather(*(store.claim(f"w{worker}", 3, 60) for worker in range(16)))
    ids = [job.job_id for jobs in claims for job in jobs]
    assert len(ids) == len(set(ids)) == 39
    assert {job.attempt for jobs in claims for job in jobs} == {1}


async def test_late_result_is_fenced_when_the_lease_ran_out(store: SqlJobStore) -> None:
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


async def test_renewed_lease_keeps_the_job(store: SqlJobStore) -> None:
    await store.submit([spec(0), spec(1)])
    jobs = await store.claim("w", 2, 0.0)
    ids = [job.job_id for job in jobs]
    assert await store.renew("w", 60, ids) == set(ids)
    assert await store.claim("other", 2, 60) == []
    assert await store.renew("other", 60, ids) == frozenset()


async def test_lease_that_is_not_renewed_gives_its_job_to_others(store: SqlJobStore) -> None:
    await store.submit([spec(0), spec(1)])
    first, second = await store.claim("w", 2, 0.0)
    assert await store.renew("w", 60, [second.job_id]) == {second.job_id}
    assert [job.job_id for job in await store.claim("other", 2, 60)] == [first.job_id]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_step_of_the_systems_clock_ends_no_lease_and_holds_up_no_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    real, stepped_s = time.time, [0.0]
    monkeypatch.setattr("nemo_gym.rollouts.store.sql.time.time", lambda: real() + stepped_s[0])
    store = SqliteJobStore(tmp_path / "store.sqlite")
    await store.submit([replace(spec(0), deadline_s=600.0), spec(1)])
    (held,) = await store.claim("w", 1, 60)
    (lost,) = await store.claim("w", 1, 60)
    await store.requeue(lost, LOST, delay_s=0.01)
    stepped_s[0] = step_s
    await asyncio.sleep(0.01)
    assert [job.job_id for job in await store.claim("w", 2, 60)] == [lost.job_id]
    await store.requeue(held)
    assert await store.claim_overdue("w", 2, 60) == []
    await store.aclose()


async def test_requeue_keeps_attempt_and_artifact_when_only_eval_failed(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.record_run(job, b'{"patch":1}')
    grader = StageFailure(StageName.EVAL, FailureKind.VERIFIER_FAILED, "broke", new_attempt=False)
    await store.requeue(job, grader)
    (again,) = await store.claim("w", 1, 60)
    assert (again.stage, again.attempt, again.run_result, again.eval_tries) == (StageName.EVAL, 1, b'{"patch":1}', 1)
    assert again.failures == (grader,)
    await store.requeue(again, LOST)
    (anew,) = await store.claim("w", 1, 60)
    assert (anew.stage, anew.attempt, anew.run_result) == (StageName.INIT, 2, None)


async def test_details_of_a_failure_are_kept_whatever_mapping_they_are(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    details = MappingProxyType({"engine": MappingProxyType({"status": 503}), "path": Path("/srv")})
    await store.requeue(job, replace(LOST, details=details))
    (again,) = await store.claim("w", 1, 60)
    assert again.failures[0].details == {"engine": {"status": 503}, "path": "/srv"}


async def test_delayed_job_is_not_claimed_before_its_time(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.requeue(job, LOST, delay_s=1000)
    assert await store.claim("w", 1, 60) == []
    due_s = await store.next_due_s()
    assert due_s is not None
    assert 900 < due_s <= 1000


async def test_jobs_and_results_are_there_after_a_new_start(open_store: OpenStore) -> None:
    store = open_store()
    await store.open_run({"run_id": "first"})
    await store.submit([spec(0), spec(1)])
    first, second = await store.claim("w", 2, 60)
    await store.complete(first, b"{}")
    await store.record_run(second, b"{}")
    await store.aclose()
    again = open_store()
    assert (await again.open_run({"run_id": "second"}))["run_id"] == "first"
    assert await again.release() == 1
    (job,) = await again.claim("w", 5, 60)
    assert (job.job_id, job.stage, job.attempt) == (second.job_id, StageName.EVAL, 1)
    await again.aclose()


async def test_cancel_records_queued_jobs_of_the_selection_only(store: SqlJobStore) -> None:
    await store.submit([spec(number) for number in range(4)])
    cancelled = await store.cancel(JobSelector(job_ids=frozenset({"run.1-0", "run.2-0"})), NOT_NEEDED, failure_row)
    assert [job.job_id for job in cancelled] == ["run.1-0", "run.2-0"]
    counts = await store.counts()
    assert (counts[JobState.CANCELLED], counts[JobState.QUEUED]) == (2, 2)


async def test_reset_queues_terminal_jobs_and_goes_on_counting_attempts(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    (job,) = await store.claim("w", 1, 60)
    await store.fail(job, LOST, b'{"reward":null}')
    assert await store.reset(JobSelector(states=frozenset({JobState.FAILED}))) == 1
    (again,) = await store.claim("w", 1, 60)
    assert (again.attempt, again.failures) == (2, ())


async def test_jobs_end_by_what_stands_in_the_result_files_and_keep_the_verdict_they_have(store: SqlJobStore) -> None:
    await store.submit([spec(number) for number in range(4)])
    (done, failed) = await store.claim("w", 2, 60)
    await store.complete(done, b'{"reward":1}')
    await store.fail(failed, LOST, b'{"reward":null}')
    found = b'{"reward":0.5}'
    await store.record_ended([(f"run.{number}-0", JobState.DONE, found) for number in (0, 1, 2)])
    await store.record_ended([(f"run.{number}-0", JobState.FAILED, b"{}") for number in (1, 3, 9)])
    await store.record_ended([])
    records = await store.results(JobSelector(), 0, 10)
    assert [(record.job_id, record.state, record.result) for record in records] == [
        ("run.0-0", JobState.DONE, b'{"reward":1}'),
        ("run.1-0", JobState.DONE, found),
        ("run.2-0", JobState.DONE, found),
        ("run.3-0", JobState.FAILED, b"{}"),
    ]
    assert await store.claim("w", 1, 60) == []


async def test_waiters_share_one_commit(open_store: OpenStore) -> None:
    batches: list[int] = []
    store = open_store(sink=lambda rows: batches.append(len(rows)))
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


async def test_store_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = SqliteJobStore(tmp_path / "store.sqlite")
    await store.submit([spec(0)])
    assert [path.stat().st_mode & 0o077 for path in store.path.parent.glob("store.sqlite*")] == [0, 0, 0]


async def test_store_names_the_fix_when_the_file_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"something else entirely, long enough to be read as a header" * 10)
    store = SqliteJobStore(path)
    with pytest.raises(StoreError, match="not a run database"):
        await store.counts()
    await store.aclose()


async def test_offers_are_taken_one_by_one_and_name_both_digests(store: SqlJobStore) -> None:
    (first,) = await store.offer([spec(0)])
    assert (first.is_new, first.is_refused, first.digest) == (True, False, spec(0).digest)
    again, changed, fresh = await store.offer([spec(0), spec(0, priority=5), spec(1)])
    assert (again.is_new, again.is_refused, again.state) == (False, False, JobState.QUEUED)
    assert (changed.is_refused, changed.digest, changed.known_digest) == (
        True,
        spec(0, priority=5).digest,
        first.digest,
    )
    assert fresh.is_new
    assert (await store.counts())[JobState.QUEUED] == 2


async def test_claim_fills_the_room_that_there_is_and_no_more(store: SqlJobStore) -> None:
    def of(agent: str, number: int, priority: int = 0) -> JobSpec:
        return replace(spec(number, priority=priority), agent=agent)

    await store.submit([of("a", n) for n in range(5)])
    await store.submit([of("b", n) for n in range(5, 10)])
    await store.submit([of("c", 10, 9), of("a", 11, 3)])
    shared = {"a": "env", "b": "env"}
    jobs = await store.claim("w", 10, 60, Room({"a": 2, "b": 5}, shared, {"env": 4}))
    assert [job.spec.agent for job in jobs] == ["a", "a", "b", "b"]
    assert [job.spec.task_index for job in jobs] == [11, 0, 5, 6]
    assert await store.claim("w", 10, 60, Room({"a": 0}, shared, {})) == []
    assert [job.spec.agent for job in await store.claim("w", 10, 60, Room({"c": 1}, {}, {}))] == ["c"]


async def test_jobs_past_their_deadline_are_claimed_to_be_ended(store: SqlJobStore) -> None:
    await store.submit([replace(spec(0), deadline_s=0.0), replace(spec(1), deadline_s=1000.0), spec(2)])
    (overdue,) = await store.claim_overdue("w", 10, 60)
    assert overdue.job_id == "run.0-0"
    assert overdue.left_s is not None and overdue.left_s <= 0
    later, endless = await store.claim("w", 10, 60)
    assert later.left_s is not None and 900 < later.left_s <= 1000
    assert endless.left_s is None


async def test_jobs_to_end_are_claimed_from_a_claimer_that_is_gone(store: SqlJobStore) -> None:
    await store.submit([replace(spec(3), deadline_s=0.0)])
    await store.claim("works", 1, 60)
    await store.submit([spec(0), replace(spec(1), deadline_s=0.0), spec(2)])
    await store.claim("gone", 3, 0.0)
    await store.cancel(JobSelector(job_ids=frozenset({"run.0-0"})), NOT_NEEDED, failure_row)
    to_end = await store.claim_overdue("w", 10, 60)
    assert sorted((job.job_id, job.cancel_reason) for job in to_end) == [("run.0-0", "not needed"), ("run.1-0", None)]
    assert await store.claim_overdue("w", 10, 60) == []


async def test_overdue_job_with_a_stored_result_is_claimed_to_be_ended_when_its_pause_is_over(
    store: SqlJobStore,
) -> None:
    await store.submit([replace(spec(0), deadline_s=0.0)])
    (job,) = await store.claim_overdue("w", 10, 60)
    await store.record_run(job, b"{}")
    await store.requeue(job, delay_s=60, new_attempt=False)
    assert await store.claim_overdue("w", 10, 60) == []


async def test_cancelled_jobs_that_others_hold_are_marked_and_not_run_again(store: SqlJobStore) -> None:
    await store.submit([spec(number) for number in range(3)])
    held, other = await store.claim("w", 2, 60)
    cancelled = await store.cancel(JobSelector(job_ids=frozenset({held.job_id, "run.2-0"})), NOT_NEEDED, failure_row)
    assert [job.job_id for job in cancelled] == ["run.2-0"]
    assert await store.asked_to_end("w") == {held.job_id: "not needed"}
    await store.requeue(held)
    await store.requeue(other)
    (to_end,) = await store.claim_overdue("w", 10, 60)
    assert (to_end.job_id, to_end.cancel_reason) == (held.job_id, "not needed")


class HeldRoom(Room):
    """A room whose claim waits, in its open transaction, until it is `let`."""

    reached, let = threading.Event(), threading.Event()

    def pick(self, candidates: Sequence[tuple[int, int, str]], limit: int) -> list[int]:
        self.reached.set()
        assert self.let.wait(60)
        return super().pick(candidates, limit)


async def test_job_that_another_process_claims_while_it_is_cancelled_is_asked_to_end(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    here, there = PostgresJobStore(url), PostgresJobStore(url)
    await here.submit([spec(0)])
    room = HeldRoom(agents={"agent": 1}, environment_of={}, environments={})
    claiming = asyncio.ensure_future(there.claim("w", 1, 60, room))
    await asyncio.to_thread(room.reached.wait, 60)
    cancelling = asyncio.ensure_future(here.cancel(JobSelector(), NOT_NEEDED, failure_row))
    await asyncio.wait({cancelling}, timeout=0.5)  # it may wait for the claim
    room.let.set()
    (claimed,) = await claiming
    assert await cancelling == []
    assert await there.asked_to_end("w") == {claimed.job_id: "not needed"}
    await here.aclose()
    await there.aclose()


async def test_job_that_is_queued_again_while_it_is_cancelled_is_recorded(store: SqlJobStore) -> None:
    await store.submit([spec(0)])
    (held,) = await store.claim("w", 1, 60)
    cancelling = asyncio.ensure_future(store.cancel(JobSelector(), NOT_NEEDED, failure_row))
    await asyncio.sleep(0)  # it has looked for queued jobs before, and looks for claimed ones after
    await store.requeue(held)
    assert [job.job_id for job in await cancelling] == [held.job_id]
    assert (await store.counts())[JobState.CANCELLED] == 1


async def test_results_are_read_on_behind_any_of_them(open_store: OpenStore) -> None:
    store = open_store()
    await store.submit([spec(number) for number in range(6)])
    jobs = await store.claim("w", 6, 60)
    for job in reversed(jobs):
        await store.complete(job, job.job_id.encode())
    first = await store.results(JobSelector(), 0, 2)
    assert [record.job_id for record in first] == ["run.5-0", "run.4-0"]
    assert first[-1].result_place is not None
    rest = await open_store().results(JobSelector(), first[-1].result_place, 100)
    assert [record.result for record in rest] == [b"run.3-0", b"run.2-0", b"run.1-0", b"run.0-0"]
    (one,) = await store.results(JobSelector(group_id="run.2"), 0, 10)
    assert one.job_id == "run.2-0"


async def test_listing_goes_on_behind_its_last_job(store: SqlJobStore) -> None:
    await store.submit([spec(number) for number in range(5)])
    first = await store.page(JobSelector(run_id="run"), 0, 3)
    rest = await store.page(JobSelector(run_id="run"), first[-1].place, 3, results=False)
    assert [record.spec.task_index for record in (*first, *rest)] == [0, 1, 2, 3, 4]


async def test_runs_are_counted_with_their_rate_and_retries(store: SqlJobStore) -> None:
    await store.submit([spec(number) for number in range(5)])
    await store.submit([replace(spec(0), job_id="other.0-0", run_id="other")])
    first, second, third, *_ = await store.claim("w", 6, 60)
    await store.complete(first, b"{}")
    failure = StageFailure(StageName.RUN, FailureKind.AGENT_CRASHED, "it fell")
    await store.fail(second, failure, b"{}")
    await store.requeue(third, failure, delay_s=60)
    other, one = await store.runs(300)
    assert [(each.run_id, each.jobs[JobState.CLAIMED]) for each in (other, one)] == [("other", 1), ("run", 2)]
    assert (one.jobs[JobState.DONE], one.jobs[JobState.FAILED], one.jobs[JobState.QUEUED]) == (1, 1, 1)
    assert (one.retried, one.waiting_for_retry, one.recent) == (1, 1, 2)
    assert one.finished_at is not None and 0 <= one.recent_s < 60
    assert (other.finished_at, other.recent) == (None, 0)
    assert [each.recent for each in await store.runs(-3600)] == [0, 0]


async def test_processes_that_share_postgresql_run_each_job_once(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    stores = [PostgresJobStore(url, pipeline=f"p{number}") for number in range(3)]
    await asyncio.gather(*(store.submit([spec(number) for number in range(300)]) for store in stores))
    ran: list[str] = []

    async def work(store: SqlJobStore, owner: str) -> None:
        while jobs := await store.claim(owner, 7, 60):
            ran.extend(job.job_id for job in jobs)
            await asyncio.gather(*(store.complete(job, b"{}") for job in jobs))

    await asyncio.gather(*(work(store, f"w{n}") for n, store in enumerate(stores)))
    assert len(ran) == len(set(ran)) == 300
    places = [record.result_place for record in await stores[0].results(JobSelector(), 0, 1000)]
    assert places == sorted(places) and len(places) == 300
    for store in stores:
        await store.aclose()


async def test_a_reader_of_results_misses_none_while_several_write(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    stores = [PostgresJobStore(url) for _ in range(3)]
    await stores[0].submit([spec(number) for number in range(200)])
    read: list[str] = []

    async def follow() -> None:
        last = 0
        while len(read) < 200:
            for record in await stores[2].results(JobSelector(), last, 5):
                read.append(record.job_id)
                last = record.result_place or 0

    async def work(store: SqlJobStore, owner: str) -> None:
        while jobs := await store.claim(owner, 3, 60):
            await asyncio.gather(*(store.complete(job, b"{}") for job in jobs))

    async with asyncio.timeout(60):
        await asyncio.gather(follow(), work(stores[0], "a"), work(stores[1], "b"))
    assert len(read) == len(set(read)) == 200
    for store in stores:
        await store.aclose()


async def test_two_pipelines_of_one_name_do_not_share_a_store(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    first = PostgresJobStore(url, pipeline="one")
    await first.submit([spec(0)])
    second = PostgresJobStore(url, pipeline="one", patience_s=0)
    with pytest.raises(StoreError, match="pipeline="):
        await second.counts()
    await first.aclose()
    third = PostgresJobStore(url, pipeline="one")
    assert (await third.counts())[JobState.QUEUED] == 1
    await second.aclose()
    await third.aclose()


async def test_store_goes_on_when_postgresql_is_back() -> None:
    with running_postgres() as server:
        store = PostgresJobStore(server.url("postgres"))
        await store.submit([spec(0)])
        server.stop()
        counting = asyncio.ensure_future(store.counts())
        await asyncio.sleep(0.2)
        server.start()
        assert (await counting)[JobState.QUEUED] == 1
        await store.aclose()


class LosesAnswers:
    """Between a store and its database: it lets so many commits through and breaks the connection before the store
    hears of them."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.commits = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        database_reader, database_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        told = asyncio.create_task(self._tell(database_reader, writer))
        self._tasks.add(told)
        try:
            while data := await reader.read(1 << 16):
                is_last = b"COMMIT" in data and self.commits > 0
                if is_last:
                    self.commits -= 1
                    told.cancel()
                    await asyncio.wait({told})
                database_writer.write(data)
                if is_last:
                    assert b"COMMIT" in await database_reader.read(1 << 16)
                    return
        finally:
            told.cancel()
            for each in (writer, database_writer):
                each.close()

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def stop(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


@pytest.fixture
async def answers(postgres: PostgresServer) -> AsyncIterator[LosesAnswers]:
    between = LosesAnswers(postgres)
    yield between
    await between.stop()


async def test_claim_whose_commit_was_not_answered_claims_the_same_jobs(
    postgres: PostgresServer, answers: LosesAnswers
) -> None:
    url = postgres.new_database()
    store = PostgresJobStore(url.replace(f"127.0.0.1:{postgres.port}", await answers.start()))
    await store.submit([spec(number) for number in range(6)])
    answers.commits = 2
    jobs = await store.claim("w", 2, 60)
    assert answers.commits == 0
    assert [(job.job_id, job.attempt) for job in jobs] == [("run.0-0", 1), ("run.1-0", 1)]
    counts = await store.counts()
    assert (counts[JobState.CLAIMED], counts[JobState.QUEUED]) == (2, 4)
    answers.commits = 1
    await store.complete(jobs[0], b'{"kept":1}')
    (record,) = await store.results(JobSelector(), 0, 9)
    assert (record.job_id, record.result) == ("run.0-0", b'{"kept":1}')
    with pytest.raises(FencedError):
        await store.complete(jobs[0], b'{"kept":2}')
    await store.aclose()


async def test_overdue_jobs_are_claimed_once_when_a_commit_was_not_answered(
    postgres: PostgresServer, answers: LosesAnswers
) -> None:
    url = postgres.new_database()
    store = PostgresJobStore(url.replace(f"127.0.0.1:{postgres.port}", await answers.start()))
    await store.submit([replace(spec(number), deadline_s=0.0) for number in range(3)])
    answers.commits = 1
    jobs = await store.claim_overdue("w", 2, 60)
    assert [(job.job_id, job.attempt) for job in jobs] == [("run.0-0", 1), ("run.1-0", 1)]
    assert (await store.counts())[JobState.CLAIMED] == 2
    await store.aclose()


async def test_a_store_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    made = SqliteJobStore(path)
    await made.submit([spec(0), spec(1)])
    (job,) = await made.claim("w", 1, 60)
    await made.complete(job, b"{}")
    await made.aclose()
    with contextlib.closing(sqlite3.connect(path)) as database:  # what that release made
        for index in ("jobs_due", "jobs_to_end", "jobs_results", "jobs_of_group", "jobs_queued_of_agent"):
            database.execute(f"DROP INDEX {index}")
        for column in NEW_COLUMNS:
            database.execute(f"ALTER TABLE jobs DROP COLUMN {column.split()[0]}")
        database.execute("DROP TABLE counters")
        database.execute("PRAGMA user_version=1")
        database.commit()
    store = SqliteJobStore(path)
    (done,) = await store.results(JobSelector(), 0, 10)
    (other,) = await store.claim("w", 5, 60)
    await store.complete(other, b"{}")
    assert [record.job_id for record in await store.results(JobSelector(), done.result_place or 0, 9)] == ["run.1-0"]
    await store.aclose()
