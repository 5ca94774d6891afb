"""The ProRL Agent Server as an object: it runs instances through three pools of workers, and returns their results.

    process ──▶ INIT (handler.init) ──▶ RUN (handler.run, runtime closed) ──▶ EVAL (handler.eval) ──▶ result

Its own thread runs an event loop with the pipeline's stage pools; every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import orjson
import structlog

import nemo_gym.prorl.handlers  # noqa: F401 - registers the suite's own
from nemo_gym._util.tasks import BackgroundTasks, LoopThread
from nemo_gym.contract.errors import ConfigError, ContractError, NemoGymError, require_whole
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.contract.verdict import StageFailure
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.prorl.jobs import CLOSE_TIMEOUT_S, STAGE_TIMEOUT_S, STATUS_KEYS, HandlerJob, JobPools, kind_of
from nemo_gym.prorl.llm_servers import LlmServers, NoLlmServerError
from nemo_gym.prorl.registry import (
    DEFAULT_MAX_ITERATIONS,
    AgentHandler,
    JobDetails,
    call_optional,
    data_source_of,
    handler_of,
    instance_id_of,
    row_of,
)

__all__ = ["NoLlmServerError", "NotRunningError", "OpenHandsServer"]

TIMEOUT_S = 7200.0
KEPT_RESULTS = 64
"""How many results are kept for repeated requests: of jobs that succeeded and whose caller chose their id."""
MAX_JOB_ID = 100

log = structlog.get_logger(__name__)
T = TypeVar("T")


class NotRunningError(NemoGymError):
    """The server was not started, or has stopped."""

    code = "not_running"
    status = 503


class UnknownJobError(ContractError):
    """No running job has that id."""

    code = "unknown_job"
    status = 404


class OpenHandsServer:
    """Runs instances, as the module describes.

    Args:
        llm_server_addresses: OpenAI-compatible servers, as URLs, pairs of a URL and its weight, or a mapping of URLs
            to weights. More may come with `add_llm_server_address`.
        max_eval_workers: as many as run workers by default.
        allow_skip_eval: handlers may skip the evaluation of runs that produced nothing.
        timeout_s: the limit for a job's init, run and eval together; waiting in queues does not count.
    """

    def __init__(
        self,
        llm_server_addresses: Iterable[Any] | Mapping[str, float] | None = None,
        max_init_workers: int = 6,
        max_run_workers: int = 5,
        max_eval_workers: int | None = None,
        allow_skip_eval: bool = False,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.max_init_workers = require_whole("max_init_workers", max_init_workers, 1)
        self.max_run_workers = require_whole("max_run_workers", max_run_workers, 1)
        eval_workers = max_run_workers if max_eval_workers is None else max_eval_workers
        self.max_eval_workers = require_whole("max_eval_workers", eval_workers, 1)
        if not isinstance(allow_skip_eval, bool):
            raise ConfigError(f"allow_skip_eval must be True or False, got {allow_skip_eval!r}", key="allow_skip_eval")
        self.allow_skip_eval = allow_skip_eval
        self.timeout_s = _positive("timeout_s", timeout_s)
        self._llm_servers = LlmServers(llm_server_addresses or ())
        self._lifecycle_lock = threading.Lock()
        """Held while starting and stopping."""
        self._lock = threading.Lock()
        """Held briefly, to schedule work on the thread or to use the LLM servers."""
        self._thread: LoopThread | None = None
        self._running = False
        self._finished: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    # Lifecycle

    @property
    def running(self) -> bool:
        return self._running

    def start(self) -> None:
        """Start the workers. Handlers start what they need with their first job."""
        with self._lifecycle_lock:
            if self._running:
                raise ConfigError("the server is running already; stop() it first", key="start")
            self._thread = LoopThread("prorl-server")
            self._thread.run(self._open())
            with self._lock:
                self._running = True

    def stop(self) -> None:
        """End running jobs, each with an error that says so, and release everything they opened; idempotent."""
        self._refuse_own_thread()
        with self._lifecycle_lock:
            with self._lock:
                was_running, self._running = self._running, False
            if was_running and self._thread is not None:
                self._thread.run(self._close())
                self._thread.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # LLM servers

    @property
    def llm_server_addresses(self) -> list[str]:
        with self._lock:
            return self._llm_servers.addresses

    def add_llm_server_address(self, address: Any) -> bool:
        """Add an LLM server for new jobs, or change the weight of a known one. Return whether it was new."""
        with self._lock:
            return self._llm_servers.add(address)

    def clear_llm_server_addresses(self) -> None:
        """Remove all LLM servers; running jobs keep theirs."""
        with self._lock:
            self._llm_servers.clear()

    # Jobs

    def process(
        self,
        instance: Any,
        sampling_params: Mapping[str, Any] | None = None,
        job_id: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Run one instance to its end; blocks, and may be called from any number of threads.

        Without ``job_id`` every call is a new job. The same id with the same instance and parameters is the same job;
        with others it raises `ContractError`. ``sampling_params`` is not changed; its ``max_iterations`` limits the
        job, its other members go to the LLM server. Errors that are known at submission are raised (no handler for
        the ``data_source``, no LLM server, a row that cannot be used); later errors are in the result.
        """
        return self._wait(lambda: self._process(instance, sampling_params, job_id, timeout))

    async def aprocess(
        self,
        instance: Any,
        sampling_params: Mapping[str, Any] | None = None,
        job_id: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """`process` for callers with an event loop. Cancelling the last caller of a job cancels the job."""
        return await asyncio.wrap_future(self._call(lambda: self._process(instance, sampling_params, job_id, timeout)))

    def cancel_job(self, job_id: str, reason: str = "cancelled by a caller") -> float:
        """Stop a job and release its resources; its ``process`` returns ``reason`` as the error. Return the seconds
        that this took. Raises `UnknownJobError` if the job is not running."""
        return self._wait(lambda: self._cancel(job_id, reason))

    def status(self) -> dict[str, int]:
        """Return how many jobs wait for each stage (``init_queue``, …), are in it (``active_init``, …), and how many
        there are in all (``total``)."""

        async def count() -> dict[str, int]:
            return self._pools.status()

        try:
            return self._wait(count)
        except NotRunningError:
            return dict.fromkeys((*STATUS_KEYS, "total"), 0)

    # Between threads

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        async def tracked() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await work()
            finally:
                self._calls.discard(task)

        with self._lock:  # work that is scheduled here begins before `_close` does
            if not self._running or self._thread is None:
                raise NotRunningError("the server is not running; start() it first", retryable=True)
            return self._thread.start(tracked())

    def _refuse_own_thread(self) -> None:
        if self._thread is not None and self._thread.is_here:
            raise ConfigError(
                "a handler works on the server's own loop, which this call would block for ever; use"
                " await server.aprocess(...), or asyncio.to_thread"
            )

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._refuse_own_thread()
        future = self._call(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also if the caller is interrupted
            raise

    # On the loop

    async def _open(self) -> None:
        self._tasks = BackgroundTasks()
        self._calls: set[asyncio.Task[Any]] = set()
        self._used: set[AgentHandler] = set()
        self._pools = JobPools(
            (self.max_init_workers, self.max_run_workers, self.max_eval_workers),
            allow_skip_eval=self.allow_skip_eval,
            on_complete=self._completed,
            on_error=self._withdraw,
        )
        self._pools.start()

    async def _close(self) -> None:
        await self._pools.stop()
        await self._tasks.cancel()
        for handler in self._used:
            try:
                await call_optional(handler, "aclose")
            except Exception as error:  # noqa: BLE001 - a custom handler must not prevent closing the others
                log.warning("handler not closed", handler=handler.name, error=str(error))
        if self._calls:  # their jobs are complete; let them return before the loop ends
            await asyncio.wait(self._calls, timeout=CLOSE_TIMEOUT_S)
        await close_global_aiohttp_client()

    async def _process(
        self, instance: Any, sampling_params: Mapping[str, Any] | None, job_id: str | None, timeout_s: float | None
    ) -> dict[str, Any]:
        params = _parameters(sampling_params)
        iterations = require_whole("max_iterations", params.pop("max_iterations", DEFAULT_MAX_ITERATIONS), 1)
        limit_s = self.timeout_s if timeout_s is None else _positive("timeout", timeout_s)
        handler, instance_id = handler_of(data_source_of(instance)), instance_id_of(instance)
        digest: str | None = None
        if job_id is None:
            job_id = f"{instance_id[: MAX_JOB_ID - 33]}-{uuid.uuid4().hex}"
        else:
            _check_job_id(job_id)
            digest = _digest(instance, params, iterations)
            while (earlier := self._find_job(job_id, digest)) is not None:
                if isinstance(earlier, dict):
                    return earlier
                if earlier.stop is None:
                    return await self._result_of(earlier)
                # It ends without a result, perhaps because this caller had lost its connection: run it again.
                await asyncio.wait({earlier.result})
        with self._lock:
            address = self._llm_servers.next()
        details = JobDetails(job_id, instance, iterations, {**params, "base_url": address})
        job = HandlerJob.submitted(handler, details, instance_id, timeout_s=limit_s, digest=digest)
        self._pools.jobs[job_id] = job
        self._used.add(handler)
        try:
            await call_optional(handler, "check", instance, details.llm_config)
            if self._pools.stopping:
                raise NotRunningError("the server was stopped", retryable=True)
        except BaseException as error:
            self._withdraw(job, error)
            raise
        self._pools.put(job)
        return await self._result_of(job)

    def _find_job(self, job_id: str, digest: str) -> HandlerJob | dict[str, Any] | None:
        """Return the running job of this id, or the result of a finished one, or ``None``. Raises `ContractError` if
        the id belongs to a different job."""
        job, finished = self._pools.jobs.get(job_id), self._finished.get(job_id)
        prior = job.digest if job is not None else finished[0] if finished is not None else digest
        if prior != digest:
            raise ContractError(
                f"job_id '{job_id}' is another job's: its instance and parameters have the digest {prior}, these have"
                f" {digest}; choose another id, or none",
                job_id=job_id,
            )
        return job if job is not None else finished[1] if finished is not None else None

    def _withdraw(self, job: HandlerJob, error: BaseException) -> None:
        """Remove a job that was refused at submission or cannot be completed, and pass the error to its callers."""
        self._pools.jobs.pop(job.job.job_id, None)
        if not job.result.done():
            cause = error if isinstance(error, Exception) else NotRunningError("the job was withdrawn", retryable=True)
            job.result.set_exception(cause)
            job.result.exception()  # mark it as retrieved, because perhaps no caller waits for it

    async def _result_of(self, job: HandlerJob) -> dict[str, Any]:
        job.waiters += 1
        try:
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            if job.waiters == 1 and not job.result.done() and not self._pools.stopping:
                self._tasks.start(self._pools.cancel(job, "its caller has left"))
            raise
        finally:
            job.waiters -= 1

    def _completed(self, job: HandlerJob, result: dict[str, Any], failure: StageFailure | None) -> None:
        if job.digest is None or failure is not None:
            return
        self._finished[job.job.job_id] = (job.digest, result)
        while len(self._finished) > KEPT_RESULTS:
            self._finished.popitem(last=False)

    async def _cancel(self, job_id: str, reason: str) -> float:
        start = time.perf_counter()
        job = self._pools.jobs.get(job_id)
        if job is None:
            raise UnknownJobError(f"no job '{job_id}' is under way", job_id=job_id)
        await self._pools.cancel(job, reason)
        return time.perf_counter() - start


def _parameters(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling_params must be a mapping, not {kind_of(given)}", key="sampling_params")
    return dict(given)


def _digest(instance: Any, params: Mapping[str, Any], iterations: int) -> str:
    body = orjson.dumps([row_of(instance), row_of({"iterations": iterations, **params})], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(body).hexdigest()[:16]


def _check_job_id(job_id: Any) -> None:
    if not isinstance(job_id, str) or not IDENTIFIER.match(job_id) or len(job_id) > MAX_JOB_ID:
        raise ConfigError(
            f"job_id must be a letter or digit and then letters, digits, '.', '_' or '-', up to {MAX_JOB_ID}; got"
            f" {job_id!r}",
            key="job_id",
        )


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= STAGE_TIMEOUT_S:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}", key=name)
    return float(value)
