"""Opens samplers over the servers of a running stack, for asynchronous and for blocking trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import orjson
import structlog

from nemo_gym._util.tasks import LoopThread
from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.contract.verdict import TASK_INDEX_KEY, new_run_id
from nemo_gym.http.client import ServerClient, close_global_aiohttp_client
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobAttempt, JobListener, JobSelector, JobState
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.results import RecordedRun, ResultFiles, RunFiles, check_sources, output_lock
from nemo_gym.rollouts.rows import RowChecker
from nemo_gym.rollouts.store import SqliteJobStore, SqlJobStore
from nemo_gym.sampling.groups import DEFAULT_FILTERS, Batch, GroupFilter
from nemo_gym.sampling.ledger import SamplerLedger
from nemo_gym.sampling.loader import LoaderCursor, RowFile
from nemo_gym.sampling.sampler import RolloutSampler

log = structlog.get_logger(__name__)

INPUTS = "rows of a data loader"
"""Recorded in place of the digest of the run's rows, which are not known beforehand."""

T = TypeVar("T")


class Workplace(Protocol):
    """The servers that run a sampler's rollouts."""

    def check(self, number: int, line: bytes, /) -> tuple[dict[str, Any], str]:
        """Return a loader's row as it is submitted, and its agent. Raises `RowError`."""
        ...

    async def prepare(self, agent: str | None) -> None:
        """Prepare for an agent's rollouts. Called before the first of them, and once with ``None``, which stands for
        the run's default agent, before anything else. Raises `ConfigError`."""
        ...

    def dispatcher(
        self, store: SqlJobStore, *, listener: JobListener, logs: Path, on_run: Callable[[JobAttempt], None]
    ) -> AsyncDispatcher:
        """Return a dispatcher over ``store``; the caller starts and stops it. It calls ``on_run`` when an attempt
        enters RUN."""
        ...


@asynccontextmanager
async def open_sampler(
    client: ServerClient,
    run: RolloutRunConfig | Mapping[str, Any],
    loader: Iterable[Any] | None = None,
    *,
    sampling: SamplingConfig | Mapping[str, Any] | None = None,
    filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
) -> AsyncIterator[RolloutSampler]:
    """Sample from ``loader``, or from the rows of ``run.input``, with the servers that ``client`` knows.

    ``run`` has the keys of ``ng_run``: workers, limits, deadlines, and the ``output`` whose files hold every rollout
    and the sampler's state; a ``loader`` replaces ``input``. ``num_repeats``, ``shard`` and ``retry_failed`` are
    refused, and ``limit`` beside a loader. If the output holds a sampler's run, that run continues.
    Leaving the block stops running rollouts and keeps them queued. Raises `ConfigError` and `RowError` before anything
    runs, and `StoreError` if the store cannot write.
    """
    config = run_config(run, loader)
    workplace = _Stack(client, config)
    async with sampler_at(workplace, config, loader, sampling=sampling, filters=filters) as sampler:
        yield sampler


def run_config(run: RolloutRunConfig | Mapping[str, Any], loader: Iterable[Any] | None) -> RolloutRunConfig:
    """Return the run configuration of a sampler; a loader replaces ``input``."""
    if isinstance(run, RolloutRunConfig):
        return run
    return RolloutRunConfig.parse(run if loader is None else {**run, "input": "data loader"})


