"""One run from its input file to its result files, against running servers."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import structlog
from rich.console import Console
from rich.text import Text

from nemo_gym._util.tasks import finish
from nemo_gym.config.launch import GC_THRESHOLDS
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.contract.verdict import new_run_id
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobRecord, JobSelector, JobState
from nemo_gym.rollouts.nemo_gym_runs import NemoGymRun, has_rows_only, take_over
from nemo_gym.rollouts.report import (
    aggregate,
    counted,
    for_aggregation,
    print_agents,
    print_key_metrics,
    print_reasons,
    print_table,
    warn_of_context,
)
from nemo_gym.rollouts.result_rows import RolloutSummary, RunProgress, Tally
from nemo_gym.rollouts.results import (
    RecordedRun,
    ResultFiles,
    RunFiles,
    check_output,
    check_sources,
    output_lock,
    replaced,
    show_running,
)
from nemo_gym.rollouts.routing import agent_instances, rows_without_prompt, servers_of
from nemo_gym.rollouts.rows import MAX_LISTED, MaterializedInputs, job_specs, materialize, without_rows
from nemo_gym.rollouts.store import SqliteJobStore, SqlJobStore
from nemo_gym.rollouts.store.sql import LOGS_KEY, store_error

log = structlog.get_logger(__name__)

SUBMIT_BATCH = 1000


@dataclass(slots=True)
class CollectionResult:
    """The results of a run."""

    run_id: str
    files: RunFiles
    tally: Tally
    summaries: list[RolloutSummary]
    aggregates: list[dict[str, Any]]
    seconds: float | None = None
    """``None`` if the run was already finished."""
    earlier: int = 0
    """Rollouts that had ended before this start, which ``seconds`` does not count."""
    server_logs: Path | None = None
    left_out: tuple[RowError, ...] = ()
    """Rows of the input that could not be used."""

    @property
    def tasks(self) -> int:
        return len({item.task_index for item in self.summaries})

    @property
    def rollouts(self) -> int:
        return len(self.summaries)

    @property
    def valid(self) -> int:
        return sum(counts.valid for counts in self.tally.agents.values())

    @property
    def invalid(self) -> int:
        return sum(counts.invalid for counts in self.tally.agents.values())


@dataclass(frozen=True, slots=True)
class RunOutlook:
    """What a run will do, known before it starts."""

    inputs: MaterializedInputs
    recorded: RecordedRun | None
    """The run to continue; ``None`` for a new run."""
    finished: bool


class Collection:
    """One run's lock, files, store and pipeline, in the order in which they are opened and closed."""

    def __init__(
        self,
        client: ServerClient,
        config: RolloutRunConfig,
        *,
        console: Console | None,
        configuration: Path | None = None,
        inputs: MaterializedInputs | None = None,
    ) -> None:
        self._configuration = configuration
        self._inputs = inputs
        self._client = client
        self._config = config
        self._console = console
        self._files = RunFiles(config.output, config.store)
        self._core = RolloutCore(client, config, say=self._say)

    @property
    def _server_logs(self) -> Path | None:
        return None if self._configuration is None else (self._configuration.parent / "logs").resolve()

    async def run(self) -> CollectionResult:
        check_sources(self._config, self._files, has_rows=has_rows_only(self._files))
        with output_lock(self._files):
            collector = gc.get_threshold()
            gc.set_threshold(*GC_THRESHOLDS)  # the interpreter's defaults cost a sixth of the pipeline's time
            try:
                result = await self._run_locked()
                result.server_logs = self._server_logs
            finally:
                gc.set_threshold(*collector)
                if self._inputs is not None:
                    self._inputs.close()
        if self._console is not None:
            show(self._console, result, self._config)
        return result

    async def _run_locked(self) -> CollectionResult:
        config, files = self._config, self._files
        start = asyncio.get_running_loop().time()
        begun = await asyncio.to_thread(NemoGymRun.of, config, files)
        recorded = None if begun is not None else await RecordedRun.of(config, files)
        core = self._core
        if config.agent_name is not None:
            servers_of(self._client.global_config_dict, config.agent_name)  # its servers must be configured
        if self._inputs is None:
            self._inputs = await asyncio.to_thread(materialize, config, core.agents)
        inputs = self._inputs
        if begun is not None:
            await asyncio.to_thread(begun.require_same, inputs)
        if recorded is not None:
            recorded.require_same(config, inputs.digest, inputs.lines)
            if changed := recorded.changed_limits(config):
                self._say(f"this run began with other values of {', '.join(changed)}; what has ended is kept as it is")
            if is_finished(config, recorded):
                return await _finished_result_locked(config, recorded)
        for agent in inputs.agents:
            await core.add_route(agent, preflights=False)
        refused = await rows_without_prompt(config, inputs, core.routes, core.peers)
        inputs = without_rows(config, inputs, refused)
        for error in inputs.bad_rows:
            log.warning("row left out", error=error.message)
        if inputs.replaced_agents:
            self._say(f"{config.agent_name} runs all rows, also those that name {', '.join(inputs.replaced_agents)}")
        await core.preflight()
        if begun is not None:
            self._say(f"going on with NeMo Gym's run at {files.output}: {counted(begun.done, 'rollout')} there")
        elif config.overwrite:
            # Only here, after all checks of the new run: until then a failed check leaves the old run in place.
            files.discard()
        sink = ResultFiles(files)
        store = SqliteJobStore(files.store, sink=sink)
        try:
            await store.counts()  # the database is made first: to the next start it shows whose the other files are
            await asyncio.to_thread(inputs.write, files.materialized_inputs)
            run_id, total = await self._open(store, inputs)
            await take_over(files, store, failures=not config.retry_failed)
            await sink.recover(store)
            tally = await self._tally(store)
            earlier = tally.finished
            if earlier < total:  # until they are computed anew, no metrics are better than those of an earlier state
                files.aggregate_metrics.unlink(missing_ok=True)
            await self._drive(store, tally, total)
            result = await self._conclude(store, run_id, start)
            result.earlier = earlier
            result.left_out = inputs.bad_rows
            return result
        finally:
            await store.aclose()
            sink.close()

    # Before

    async def _open(self, store: SqlJobStore, inputs: MaterializedInputs) -> tuple[str, int]:
        """Record the run and its jobs, or continue the recorded run."""
        config = self._config
        info = {
            "run_id": config.run_id or new_run_id(),
            "inputs_sha256": inputs.digest,
            "input": str(config.input),
            "validation": config.validation,
            "sampling": config.sampling_beside_rows,
            "limits": config.limits.model_dump(),
            LOGS_KEY: [] if self._server_logs is None else [str(self._server_logs)],
        }
        run_id = str((await store.open_run(info))["run_id"])
        self._keep_configuration()
        specs = job_specs(self._files.materialized_inputs, run_id)
        while batch := list(islice(specs, SUBMIT_BATCH)):
            await store.submit(batch)
        # The jobs' earlier owner is gone, because this process holds the lock of the output.
        await store.release()
        if config.retry_failed:
            await store.reset(JobSelector(states=frozenset({JobState.FAILED, JobState.CANCELLED})))
        return run_id, inputs.rollouts

    def _keep_configuration(self) -> None:
        """Copy the configuration beside the results, so that they can be graded again when the servers' own directory
        is gone."""
        if self._configuration is None or not self._configuration.exists():
            return
        try:
            shutil.copyfile(self._configuration, self._files.configuration)
        except OSError as error:
            raise store_error(self._files.configuration, error) from error

    async def _tally(self, store: SqlJobStore) -> Tally:
        tally = Tally()
        done = JobSelector(states=frozenset(state for state in JobState if state.terminal))
        async for record, row in _rows(store, done):
            tally.add_row(record.spec.agent, row)
        return tally

    # During

    async def _drive(self, store: SqlJobStore, tally: Tally, total: int) -> None:
        with RunProgress(total, tally, self._console) as progress:
            dispatcher = self._core.dispatcher(
                store, listener=progress, logs=self._files.logs, server_logs=self._server_logs
            )
            await dispatcher.start()
            try:
                async with show_running(self._files.running, dispatcher, self._client):
                    await dispatcher.drain()
            except asyncio.CancelledError:
                self._say(f"stopping; the same command continues (output {self._files.output})")
                raise
            finally:
                await finish(dispatcher.stop())

    # After

    async def _conclude(self, store: SqlJobStore, run_id: str, start: float) -> CollectionResult:
        summaries: list[RolloutSummary] = []
        rows: dict[str, list[dict[str, Any]]] = {agent: [] for agent in self._core.routes}
        tally = Tally()
        async for record, row in _rows(store, JobSelector()):
            summaries.append(RolloutSummary.of_row(row))
            tally.add_row(record.spec.agent, row)
            if record.state is JobState.DONE and not self._config.disable_aggregation:
                rows[record.spec.agent].append(for_aggregation(row, record.spec.row))
        aggregates: list[dict[str, Any]] = []
        if not self._config.disable_aggregation:
            for agent, counts in tally.agents.items():
                items = [item for item in summaries if item.agent == agent]
                servers = self._core.routes[agent]
                aggregates.append(await aggregate(self._core.peers, servers, rows[agent], counts, items))
            await asyncio.to_thread(_write_metrics, self._files.aggregate_metrics, aggregates)
        seconds = asyncio.get_running_loop().time() - start
        return CollectionResult(run_id, self._files, tally, summaries, aggregates, seconds)

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(Text(text), soft_wrap=True)


