"""The in-process dispatcher: bounded hand-over, cancelling, lost leases."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import orjson
import pytest
import structlog

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import FailureKind, StageName
from nemo_gym.http.peers import PeerError
from nemo_gym.rollout import Attempt, RolloutSteps, Servers
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import Job, JobAttempt, JobEvent, JobSelector, JobSpec, JobState, Stop
from nemo_gym.rollouts.pipeline import StagePool
from nemo_gym.rollouts.rows import job_specs, materialize
from nemo_gym.rollouts.store import SqliteJobStore
from tests.rollouts.chain_process import ChainServer
from tests.rollouts.conftest import Chain, wait_until

MakeChain = Callable[..., Chain]


class Running:
    """A dispatcher over a store with one job per row."""

    def __init__(
        self, chain: Chain, rows: int, *, lines: list[str] | None = None, sweeps: bool = False, **keys: object
    ) -> None:
        source = chain.write_rows(rows)
        if lines is not None:
            source.write_text("".join(f"{line}\n" for line in lines))
        self.sweeps = sweeps
        self.chain = chain
        self.config = RolloutRunConfig.parse(chain.run_keys(run_id="r", **keys))
        self.events: list[JobEvent] = []

    async def __aenter__(self) -> Running:
        core = RolloutCore(self.chain.client(), self.config)
        rows = Path(self.chain.directory, "materialized.jsonl")
        inputs = materialize(self.config, ["trivial"])
        inputs.write(rows)
        inputs.close()
        self.store = SqliteJobStore(Path(self.chain.directory, "store.sqlite"))
        await self.store.submit([*job_specs(rows, "r")])
        await core.add_route("trivial")
        self.dispatcher = core.dispatcher(self.store, listener=self.events.append, sweeps=self.sweeps)
        self.core = core
        await self.dispatcher.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.dispatcher.stop()
        await self.store.aclose()

    async def wait(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_until, condition, what)


async def test_cancel_stops_active_and_queued_jobs_of_the_selection_and_leaves_the_others(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(agent={"hang": ["t0", "t1"]})
    async with Running(chain, 6, concurrency=2) as running:
        await running.wait(lambda: len(chain.notes("act")) == 2, "both workers to hang")
        report = await running.dispatcher.cancel(JobSelector(job_ids=frozenset({"r.0-0", "r.5-0"})), "not needed")
        assert report.queued + report.active == 2
        assert report.seconds < 20
        await running.wait(lambda: ("r.0-0", 1) in chain.notes("cancelled"), "the agent to see it")
        await running.wait(lambda: len(running.events) == 5, "the other jobs to finish")
        report = await running.dispatcher.cancel(JobSelector(group_id="r.1"), "nor this")
        assert (report.queued, report.active) == (0, 1)
        await running.dispatcher.drain()
        counts = await running.store.counts()
        assert (counts[JobState.DONE], counts[JobState.CANCELLED]) == (3, 3)
        records = {
            r.job_id: r async for r in running.store.iterate(JobSelector(states=frozenset({JobState.CANCELLED})))
        }
        assert set(records) == {"r.0-0", "r.1-0", "r.5-0"}
        assert records["r.0-0"].result is not None
        assert b'"failure_reason":"not needed"' in records["r.0-0"].result
    assert set(chain.notes("seed")) == set(chain.notes("close"))


@pytest.mark.parametrize("stopped", [False, True])
async def test_listener_that_fails_stops_the_dispatcher_and_leaves_nothing_open(
    make_chain: MakeChain, stopped: bool
) -> None:
    def broken(_: JobEvent) -> None:
        raise BrokenPipeError("nobody reads this")

    chain = make_chain(agent={"hang": ["t0"]} if stopped else {})
    async with Running(chain, 1) as running, asyncio.timeout(30):
        running.dispatcher._listener = broken
        if stopped:
            await running.wait(lambda: len(chain.notes("act")) == 1, "the worker to hang")
            await running.dispatcher.cancel(JobSelector(), "not needed")
        with pytest.raises(BrokenPipeError):
            await running.dispatcher.drain()
    assert set(chain.notes("seed")) == set(chain.notes("close"))


def on_full_disk() -> TextIO:
    return Path("/dev/full").open("w")


async def test_run_whose_log_cannot_be_written_ends_with_the_error(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 1}})
    before = structlog.get_config()
    full = on_full_disk()
    with pytest.raises(OSError, match="No space left"):
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(full))
        try:
            async with Running(chain, 1) as running, asyncio.timeout(30):
                await running.dispatcher.drain()
        finally:
            structlog.configure(**before)
    with suppress(OSError):
        full.close()
    assert set(chain.notes("seed")) == set(chain.notes("close"))


async def test_no_more_is_prepared_than_can_soon_be_used(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": [f"t{number}" for number in range(20)]})
    async with Running(chain, 20, concurrency=1, init_workers=8, ready_buffer=2) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the worker to hang")
        # One runs, two wait prepared, and each INIT worker holds one that it cannot hand on.
        await running.wait(lambda: len(chain.notes("seed")) == 1 + 2 + 8, "INIT to fill what it may")
        seeded = len(chain.notes("seed"))
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert len(chain.notes("seed")) == seeded


async def test_attempt_is_given_up_when_another_process_has_taken_its_lease(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    async with Running(chain, 1, lease_s=0.6) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the act to start")
        assert await running.store.release() == 1
        (taken,) = await running.store.claim("another process", 1, 60)
        await running.wait(lambda: ("r.0-0", 1) in chain.notes("cancelled"), "the act to be stopped")
        await running.store.complete(taken, b"{}")
        await running.dispatcher.drain()
        assert (await running.store.counts())[JobState.DONE] == 1
        assert running.events == []


async def test_attempt_is_given_up_when_its_own_dispatcher_claims_the_job_again(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    async with Running(chain, 1, agent_caps={"trivial": 2}) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the act to start")
        assert await running.store.release() == 1  # as the claim does after its lease has expired
        await running.wait(lambda: ("r.0-0", 2) in chain.notes("act"), "the job to be claimed again")
        await running.wait(lambda: ("r.0-0", 1) in chain.notes("cancelled"), "the first act to be stopped")
        await running.dispatcher.cancel(JobSelector(), "not needed")
        await running.wait(lambda: sorted(chain.notes("close")) == [("r.0-0", 1), ("r.0-0", 2)], "both to be closed")
        assert running.core.pool is not None
        assert [server.busy for server in running.core.pool.all()] == [0, 0, 0]


async def test_no_lease_is_called_lost_while_a_finished_attempt_is_closed(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"close_s": 1.0})
    with structlog.testing.capture_logs() as logs:
        async with Running(chain, 1, lease_s=0.3) as running:
            await running.dispatcher.drain()
    assert [entry for entry in logs if entry["event"] == "lease lost"] == []


async def test_stop_while_a_recorded_attempt_is_closed_does_not_say_that_something_is_not_recorded(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(environment={"close_s": 1.0})
    with structlog.testing.capture_logs() as logs:
        async with Running(chain, 1) as running:
            await running.wait(lambda: len(running.events) == 1, "the result to be recorded")
            await running.wait(lambda: len(chain.notes("close")) == 1, "the close to begin")
            await running.dispatcher.stop()
            assert (await running.store.counts())[JobState.DONE] == 1
    assert logs == []


async def test_a_stop_closes_all_attempts_at_once(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0", "t1", "t2"]}, environment={"close_s": 0.5})
    async with Running(chain, 3) as running:
        await running.wait(lambda: len(chain.notes("act")) == 3, "all workers to hang")
    closes = [line.split()[0] for line in chain.journal.read_text().splitlines() if line.startswith("close")]
    assert closes == ["close"] * 3 + ["closed"] * 3


@pytest.mark.parametrize("priority_task", [0, 4])
async def test_jobs_run_by_priority(make_chain: MakeChain, priority_task: int) -> None:
    chain = make_chain(agent={"hang": ["t2"]})
    async with Running(chain, 3, concurrency=1, init_workers=1, ready_buffer=1) as running:
        await running.wait(lambda: any(r == "r.2-0" for r, _ in chain.notes("act")), "the worker to hang")
        record, *_ = [r async for r in running.store.iterate(JobSelector())]
        late = [
            replace(
                record.spec, job_id=f"late-{n}", task_index=n, task_id=f"late{n}", priority=int(n == priority_task)
            )
            for n in range(5)
        ]
        await running.store.submit(late)
        running.dispatcher.notify()
        await running.dispatcher.cancel(JobSelector(job_ids=frozenset({"r.2-0"})), "make room")
        await running.dispatcher.drain()
        order = [rollout_id for rollout_id, _ in chain.notes("act") if rollout_id.startswith("late")]
        assert order[0] == f"late-{priority_task}"
        assert len(order) == 5


async def test_cancel_reaches_attempts_that_wait_behind_workers_that_hang(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": [f"t{number}" for number in range(8)]})
    async with Running(chain, 8, concurrency=1, init_workers=3, ready_buffer=2) as running:
        await running.wait(lambda: len(chain.notes("seed")) == 6, "one to hang, two to wait, three to be handed on")
        waiting = frozenset(f"r.{n}-0" for n in range(8)) - {rollout_id for rollout_id, _ in chain.notes("act")}
        report = await running.dispatcher.cancel(JobSelector(job_ids=waiting), "not needed")
        assert report.queued + report.active == 7
        assert report.released >= 10  # a session of the environment and one of the model for each
        assert (await running.store.counts())[JobState.CANCELLED] == 7
        assert (await running.store.counts())[JobState.CLAIMED] == 1


async def test_verifications_that_pause_occupy_no_worker_and_are_bounded_and_can_end(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 6, concurrency=2, eval_workers=1, init_workers=2, retry_delay_s=60) as running:
        await running.wait(lambda: len(chain.notes("verify")) == 2, "each to fail once, though one worker serves both")
        await running.wait(lambda: len(chain.notes("act")) == 4, "the agents' workers to hold one each")
        for _ in range(20):
            await asyncio.sleep(0.02)
            # As many pause as the worker and the queue's one place would hold.
            assert (len(chain.notes("verify")), len(chain.notes("act"))) == (2, 4)
        report = await running.dispatcher.cancel(JobSelector(), "not needed")
        assert report.queued + report.active == 6
        assert report.seconds < 10
        assert (await running.store.counts())[JobState.CANCELLED] == 6
    assert sorted(chain.notes("seed")) == sorted(chain.notes("close"))


async def test_every_verification_that_paused_is_tried_again(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 12, concurrency=2, eval_workers=1, init_workers=2, retry_delay_s=0.2) as running:
        await running.dispatcher.drain()
        assert (await running.store.counts())[JobState.DONE] == 12
    assert len(chain.notes("verify")) == 24


async def test_row_has_the_time_of_run_when_another_dispatcher_verifies(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 1, retry_delay_s=60) as first:
        await first.wait(lambda: len(chain.notes("verify")) == 1, "the first verification to fail")
    async with Running(chain, 1) as second:
        await second.dispatcher.drain()
        (record,) = [record async for record in second.store.iterate(JobSelector())]
    assert record.state is JobState.DONE and record.result is not None
    assert set(orjson.loads(record.result)["timings"]) == {"init_s", "run_s", "eval_s"}
    assert len(chain.notes("act")) == 1


async def test_stop_leaves_an_attempt_that_is_graded_open_and_its_successor_grades_it(make_chain: MakeChain) -> None:
    chain = make_chain(
        environment={"verify_failures": 1, "stateful": True}, model={"trajectories": [{"prompt_ids": [1]}]}
    )
    async with Running(chain, 2, retry_delay_s=60) as first:
        await first.wait(lambda: len(chain.notes("verify")) == 2, "the first verifications to fail")
    assert chain.notes("close") == chain.notes("abort") == []
    async with Running(chain, 2) as second:
        await second.dispatcher.drain()
        rows = [orjson.loads(record.result or b"{}") async for record in second.store.iterate(JobSelector())]
    assert [(row["valid"], row["ng_trajectory"]) for row in rows] == [(True, [{"prompt_ids": [1]}])] * 2
    assert len(chain.notes("act")) == 2
    assert sorted(chain.notes("seed")) == sorted(chain.notes("close")) == sorted(chain.notes("finalize"))


async def test_cancel_reaches_a_claimed_job_that_waits_while_others_of_its_claim_are_ended(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    async with Running(chain, 1, concurrency=16) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the act to start")
        (record,) = [record async for record in running.store.iterate(JobSelector())]
        ended: dict[str, JobState] = {}
        cancels: list[asyncio.Task[Any]] = []

        def on_end(event: JobEvent) -> None:
            ended[event.job.job_id] = event.state
            if not cancels:
                selector = JobSelector(job_ids=frozenset({"last"}))
                cancels.append(asyncio.create_task(running.dispatcher.cancel(selector, "not needed")))

        running.dispatcher._listener = on_end
        overdue = [replace(record.spec, job_id=f"late-{number}", deadline_s=0.0) for number in range(10)]
        await running.store.submit([*overdue, replace(record.spec, job_id="last")])
        running.dispatcher.notify()
        await running.wait(lambda: "last" in ended, "the last to be cancelled")
        assert ended["last"] == JobState.CANCELLED


async def test_cancelled_job_whose_attempt_was_left_open_is_closed(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 1, retry_delay_s=60) as first:
        await first.wait(lambda: len(chain.notes("verify")) == 1, "the first verification to fail")
    async with Running(chain, 1) as second:
        second.dispatcher.pause()
        await second.store.release()
        report = await second.dispatcher.cancel(JobSelector(), "not needed any more")
        assert report.queued + report.active == 1
    assert chain.notes("seed") == chain.notes("close") == chain.notes("abort")


async def test_stored_jobs_of_an_agent_that_is_gone_stop_nothing(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    async with Running(chain, 1, sweeps=True) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the act to start")
        running.dispatcher.pause()
        store = running.store
        (record,) = [record async for record in store.iterate(JobSelector())]
        names = ("ungraded", "graded", "cancelled")
        gone = [replace(record.spec, job_id=name, agent="gone") for name in names]
        overdue = [replace(spec, deadline_s=0.01) for spec in gone[:2]]
        await store.submit([*overdue, gone[2]])
        for job in await store.claim("earlier", 3, 60):
            verdict = {"verified": {"reward": 1.0}} if job.job_id == "graded" else {}
            await store.record_run(job, orjson.dumps({"act": {}, "held": {}, **verdict}))
        await store.release("earlier")
        await running.wait(lambda: len(running.events) == 1, "the deadline to end the one without a verdict")
        assert [(event.job.job_id, event.state) for event in running.events] == [("ungraded", "failed")]
        await asyncio.sleep(1.5)  # another sweep
        await running.dispatcher.cancel(JobSelector(job_ids=frozenset({"r.0-0", "cancelled"})), "not needed")
        states = {record.job_id: record.state async for record in store.iterate(JobSelector())}
        assert states.pop("graded") in (JobState.QUEUED, JobState.CLAIMED)
        assert states == {"r.0-0": JobState.CANCELLED, "cancelled": JobState.CANCELLED, "ungraded": JobState.FAILED}
        assert running.dispatcher.failure is None


async def test_deadline_takes_no_verdict_away_while_the_session_is_finalized(make_chain: MakeChain) -> None:
    chain = make_chain(model={"end_s": 3.0})
    async with Running(chain, 1) as running:
        (record,) = [record async for record in running.store.iterate(JobSelector())]
        await running.dispatcher.drain()
        await running.store.submit([replace(record.spec, job_id="late", deadline_s=2.0)])
        running.dispatcher.notify()
        await running.dispatcher.drain()
        assert [(event.job.job_id, event.state) for event in running.events] == [("r.0-0", "done"), ("late", "done")]


async def test_deadline_takes_no_stored_verdict_away(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"overrides_run": True}, model={"end_s": 3.0})
    async with Running(chain, 1) as first:
        (record,) = [record async for record in first.store.iterate(JobSelector())]
        await first.dispatcher.drain()
        await first.store.submit([replace(record.spec, job_id="late", deadline_s=2.0)])
        first.dispatcher.notify()
        await first.wait(lambda: len(chain.notes("finalize")) == 2, "the finalize after its verdict to begin")
    async with Running(chain, 1, sweeps=True) as second:
        second.dispatcher.pause()
        await asyncio.sleep(2.0)
        second.dispatcher.resume()
        await second.dispatcher.drain()
        assert [(event.job.job_id, event.state) for event in second.events] == [("late", "done")]
    assert len(chain.notes("run")) == 2


async def test_stop_for_good_closes_an_attempt_that_is_graded_too(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 1, retry_delay_s=60) as running:
        await running.wait(lambda: len(chain.notes("verify")) == 1, "the first verification to fail")
        await running.dispatcher.stop(for_good=True)
    assert chain.notes("seed") == chain.notes("close") == chain.notes("abort")


async def test_attempt_whose_lease_is_lost_while_it_is_graded_stays_open_for_its_next_owner(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(environment={"verify_failures": 1})
    async with Running(chain, 1, retry_delay_s=60, lease_s=0.6) as running:
        await running.wait(lambda: len(chain.notes("verify")) == 1, "the first verification to fail")
        assert await running.store.release() == 1
        (taken,) = await running.store.claim("another process", 1, 60)
        await running.wait(lambda: not running.dispatcher.held, "the loss to be noticed")
        assert (taken.attempt, taken.stage) == (1, "eval")
        assert chain.notes("close") == chain.notes("abort") == []


@pytest.mark.parametrize("failures", [0, 9], ids=["verdict", "failure"])
async def test_end_that_comes_after_the_lease_was_lost_closes_nothing(make_chain: MakeChain, failures: int) -> None:
    chain = make_chain(environment={"verify_failures": failures}, model={"end_s": 0.5})
    async with Running(chain, 1, max_attempts=1) as running:
        await running.wait(lambda: len(chain.notes("finalize")) == 1, "the end of the grading")
        assert await running.store.release() == 1
        (taken,) = await running.store.claim("another process", 1, 60)
        await running.wait(lambda: not running.dispatcher.held, "the end not to be recorded")
        assert (taken.attempt, taken.stage) == (1, "eval")
    assert chain.notes("close") == running.events == []


async def test_stop_while_a_failed_attempt_is_closed_records_its_failure(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"fenced": True, "close_s": 0.5})
    async with Running(chain, 1) as first:
        await first.wait(lambda: len(chain.notes("close")) == 1, "the close to begin")
        await first.dispatcher.stop()
        (record,) = [record async for record in first.store.iterate(JobSelector())]
    assert [(failure.kind, failure.details["status"]) for failure in record.failures] == [("verifier_failed", 409)]
    async with Running(chain, 1) as second:
        await second.dispatcher.drain()
    assert chain.notes("verify") == [("r.0-0", 1), ("r.0-0", 2)]


async def test_row_has_its_prompt_and_topology_when_another_dispatcher_verifies(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 1, "words_prompts": True, "topology": "agent_in_env"})
    original = [json.dumps({"id": "t0", "question": "A or B?", "expected_answer": "B"})]
    async with Running(chain, 1, lines=original, retry_delay_s=60) as first:
        await first.wait(lambda: len(chain.notes("verify")) == 1, "the first verification to fail")
    async with Running(chain, 1, lines=original) as second:
        await second.dispatcher.drain()
        (record,) = [record async for record in second.store.iterate(JobSelector())]
    row = orjson.loads(record.result or b"{}")
    assert (row["responses_create_params"], row["topology"]) == ({"input": "A or B?"}, "agent_in_env")
    assert len(chain.notes("act")) == 1


def test_run_that_an_earlier_version_stored_is_graded() -> None:
    spec = JobSpec("r.0-0", "r", "t0", "r.0", 0, 0, "trivial", b"{}")
    held = {"control_token": "c", "cookies": {"a": "b"}, "replicas": {}, "timings": {"run_s": 1.0}}
    stored = orjson.dumps({"act": {"response": {}}, "held": held})
    job = Job(spec, JobState.CLAIMED, StageName.EVAL, 1, run_result=stored)
    attempt = JobAttempt.of(job, Servers("trivial", "env", "policy"))
    assert (attempt.control_token, attempt.cookies, attempt.session) == ("c", {"a": "b"}, None)
    assert (attempt.public_params, attempt.row_ref, attempt.closes_with_verdict) == (None, None, False)


async def test_deadline_ends_a_job_wherever_it_is(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0", "t1"]})
    async with Running(chain, 1, concurrency=1, init_workers=1, ready_buffer=1, sweeps=True) as running:
        await running.wait(lambda: len(chain.notes("act")) == 1, "the worker to hang")
        (record,) = [r async for r in running.store.iterate(JobSelector())]
        late = [replace(record.spec, job_id=f"late-{n}", task_id="t1", deadline_s=1.5) for n in range(6)]
        await running.store.submit(late)
        running.dispatcher.notify()
        await running.wait(lambda: len(running.events) == 6, "all to end, also those that nobody claimed")
        assert {event.state for event in running.events} == {JobState.FAILED}
        failures = [event.failure for event in running.events]
        assert {failure.kind for failure in failures if failure} == {"deadline"}
        assert all("1.5 s from its submission" in failure.reason for failure in failures if failure)


async def test_caps_bound_what_is_under_way(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": [f"t{number}" for number in range(6)]})
    async with Running(chain, 6, concurrency=6, environment_caps={"env": 2}) as running:
        await running.wait(lambda: len(chain.notes("act")) == 2, "as many to work as may")
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert len(chain.notes("seed")) == 2
        await running.dispatcher.cancel(JobSelector(job_ids=frozenset({"r.0-0"})), "make room")
        await running.wait(lambda: len(chain.notes("act")) == 3, "the next")


async def test_caps_may_be_of_every_instance_and_of_no_other(make_chain: MakeChain) -> None:
    chain = make_chain()
    client, store = chain.client(), SqliteJobStore(Path(chain.directory, "store.sqlite"))
    client.global_config_dict["spare"] = client.global_config_dict["env"]
    for cap in ("spare", "spar"):
        core = RolloutCore(client, RolloutRunConfig.parse(chain.run_keys(environment_caps={cap: 2})))
        refused = pytest.raises(ConfigError, match="environment_caps: unknown key 'spar' ")
        with nullcontext() if cap == "spare" else refused:
            core.dispatcher(store)
    await store.aclose()


@pytest.mark.parametrize("kind", [FailureKind.AGENT_LOST, FailureKind.MODEL_UNREACHABLE])
async def test_attempts_of_a_lost_server_have_a_budget_of_their_own(make_chain: MakeChain, kind: FailureKind) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    async with Running(chain, 1, max_attempts=1, max_lost_attempts=3) as running:
        for attempt in (1, 2, 3):
            await running.wait(lambda n=attempt: ("r.0-0", n) in chain.notes("act"), f"attempt {attempt}")  # type: ignore[misc]
            (held,) = running.dispatcher.held
            running.dispatcher.interrupt(held, Stop(kind, "gone", retryable=True, server_lost=True))
        await running.dispatcher.drain()
        (event,) = running.events
        assert event.failure is not None and event.failure.kind is kind
    assert len(chain.notes("act")) == 3


async def test_attempts_whose_model_server_is_lost_count_in_that_budget(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def lost(_: RolloutSteps, __: Attempt, model: str) -> None:
        opened.append(model)
        raise PeerError(model, "/sessions", 0, {"detail": "the connection broke"})

    monkeypatch.setattr(RolloutSteps, "open_session", lost)
    async with Running(make_chain(), 1, max_attempts=1, max_lost_attempts=3) as running:
        await running.dispatcher.drain()
        (event,) = running.events
    assert event.failure is not None and event.failure.kind is FailureKind.MODEL_UNREACHABLE
    assert len(opened) == 3


async def test_a_server_that_is_silent_gives_its_jobs_to_the_others(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 0.3})
    other = ChainServer("agent", {"journal": str(chain.journal), "delay_s": 0.3})
    other.wait_ready()
    keys = {"agent_caps": {"trivial": 8}, "max_lost_attempts": 9, "max_attempts": 1}
    try:
        async with Running(chain, 30, concurrency=4, **keys) as running:
            pool = running.core.pool
            assert pool is not None
            pool.replicas("trivial")[0].capacity = 2
            added = pool.register("trivial", f"http://127.0.0.1:{other.port}", capacity=2)
            watching = asyncio.create_task(pool.watch(every_s=0.1, silent_s=0.5))
            await running.wait(lambda: added.done > 2, "the added one to work")
            os.kill(other.process.pid or 0, signal.SIGSTOP)
            await running.wait(lambda: added.state == "lost", "its silence to be noticed")
            await running.dispatcher.drain()
            os.kill(other.process.pid or 0, signal.SIGCONT)
            await running.wait(lambda: added.state == "ready", "it to be back")
            watching.cancel()
            assert (await running.store.counts())[JobState.DONE] == 30
            assert sum(server.done for server in pool.replicas("trivial")) == 30
            assert [server.busy for server in pool.all()] == [0] * len(pool.all())
    finally:
        other.stop()


async def test_worker_counts_no_cancellation_of_an_attempt_that_was_interrupted_twice() -> None:
    counted: asyncio.Queue[int] = asyncio.Queue()

    class Waits:
        name, workers, timeout_s = StageName.RUN, 1, 30.0

        async def run(self, attempt: Any, /) -> bytes:
            task = asyncio.current_task()
            assert task is not None
            counted.put_nowait(task.cancelling())
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(30 if attempt.stop else 0)
            return b""

        def classify(self, error: BaseException) -> Any:
            raise AssertionError from error

    async def ends(*_: Any) -> None:
        counted.put_nowait(-1)

    pool: StagePool[Any] = StagePool(Waits(), 2, ends, ends, ends, lambda *_: None)
    pool.start()
    try:
        new = {"lost": False, "stop": None, "span": None}
        first, second = (SimpleNamespace(job=SimpleNamespace(job_id=name), **new) for name in "ab")
        pool.put_now(first)
        assert await counted.get() == 0
        first.stop = Stop(FailureKind.CANCELLED, "not needed")
        for _ in range(2):
            pool.interrupt(first)
            await asyncio.sleep(0)
        assert await counted.get() == -1
        pool.put_now(second)
        assert await counted.get() == 0
    finally:
        await pool.stop()
