"""One run from its input file to its result files, against running servers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import structlog
from rich.console import Console
from rich.text import Text

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.attempt import Route, agent_instances, route_of
from nemo_gym.rollouts.config import RolloutRunConfig
from nemo_gym.rollouts.identity import new_run_id
from nemo_gym.rollouts.interfaces import JobListener, JobSelector, JobState, JobStore
from nemo_gym.rollouts.metrics import aggregate, for_aggregation, write_aggregates
from nemo_gym.rollouts.peers import Peers
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.progress import RunProgress
from nemo_gym.rollouts.results import OutputLock, ResultFiles, RunFiles
from nemo_gym.rollouts.routing import checked_route, chosen_topology
from nemo_gym.rollouts.rows import MaterializedInputs, job_specs, materialize
from nemo_gym.rollouts.stages import http_stages
from nemo_gym.rollouts.store import SqliteJobStore
from nemo_gym.rollouts.store.sqlite import store_error
from nemo_gym.rollouts.table import print_agents, print_key_metrics, print_table
from nemo_gym.rollouts.tally import RolloutSummary, Tally
from nemo_gym.serving.client import ServerClient

log = structlog.get_logger(__name__)

SUBMIT_BATCH = 1000
UNFINISHED = frozenset({JobState.QUEUED, JobState.CLAIMED})


@dataclass(slots=True)
class CollectionResult:
    """What a run came to."""

    run_id: str
    files: RunFiles
    tasks: int
    rollouts: int
    valid: int
    invalid: int
    seconds: float
    aggregates: list[dict[str, Any]] = field(default_factory=list)
    summaries: list[RolloutSummary] = field(default_factory=list)


class Collection:
    """One run's lock, files, store and pipeline, in the order in which they are opened and closed."""

    def __init__(
        self,
        client: ServerClient,
        config: RolloutRunConfig,
        *,
        console: Console | None,
        configuration: Path | None = None,
    ) -> None:
        self._configuration = configuration
        self._client = client
        self._config = config
        self._console = console
        self._files = RunFiles(config.output, config.store)
        self._peers = Peers(client)
        self._routes: dict[str, Route] = {}

    async def run(self) -> CollectionResult:
        lock = OutputLock(self._files)
        lock.acquire()
        try:
            return await self._run_locked()
        finally:
            lock.release()

    async def _run_locked(self) -> CollectionResult:
        config, files = self._config, self._files
        start = asyncio.get_running_loop().time()
        await self._check_output()
        agents = agent_instances(self._client.global_config_dict)
        if config.agent_name is not None:
            route_of(self._client.global_config_dict, config.agent_name)
        inputs = await asyncio.to_thread(self._materialize, agents)
        for error in inputs.bad_rows:
            log.warning("row left out", error=error.message)
        for agent in inputs.agents:
            self._routes[agent] = await checked_route(self._client, self._peers, agent, config)
        sink = ResultFiles(files)
        store = SqliteJobStore(files.store, sink=sink)
        try:
            run_id, total = await self._open(store, inputs)
            await sink.recover(store)
            tally = await self._tally(store)
            await self._drive(store, tally, total)
            result = await self._conclude(store, run_id, inputs, start)
        finally:
            await store.aclose()
            sink.close()
        self._show(result)
        return result

    # Before

    async def _check_output(self) -> None:
        """Keep what an unfinished run has; replace what a finished one left, as NeMo Gym does."""
        config, files = self._config, self._files
        files.output.parent.mkdir(parents=True, exist_ok=True)
        if files.store.is_dir() or files.output.is_dir():
            raise ConfigError(f"output '{files.output}' is a directory", key="output")
        has_store = files.store.exists()
        if config.resume or config.overwrite:
            if config.overwrite:
                files.discard()
            elif not has_store and _has_content(files.output):
                raise ConfigError(
                    f"output '{files.output}' has results but its run database '{files.store.name}' is missing, so it"
                    " cannot be resumed; restore the database, or choose another 'output'",
                    key="output",
                )
            return
        if has_store:
            store = SqliteJobStore(files.store)
            try:
                counts = await store.counts()
            finally:
                await store.aclose()
            left = sum(counts[state] for state in UNFINISHED)
            if left:
                raise ConfigError(
                    f"output '{files.output}' holds an unfinished run ({left} of {sum(counts.values())} rollouts"
                    " left): continue it with resume=true, or discard it with overwrite=true",
                    key="output",
                )
        elif _has_content(files.output):
            raise ConfigError(
                f"output '{files.output}' exists and is not a run of this pipeline; choose another 'output', or"
                " discard it with overwrite=true",
                key="output",
            )
        files.discard()

    def _materialize(self, agents: list[str]) -> MaterializedInputs:
        return materialize(self._config, self._files.materialized_inputs, agents)

    async def _open(self, store: JobStore, inputs: MaterializedInputs) -> tuple[str, int]:
        """Record the run and its jobs; a resumed one must be the same run."""
        config = self._config
        info = {
            "run_id": config.run_id or new_run_id(),
            "inputs_sha256": inputs.digest,
            "input": str(config.input),
            "validation": config.validation,
        }
        recorded = await store.open_run(info)
        for key, what in (("inputs_sha256", "rows, repeats or parameters"), ("validation", "'validation'")):
            if recorded[key] != info[key]:
                raise ConfigError(
                    f"output '{self._files.output}' holds run '{recorded['run_id']}' with other {what}; a resumed run"
                    " keeps them: choose another 'output', or discard it with overwrite=true",
                    key="resume",
                )
        run_id = str(recorded["run_id"])
        self._keep_configuration()
        batch = []
        for spec in job_specs(inputs.path, run_id):
            batch.append(spec)
            if len(batch) == SUBMIT_BATCH:
                await store.submit(batch)
                batch = []
        await store.submit(batch)
        # Whoever held the jobs before is gone: this process holds the output's lock.
        await store.release()
        if config.retry_failed:
            await store.reset(JobSelector(states=frozenset({JobState.FAILED, JobState.CANCELLED})))
        return run_id, inputs.rollouts

    def _keep_configuration(self) -> None:
        """Beside the results, so that they can be graded again when the servers' own directory is gone."""
        if self._configuration is None or not self._configuration.exists():
            return
        try:
            shutil.copyfile(self._configuration, self._files.configuration)
        except OSError as error:
            raise store_error(self._files.configuration, error) from error

    async def _tally(self, store: JobStore) -> Tally:
        tally = Tally()
        done = JobSelector(states=frozenset(state for state in JobState if state.terminal))
        async for record in store.iterate(done):
            if record.result is not None:
                tally.add_row(record.spec.agent, orjson.loads(record.result))
        return tally

    # During

    async def _drive(self, store: JobStore, tally: Tally, total: int) -> None:
        config = self._config
        stages = http_stages(self._peers, config, chosen_topology(self._client))
        with RunProgress(total, tally, self._console) as progress:
            listener: JobListener = progress
            dispatcher = AsyncDispatcher(store, stages, config, self._routes.__getitem__, listener=listener)
            await dispatcher.start()
            try:
                await dispatcher.drain()
            except asyncio.CancelledError:
                self._say(f"stopping; continue with the same command and resume=true (output {self._files.output})")
                raise
            finally:
                await _uninterrupted(dispatcher.stop)

    # After

    async def _conclude(
        self, store: JobStore, run_id: str, inputs: MaterializedInputs, start: float
    ) -> CollectionResult:
        summaries: list[RolloutSummary] = []
        rows: dict[str, list[dict[str, Any]]] = {agent: [] for agent in self._routes}
        tally = Tally()
        async for record in store.iterate(JobSelector()):
            row = orjson.loads(record.result) if record.result is not None else {}
            if not row:
                continue
            summaries.append(RolloutSummary.of_row(row))
            tally.add_row(record.spec.agent, row)
            if record.state is JobState.DONE and not self._config.disable_aggregation:
                rows[record.spec.agent].append(for_aggregation(row))
        aggregates: list[dict[str, Any]] = []
        if not self._config.disable_aggregation:
            for agent, counted in tally.agents.items():
                total = counted.valid + counted.invalid
                aggregates.append(await aggregate(self._peers, self._routes[agent], rows[agent], counted, total))
            await asyncio.to_thread(write_aggregates, self._files.aggregate_metrics, aggregates)
        return CollectionResult(
            run_id=run_id,
            files=self._files,
            tasks=inputs.tasks,
            rollouts=inputs.rollouts,
            valid=sum(counted.valid for counted in tally.agents.values()),
            invalid=sum(counted.invalid for counted in tally.agents.values()),
            seconds=asyncio.get_running_loop().time() - start,
            aggregates=aggregates,
            summaries=summaries,
        )

    def _show(self, result: CollectionResult) -> None:
        console = self._console
        if console is None:
            return
        title = f"{result.rollouts} rollouts of {result.tasks} tasks in {result.seconds:.1f} s"
        if self._config.validation is not None:
            title += f" (validation: {self._config.validation})"
        print_table(console, result.summaries, title=title)
        tally = Tally()
        for item in result.summaries:
            tally.add_row(item.agent, {"reward": item.reward, "failure_kind": item.outcome, "findings": item.findings})
        print_agents(console, tally)
        print_key_metrics(console, result.aggregates)
        files = result.files
        for name, path in (
            ("Rollouts", files.output),
            ("Materialized inputs", files.materialized_inputs),
            ("Failures", files.failures),
            ("Aggregate metrics", files.aggregate_metrics),
        ):
            if path.exists():
                console.print(Text(f"{name}: {path}"), soft_wrap=True)

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(Text(text), soft_wrap=True)


async def run_collection(
    client: ServerClient,
    config: RolloutRunConfig | Mapping[str, Any],
    *,
    console: Console | None = None,
    configuration: Path | None = None,
) -> CollectionResult:
    """Run ``config`` against the servers that ``client`` knows; ``console`` shows progress and the table.
    ``configuration`` is a file that says what these servers are; the results keep a copy.

    ``client`` needs credentials for the agents, environments and models of the run, in the role ``pipeline``.
    Cancelling stops the run in order and leaves it resumable. Raises `ConfigError` and `RowError` before any task
    runs, and `StoreError` when results cannot be recorded.
    """
    if not isinstance(config, RolloutRunConfig):
        config = RolloutRunConfig.parse(config)
    return await Collection(client, config, console=console, configuration=configuration).run()


async def _uninterrupted(action: Callable[[], Any]) -> None:
    """Finish ``action`` even when the caller is cancelled meanwhile; each step of it is bounded."""
    task = asyncio.ensure_future(action())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
