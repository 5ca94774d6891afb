"""The pipeline's three stages: the parts of one rollout (`nemo_gym.rollout`), each with its own workers and deadline.

An agent that overrides NeMo Gym's ``run()`` seeds and verifies by itself, in the one call of its RUN stage. It gets a
reference to its row, and the verdict is read from the environment, not from the agent's response.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import orjson
import structlog

from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import (
    AGENT_FIELDS,
    MAX_REASON_CHARS,
    NG_FAILURE_CLASS_KEY,
    ROLLOUT_ID_KEY,
    RUN_FIELDS,
    SESSION_KEY,
    VERDICT_FIELDS,
    FailureKind,
    StageError,
    StageFailure,
    StageName,
    dataset_fields,
    failure_of_reply,
    without,
)
from nemo_gym.http.peers import REFUSED, PeerError, Peers
from nemo_gym.http.telemetry import SpanKind, step
from nemo_gym.rollout import RolloutSettings, RolloutSteps, failure_of, required
from nemo_gym.rollouts.interfaces import JobAttempt
from nemo_gym.rollouts.pipeline import STAGE_SECONDS
from nemo_gym.rollouts.result_rows import result_row

VERDICT_TIMEOUT_S = 10.0
"""How long RUN waits, after its deadline or another end, for the verdict of an agent that failed."""
log = structlog.get_logger(__name__)


class HttpStage(ABC):
    """The base class of the three stages; see `Stage`."""

    name: StageName

    def __init__(self, steps: RolloutSteps, workers: int, timeout_s: float) -> None:
        self._steps, self.workers, self.timeout_s = steps, workers, timeout_s
        self._limit_s = timeout_s
        """The configured deadline of the stage's work."""

    async def run(self, attempt: JobAttempt, /) -> bytes:
        """Run the stage and time it. See `classify` for what its exceptions mean."""
        start = time.perf_counter()
        await self._run(attempt)
        duration_s = time.perf_counter() - start
        attempt.timings[f"{self.name}_s"] = duration_s
        STAGE_SECONDS.observe(duration_s, str(self.name))
        return self._result(attempt)

    @abstractmethod
    async def _run(self, attempt: JobAttempt) -> None: ...

    def _result(self, attempt: JobAttempt) -> bytes:
        """Return what is stored of an attempt that has passed the stage, including the time of the stage."""
        return b""

    def classify(self, error: BaseException) -> StageFailure:
        return failure_of(self.name, error, f"{self._limit_s:g} s ({self.name}_timeout_s)")


class InitStage(HttpStage):
    name = StageName.INIT

    async def _run(self, attempt: JobAttempt) -> None:
        servers = attempt.servers
        if not servers.own_run:
            await self._steps.prepare(attempt)
            return
        if servers.model is not None:
            with step("open_session", has_span=False):
                try:
                    await self._steps.open_session(attempt, servers.model)
                except PeerError as error:
                    if error.status not in (404, 405):  # these mean that the model server has no sessions
                        raise
        if servers.environment is not None:
            await self._deposit_row(attempt, servers.environment)

    async def _deposit_row(self, attempt: JobAttempt, environment: str) -> None:
        """Leave the row with the environment, for an agent that seeds and verifies by itself."""
        access = attempt.servers.row_access
        row = attempt.row_with(**{ROLLOUT_ID_KEY: attempt.job.job_id})
        body = {"row": row, "rollout": attempt.rollout, "access": "full" if access == "full" else "public"}
        reply = (await self._steps.peers_of(attempt).post(environment, "/rows", body, idempotent=True)).json()
        attempt.row_ref = required(reply, "row_ref", environment, "/rows", StageName.INIT)
        public = required(reply, "public_row", environment, "/rows", StageName.INIT)
        attempt.public_row = row if access == "full" else public

        attempt.closers["row"] = lambda: self._close_row(attempt)

    async def _close_row(self, attempt: JobAttempt) -> None:
        # Repeat the agent's seed with the same reference: it is idempotent and returns the token that closes.
        peers, session = self._steps.peers_of(attempt), {SESSION_KEY: attempt.envelope()}
        environment = attempt.servers.environment or ""
        seeded = (await peers.post(environment, "/seed_session", session, idempotent=True)).json()
        token = required(seeded, "control_token", environment, "/seed_session", StageName.INIT)
        body = {"rollout": attempt.rollout}
        await peers.post(environment, "/close", body, control_token=token, idempotent=True)

    def adopt(self, attempt: JobAttempt) -> None:
        """Register what a restored attempt has open, in the order of opening."""
        if attempt.session is not None:
            attempt.closers["model session"] = lambda: _unless_forgotten(self._steps.abort_session(attempt))
        if attempt.control_token is not None:
            attempt.closers["environment"] = lambda: _unless_forgotten(self._steps.close_environment(attempt))
        elif attempt.row_ref is not None:
            attempt.closers["row"] = lambda: _unless_forgotten(self._close_row(attempt))