@asynccontextmanager
async def sampler_at(
    workplace: Workplace,
    config: RolloutRunConfig,
    loader: Iterable[Any] | None = None,
    *,
    sampling: SamplingConfig | Mapping[str, Any] | None = None,
    filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
) -> AsyncIterator[RolloutSampler]:
    """`open_sampler` over any workplace."""
    chosen = sampling if isinstance(sampling, SamplingConfig) else SamplingConfig.parse(sampling or {})
    refuse_keys(config, _NO_SAMPLING if loader is None else {**_NO_SAMPLING, **_NO_LOADER})
    files = RunFiles(config.output, config.store)
    cursor = LoaderCursor(RowFile(config.input, limit=config.limit) if loader is None else loader, chosen.epochs)
    check_sources(config, files)
    async with AsyncExitStack() as undo:
        undo.enter_context(output_lock(files))
        recorded = await RecordedRun.of(config, files)
        await workplace.prepare(None)
        if recorded is not None:
            recorded.require_same(config, INPUTS)
        elif config.overwrite:
            files.discard()
        sink = ResultFiles(files)
        undo.callback(sink.close)
        store = SqliteJobStore(files.store, sink=sink)
        undo.push_async_callback(store.aclose)
        ledger = SamplerLedger(files.sampler)
        undo.push_async_callback(ledger.aclose)
        info = {"run_id": config.run_id or new_run_id(), "inputs_sha256": INPUTS, "validation": config.validation}
        run_id = str((await store.open_run(info))["run_id"])
        await store.release()  # the jobs' earlier owner is gone: this process holds the output's lock
        await sink.recover(store)

        async def checked_row(number: int, row: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
            try:
                checked, agent = workplace.check(number, _loader_row(number, row))
            except RowError as error:
                if not config.skip_bad_rows:
                    raise
                log.warning("row left out", error=error.message)
                return None
            await workplace.prepare(agent)
            return checked, agent

        dispatcher = workplace.dispatcher(
            store,
            listener=lambda event: sampler.job_ended(event),
            logs=files.logs,
            on_run=lambda attempt: sampler.job_started(attempt),
        )
        sampler = RolloutSampler(
            store,
            ledger,
            dispatcher,
            cursor,
            checked_row,
            run_id=run_id,
            workers=config.workers,
            config=chosen,
            filters=filters,
        )
        unfinished = JobSelector(states=frozenset({JobState.QUEUED, JobState.CLAIMED}))
        for agent in {record.spec.agent async for record in store.iterate(unfinished)}:
            await workplace.prepare(agent)
        undo.push_async_callback(dispatcher.stop)
        undo.push_async_callback(sampler.aclose)
        yield sampler


def refuse_keys(config: RolloutRunConfig, fixes: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a run sets one of these keys, which would have no effect; ``fixes`` say what to do."""
    for key, fix in fixes.items():
        if getattr(config, key) != RolloutRunConfig.model_fields[key].get_default(call_default_factory=True):
            raise ConfigError(f"{key} has no effect here: {fix}", key=key)


_NO_SAMPLING = {
    "num_repeats": "the sampling key samples_per_group is the number of samples of each row",
    "shard": "leave it out, and give this trainer's part of the rows as the loader",
    "retry_failed": "leave it out; a sampler retries what the infrastructure lost, and leaves out groups that fail",
}
_NO_LOADER = {"limit": "leave it out, and give a loader with fewer rows"}


class _Stack:
    """The servers of a running stack; see `Workplace`."""

    def __init__(self, client: ServerClient, config: RolloutRunConfig) -> None:
        self._config = config
        self._core = RolloutCore(client, config, say=lambda text: log.info(text))
        # A loader's rows are checked like those of a file. Their errors name ``input``, which `run_config` sets.
        self.check = RowChecker(config.input, config, self._core.agents, config.prompt).row_and_agent
        self.dispatcher = self._core.dispatcher

    async def prepare(self, agent: str | None) -> None:
        agents = self._core.agents
        agent = agent or self._config.agent_name or (agents[0] if len(agents) == 1 else None)
        if agent is not None:
            await self._core.add_route(agent)


def _loader_row(number: int, row: Mapping[str, Any]) -> bytes:
    """Return a loader's row as JSON, without its own task index. Raises `RowError`."""
    fields = {key: value for key, value in row.items() if key != TASK_INDEX_KEY}
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:
        raise RowError(f"row {number} of the data loader is not JSON: {error}", line=number) from error


OpenSampler = Callable[..., AbstractAsyncContextManager[RolloutSampler]]


class BlockingSampler:
    """A sampler for trainers without an event loop. The pipeline has its own thread, so rollouts continue while the
    trainer computes."""

    def __init__(self, *given: Any, opened_by: OpenSampler = open_sampler, **options: Any) -> None:
        """Open a sampler with ``opened_by``: takes its arguments, and raises its errors."""
        opening = opened_by(*given, **options)  # before the thread begins: wrong arguments raise here
        opened: Future[RolloutSampler] = Future()
        self._closing = asyncio.Event()
        self._thread = LoopThread("sampler")
        self._serving = self._thread.start(self._serve(opened, opening))
        try:
            self._sampler = opened.result()
        except BaseException:
            if not opened.done():  # the caller was interrupted
                self._serving.cancel()
            wait((self._serving,))
            self._thread.close()
            raise

    async def _serve(
        self, opened: Future[RolloutSampler], opening: AbstractAsyncContextManager[RolloutSampler]
    ) -> None:
        try:
            async with opening as sampler:
                opened.set_result(sampler)
                await self._closing.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            await close_global_aiohttp_client()

    def next_batch(self, requested_batch_size: int, *, weights_version: int | None = None) -> Batch:
        """See `RolloutSampler.next_batch`."""
        return self._call(self._sampler.next_batch(requested_batch_size, weights_version=weights_version))

    def set_weights_version(self, version: int) -> None:
        """See `RolloutSampler.set_weights_version`."""
        self._call(self._sampler.set_weights_version(version))

    def state_dict(self) -> dict[str, Any]:
        """See `RolloutSampler.state_dict`."""

        async def state() -> dict[str, Any]:
            return self._sampler.state_dict()

        return self._call(state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RolloutSampler.load_state_dict`."""
        self._sampler.load_state_dict(state)

    def close(self) -> None:
        """Stop running rollouts and keep them queued; idempotent."""
        if not self._thread.loop.is_closed():
            self._thread.loop.call_soon_threadsafe(self._closing.set)
            try:
                self._serving.result()
            finally:
                self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread.loop.is_closed():
            work.close()
            raise ConfigError("the sampler is closed", key="sampler")
        return self._thread.run(work)
