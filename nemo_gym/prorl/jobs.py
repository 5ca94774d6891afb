"""Runs jobs through three pools of workers: the pipeline's stage pools, which call the handlers."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from nemo_gym._util.tasks import finish, without_exit
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import FailureKind, StageError, StageFailure, StageName
from nemo_gym.prorl.registry import AgentHandler, JobDetails, call_optional, plain_number
from nemo_gym.rollout import Servers, failure_of
from nemo_gym.rollouts.interfaces import Job, JobAttempt, JobSpec, JobState, Stop
from nemo_gym.rollouts.pipeline import StagePool

CLOSE_TIMEOUT_S = 60.0
"""The timeout for closing one job's runtime, and for its handler's ``release``."""
STAGE_TIMEOUT_S = 30 * 24 * 3600.0
"""In effect no limit, because a job's own timeout covers all of its stages."""
STATUS_KEYS = ("init_queue", "run_queue", "eval_queue", "active_init", "active_run", "active_eval")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class HandlerJob(JobAttempt):
    """A job on its way through the pools."""

    details: JobDetails = field(kw_only=True)
    handler: AgentHandler = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    result: asyncio.Future[dict[str, Any]] = field(kw_only=True)
    digest: str | None = None
    """The digest of the caller's instance and parameters, if the caller chose the id."""
    place: str = "init_queue"
    """One of `STATUS_KEYS`."""
    waiters: int = 0
    completing: bool = False

    @classmethod
    def submitted(
        cls, handler: AgentHandler, details: JobDetails, instance_id: str, *, timeout_s: float, digest: str | None
    ) -> HandlerJob:
        spec = JobSpec(details.job_id, "prorl", instance_id, details.job_id, 0, 0, handler.name, b"{}")
        return cls(
            servers=Servers(handler.name, None, None),
            rollout={"rollout_id": details.job_id},
            row=b"{}",
            job=Job(spec, JobState.CLAIMED, StageName.INIT, attempt=1),
            details=details,
            handler=handler,
            timeout_s=timeout_s,
            result=asyncio.get_running_loop().create_future(),
            digest=digest,
        )


class HandlerStage:
    """One stage of all jobs; see `nemo_gym.rollouts.interfaces.Stage`."""

    timeout_s = STAGE_TIMEOUT_S

    def __init__(self, name: StageName, workers: int, work: Callable[[HandlerJob], Awaitable[None]]):
        self.name, self.workers, self._work = name, workers, work

    async def run(self, job: HandlerJob, /) -> bytes:
        job.place = f"active_{self.name}"
        left_s = job.timeout_s - sum(job.timings.values())
        start = time.perf_counter()
        try:
            async with asyncio.timeout(max(left_s, 0.001)) as scope:
                await without_exit(partial(self._work, job))
        except TimeoutError as error:
            if not scope.expired():
                raise
            reason = f"the job took longer than its {job.timeout_s:g} s of execution; it ended in {self.name}"
            raise StageError(StageFailure(self.name, FailureKind.DEADLINE, reason, retryable=False)) from error
        finally:
            job.timings[f"{self.name}_s"] = time.perf_counter() - start
        return b""

    def classify(self, error: BaseException) -> StageFailure:
        return failure_of(self.name, error)


