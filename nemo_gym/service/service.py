"""The service: it runs the jobs of its clients, with the pipeline's core and a store that outlives the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import structlog

from nemo_gym._util.files import write_private
from nemo_gym._util.tasks import BackgroundTasks, Backoff
from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.contract.verdict import new_run_id
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import CancelReport, JobEvent, JobRecord, JobSelector, RunCounts
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.results import lock_of_store, locked_file, under_way
from nemo_gym.rollouts.server_pool import PooledServer, ServerPool, ServerState
from nemo_gym.rollouts.store import SqliteJobStore, SqlJobStore
from nemo_gym.rollouts.store.sql import store_error
from nemo_gym.service.submission import Submissions

log = structlog.get_logger(__name__)

POLL_S = 1.0
"""How often a shared store is polled, because nothing announces changes by other processes."""
LOOK_AGAIN_AT_MOST_S = 60.0
"""The longest pause between checks of an agent that is not ready."""
FEED_PAGE = 4
"""How many results a stream reads at once. A slow client keeps them in memory, and one that went away keeps them until
the garbage collector comes; each may have many megabytes."""
MIN_COUNT_S = 0.5
"""How many seconds, at least, the counts of runs are reused before they are counted again."""
RATE_WINDOW_S = 300.0
"""The period over which the rate of a run is measured."""


class NoSuchJobError(NemoGymError):
    """No job has this id."""

    code = "no_such_job"
    status = 404


class CursorError(NemoGymError):
    """The cursor does not come from this store."""

    code = "cursor"
    status = 400


class StoppedError(NemoGymError):
    """The pipeline has stopped and accepts no jobs."""

    code = "stopped"
    status = 503


class RolloutService:
    """The service over one stack and one store. `open_service` makes it."""

    def __init__(
        self, core: RolloutCore, store: SqlJobStore, config: ServiceConfig, *, store_id: str, state_dir: Path
    ) -> None:
        self.core = core
        self.store = store
        self.config = config
        self.store_id = store_id
        self.closing = asyncio.Event()
        """Set when the service stops; streams then end."""
        self._state_file = state_dir / f"servers-{config.pipeline}.json"
        owner = config.pipeline if store.is_shared() else None
        self.dispatcher: AsyncDispatcher = core.dispatcher(
            store,
            listener=self._on_event,
            logs=state_dir / "logs",
            several_runs=True,
            pooled=True,
            owner=owner,
            sweeps=True,
            server_logs=(state_dir / "logs").resolve(),
        )
        self.submissions = Submissions(core, store, config, run_id=store_id)
        self._unready: dict[str, str] = {}
        """Why an agent was not ready when it was last checked."""
        self._counted: list[RunCounts] = []
        self._counted_until = 0.0
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._new_results = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._writing_entries = asyncio.Lock()

    @property
    def pool(self) -> ServerPool:
        assert self.core.pool is not None
        return self.core.pool

    # Lifecycle

    async def start(self) -> None:
        for agent in self.core.agents:
            self.pool.replicas(agent)
        await self._find_routes()
        for instance, capacity in self.config.capacities.items():
            for server in self.pool.replicas(instance):
                server.capacity = capacity
        for entry in _entries(self._state_file):
            instance, url = entry["instance"], entry["url"]
            try:
                if entry.get("removed") and url in [each.url for each in self.pool.replicas(instance)]:
                    continue  # by now, the composition itself has a server there
                server = self.pool.register(instance, url, capacity=entry["capacity"], credential=entry["credential"])
            except ConfigError as error:  # the composition has changed; it may have the instance again later
                log.warning("a registered server is left out", url=url, error=str(error), file=str(self._state_file))
                continue
            if entry.get("removed"):
                self.pool.remove(server, "an operator removed it")
        await self.dispatcher.start()
        watching = self.pool.watch(every_s=self.config.watch_s, silent_s=self.config.silent_s)
        self._tasks.start(watching, name="watch servers")
        self._tasks.start(self._keep_finding_routes(), name="find agents")

    async def _find_routes(self) -> None:
        """Check the agents whose servers are not known yet."""
        for agent in [agent for agent in self.core.agents if agent not in self.core.routes]:
            try:
                async with asyncio.timeout(self.config.check_s):
                    await self.core.add_route(agent, preflights=False)
            except (NemoGymError, TimeoutError) as error:
                reason = str(error) or f"no answer within {self.config.check_s:g} s (check_s)"
                if self._unready.get(agent) != reason:
                    log.warning("agent is not ready yet", agent=agent, error=reason)
                self._unready[agent] = reason
            else:
                self.dispatcher.notify()

    async def _keep_finding_routes(self) -> None:
        """Keep checking agents that were not ready, because jobs of earlier starts may wait for them."""
        backoff = Backoff(first_s=self.config.watch_s, longest_s=LOOK_AGAIN_AT_MOST_S)
        while len(self.core.routes) < len(self.core.agents) and await backoff.again():
            await self._find_routes()

    def end_streams(self) -> None:
        """End all streams and waiting requests, because the service stops."""
        self.closing.set()
        self._wake_all()

    async def stop(self) -> None:
        self.end_streams()
        await self._tasks.cancel()
        await self.dispatcher.stop()

    # Jobs

    async def submit(self, bodies: list[Any]) -> list[dict[str, Any]]:
        """Submit jobs and return an outcome for each."""
        if (failure := self.dispatcher.failure) is not None:
            raise StoppedError(f"the pipeline has stopped ({failure}); fix that and start the service again")
        outcomes = await self.submissions.submit(bodies)
        if any("error" not in outcome for outcome in outcomes):
            self.dispatcher.notify()
        return outcomes

    async def job(self, job_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Return a job once it has ended or ``wait_s`` seconds have passed. Raises `NoSuchJobError`."""
        if not IDENTIFIER.match(job_id):  # PostgreSQL takes no NUL, and fails every operation of the transaction
            raise NoSuchJobError(f"no job has the id {job_id[:80]!r}")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        selector = JobSelector(job_ids=frozenset({job_id}))
        ended = asyncio.Event()
        self._waiters[job_id].add(ended)
        try:
            while True:
                ended.clear()
                records = await self.store.page(selector, 0, 1)
                if not records:
                    raise NoSuchJobError(f"no job has the id '{job_id}'", job_id=job_id)
                left_s = give_up - loop.time()
                if records[0].state.terminal or left_s <= 0 or self.closing.is_set():
                    return self.view(records[0])
                await self._wait_for(ended, left_s)
        finally:
            self._waiters[job_id].discard(ended)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    async def jobs(self, selector: JobSelector, cursor: str | None, limit: int) -> dict[str, Any]:
        """Return a page of jobs without their results, and the cursor of the next page."""
        records = await self.store.page(selector, self.place_of(cursor), limit, results=False)
        more = len(records) == limit
        return {
            "jobs": [self.view(record) for record in records],
            "cursor": self.cursor(records[-1].place) if more else None,
        }

    async def results(
        self, selector: JobSelector, after: str | None, *, follow: bool, idle_s: float
    ) -> AsyncIterator[JobRecord | None]:
        """Yield the results after a cursor in the order in which they were recorded, and ``None`` after ``idle_s``
        seconds without one. Ends after the last result unless ``follow`` is true, and when the service stops."""
        last = self.place_of(after)
        idle_since = asyncio.get_running_loop().time()
        while True:
            new_results = self._new_results
            records = await self.store.results(selector, last, FEED_PAGE)
            for record in records:
                assert record.result_place is not None
                last = record.result_place
                yield record
            now = asyncio.get_running_loop().time()
            if records:
                idle_since = now
                continue
            if not follow or self.closing.is_set():
                return
            left_s = idle_since + idle_s - now
            if left_s <= 0:
                idle_since = now
                yield None
                continue
            await self._wait_for(new_results, left_s)

    async def _wait_for(self, event: asyncio.Event, left_s: float) -> None:
        """Wait for an event of this process, or until another process may have changed a shared store."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, POLL_S) if self.store.is_shared() else left_s):
                await event.wait()

    async def cancel(self, selector: JobSelector, reason: str) -> CancelReport:
        report = await self.dispatcher.cancel(selector, reason)
        log.info("cancelled", queued=report.queued, active=report.active, seconds=round(report.seconds, 3))
        return report

    async def drain(self, wait_s: float) -> bool:
        """Claim no more jobs. Return whether all attempts have ended within ``wait_s`` seconds."""
        self.dispatcher.pause()
        try:
            async with asyncio.timeout(wait_s):
                await self.dispatcher.quiet()
        except TimeoutError:
            return False
        return True

    # Servers

    async def register(self, instance: str, url: str, capacity: int | None, credential: str | None) -> PooledServer:
        """Add a server, and remember it for later starts. Raises `ConfigError` and `StoreError`."""
        self.pool.replicas(instance)  # refuse an unknown instance before anything is written
        url = url.rstrip("/")
        entry = {"instance": instance, "url": url, "capacity": capacity, "credential": credential}
        await self._write_entry(entry, is_new=True)
        server = self.pool.register(instance, url, capacity=capacity, credential=credential)
        self.dispatcher.notify()
        return server

    async def remove(self, server: PooledServer, reason: str) -> int:
        """Remove a server, and return how many of its attempts were given back."""
        entry = {"instance": server.instance, "url": server.url, "capacity": server.capacity, "credential": None}
        await self._write_entry({**entry, "removed": True}, is_new=False)
        return self.pool.remove(server, reason)

    async def _write_entry(self, entry: dict[str, Any], *, is_new: bool) -> None:
        """Replace the server's entry in the state file; if it has none, add it if it ``is_new``. Entries keep their
        places, also those of removed servers, because a server's place decides its id. Raises `StoreError`."""
        async with self._writing_entries:
            entries = _entries(self._state_file)
            is_known = False
            for place, each in enumerate(entries):
                if each["url"] == entry["url"] and each["instance"] == entry["instance"]:
                    entries[place], is_known = entry, True
                elif each["url"] == entry["url"] and is_new:  # another instance's server was there before
                    entries[place] = {**each, "credential": None, "removed": True}
            if is_new and not is_known:
                entries.append(entry)
            try:
                await asyncio.to_thread(write_private, self._state_file, json.dumps(entries), sync=True)
            except OSError as error:
                raise store_error(self._state_file, error) from error

    # Status

    async def status(self) -> dict[str, Any]:
        counts = await self.store.counts()
        failure = self.dispatcher.failure
        return {
            "store": self.store_id,
            "pipeline": self.config.pipeline,
            "state": "stopped" if failure is not None else "draining" if self.dispatcher.is_paused else "running",
            "failure": None if failure is None else str(failure),
            "jobs": {state.value: count for state, count in counts.items()},
            "under_way": len(self.dispatcher.held),
            "stages": [asdict(stage) for stage in self.dispatcher.stages],
            "servers": [each.as_dict() for each in self.pool.all() if each.state is not ServerState.REMOVED],
            "agents": {agent: agent in self.core.routes for agent in self.core.agents},
        }

    async def runs(self) -> dict[str, Any]:
        """Return the progress of each run, and the running attempts with their servers."""
        loop = asyncio.get_running_loop()
        if (start := loop.time()) >= self._counted_until:
            self._counted = await self.store.runs(RATE_WINDOW_S)
            # Counting blocks the store's writer: use a twentieth of its time at most, however often clients ask.
            self._counted_until = loop.time() + max(MIN_COUNT_S, 20 * (loop.time() - start))
        runs = []
        for run in self._counted:
            unfinished = sum(count for state, count in run.jobs.items() if not state.terminal)
            rate = run.recent / run.recent_s if run.recent > 1 and run.recent_s else None
            runs.append(
                {
                    "run_id": run.run_id,
                    "jobs": {state.value: count for state, count in run.jobs.items()},
                    "retried": run.retried,
                    "waiting_for_retry": run.waiting_for_retry,
                    "per_minute": None if rate is None else round(rate * 60, 3),
                    "seconds_left": unfinished / rate if rate and unfinished else None,
                    "finished_at": run.finished_at,
                }
            )
        return {
            "store": self.store_id,
            "runs": runs,
            "under_way": len(self.dispatcher.held),
            "running": under_way(self.dispatcher, self.core.client),
        }

    def view(self, record: JobRecord) -> dict[str, Any]:
        """Return a job as clients see it: without its row, and with the result as the stored JSON."""
        spec = record.spec
        return {
            "job_id": record.job_id,
            "state": record.state.value,
            "run_id": spec.run_id,
            "group_id": spec.group_id,
            "task_id": spec.task_id,
            "sample_index": spec.sample_index,
            "agent": spec.agent,
            "priority": spec.priority,
            "deadline_s": spec.deadline_s,
            "attempt": record.attempt,
            "digest": spec.digest,
            "failures": [{"stage": each.stage, "kind": each.kind, "reason": each.reason} for each in record.failures],
            "result": None if record.result is None else orjson.Fragment(record.result),
        }

    def cursor(self, place: int) -> str:
        return f"{self.store_id}:{place}"

    def place_of(self, cursor: str | None) -> int:
        """Return a cursor's place; 0 without a cursor. Raises `CursorError` for a cursor that this store did not
        issue."""
        if not cursor:
            return 0
        store_id, _, place = cursor.rpartition(":")
        if store_id != self.store_id or not place.isdecimal() or len(place) > 18:
            raise CursorError(
                f"'{cursor[:80]}' is not a cursor of this store ('{self.store_id}'); leave it out to start from 0"
            )
        return int(place)

    def _on_event(self, event: JobEvent) -> None:
        for ended in self._waiters.get(event.job.job_id, ()):
            ended.set()
        self._wake_all()

    def _wake_all(self) -> None:
        new_results, self._new_results = self._new_results, asyncio.Event()
        new_results.set()
        if self.closing.is_set():
            for waiting in self._waiters.values():
                for ended in waiting:
                    ended.set()


