"""The three stages over HTTP: seed, act, verify, and what opens and closes around them.

INIT  gateway session ◀─ model server; descriptor and control token ◀─ environment
RUN   response, outcome, artifacts ◀─ agent server (its open connection is the attempt's heartbeat);
      artifacts ◀─ environment, where it owns the box (heartbeats from seed to harvest)
EVAL  verdict ◀─ environment; trajectories ◀─ model server
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import structlog

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.identity import ROLLOUT_ID_KEY
from nemo_gym.contract.model_limits import REQUEST_TIMEOUT_S
from nemo_gym.contract.rows import NO_PROMPT, SESSION_KEY, has_prompt
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.rollouts import failures
from nemo_gym.rollouts.attempt import Attempt, GatewaySession, public_params_of
from nemo_gym.rollouts.failures import PeerError, StageError
from nemo_gym.rollouts.heartbeat import start_heartbeat, stop_heartbeat
from nemo_gym.rollouts.interfaces import StageFailure, StageName, StageResult
from nemo_gym.rollouts.peers import Peers
from nemo_gym.rollouts.rowmaking import OWN_FIELDS, result_row

log = structlog.get_logger(__name__)


class HttpStage(ABC):
    """What the three have in common; see `Stage`."""

    name: StageName

    def __init__(self, peers: Peers, config: RolloutRunConfig, *, workers: int, timeout_s: float) -> None:
        self._peers = peers
        self._config = config
        self._workers = workers
        self._timeout_s = timeout_s
        self._limits = config.limits.model_dump(exclude_none=True)
        """The limits that the run sets; empty where it leaves them to environment and agent."""

    @property
    def workers(self) -> int:
        return self._workers

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    async def run(self, attempt: Attempt) -> StageResult:
        """Raises `StageError` with the typed failure."""
        start = time.perf_counter()
        payload = await self._run(attempt)
        duration_s = time.perf_counter() - start
        attempt.timings[f"{self.name}_s"] = duration_s
        return StageResult(self.name, payload, duration_s)

    @abstractmethod
    async def _run(self, attempt: Attempt) -> bytes: ...

    def _peers_of(self, attempt: Attempt) -> Peers:
        return self._peers.of_attempt(attempt.replicas)

    def classify(self, error: BaseException) -> StageFailure:
        if isinstance(error, StageError):
            return error.failure
        if isinstance(error, PeerError):
            return failures.of_peer(self.name, error)
        again = self.name is not StageName.EVAL
        if isinstance(error, TimeoutError):
            reason = f"stage '{self.name}' took longer than {self.timeout_s:g} s ({self.name}_timeout_s)"
            return StageFailure(self.name, FailureKind.DEADLINE, reason, new_attempt=again)
        reason = f"{type(error).__name__}: {error}"[: failures.MAX_REASON_CHARS]
        retryable = not isinstance(error, NemoGymError) or error.retryable
        return StageFailure(self.name, FailureKind.INTERNAL, reason, retryable=retryable, new_attempt=again)


class InitStage(HttpStage):
    name = StageName.INIT

    def __init__(
        self, peers: Peers, config: RolloutRunConfig, *, workers: int, timeout_s: float, topology: str | None = None
    ) -> None:
        super().__init__(peers, config, workers=workers, timeout_s=timeout_s)
        self._topology = topology
        """The composition's choice; ``None`` leaves the environment its default."""
        self._model_limits = config.model_limits.given()

    async def _run(self, attempt: Attempt) -> bytes:
        route = attempt.route
        if route.opaque_run:
            if route.environment is not None:
                await self._deposit_row(attempt, route.environment)
            return b"{}"
        if route.model is not None:
            await self._open_session(attempt, route.model)
        if route.environment is not None:
            attempt.closers.append(lambda: self._close_environment(attempt))
            await self._seed(attempt, route.environment)
        return b"{}"

    async def _deposit_row(self, attempt: Attempt, environment: str) -> None:
        """Leave the row with the environment: an agent that seeds and verifies by itself gets a reference to it."""
        access = attempt.route.row_access
        row = attempt.row_with(**{ROLLOUT_ID_KEY: attempt.job.job_id})
        body = {"row": row, "rollout": attempt.rollout, "access": "full" if access == "full" else "public"}
        reply = (await self._peers_of(attempt).post(environment, "/rows", body, idempotent=True)).json()
        attempt.row_ref = _member(reply, "row_ref", environment, "/rows", StageName.INIT)
        public = _member(reply, "public_row", environment, "/rows", StageName.INIT)
        attempt.public_row = row if access == "full" else public

        async def close() -> None:
            # The agent's seed is repeated with the same reference: idempotent, and it returns the token that closes.
            session = {SESSION_KEY: opaque_session(attempt)}
            seeded = (
                await self._peers_of(attempt).post(environment, "/seed_session", session, idempotent=True)
            ).json()
            token = _member(seeded, "control_token", environment, "/seed_session", StageName.INIT)
            body = {"rollout": attempt.rollout}
            await self._peers_of(attempt).post(environment, "/close", body, control_token=token, idempotent=True)

        attempt.closers.append(close)

    async def _open_session(self, attempt: Attempt, model: str) -> None:
        body = {"rollout": attempt.rollout, **self._sampling(attempt)}
        if self._model_limits:
            body["limits"] = self._model_limits
        opened = (await self._peers_of(attempt).post(model, "/sessions", body)).json()
        attempt.session = session = GatewaySession(
            session_id=_member(opened, "session_id", model, "/sessions", StageName.INIT),
            base_url=_member(opened, "base_url", model, "/sessions", StageName.INIT),
            inference_token=_member(opened, "inference_token", model, "/sessions", StageName.INIT),
            control_token=_member(opened, "control_token", model, "/sessions", StageName.INIT),
            model=opened.get("model") or "policy",
            request_timeout_s=opened.get("request_timeout_s") or REQUEST_TIMEOUT_S,
        )

        async def abort() -> None:
            if attempt.session is not None:  # not finalized
                path = f"/sessions/{session.session_id}/abort"
                await self._peers_of(attempt).post(
                    model, path, {}, control_token=session.control_token, idempotent=True
                )
                attempt.session = None

        attempt.closers.append(abort)

    def _sampling(self, attempt: Attempt) -> dict[str, Any]:
        if self._config.base_seed is None:
            return {}
        return {"sampling": {"seed": self._config.base_seed + attempt.job.spec.sample_index}}

    async def _seed(self, attempt: Attempt, environment: str) -> None:
        validation = self._config.validation
        session: dict[str, Any] = {"rollout": attempt.rollout}
        if validation:
            session["validation"] = validation
        if self._topology is not None:
            session["topology"] = self._topology
        if self._limits:
            session["limits"] = self._limits
        if attempt.route.box_needs is not None:
            session["box_needs"] = attempt.route.box_needs
        body = attempt.row_with(**{SESSION_KEY: session})
        try:
            reply = await self._peers_of(attempt).post(environment, "/seed_session", body, idempotent=True)
        except PeerError as error:
            attempt.seed_refused = error.status != 0
            raise
        seeded = reply.json()
        attempt.descriptor = _member(seeded, "descriptor", environment, "/seed_session", StageName.INIT)
        attempt.control_token = _member(seeded, "control_token", environment, "/seed_session", StageName.INIT)
        attempt.cookies = reply.cookies
        if isinstance(beat_s := seeded.get("heartbeat_s"), int | float):
            start_heartbeat(attempt, self._peers_of(attempt), environment, beat_s)
        public = seeded.get("public_row")
        if isinstance(public, dict) and "responses_create_params" in public:
            attempt.public_params = public["responses_create_params"]
        params = attempt.public_params or public_params_of(attempt.job.spec.row)
        if attempt.route.needs_prompt and not has_prompt(params):
            # Nobody was asked anything: whatever came of it would be no reward.
            kind = FailureKind.SEED_FAILED
            raise StageError(StageFailure(StageName.INIT, kind, NO_PROMPT, retryable=False))
        if validation:
            if seeded.get("validation") is None:
                raise StageError(
                    StageFailure(
                        StageName.INIT,
                        FailureKind.SEED_FAILED,
                        f"environment '{environment}' gives no solution for validation={validation}",
                        retryable=False,
                    )
                )
            attempt.validation = seeded["validation"]

    async def _close_environment(self, attempt: Attempt) -> None:
        environment = attempt.route.environment
        assert environment is not None
        if attempt.control_token is None:
            if attempt.seed_refused:
                return
            # A seed whose answer we never saw may have opened something. Seeding again is idempotent and returns the
            # token that closes it.
            await self._seed(attempt, environment)
        body = {"rollout": attempt.rollout}
        await self._peers_of(attempt).post(
            environment,
            "/close",
            body,
            control_token=attempt.control_token,
            cookies=attempt.cookies,
            idempotent=True,
        )