class JobPools:
    """The pools of one server, and its jobs. Belongs to the server's event loop.

    Args:
        workers: the numbers of INIT, RUN and EVAL workers.
        on_complete: called for each complete job, with its result and, if it failed, its failure.
        on_error: called for each job that could not be completed.
    """

    def __init__(
        self,
        workers: tuple[int, int, int],
        *,
        allow_skip_eval: bool,
        on_complete: Callable[[HandlerJob, dict[str, Any], StageFailure | None], None],
        on_error: Callable[[HandlerJob, Exception], None],
    ) -> None:
        self.jobs: dict[str, HandlerJob] = {}
        self.stopping = False
        self._allow_skip_eval = allow_skip_eval
        self._on_complete = on_complete
        steps = (
            (StageName.INIT, self._init, self._ready),
            (StageName.RUN, self._run, self._ran),
            (StageName.EVAL, self._eval, self._evaluated),
        )
        ends = (self._complete, self._abandoned, on_error)
        init, run, eval_ = (
            StagePool(HandlerStage(name, count, work), max(1, count // 4), done, *ends)
            for (name, work, done), count in zip(steps, workers, strict=True)
        )
        self._pools = (init, run, eval_)

    def start(self) -> None:
        for pool in self._pools:
            pool.start()

    async def stop(self) -> None:
        """End all jobs, each with an error that says so."""
        self.stopping = True
        for pool in self._pools:
            await pool.stop()
        stopped = StageFailure(StageName.INIT, FailureKind.CANCELLED, "the server was stopped", retryable=True)
        await asyncio.gather(*(self._complete(job, stopped) for job in [*self.jobs.values()]))

    def put(self, job: HandlerJob) -> None:
        """Start a job that is in `jobs`."""
        self._pools[0].put_now(job)

    async def cancel(self, job: HandlerJob, reason: str) -> None:
        """Stop a job, and wait until its resources are released."""
        job.stop = Stop(FailureKind.CANCELLED, reason)
        for pool in self._pools:
            pool.interrupt(job)
        await asyncio.wait({job.result})

    def status(self) -> dict[str, int]:
        places = Counter(job.place for job in self.jobs.values())
        return {**{key: places[key] for key in STATUS_KEYS}, "total": len(self.jobs)}

    # Stages

    async def _init(self, job: HandlerJob) -> None:
        details = job.details
        returned = await job.handler.init(
            details.instance, llm_config=details.llm_config, sid=details.job_id, max_iterations=details.max_iterations
        )
        try:
            details.runtime, details.metadata, details.config = returned
        except (TypeError, ValueError):
            raise ConfigError(
                f"handler '{job.handler.name}': init must return (runtime, metadata, config), not {kind_of(returned)}"
            ) from None

    async def _run(self, job: HandlerJob) -> None:
        details = job.details
        details.start_run_time = time.time()
        try:
            results = await job.handler.run(details.runtime, details.metadata, details.config, details.instance)
        finally:
            await _close_runtime(details)
        details.run_results = _mapping(results, job.handler, "run")

    async def _eval(self, job: HandlerJob) -> None:
        details = job.details
        details.start_eval_time = time.time()
        returned = await job.handler.eval(details, sid=f"eval_{details.job_id}", allow_skip=self._allow_skip_eval)
        results = _mapping(returned, job.handler, "eval")
        report = _mapping(results["report"], job.handler, "eval") if "report" in results else results
        reward = plain_number(report.get("reward"))
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise ConfigError(
                f"handler '{job.handler.name}': eval's 'reward' must be a finite number, not {reward!r}", key="reward"
            )
        details.eval_results = report

    async def _ready(self, job: HandlerJob, _: bytes) -> None:
        job.place = "run_queue"
        await self._pools[1].put(job)

    async def _ran(self, job: HandlerJob, _: bytes) -> None:
        job.place = "eval_queue"
        await self._pools[2].put(job)

    async def _evaluated(self, job: HandlerJob, _: bytes) -> None:
        await self._complete(job, None)

    async def _abandoned(self, job: HandlerJob) -> None:
        """Complete a job that was cancelled while it waited, or whose handler cancelled itself."""
        reason = f"the handler of '{job.job.spec.agent}' was cancelled from within"
        await self._complete(job, StageFailure(StageName.RUN, FailureKind.INTERNAL, reason))

    async def _complete(self, job: HandlerJob, failure: StageFailure | None) -> None:
        if job.result.done() or (job.completing and not self.stopping):
            return
        job.completing = True
        await finish(self._release(job))
        if job.result.done():
            return
        result = _result(job, failure)
        if failure is not None:
            log.warning("job failed", job_id=job.job.job_id, stage=failure.stage, reason=failure.reason)
        del self.jobs[job.job.job_id]
        self._on_complete(job, result, failure)
        job.result.set_result(result)
        job.details.event.set()

    async def _release(self, job: HandlerJob) -> None:
        await _close_runtime(job.details)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await call_optional(job.handler, "release", job.details)
        except Exception as error:  # noqa: BLE001 - the job is complete even if its release fails
            log.warning("job not released", job_id=job.job.job_id, error=str(error) or type(error).__name__)


def _result(job: HandlerJob, failure: StageFailure | None) -> dict[str, Any]:
    """Return the result of `OpenHandsServer.process`: the results of run, with the server's own members, which win."""
    details = job.details
    evaluation = details.eval_results or {}
    reward = None if failure is not None else evaluation.get("reward")
    resolved = None if failure is not None else evaluation.get("resolved")
    if reward is None and isinstance(resolved, bool):
        reward = float(resolved)
    failure_details = None
    if failure is not None:
        failure_details = {
            "stage": str(failure.stage),
            "kind": str(failure.kind),
            "reason": failure.reason,
            "retryable": failure.retryable,
            **({"status": 0} if failure.details.get("status") == 0 else {}),  # a server did not respond
        }
    results = details.run_results or {}
    return {
        **results,
        "job_id": details.job_id,
        "instance_id": job.job.spec.task_id,
        "data_source": job.handler.name,
        "llm_server": details.llm_config["base_url"],
        "success": failure is None,
        "error": f"{failure.stage}: {failure.reason}" if failure is not None else results.get("error"),
        "failure": failure_details,
        "eval_results": None if failure is not None else details.eval_results,
        "reward": reward,
        "resolved": resolved,
        "timing": {name: round(seconds, 6) for name, seconds in job.timings.items()},
    }


async def _close_runtime(details: JobDetails) -> None:
    """Close the job's runtime, if no earlier call has done so."""
    runtime, details.runtime = details.runtime, None
    close = getattr(runtime, "close", None)
    if not callable(close):
        return
    try:
        await finish(_closed(close), timeout_s=CLOSE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the results of run are valid even if the runtime cannot be closed
        log.warning("runtime not closed", job_id=details.job_id, error=str(error) or type(error).__name__)


async def _closed(close: Callable[[], Any]) -> None:
    if inspect.iscoroutinefunction(close):
        await close()
    else:
        closing = await asyncio.to_thread(close)  # OpenHands' own ``close`` blocks
        if inspect.isawaitable(closing):
            await closing


def _mapping(value: Any, handler: AgentHandler, stage: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"handler '{handler.name}': {stage} must return a mapping, not {kind_of(value)}", key=stage)
    return dict(value)


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