def _write_metrics(path: Path, aggregates: list[dict[str, Any]]) -> None:
    try:
        with replaced(path) as file:
            file.write(orjson.dumps(aggregates, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    except OSError as error:
        raise store_error(path, error) from error


async def check_run(
    config: RolloutRunConfig, servers: Mapping[str, Any], *, keep: bool, configurations: Iterable[Path] = ()
) -> RunOutlook:
    """Check everything about a run that needs no running servers: input, rows, output and the output's lock.

    ``servers`` is the servers' configuration, ``configurations`` are the files it comes from. With ``keep``, the rows
    are kept for `run_collection`. Raises the errors that `run_collection` would raise, and leaves no files behind."""
    files = RunFiles(config.output, config.store)
    config.check_input()
    check_sources(config, files, configurations, has_rows=has_rows_only(files))
    check_output(files)
    begun = await asyncio.to_thread(NemoGymRun.of, config, files)
    recorded = None if begun is not None else await RecordedRun.of(config, files)
    inputs = await asyncio.to_thread(materialize, config, agent_instances(servers), keep=keep)
    try:
        if begun is not None and keep:
            await asyncio.to_thread(begun.require_same, inputs)
        if recorded is not None:
            recorded.require_same(config, inputs.digest, inputs.lines)
    except ConfigError:
        inputs.close()
        raise
    return RunOutlook(inputs, recorded, recorded is not None and is_finished(config, recorded))


def is_finished(config: RolloutRunConfig, recorded: RecordedRun) -> bool:
    """Return whether nothing is left to do: every rollout has ended, and the metrics are written."""
    if recorded.left or not recorded.rollouts:
        return False
    if config.retry_failed and recorded.counts[JobState.DONE] < recorded.rollouts:
        return False
    return config.disable_aggregation or recorded.files.aggregate_metrics.is_file()


async def finished_result(config: RolloutRunConfig, recorded: RecordedRun) -> CollectionResult:
    """Return the results of a finished run from its files, without a request to any server. Incomplete files are
    repaired."""
    with output_lock(recorded.files):
        return await _finished_result_locked(config, recorded)


async def _finished_result_locked(config: RolloutRunConfig, recorded: RecordedRun) -> CollectionResult:
    """`finished_result` for a caller that holds the output's lock."""
    files = recorded.files
    sink = ResultFiles(files)
    store = SqliteJobStore(files.store, sink=sink)
    summaries, tally = [], Tally()
    try:
        await take_over(files, store)
        await sink.recover(store)
        async for record, row in _rows(store, JobSelector()):
            summaries.append(RolloutSummary.of_row(row))
            tally.add_row(record.spec.agent, row)
    finally:
        await store.aclose()
        sink.close()
    aggregates = [] if config.disable_aggregation else orjson.loads(files.aggregate_metrics.read_bytes())
    return CollectionResult(recorded.run_id, files, tally, summaries, aggregates)


async def _rows(store: SqlJobStore, selector: JobSelector) -> AsyncIterator[tuple[JobRecord, dict[str, Any]]]:
    """Yield the matching jobs that have ended, with their result or failure rows."""
    async for record in store.iterate(selector):
        if record.result is not None:
            yield record, orjson.loads(record.result)


async def show_finished(config: RolloutRunConfig, recorded: RecordedRun, console: Console) -> CollectionResult:
    """Show a finished run again, without a request to any server."""
    result = await finished_result(config, recorded)
    show(console, result, config)
    return result


def show(console: Console, result: CollectionResult, config: RolloutRunConfig) -> None:
    """Print the tables of a run and the paths of its files."""
    title = f"{counted(result.rollouts, 'rollout')} of {counted(result.tasks, 'task')}"
    title += ", finished before" if result.seconds is None else f" in {result.seconds:.1f} s"
    if result.earlier:
        title += f", {result.earlier} of them finished before"
    if config.validation is not None:
        title += f" (validation: {config.validation})"
    print_table(console, result.summaries, title=title)
    print_reasons(console, result.summaries, result.files.logs)
    if left_out := result.left_out:
        console.print(Text(f"Left out: {counted(len(left_out), 'row')} of {config.input}", style="bold"))
        for error in left_out[:MAX_LISTED]:
            console.print(Text(f"  {error.message}"), soft_wrap=True)
        if len(left_out) > MAX_LISTED:
            console.print(f"  … and {len(left_out) - MAX_LISTED} more, named when the run began")
    print_agents(console, result.tally)
    print_key_metrics(console, result.aggregates)
    warn_of_context(console, result.summaries)
    files = result.files
    for name, path in (
        ("Rollouts", files.output),
        ("Materialized inputs", files.materialized_inputs),
        ("Failures", files.failures if result.invalid else None),
        ("Evaluation logs", files.logs),
        ("Aggregate metrics", files.aggregate_metrics),
        ("Server logs", result.server_logs if result.invalid else None),
    ):
        if path is not None and path.exists():
            console.print(Text(f"{name}: {path}"), soft_wrap=True)
    if result.invalid or any(item.findings for item in result.summaries):
        console.print(Text(f"Explained: ng_why {files.output}"), soft_wrap=True)
    if result.seconds is None:
        again = " (rollouts without a verdict: retry_failed=true)" if result.invalid else ""
        done = f"This run is finished, and nothing was run again{again}. overwrite=true discards it and starts anew."
        console.print(Text(done), soft_wrap=True)


async def run_collection(
    client: ServerClient,
    config: RolloutRunConfig | Mapping[str, Any],
    *,
    console: Console | None = None,
    configuration: Path | None = None,
    inputs: MaterializedInputs | None = None,
) -> CollectionResult:
    """Run ``config`` against the servers that ``client`` knows; ``console`` shows progress and the table.
    ``configuration`` is the file that configures these servers; a copy is kept beside the results. ``inputs`` are the
    run's rows, if `check_run` has already read them.

    ``client`` needs credentials for the agents, environments and models of the run, in the role ``pipeline``.
    Cancelling stops the run in an orderly way and leaves it resumable. Raises `ConfigError` and `RowError` before any
    task runs, and `StoreError` when results cannot be recorded.
    """
    if not isinstance(config, RolloutRunConfig):
        config = RolloutRunConfig.parse(config)
    return await Collection(client, config, console=console, configuration=configuration, inputs=inputs).run()