class RunStage(HttpStage):
    name = StageName.RUN

    async def _run(self, attempt: Attempt) -> bytes:
        if attempt.route.opaque_run:
            return await self._run_opaque(attempt)
        agent, session = attempt.route.agent, attempt.session
        endpoint = (
            {
                "base_url": session.base_url,
                "token": session.inference_token,
                "model": session.model,
                "request_timeout_s": session.request_timeout_s,
            }
            if session is not None
            else {"base_url": "", "token": "", "model": ""}
        )
        body = {
            "responses_create_params": attempt.public_params or public_params_of(attempt.job.spec.row),
            "descriptor": attempt.descriptor,
            "inference": endpoint,
        }
        if self._limits:
            body["limits"] = self._limits
        if attempt.validation is not None:
            body["validation"] = attempt.validation
        reply = await self._peers_of(attempt).post(agent, "/act", body, cookies=attempt.cookies, from_agent=True)
        act = reply.json()
        _member(act, "response", agent, "/act", StageName.RUN)
        failure = failures.of_outcome(_outcome(act, agent), act.get("outcome_detail"))
        if failure is not None and act.get("within_reach") is not True:
            raise StageError(failure)
        attempt.act = act
        if attempt.heartbeat is None:
            return stored_run(attempt, orjson.Fragment(reply.body))
        act["artifacts"] = await self._harvest(attempt)
        return stored_run(attempt, act)

    async def _harvest(self, attempt: Attempt) -> list[Any]:
        """What is in the environment's box. The agent has no part in it: its lease of the box ends first."""
        environment = attempt.route.environment
        assert environment is not None
        reply = await self._peers_of(attempt).post(
            environment,
            "/harvest",
            {"rollout": attempt.rollout},
            control_token=attempt.control_token,
            cookies=attempt.cookies,
            idempotent=True,
        )
        await stop_heartbeat(attempt)
        artifacts: list[Any] = _member(reply.json(), "artifacts", environment, "/harvest", StageName.RUN)
        return artifacts

    async def _run_opaque(self, attempt: Attempt) -> bytes:
        """One call to an agent that seeds and verifies by itself. The verdict is read from the environment, not from
        the agent's answer."""
        route, spec = attempt.route, attempt.job.spec
        try:
            reply = await self._opaque_reply(attempt)
        except (PeerError, StageError) as error:
            # Who has been told its reward buys no second try by failing now, nor gets rid of a bad sample.
            verdict = await self._known_verdict(attempt)
            if verdict is None:
                raise
            failed = str(error)[: failures.MAX_REASON_CHARS]
            log.warning("the agent failed after its verdict, which stands", rollout_id=spec.job_id, error=failed)
            attempt.act = {"outcome": AgentOutcome.CRASHED.value, "outcome_detail": failed}
            reply = {"response": {}, **verdict}
        if route.environment is not None:
            reply = {key: value for key, value in reply.items() if key not in OWN_FIELDS}
            reply = {**orjson.loads(spec.row), **reply, **await self._verdict(attempt, route.environment)}
            if (failure := failures.of_verdict(StageName.RUN, reply)) is not None:
                raise StageError(failure)
        attempt.verified = reply
        return orjson.dumps({"verified": reply})

    async def _opaque_reply(self, attempt: Attempt) -> dict[str, Any]:
        agent = attempt.route.agent
        body = {**(attempt.public_row or attempt.row_with()), SESSION_KEY: opaque_session(attempt)}
        reply = (await self._peers_of(attempt).post(agent, "/run", body, from_agent=True)).json()
        if not isinstance(reply, dict):
            reason = f"{agent}/run answered no JSON object"
            raise StageError(StageFailure(StageName.RUN, FailureKind.AGENT_CRASHED, reason))
        if (failure := failures.of_verdict(StageName.RUN, reply)) is not None:
            raise StageError(failure)
        return reply

    async def _known_verdict(self, attempt: Attempt) -> dict[str, Any] | None:
        """The environment's valid verdict of an attempt whose agent has failed."""
        if attempt.route.environment is None:
            return None
        try:
            verdict = await self._verdict(attempt, attempt.route.environment)
        except (PeerError, StageError):
            return None
        return verdict if failures.of_verdict(StageName.RUN, verdict) is None else None

    async def _verdict(self, attempt: Attempt, environment: str) -> dict[str, Any]:
        try:
            reply = await self._peers_of(attempt).post(environment, "/verdict", {"rollout": attempt.rollout})
        except PeerError as error:
            if error.status != 409:
                raise
            reason = f"agent '{attempt.route.agent}' answered without having asked '{environment}' for a verdict"
            raise StageError(StageFailure(StageName.RUN, FailureKind.VERIFIER_FAILED, reason)) from error
        verdict: dict[str, Any] = reply.json()
        return verdict