async def _unless_forgotten(release: Awaitable[None]) -> None:
    """Release something that an earlier process opened. If its server started anew since, nothing is open there."""
    try:
        await release
    except PeerError as error:
        if error.status not in REFUSED:
            raise


class RunStage(HttpStage):
    """Has the agent work for up to ``timeout_s``; the stage's own deadline is later, by the time for a verdict."""

    name = StageName.RUN

    def __init__(self, steps: RolloutSteps, workers: int, timeout_s: float) -> None:
        super().__init__(steps, workers, timeout_s)
        self.timeout_s += VERDICT_TIMEOUT_S

    async def _run(self, attempt: JobAttempt) -> None:
        if attempt.servers.own_run:
            await self._own_run(attempt)
        else:
            async with asyncio.timeout(self._limit_s):
                await self._steps.work(attempt)

    def _result(self, attempt: JobAttempt) -> bytes:
        return attempt.stored_run()

    async def _own_run(self, attempt: JobAttempt) -> None:
        servers, spec, verdict = attempt.servers, attempt.job.spec, None
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self._own_reply(attempt)
        except (Exception, asyncio.CancelledError) as error:
            # An agent that knows its reward must not get a second try, or discard a bad sample, by failing, hanging or
            # going away now.
            if isinstance(error, asyncio.CancelledError):
                failed = _failure_of_agent(attempt)
            else:
                failed = self.classify(error).reason[:MAX_REASON_CHARS]
            verdict = None if failed is None else await self._known_verdict(attempt)
            if verdict is None:
                raise
            attempt.stop = None
            log.warning("the agent failed after its verdict, which stands", rollout_id=spec.job_id, error=failed)
            attempt.act = {"outcome": AgentOutcome.CRASHED.value, "outcome_detail": failed}
            reply = {"response": {}}
        reply = {**dataset_fields(orjson.loads(spec.row)), **without(reply, RUN_FIELDS)}
        if servers.skipped_reward is not None:
            skipped = {"reward": servers.skipped_reward, "verification_skipped": True}
            reply = {**without(reply, VERDICT_FIELDS), **skipped}
        elif servers.environment is not None:
            verdict = verdict or await self._verdict(attempt, servers.environment)
            reply = {**without(reply, VERDICT_FIELDS), **verdict}
            if (failure := failure_of_reply(StageName.RUN, reply)) is not None:
                raise StageError(failure)
        attempt.verified = reply

    async def _own_reply(self, attempt: JobAttempt) -> dict[str, Any]:
        agent = attempt.servers.agent
        body = {**(attempt.public_row or attempt.row_with()), SESSION_KEY: attempt.envelope()}
        token = attempt.session.inference_token if attempt.session is not None else None
        with step("run", kind=SpanKind.CLIENT, peer=agent):
            sent = self._steps.peers_of(attempt).post(agent, "/run", body, inference_token=token, from_agent=True)
            reply = (await sent).json()
        if not isinstance(reply, dict):
            reason = f"{agent}/run answered no JSON object"
            raise StageError(StageFailure(StageName.RUN, FailureKind.AGENT_CRASHED, reason))
        # What it repeats of the row is no part of its verdict; an equal reward may be an earlier run's.
        decided = VERDICT_FIELDS - {"reward"}
        reply = without(reply, {key for key in decided if key in reply and key in body and reply[key] == body[key]})
        judged = reply
        if (skipped := attempt.servers.skipped_reward) is not None:  # only a failure of the agent's own counts
            judged = {**{key: reply[key] for key in reply.keys() & {NG_FAILURE_CLASS_KEY}}, "reward": skipped}
        if (failure := failure_of_reply(StageName.RUN, judged)) is not None:
            raise StageError(failure)
        return reply

    async def _known_verdict(self, attempt: JobAttempt) -> dict[str, Any] | None:
        """Return the environment's valid verdict on an attempt whose agent has failed, or ``None``."""
        if attempt.servers.environment is None or attempt.servers.skipped_reward is not None:
            return None
        try:
            async with asyncio.timeout(VERDICT_TIMEOUT_S):
                verdict = await self._verdict(attempt, attempt.servers.environment)
        except (PeerError, StageError, TimeoutError):
            return None
        return verdict if failure_of_reply(StageName.RUN, verdict) is None else None

    async def _verdict(self, attempt: JobAttempt, environment: str) -> dict[str, Any]:
        try:
            reply = await self._steps.peers_of(attempt).post(environment, "/verdict", {"rollout": attempt.rollout})
        except PeerError as error:
            if error.status != 409:
                raise
            agent = attempt.servers.agent
            reason = f"agent '{agent}' responded without calling verify of '{environment}'"
            raise StageError(StageFailure(StageName.RUN, FailureKind.VERIFIER_FAILED, reason)) from error
        return without(reply.json(), RUN_FIELDS | AGENT_FIELDS)


