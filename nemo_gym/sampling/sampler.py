"""Batches of effective groups for a trainer, from a pipeline that never waits for a batch.

    loader ──row──▶ group of N jobs ──▶ job store ──▶ dispatcher ──▶ complete group ──filters──▶ ready ──▶ batch

A full batch is handed out at once, and unfinished rollouts continue for the next batch, so no work is lost.
`LookAhead` decides when groups are submitted, and older groups go first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.contract.errors import ConfigError, NemoGymError, require_whole
from nemo_gym.contract.verdict import TASK_INDEX_KEY, group_id_of, rollout_id_of, task_id_of
from nemo_gym.rollouts.interfaces import JobAttempt, JobEvent, JobSelector, JobSpec, JobState
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.store import SqlJobStore
from nemo_gym.sampling.groups import (
    DEFAULT_FILTERS,
    OBSERVED,
    Batch,
    Carried,
    Group,
    GroupFilter,
    LookAhead,
    Sample,
    WeightsSpan,
    why_left_out,
)
from nemo_gym.sampling.ledger import GroupRecord, GroupState, SamplerLedger
from nemo_gym.sampling.loader import LoaderCursor

STATE_VERSION = 1
STATE_MEMBERS = {
    **{"run_id": str, "batch": int, "weights_version": int},
    **{"cursor": Mapping, "outcomes": Sequence, "groups": Sequence},
}
"""The members of a checkpoint, checked before any of them is used."""

CheckedRow = Callable[[int, Mapping[str, Any]], Awaitable[tuple[dict[str, Any], str] | None]]
"""Maps the number and content of a loader's row to the row to submit and its agent, or to ``None`` to skip the row.
Raises `RowError` and `ConfigError`."""


class NoEffectiveGroupsError(NemoGymError):
    """The data and the policy yield too few effective groups. Effective groups stay ready."""

    code = "no_effective_groups"
    status = 503


class RolloutSampler:
    """Samples batches, as the module describes. `open_sampler` makes it. The first requested batch starts the
    dispatcher, so that nothing runs before a checkpoint is loaded and the weights are known; its owner stops it.

    ``workers`` are the pipeline's INIT, RUN and EVAL workers. The dispatcher calls `job_started` as its ``on_run``,
    and `job_ended` as its listener.
    """

    def __init__(
        self,
        store: SqlJobStore,
        ledger: SamplerLedger,
        dispatcher: AsyncDispatcher,
        cursor: LoaderCursor,
        check: CheckedRow,
        *,
        run_id: str,
        workers: Sequence[int],
        config: SamplingConfig | None = None,
        filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
    ) -> None:
        self._store, self._ledger, self._dispatcher = store, ledger, dispatcher
        self._cursor, self._check = cursor, check
        self._run_id = run_id
        self._config = config or SamplingConfig()
        self._look_ahead = LookAhead(self._config, workers)
        self._filters = tuple(filters)
        self._open: dict[int, GroupRecord] = {}
        self._ready: dict[int, tuple[GroupRecord, Group]] = {}
        self._running: dict[str, Carried] = {}
        self._left_out: Counter[str] = Counter()
        self._next_serial = self._batch = self._weights_version = 0
        self._requested = 0
        self._last_requested = 0
        self._exhausted = False
        self._refusing_since: int | None = None
        """The pass over the data in which the refused rows in a row began."""
        self._checkpoint: Mapping[str, Any] | None = None
        """The checkpoint to start from, and later that of the last batch."""
        self._in_next_batch = False
        self._tasks: list[asyncio.Task[None]] = []
        self._fatal: BaseException | None = None
        self._turn = asyncio.Lock()
        self._wake, self._full = asyncio.Event(), asyncio.Event()

    # For the trainer

    async def next_batch(self, requested_batch_size: int, *, weights_version: int | None = None) -> Batch:
        """Wait for the next ``requested_batch_size`` effective groups, and return them, oldest first.

        ``weights_version`` is the version that trains on them and that engines serve from now on; by default it grows
        by one with each batch. Raises `NoEffectiveGroupsError`, after which the next call continues, and any error of
        the pipeline or of reading rows, after which a newly opened sampler continues.
        """
        require_whole("requested_batch_size", requested_batch_size, 1)
        if self._in_next_batch:
            raise ConfigError("next_batch is under way: one batch is asked for at a time", key="requested_batch_size")
        self._in_next_batch = True
        try:
            await self._start()
            version = max(self._weights_version, self._batch) if weights_version is None else weights_version
            await self.set_weights_version(version)
            self._requested = self._last_requested = requested_batch_size
            self._wake.set()
            while True:
                self._full.clear()
                async with self._turn:
                    if self._fatal is not None:
                        raise self._fatal
                    if len(self._ready) >= self._requested or (self._exhausted and not self._open):
                        return await self._hand_out()
                    self._check_yield()
                await self._full.wait()
        finally:
            self._requested, self._in_next_batch = 0, False

    async def set_weights_version(self, version: int) -> None:
        """Record that the engines now serve these weights; drop samples that are then too old, or run them again."""
        require_whole("weights_version", version, 0)
        await self._start()
        if version < self._weights_version:
            raise ConfigError(
                f"weights_version={version} is older than {self._weights_version}, the current one: versions only"
                " grow; load_state_dict goes back",
                key="weights_version",
            )
        async with self._turn:
            if version > self._weights_version:
                self._weights_version = version
                await self._ledger.use_weights(version)
            await self._expire()
        self._wake.set()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state when it handed out the last batch: plain data and the loader's state."""
        return dict(self._checkpoint or self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "run_id": self._run_id,
            "batch": self._batch,
            "weights_version": self._weights_version,
            "cursor": self._cursor.state_dict(),
            "outcomes": self._look_ahead.outcomes,
            "groups": [
                {"row": orjson.loads(group.row), "agent": group.agent, "rank": group.rank}
                for group in (*(record for record, _ in self._ready.values()), *self._open.values())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; call it before the first batch. With the run's own store, batches after the
        checkpoint are handed out again, and no finished rollout is lost; with an empty store, unfinished groups are
        run again from the start."""
        if self._tasks:
            raise ConfigError("load_state_dict comes before the first batch", key="state_dict")
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise ConfigError(
                f"not a sampler state of this release: its version is {version!r}, and this release reads"
                f" {STATE_VERSION}",
                key="state_dict",
            )
        wrong = [name for name, kind in STATE_MEMBERS.items() if not isinstance(state.get(name), kind)]
        if wrong:
            raise ConfigError(f"the sampler state is incomplete: {', '.join(wrong)}", key="state_dict")
        self._checkpoint = state

    @property
    def weights_version(self) -> int:
        return self._weights_version

    async def aclose(self) -> None:
        """Submit no more groups. Queued jobs stay queued for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # For the pipeline

    def job_started(self, attempt: JobAttempt) -> None:
        """Record that an attempt enters RUN."""
        spec, session = attempt.job.spec, attempt.session
        session_id = session.session_id if session is not None else None
        self._running[spec.job_id] = Carried(
            spec.job_id, spec.group_id, attempt.job.attempt, session_id, self._weights_version
        )
        self._ledger.started(spec.job_id, self._weights_version)
        self._wake.set()

    def job_ended(self, event: JobEvent) -> None:
        """Record that a job ended; a `JobListener`."""
        spec = event.job.spec
        self._running.pop(spec.job_id, None)
        self._ledger.ended(spec.job_id, self._weights_version)
        if (group := self._open.get(spec.task_index)) is not None:
            group.ended.add(spec.sample_index)
            self._wake.set()

    # Lifecycle

    async def _start(self) -> None:
        async with self._turn:
            if not self._tasks:
                await self._recover()
                await self._dispatcher.start()
                self._tasks = [
                    asyncio.create_task(self._guard(work), name=f"sampler{work.__name__}")
                    for work in (self._pump, self._dispatcher.stopped)
                ]

    async def _recover(self) -> None:
        """Restore the state of the files or of the checkpoint, including everything that has ended since."""
        remembered = await self._ledger.recall(self._run_id, OBSERVED)
        state, has_records = self._checkpoint, remembered.next_serial > 0
        if state is not None:
            if has_records and state["run_id"] != self._run_id:
                raise ConfigError(
                    f"the checkpoint is of run '{state['run_id']}', the output holds run '{self._run_id}': go on with"
                    " that run's output, or with an empty one",
                    key="state_dict",
                )
            await self._ledger.go_back(state["batch"], state["weights_version"])
            remembered = await self._ledger.recall(self._run_id, OBSERVED)
            self._cursor.restore(state["cursor"])
        self._batch, self._weights_version = remembered.batch, remembered.weights_version
        self._look_ahead.learn_outcomes(remembered.outcomes)
        self._next_serial = remembered.next_serial
        self._cursor.pass_over(max(0, remembered.taken - self._cursor.taken))
        self._open = {group.serial: group for group in (*remembered.open, *remembered.ready)}
        await self._submit(remembered.open)  # jobs that the store knows stay the same
        for group in self._open.values():
            async for record in self._store.iterate(self._jobs_of(group)):
                if record.state.terminal:
                    group.ended.add(record.spec.sample_index)
        await self._cancel_strays()
        if state is not None and not has_records:
            self._look_ahead.learn_outcomes(state["outcomes"])
            for item in state["groups"]:
                await self._add(self._as_new(orjson.dumps(item["row"])), item["agent"], rank=item["rank"])

    def _needed(self) -> frozenset[str]:
        """The jobs of the open groups."""
        return frozenset(job_id for group in self._open.values() for job_id in self._jobs_of(group).job_ids or ())

    async def _cancel_strays(self) -> None:
        """Cancel jobs whose samples were dropped by a process that ended before it could cancel them."""
        needed = self._needed()
        unfinished = JobSelector(run_id=self._run_id, states=frozenset({JobState.QUEUED, JobState.CLAIMED}))
        strays = [record.job_id async for record in self._store.iterate(unfinished) if record.job_id not in needed]
        if strays:
            await self._dispatcher.cancel(JobSelector(job_ids=frozenset(strays)), "not needed any more")

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - nobody awaits the background tasks; next_batch raises for them
            self._fatal = self._fatal or error
            self._full.set()

    async def _pump(self) -> None:
        while True:
            async with self._turn:
                self._wake.clear()
                for group in [group for group in self._open.values() if not group.unfinished]:
                    await self._settle(group)
                while not self._exhausted and self._another_is_wanted():
                    await self._take_row()
            if self._requested:
                self._full.set()
            await self._wake.wait()

    # Policy

    def _another_is_wanted(self) -> bool:
        return self._look_ahead.wants_another(
            unfinished=sum(len(group.unfinished) for group in self._open.values()),
            running=len(self._running),
            under_way=len(self._open),
            ready=len(self._ready),
            wanted=self._requested + self._config.ahead * self._last_requested,
        )

    def _check_yield(self) -> None:
        limit, ended = self._config.max_groups_per_batch, sum(self._left_out.values()) + len(self._ready)
        if limit is None or ended < limit:
            return
        why = "; ".join(f"{count}: {reason}" for reason, count in self._left_out.most_common())
        self._left_out.clear()
        raise NoEffectiveGroupsError(
            f"{ended} groups ended for this batch and {len(self._ready)} of {self._requested} are effective ({why})."
            " Give easier or harder rows, other filters, or raise max_groups_per_batch; ready groups are kept"
        )

    # Groups

    def _jobs_of(self, group: GroupRecord) -> JobSelector:
        return JobSelector(
            job_ids=frozenset(rollout_id_of(self._run_id, group.serial, sample) for sample in group.samples)
        )

    async def _take_row(self) -> None:
        row = self._cursor.next_row()
        if row is None:
            self._exhausted = True
            return
        if (checked := await self._check(self._cursor.taken, row)) is not None:
            self._refusing_since = None
            await self._add(self._as_new(orjson.dumps(checked[0])), checked[1], rank=-self._batch)
            return
        if self._refusing_since is None:
            self._refusing_since = self._cursor.passes
        elif self._cursor.passes > self._refusing_since + 1:  # the pass after it was refused from start to end
            raise ConfigError("input holds no usable rows: every one was left out, as the log says", key="input")
        await asyncio.sleep(0)  # nothing else here suspends, and a loader may have no end

    async def _add(self, row: bytes, agent: str, *, rank: int, reruns: int = 0) -> None:
        size = self._config.samples_per_group
        group = GroupRecord(
            serial=self._next_serial,
            row=row,
            agent=agent,
            samples=list(range(size)),
            size=size,
            rank=rank,
            reruns=reruns,
            weights_version=self._weights_version,
            taken=self._cursor.taken,
        )
        self._next_serial += 1
        await self._ledger.keep(group)
        self._open[group.serial] = group
        await self._submit([group])

    async def _submit(self, groups: Iterable[GroupRecord]) -> None:
        """Submit the jobs of groups; jobs that the store knows stay as they are."""
        specs = [
            JobSpec(
                job_id=rollout_id_of(self._run_id, group.serial, sample),
                run_id=self._run_id,
                task_id=task_id_of(orjson.loads(group.row), group.serial),
                group_id=group_id_of(self._run_id, group.serial),
                sample_index=sample,
                task_index=group.serial,
                agent=group.agent,
                row=group.row,
                priority=group.rank,
            )
            for group in groups
            for sample in group.samples
        ]
        await self._store.submit(specs)
        self._dispatcher.notify()

    async def _settle(self, record: GroupRecord) -> None:
        """Settle a group whose last sample has ended: make it ready, leave it out, or run it again."""
        jobs = self._jobs_of(record)
        spans = await self._ledger.spans(jobs.job_ids or ())
        at_least = WeightsSpan(record.weights_version, self._weights_version)
        samples = [Sample.of(job, spans.get(job.job_id, at_least)) async for job in self._store.iterate(jobs)]
        for sample in samples:
            self._look_ahead.learn_times(sample.row)
        row = orjson.loads(record.row)
        group = Group(group_id_of(self._run_id, record.serial), row, tuple(samples), record.size)
        if (fresh := await self._fresh(record, group)) is None:
            return
        reason = why_left_out(fresh, self._filters)
        self._look_ahead.learn_outcomes([reason is None])
        if reason is not None:
            await self._leave_out(record, reason)
            return
        await self._ledger.settle(record, GroupState.EFFECTIVE)
        self._open.pop(record.serial, None)
        self._ready[record.serial] = (record, fresh)

    async def _leave_out(self, record: GroupRecord, reason: str) -> None:
        await self._ledger.settle(record, GroupState.LEFT_OUT, reason)
        self._open.pop(record.serial, None)
        self._ready.pop(record.serial, None)
        self._left_out[reason] += 1

    # Staleness

    async def _expire(self) -> None:
        """Drop or run again all samples that are too old for the current weights, including running ones."""
        if self._config.max_weights_lag is None:
            return
        for record, group in list(self._ready.values()):
            if (fresh := await self._fresh(record, group)) is None:
                continue
            if fresh is group:
                continue
            self._ready[record.serial] = (record, fresh)
            if (reason := why_left_out(fresh, self._filters)) is not None:
                await self._leave_out(record, reason)
            else:
                await self._ledger.settle(record, GroupState.EFFECTIVE)
        running, needed = self._under_way(), self._needed()
        for record in list(self._open.values()):
            first = await self._first_versions(record, running)
            if old := [sample for sample in record.samples if sample in first and self._is_old(first[sample])]:
                await self._too_old(record, old)
        if dropped := needed - self._needed():
            # All at once, because a cancel waits until what its attempts hold is released.
            await self._dispatcher.cancel(JobSelector(job_ids=dropped), "sampled with weights that are too old by now")

    def _under_way(self) -> dict[str, Carried]:
        """The running attempts, without attempts that failed, whose jobs wait for another attempt."""
        held = {attempt.job.job_id: attempt.job.attempt for attempt in self._dispatcher.held}
        return {job_id: each for job_id, each in self._running.items() if held.get(job_id) == each.attempt}

    async def _first_versions(self, record: GroupRecord, running: Mapping[str, Carried]) -> dict[int, int]:
        """Return the weights version with which each started sample of an open group began."""
        ids = {rollout_id_of(self._run_id, record.serial, sample): sample for sample in record.samples}
        began = {ids[job_id]: running[job_id].weights_version or 0 for job_id in ids if job_id in running}
        ended = await self._ledger.spans(job_id for job_id, sample in ids.items() if sample in record.ended)
        return began | {ids[job_id]: span.first for job_id, span in ended.items()}

    def _is_old(self, first: int) -> bool:
        bound = self._config.max_weights_lag
        return bound is not None and self._weights_version - first > bound

    async def _fresh(self, record: GroupRecord, group: Group) -> Group | None:
        """Return a complete group without samples that are too old, or ``None`` if the group is no longer ready."""
        old = [sample.sample_index for sample in group.samples if self._is_old(sample.weights.first)]
        if not old:
            return group
        if await self._too_old(record, old):
            return None
        remaining = tuple(sample for sample in group.samples if sample.sample_index not in old)
        return Group(group.group_id, group.row, remaining, group.size)

    async def _too_old(self, record: GroupRecord, old: Sequence[int]) -> bool:
        """Drop samples that are too old, or run them again. Return whether the group is gone or waits for samples."""
        again = self._config.when_stale == "rerun" and record.reruns < self._config.max_reruns
        whole = self._config.stale_unit == "group" or len(old) == len(record.samples)
        if whole:
            await self._leave_out(record, "too old")
            if again:
                await self._add(self._as_new(record.row), record.agent, rank=record.rank, reruns=record.reruns + 1)
        else:
            first_new = max(record.samples) + 1
            record.samples = [sample for sample in record.samples if sample not in old]
            if again:
                record.samples += range(first_new, first_new + len(old))
                record.reruns += 1
                self._ready.pop(record.serial, None)
                self._open[record.serial] = record
            await self._ledger.keep(record)
            if again:
                await self._submit([record])
        self._wake.set()
        return whole or again

    def _as_new(self, row: bytes) -> bytes:
        return orjson.dumps({**orjson.loads(row), TASK_INDEX_KEY: self._next_serial})

    # Handing out

    async def _hand_out(self) -> Batch:
        chosen = [self._ready[serial] for serial in sorted(self._ready)[: self._requested]]
        self._batch += 1
        await self._ledger.hand_out([record for record, _ in chosen], self._batch)
        for record, _ in chosen:
            del self._ready[record.serial]
        self._checkpoint = self._snapshot()
        left_out, self._left_out = dict(self._left_out), Counter()
        return Batch(
            index=self._batch,
            weights_version=self._weights_version,
            groups=tuple(group for _, group in chosen),
            carried=tuple(self._carried()),
            left_out=left_out,
            exhausted=self._exhausted,
        )

    def _carried(self) -> Iterable[Carried]:
        running = self._under_way()
        for group in self._open.values():
            for sample in group.unfinished:
                job_id = rollout_id_of(self._run_id, group.serial, sample)
                waiting = Carried(job_id, group_id_of(self._run_id, group.serial), 0, None, None)
                yield running.get(job_id, waiting)