class EvalStage(HttpStage):
    name = StageName.EVAL

    def __init__(
        self, peers: Peers, config: RolloutRunConfig, *, workers: int, timeout_s: float, logs: Path | None = None
    ) -> None:
        super().__init__(peers, config, workers=workers, timeout_s=timeout_s)
        self._logs = logs if config.evaluation_log_chars else None
        """Where the logs of evaluations go; ``None`` keeps none."""

    async def run(self, attempt: Attempt) -> StageResult:
        result = await super().run(attempt)
        # The row holds its own EVAL time, so it is made when the stage is over.
        row = result_row(attempt, attempt.verified or {}, validation=self._config.validation)
        return StageResult(StageName.EVAL, row, result.duration_s)

    async def _run(self, attempt: Attempt) -> bytes:
        environment = attempt.route.environment
        # A grader that fails takes the verdict, not what the policy did until then.
        attempt.salvage = lambda: self._salvage(attempt)
        if attempt.verified is None and attempt.route.skipped_reward is not None:
            attempt.verified = attempt.row_with(
                response=attempt.act["response"], reward=attempt.route.skipped_reward, verification_skipped=True
            )
        elif attempt.verified is None:
            assert environment is not None
            attempt.verified = await self._verify(attempt, environment)
        else:
            await self._keep_log(attempt, attempt.verified)
        attempt.verified |= await self._finalize(attempt, attempt.verified)
        return b""

    async def _verify(self, attempt: Attempt, environment: str) -> dict[str, Any]:
        act = attempt.act
        session = {
            "rollout": attempt.rollout,
            "artifacts": act.get("artifacts") or [],
            "outcome": act.get("outcome", AgentOutcome.COMPLETED),
        }
        body = attempt.row_with(**{"response": act["response"], SESSION_KEY: session})
        reply = await self._peers_of(attempt).post(
            environment,
            "/verify",
            body,
            control_token=attempt.control_token,
            cookies=attempt.cookies,
            idempotent=True,
        )
        verified = reply.json()
        if not isinstance(verified, dict):
            reason = f"{environment}/verify answered no JSON object"
            raise StageError(StageFailure(StageName.EVAL, FailureKind.VERIFIER_FAILED, reason, new_attempt=False))
        await self._keep_log(attempt, verified)
        if (failure := failures.of_verdict(StageName.EVAL, verified)) is not None:
            raise StageError(failure)
        return verified

    async def _keep_log(self, attempt: Attempt, verified: dict[str, Any]) -> None:
        """Move the evaluation's log from the verdict into its file, which the row then names."""
        log_text, logs, spec = verified.get("evaluation_log"), self._logs, attempt.job.spec
        if log_text is None or attempt.row_with().get("evaluation_log") == log_text:
            return  # nothing, or a field of the row's own
        del verified["evaluation_log"]
        if logs is None or not isinstance(log_text, str):
            return
        file = logs / f"{spec.task_index}-{spec.sample_index}-{spec.task_id}.log"
        try:
            await asyncio.to_thread(_write_log, file, log_text[-self._config.evaluation_log_chars :])
        except OSError as error:
            log.warning("evaluation log not kept", rollout_id=spec.job_id, path=str(file), error=str(error))
            return
        verified["evaluation_log"] = attempt.evaluation_log = f"{logs.name}/{file.name}"

    async def _salvage(self, attempt: Attempt) -> dict[str, Any]:
        kept_log = {"evaluation_log": attempt.evaluation_log} if attempt.evaluation_log else {}
        return {**kept_log, **await self._finalize(attempt, {})}

    async def _finalize(self, attempt: Attempt, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Close the model session for its trajectories. The verdict stands without them, and the row says so."""
        session, model = attempt.session, attempt.route.model
        if session is None or model is None:
            return {}
        path, body = f"/sessions/{session.session_id}/finalize", reward_of(verdict)
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                reply = await self._peers_of(attempt).post(
                    model, path, body, control_token=session.control_token, idempotent=True
                )
        except (PeerError, TimeoutError) as error:
            log.warning("session not finalized", rollout_id=attempt.job.job_id, error=str(error))
            return {"ng_model_session": {"error": str(error) or "timed out"}}
        attempt.session = None
        finalized = reply.json()
        trajectories = finalized.pop("trajectories", None)
        return {"ng_model_session": finalized, **({"ng_trajectory": trajectories} if trajectories else {})}


def _write_log(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="replace")


def http_stages(
    peers: Peers, config: RolloutRunConfig, topology: str | None, *, logs: Path | None = None
) -> tuple[InitStage, RunStage, EvalStage]:
    """The stages of a run, with its worker counts and deadlines. ``logs``: where the logs of evaluations go."""
    init, run, eval_ = config.workers
    return (
        InitStage(peers, config, workers=init, timeout_s=config.init_timeout_s, topology=topology),
        RunStage(peers, config, workers=run, timeout_s=config.run_timeout_s),
        EvalStage(peers, config, workers=eval_, timeout_s=config.eval_timeout_s, logs=logs),
    )


def reward_of(verified: Mapping[str, Any]) -> dict[str, Any]:
    """What trajectories get of a verdict: ``reward``, ``None`` for one that is invalid or masked, and
    ``reward_info``."""
    findings = verified.get("findings")
    kinds = [each.get("kind") for each in findings if isinstance(each, Mapping)] if isinstance(findings, list) else []
    own = verified.get("reward_info")
    info = {**(own if isinstance(own, Mapping) else {}), **({"findings": kinds} if kinds else {})}
    if verified.get("verification_skipped"):
        info["verification_skipped"] = True
    reward = verified.get("reward")
    masked = failures.of_verdict(StageName.EVAL, verified) is not None
    return {"reward": None if masked or reward is None else float(reward), "reward_info": info}


def opaque_session(attempt: Attempt) -> dict[str, Any]:
    """``_ng_session`` of a call that an agent with its own ``run()`` gets."""
    session: dict[str, Any] = {"rollout": attempt.rollout}
    if attempt.row_ref is not None:
        session["row_ref"] = attempt.row_ref
    return session


def stored_run(attempt: Attempt, act: Any) -> bytes:
    """RUN's payload: what EVAL needs when another process takes the attempt up again. ``act`` is the agent's answer,
    read or as the `orjson.Fragment` of what was read."""
    kept: dict[str, Any] = {"control_token": attempt.control_token, "cookies": dict(attempt.cookies)}
    if attempt.session is not None:
        session = attempt.session
        kept["session"] = {"session_id": session.session_id, "control_token": session.control_token}
    kept["replicas"] = attempt.replicas
    kept["timings"] = attempt.timings
    return orjson.dumps({"act": act, "held": kept})


def restore_run(attempt: Attempt, payload: bytes) -> None:
    """Take an attempt up at EVAL from its stored RUN payload."""
    stored = orjson.loads(payload)
    attempt.verified = stored.get("verified")
    attempt.act = stored.get("act") or {}
    held = stored.get("held") or {}
    attempt.control_token = held.get("control_token")
    attempt.cookies = held.get("cookies") or {}
    attempt.replicas.update(held.get("replicas") or {})
    attempt.timings.update(held.get("timings") or {})
    if (session := held.get("session")) is not None:
        attempt.session = GatewaySession(session["session_id"], "", "", session["control_token"])


def _outcome(act: Mapping[str, Any], agent: str) -> AgentOutcome:
    """How the agent says its work ended. A word of its own is refused whatever else it says: nobody knows whether such
    work may be graded."""
    said = act.get("outcome", AgentOutcome.COMPLETED)
    try:
        return AgentOutcome(said)
    except ValueError:
        reason = f"{agent}/act answered the unknown outcome {said!r}"[: failures.MAX_REASON_CHARS]
        kind = FailureKind.AGENT_CRASHED
        raise StageError(StageFailure(StageName.RUN, kind, reason, retryable=False)) from None


def _member(reply: Any, name: str, server: str, path: str, stage: StageName) -> Any:
    """A required member of a peer's reply; a peer without it does not speak the contract, and will not next time."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if value is None:
        kind = FailureKind.SEED_FAILED if stage is StageName.INIT else FailureKind.AGENT_CRASHED
        raise StageError(StageFailure(stage, kind, f"{server}{path} answered without '{name}'", retryable=False))
    return value