def _failure_of_agent(attempt: JobAttempt) -> str | None:
    """Return why an attempt is being stopped, if an agent can cause that: its server went away, or the job's deadline
    has passed. The running task is then no longer cancelled, so that it can ask for the verdict."""
    stop, task = attempt.stop, asyncio.current_task()
    if task is None or stop is None or stop.kind not in (FailureKind.AGENT_LOST, FailureKind.DEADLINE):
        return None
    return stop.reason if task.uncancel() == 0 else None  # the pipeline stops too


class EvalStage(HttpStage):
    """Grades within ``timeout_s``; the stage's own deadline is later, by the time for finalizing the model session.
    The logs of evaluations move from verify responses into files, and the result rows name the files.

    Args:
        finalize_timeout_s: the time limit of finalizing.
        logs: the folder of these files; ``None`` discards the logs.
        log_chars: how many characters of each log are kept, from its end.
        several_runs: jobs may have the same indices and task, so their ids name the files.
    """

    name = StageName.EVAL

    def __init__(
        self,
        steps: RolloutSteps,
        workers: int,
        timeout_s: float,
        *,
        finalize_timeout_s: float,
        validation: str | None,
        logs: Path | None,
        log_chars: int,
        several_runs: bool = False,
    ) -> None:
        super().__init__(steps, workers, timeout_s)
        self.timeout_s += finalize_timeout_s
        self._validation = validation
        self._logs = logs if log_chars else None
        self._log_chars = log_chars
        self._several_runs = several_runs

    def _result(self, attempt: JobAttempt) -> bytes:
        return result_row(attempt, attempt.verified or {}, validation=self._validation)

    async def _run(self, attempt: JobAttempt) -> None:
        # A failed grader costs the verdict, but the policy's work up to then is kept.
        attempt.salvage = lambda: self._salvage(attempt)
        try:
            await self._steps.judge(attempt, self._limit_s)
        finally:
            if (graded := attempt.reply or attempt.verified) is not None:
                await self._keep_log(attempt, graded)

    async def _salvage(self, attempt: JobAttempt) -> dict[str, Any]:
        kept_log = {"evaluation_log": attempt.evaluation_log} if attempt.evaluation_log else {}
        return {**kept_log, **await self._steps.finalize(attempt, {})}

    async def _keep_log(self, attempt: JobAttempt, verified: dict[str, Any]) -> None:
        text, directory, spec = verified.pop("evaluation_log", None), self._logs, attempt.job.spec
        if directory is None or not isinstance(text, str) or attempt.row_with().get("evaluation_log") == text:
            return  # not kept, no log, or a field that the dataset row itself has
        # The indices come first, so that no id is the name of a server's log, which may be in the same folder.
        name = spec.job_id if self._several_runs else spec.task_id
        file = directory / f"{spec.task_index}-{spec.sample_index}-{name}.log"
        try:
            await asyncio.to_thread(_write_log, file, text[-self._log_chars :])
        except OSError as error:
            log.warning("evaluation log not kept", rollout_id=spec.job_id, path=str(file), error=str(error))
            return
        verified["evaluation_log"] = attempt.evaluation_log = f"{directory.name}/{file.name}"


def _write_log(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="replace")


def http_stages(
    peers: Peers,
    config: PipelineConfig,
    topology: str | None,
    *,
    logs: Path | None = None,
    several_runs: bool = False,
) -> tuple[InitStage, RunStage, EvalStage]:
    """Return the stages of a run, with its worker counts and deadlines.

    Args:
        topology: the composition's choice; ``None`` lets the environment use its default.
        logs: the folder for the logs of evaluations.
        several_runs: the jobs may be of several runs; see `EvalStage`.
    """
    settings = RolloutSettings(
        limits=config.limits.model_dump(exclude_none=True),
        model_limits=config.model_limits.given(),
        topology=topology,
        validation=config.validation,
        sampling=config.sampling,
        base_seed=config.base_seed,
        finalize_timeout_s=config.close_timeout_s,
    )
    steps = RolloutSteps(peers, settings)
    init, run, eval_ = config.workers
    return (
        InitStage(steps, init, config.init_timeout_s),
        RunStage(steps, run, config.run_timeout_s),
        EvalStage(
            steps,
            eval_,
            config.eval_timeout_s,
            finalize_timeout_s=config.close_timeout_s,
            validation=config.validation,
            logs=logs,
            log_chars=config.evaluation_log_chars,
            several_runs=several_runs,
        ),
    )