@asynccontextmanager
async def open_service(client: ServerClient, config: ServiceConfig, state_dir: Path) -> AsyncIterator[RolloutService]:
    """Open a service over the servers that ``client`` knows, until the block ends; running jobs then stay queued.

    Raises `ConfigError` for names that the stack does not have or a store that another service uses, and
    `StoreError`.
    """
    async with AsyncExitStack() as undo:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        core = RolloutCore(client, config, say=lambda text: log.info(text), needs_engines=True)
        store = await _open_store(config, state_dir, undo)
        recorded = await store.open_run({"run_id": new_run_id(), "service": True})
        if not recorded.get("service"):
            raise ConfigError(
                f"store '{config.store}' holds the run '{recorded['run_id']}' of ng_run; choose another", key="store"
            )
        # This process owns leases under the pipeline's name; the earlier process of that name is gone.
        await store.release(config.pipeline if store.is_shared() else None)
        service = RolloutService(core, store, config, store_id=str(recorded["run_id"]), state_dir=state_dir)
        undo.push_async_callback(service.stop)
        await service.start()
        yield service


async def _open_store(config: ServiceConfig, state_dir: Path, undo: AsyncExitStack) -> SqlJobStore:
    store: SqlJobStore
    if config.is_postgres:
        from nemo_gym.rollouts.store.postgres import PostgresJobStore

        store = PostgresJobStore(str(config.store), pipeline=config.pipeline)
    else:
        path = Path(config.store).expanduser() if config.store is not None else state_dir / "jobs.sqlite"
        try:
            undo.callback(locked_file(lock_of_store(path)).close)
        except BlockingIOError:
            raise ConfigError(
                f"store '{path}' is another service's or run's on this machine; stop it, or choose another store"
                " (several services share postgresql://…)",
                key="store",
            ) from None
        except OSError as error:
            raise ConfigError(f"store '{path}' cannot be used ({error.strerror})", key="store") from error
        store = SqliteJobStore(path)
    undo.push_async_callback(store.aclose)
    return store


def _entries(path: Path) -> list[dict[str, Any]]:
    """Read the registered servers from the state file."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return entries


def write_address(path: Path, url: str, tokens: Mapping[str, str | None], store_id: str) -> None:
    """Write the service's URL and tokens to a private file, for commands of the same user."""
    address = {"url": url, "tokens": dict(tokens), "store": store_id, "pid": os.getpid()}
    write_private(path, json.dumps(address), sync=True)
