"""One rollout on one page: seed → act → harvest → verify → finalize → close.

    prepare   model session ◀─ model server; descriptor and control token ◀─ environment
    work      response, outcome, artifacts ◀─ agent, whose open connection is the attempt's heartbeat;
              artifacts ◀─ environment if it owns the sandbox, with heartbeats from seed to harvest
    judge     verdict ◀─ environment; trajectories ◀─ model server

`RolloutSteps.run` drives a whole rollout: an agent server's ``/run`` calls it, and so may any program that has a row.
The pipeline calls the three parts, each in a stage with its own workers and deadline (`nemo_gym.rollouts.stages`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
import structlog

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, finish
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.session import REQUEST_TIMEOUT_S, AgentOutcome
from nemo_gym.contract.verdict import (
    AGENT_FIELDS,
    MAX_REASON_CHARS,
    NO_PROMPT,
    PARAMS_KEY,
    RESPONSE_KEY,
    RUN_FIELDS,
    SAMPLING_KEYS,
    SESSION_KEY,
    FailureKind,
    StageError,
    StageFailure,
    StageName,
    dataset_fields,
    decide_validity,
    failure_of_outcome,
    failure_of_reply,
    has_prompt,
    public_params,
    without,
)
from nemo_gym.http.peers import PeerError, PeerReply, Peers, failure_of_peer, kind_by_route
from nemo_gym.http.telemetry import ROLLOUT_ID_PATTERN, Span, rollout_context, step, within

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 30.0
MODEL_SESSION_KEYS = frozenset({"ng_model_session", "ng_trajectory"})
"""The keys that `RolloutSteps.finalize` adds to a verify response."""

Closer = Callable[[], Awaitable[None]]
"""Releases one resource of an attempt; idempotent."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of one agent instance, with the properties that they and their configuration declare."""

    agent: str
    environment: str | None
    model: str | None
    row_access: str = "public"
    """``public``, ``validation`` (only with run key ``validation``) or ``full``."""
    needs_prompt: bool = False
    """This agent cannot work on a row without a prompt."""
    enforce_row_sampling: bool = False
    """This agent's model sessions enforce the row's sampling parameters."""
    words_prompts: bool = False
    """The environment may write a prompt for a row that has none."""
    own_run: bool = False
    """The agent overrides NeMo Gym's ``run()``: it seeds and verifies by itself, in one call."""
    own_metrics: bool = False
    """The agent computes metrics beside those of its environment."""
    box_needs: Mapping[str, Any] | None = None
    """What the agent needs in its sandbox, if the environment creates the sandboxes."""
    skipped_reward: float | None = None
    """The reward of every rollout, marked ``verification_skipped``, if the agent has ``skip_verification``."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The settings of all rollouts of one run; the defaults leave every choice to environments and agents."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    model_limits: Mapping[str, Any] = field(default_factory=dict)
    topology: str | None = None
    validation: str | None = None
    base_seed: int | None = None
    """The sampling seed of a sample is ``base_seed`` plus the sample's index."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of every model call; they override the harness's."""
    engine: str | None = None
    """The gateway's engine for every model call; by default the gateway chooses."""
    finalize_timeout_s: float = CLOSE_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Budgets:
    """Deadlines in seconds; ``None`` sets none."""

    prepare_s: float | None = None
    work_s: float | None = None
    judge_s: float | None = None
    close_s: float = CLOSE_TIMEOUT_S


@dataclass(slots=True)
class ModelSession:
    """A rollout's session with its model server."""

    session_id: str
    base_url: str
    inference_token: str = field(repr=False)
    control_token: str = field(repr=False)
    model: str = "policy"
    request_timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(slots=True)
class Attempt:
    """One attempt at a row, with everything it has open; closed once, in reverse order of opening."""

    servers: Servers
    rollout: Mapping[str, Any]
    """The `RolloutIdentity` as plain data."""
    row: bytes = field(repr=False)
    """The dataset row as a JSON object, without its private part if the attempt has a ``row_ref``."""
    row_ref: str | None = field(default=None, repr=False)
    """The environment's reference to the row. It entitles an agent to seed, verify and close this attempt."""
    cookies: Mapping[str, str] = field(default_factory=dict, repr=False)
    control_token: str | None = field(default=None, repr=False)
    seed_refused: bool = False
    """The environment answered the seed request with an error, so it holds nothing open for the attempt."""
    descriptor: Mapping[str, Any] = field(default_factory=dict)
    public_params: Mapping[str, Any] | None = None
    validation: Any = field(default=None, repr=False)
    heartbeat: asyncio.Task[None] | None = None
    """Keeps the environment's sandbox alive until it is harvested or the attempt is closed."""
    session: ModelSession | None = None
    act: dict[str, Any] = field(default_factory=dict)
    """The agent's response to ``/act``."""
    act_json: bytes | None = field(default=None, repr=False)
    """The unparsed body of ``act``; ``None`` once the environment's artifacts were added to ``act``."""
    reply: dict[str, Any] | None = field(default=None, repr=False)
    """The latest verify response, whatever its verdict."""
    verified: dict[str, Any] | None = None
    """The verify response, once it has a valid verdict."""
    replicas: dict[str, int] = field(default_factory=dict)
    """The replica of each server that holds this attempt's sessions; a new attempt chooses again."""
    closes_with_verdict: bool = False
    """The environment has nothing to release for the attempt: a valid verdict may close it there."""
    closers: dict[str, Closer] = field(default_factory=dict)
    """The open resources: what each is, and the function that releases it."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Members that a run adds to the row."""
    span: Span | None = field(default=None, repr=False)
    """The root span of the attempt's trace, if it is traced."""

    def row_with(self, **members: Any) -> dict[str, Any]:
        """Return the row with the run's numbers and ``members``."""
        return {**orjson.loads(self.row), **self.numbers, **members}

    def envelope(self, **members: Any) -> dict[str, Any]:
        """Return ``_ng_session`` of a request to the environment: the attempt's identity and ``members``."""
        fields = {"rollout": self.rollout, **members}
        return fields if self.row_ref is None else {**fields, "row_ref": self.row_ref}

    def agent_params(self) -> Mapping[str, Any]:
        """Return the agent's request parameters: the environment's, or else the public part of the row's."""
        return self.public_params or public_params(orjson.loads(self.row).get(PARAMS_KEY) or {})

    def row_sampling(self) -> dict[str, Any]:
        """Return the row's sampling parameters if the model session must enforce them."""
        params = self.agent_params() if self.servers.enforce_row_sampling else {}
        return {name: params[name] for name in SAMPLING_KEYS if params.get(name) is not None}

    async def close(self, timeout_s: float) -> None:
        """Release everything, even if the caller is cancelled meanwhile. A release that fails or hangs is logged; the
        lease of its resource then expires."""
        if not self.closers:
            return
        root = self.span.context if self.span is not None else None
        rollout_id = str(self.rollout["rollout_id"])
        context = rollout_context(rollout_id if ROLLOUT_ID_PATTERN.match(rollout_id) else None)
        with context, within(root), step("close", has_span=False):
            await finish(self._close(timeout_s))

    async def _close(self, timeout_s: float) -> None:
        rollout_id = self.rollout["rollout_id"]
        try:
            async with asyncio.timeout(timeout_s):
                while self.closers:
                    resource = next(reversed(self.closers))
                    try:
                        await self.closers[resource]()
                    except Exception as error:  # noqa: BLE001 - one failed release must not prevent the others
                        log.warning("release failed", rollout_id=rollout_id, what=resource, error=str(error))
                    self.closers.pop(resource, None)
        except TimeoutError:
            log.warning("release timed out", rollout_id=rollout_id, left=len(self.closers), timeout_s=timeout_s)
            self.closers.clear()


CallAgent = Callable[[Attempt, dict[str, Any]], Awaitable[PeerReply]]


class RolloutSteps:
    """The steps of every rollout of one run.

    Args:
        peers: the servers.
        call_agent: sends the agent its ``/act`` request; by default ``POST /act``.
    """

    def __init__(
        self,
        peers: Peers,
        settings: RolloutSettings | None = None,
        *,
        call_agent: CallAgent | None = None,
    ) -> None:
        self._peers = peers
        self._settings = settings or RolloutSettings()
        self._call_agent = call_agent or self._post_act

    async def run(self, attempt: Attempt, budgets: Budgets) -> dict[str, Any]:
        """Run a whole rollout. Return its verify response, which holds a valid reward, and the model session's
        trajectories.

        However the rollout ends, also by cancellation, the attempt is closed first. `failure_of` turns every
        exception (`StageError`, `PeerError`, `TimeoutError`, or one of ``call_agent``) into a typed failure.
        """
        try:
            async with asyncio.timeout(budgets.prepare_s):
                await self.prepare(attempt)
            async with asyncio.timeout(budgets.work_s):
                await self.work(attempt)
            return await self.judge(attempt, budgets.judge_s)
        finally:
            await attempt.close(budgets.close_s)

    async def prepare(self, attempt: Attempt) -> None:
        servers = attempt.servers
        if servers.model is not None:
            with step("open_session", has_span=False):
                await self.open_session(attempt, servers.model)
        if servers.environment is not None:
            attempt.closers["environment"] = lambda: self.close_environment(attempt)
            with step("seed", has_span=False):
                await self.seed(attempt)

    async def work(self, attempt: Attempt) -> None:
        with step("act", has_span=False):
            await self.act(attempt)
        if attempt.heartbeat is not None:
            with step("harvest", has_span=False):
                await self.harvest(attempt)

    async def judge(self, attempt: Attempt, verify_s: float | None = None) -> dict[str, Any]:
        """Verify within ``verify_s`` and finalize, which has a time limit of its own: no verdict is lost for it."""
        if attempt.verified is None:
            with step("verify", has_span=False):
                async with asyncio.timeout(verify_s):
                    attempt.verified = await self.verify(attempt)
        if attempt.session is not None:
            with step("finalize", has_span=False):
                attempt.verified |= await self.finalize(attempt, attempt.verified)
        return attempt.verified

    # The steps, in their order

    async def open_session(self, attempt: Attempt, model: str) -> None:
        body: dict[str, Any] = {"rollout": attempt.rollout}
        own = without(attempt.row_sampling(), self._settings.sampling)
        sampling = {**own, **self._settings.sampling}
        if self._settings.base_seed is not None:
            sampling["seed"] = self._settings.base_seed + attempt.rollout["sample_index"]
        if sampling:
            body["sampling"] = sampling
        if self._settings.engine is not None:
            body["engine"] = self._settings.engine
        if self._settings.model_limits:
            body["limits"] = self._settings.model_limits
        try:
            opened = (await self.peers_of(attempt).post(model, "/sessions", body)).json()
        except PeerError as error:
            if own and error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                raise _seed_failed(f"the row's {PARAMS_KEY} ({', '.join(own)}) were refused: {error}") from error
            raise
        facts = ("session_id", "base_url", "inference_token", "control_token")
        attempt.session = ModelSession(
            **{name: required(opened, name, model, "/sessions", StageName.INIT) for name in facts},
            model=opened.get("model") or "policy",
            request_timeout_s=opened.get("request_timeout_s") or REQUEST_TIMEOUT_S,
        )

        attempt.closers["model session"] = lambda: self.abort_session(attempt)

    async def seed(self, attempt: Attempt) -> None:
        servers, settings = attempt.servers, self._settings
        environment, seeded = servers.environment or "", await self._post_seed(attempt)
        attempt.descriptor = required(seeded, "descriptor", environment, "/seed_session", StageName.INIT)
        attempt.closes_with_verdict = seeded.get("closes_with_verdict") is True
        if isinstance(beat_s := seeded.get("heartbeat_s"), int | float) and attempt.heartbeat is None:
            name = f"heartbeat {attempt.rollout['rollout_id']}"
            attempt.heartbeat = asyncio.create_task(self._beat(attempt, beat_s), name=name)
            attempt.closers["heartbeat"] = lambda: stop_heartbeat(attempt)
        public = seeded.get("public_row")
        if isinstance(public, dict) and PARAMS_KEY in public:
            attempt.public_params = public[PARAMS_KEY]
        if servers.needs_prompt and not has_prompt(attempt.agent_params()):
            # The agent would have no task, so no result of it could be a valid reward.
            raise _seed_failed(NO_PROMPT)
        if settings.validation:
            if seeded.get("validation") is None:
                raise _seed_failed(
                    f"environment '{environment}' gives no solution for validation={settings.validation}"
                )
            attempt.validation = seeded["validation"]

    async def act(self, attempt: Attempt) -> None:
        agent, session = attempt.servers.agent, attempt.session
        endpoint: dict[str, Any] = {"base_url": "", "token": "", "model": ""}
        if session is not None:
            endpoint = {
                "base_url": session.base_url,
                "token": session.inference_token,
                "model": session.model,
                "request_timeout_s": session.request_timeout_s,
            }
        body = {
            "responses_create_params": attempt.agent_params(),
            "descriptor": attempt.descriptor,
            "inference": endpoint,
        }
        if self._settings.limits:
            body["limits"] = self._settings.limits
        if attempt.validation is not None:
            body["validation"] = attempt.validation
        reply = await self._call_agent(attempt, body)
        act = reply.json()
        required(act, "response", agent, "/act", StageName.RUN)
        failure = failure_of_outcome(_outcome(act, agent), act.get("outcome_detail"))
        if failure is not None and act.get("within_reach") is not True:
            raise StageError(failure)
        attempt.act, attempt.act_json = act, reply.body

    async def harvest(self, attempt: Attempt) -> None:
        """Collect the artifacts in the environment's sandbox. The agent has no access then: its lease ends first."""
        reply = await self._post_environment(attempt, "/harvest", attempt.envelope())
        await stop_heartbeat(attempt)
        environment = attempt.servers.environment or ""
        attempt.act["artifacts"] = required(reply.json(), "artifacts", environment, "/harvest", StageName.RUN)
        attempt.act_json = None

    async def verify(self, attempt: Attempt) -> dict[str, Any]:
        """Return the verify response; raise `StageError` if it holds no valid verdict."""
        act, servers, attempt.reply = attempt.act, attempt.servers, None
        if servers.skipped_reward is not None:
            graded = {RESPONSE_KEY: act["response"], "reward": servers.skipped_reward, "verification_skipped": True}
            return {**dataset_fields(attempt.row_with()), **graded}
        outcome = act.get("outcome", AgentOutcome.COMPLETED)
        closes = {"close": True} if attempt.closes_with_verdict else {}
        session = attempt.envelope(artifacts=act.get("artifacts") or [], outcome=outcome, **closes)
        body = attempt.row_with(**{RESPONSE_KEY: act["response"], SESSION_KEY: session})
        verified = (await self._post_environment(attempt, "/verify", body)).json()
        if not isinstance(verified, dict):
            reason = f"{servers.environment}/verify answered no JSON object"
            raise StageError(StageFailure(StageName.EVAL, FailureKind.VERIFIER_FAILED, reason, new_attempt=False))
        verified = {**dataset_fields(body), **without(verified, RUN_FIELDS | AGENT_FIELDS)}
        attempt.reply = verified
        if (failure := failure_of_reply(StageName.EVAL, verified)) is not None:
            raise StageError(failure)
        if attempt.closes_with_verdict:
            attempt.closers.pop("environment", None)
        return verified

    async def finalize(self, attempt: Attempt, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Close the model session and return its trajectories. If that fails for longer than ``finalize_timeout_s``,
        the verdict still counts, and the result row holds the error."""
        session, model = attempt.session, attempt.servers.model
        if session is None or model is None:
            return {}
        path, body, token = f"/sessions/{session.session_id}/finalize", reward_of(verdict), session.control_token
        timeout_s, reply = self._settings.finalize_timeout_s, None
        # No new attempt is made for a valid verdict: trajectories that are not taken now are lost.
        backoff = Backoff(first_s=0.5, longest_s=5.0, patience_s=timeout_s, jitter=NETWORK_JITTER)
        try:
            async with asyncio.timeout(timeout_s):
                while reply is None:
                    try:
                        reply = await self.peers_of(attempt).post(
                            model, path, body, control_token=token, idempotent=True
                        )
                    except PeerError as error:
                        if not error.may_pass or not await backoff.again(at_least_s=error.retry_after_s):
                            raise
            finalized = reply.json()
            if not isinstance(finalized, dict):
                raise PeerError(model, path, 200, {"detail": "answered no JSON object"})
        except (PeerError, TimeoutError, ValueError) as error:
            log.warning("session not finalized", rollout_id=attempt.rollout["rollout_id"], error=str(error))
            return {"ng_model_session": {"error": str(error) or "timed out"}}
        attempt.session = None
        attempt.closers.pop("model session", None)
        trajectories = finalized.pop("trajectories", None)
        return {"ng_model_session": finalized, **({"ng_trajectory": trajectories} if trajectories else {})}

    async def abort_session(self, attempt: Attempt) -> None:
        """Close the model session without its trajectories, unless it was finalized."""
        if (session := attempt.session) is not None:
            path, token = f"/sessions/{session.session_id}/abort", session.control_token
            model = attempt.servers.model or ""
            await self.peers_of(attempt).post(model, path, {}, control_token=token, idempotent=True)
            attempt.session = None

    async def close_environment(self, attempt: Attempt) -> None:
        if attempt.control_token is None and attempt.row_ref is None:
            if attempt.seed_refused:
                return
            # A seed request without a response may have opened a session. Seeding again is idempotent and returns the
            # token that closes it. Nothing else of the response counts here, and nothing is to be kept alive.
            await self._post_seed(attempt)
        await self._post_environment(attempt, "/close", attempt.envelope())

    # Requests

    def peers_of(self, attempt: Attempt) -> Peers:
        return self._peers.of_attempt(attempt.replicas)

    async def _post_environment(self, attempt: Attempt, path: str, body: Mapping[str, Any]) -> PeerReply:
        return await self.peers_of(attempt).post(
            attempt.servers.environment or "",
            path,
            body,
            control_token=attempt.control_token,
            cookies=attempt.cookies,
            idempotent=True,
        )

    async def _post_seed(self, attempt: Attempt) -> Any:
        """Seed the attempt, take the token and cookies, and return the response."""
        servers, settings = attempt.servers, self._settings
        environment, path = servers.environment or "", "/seed_session"
        options = {
            "validation": settings.validation,
            "topology": settings.topology,
            "limits": settings.limits or None,
            "box_needs": servers.box_needs,
        }
        session = attempt.envelope(**{name: value for name, value in options.items() if value is not None})
        try:
            reply = await self._post_environment(attempt, path, attempt.row_with(**{SESSION_KEY: session}))
        except PeerError as error:
            attempt.seed_refused = error.status != 0
            raise
        seeded = reply.json()
        if attempt.row_ref is None:
            attempt.control_token = required(seeded, "control_token", environment, path, StageName.INIT)
        attempt.cookies = {**attempt.cookies, **reply.cookies}
        return seeded

    async def _post_act(self, attempt: Attempt, body: dict[str, Any]) -> PeerReply:
        agent = attempt.servers.agent
        return await self.peers_of(attempt).post(agent, "/act", body, cookies=attempt.cookies, from_agent=True)

    # Heartbeats tell an environment that owns the sandbox that the attempt is still alive, from seed to harvest, also
    # while it is queued. They stop with this process, and then the lease of the sandbox expires too.

    async def _beat(self, attempt: Attempt, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._post_environment(attempt, "/heartbeat", attempt.envelope())
            except PeerError as error:
                # The agent notices by itself if the sandbox is gone, and a restarting environment may come back.
                log.warning("heartbeat failed", rollout_id=attempt.rollout["rollout_id"], error=str(error))


async def stop_heartbeat(attempt: Attempt) -> None:
    beating = attempt.heartbeat
    if beating is not None and not beating.done():
        beating.cancel()
        await asyncio.wait({beating})


def reward_of(verified: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that trajectories take from a verify response: ``reward`` (``None`` for an invalid verdict) and
    ``reward_info``."""
    findings = verified.get("findings")
    kinds = [each.get("kind") for each in findings if isinstance(each, Mapping)] if isinstance(findings, list) else []
    reward_info = verified.get("reward_info")
    info = {**(reward_info if isinstance(reward_info, Mapping) else {}), **({"findings": kinds} if kinds else {})}
    if verified.get("verification_skipped"):
        info["verification_skipped"] = True
    return {"reward": decide_validity(verified).reward, "reward_info": info}


def failure_of(stage: StageName, error: BaseException, deadline: str = "its deadline") -> StageFailure:
    """Return the typed failure for an exception in ``stage``. ``deadline`` describes the deadline of a timeout."""
    if isinstance(error, StageError):
        return error.failure
    if isinstance(error, PeerError):
        return failure_of_peer(stage, error)
    again = stage is not StageName.EVAL
    if isinstance(error, TimeoutError):
        reason = f"stage '{stage}' took longer than {deadline}"
        return StageFailure(stage, FailureKind.DEADLINE, reason, new_attempt=again)
    reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
    retryable = not isinstance(error, NemoGymError) or error.retryable
    return StageFailure(stage, FailureKind.INTERNAL, reason, retryable=retryable, new_attempt=again)


def required(reply: Any, name: str, server: str, path: str, stage: StageName) -> Any:
    """Return a required member of a server's reply. A server that leaves it out does not follow the contract, so its
    failure is not retryable."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if value is None:
        kind = kind_by_route(stage, path)
        raise StageError(StageFailure(stage, kind, f"{server}{path} answered without '{name}'", retryable=False))
    return value


def _seed_failed(reason: str) -> StageError:
    return StageError(StageFailure(StageName.INIT, FailureKind.SEED_FAILED, reason, retryable=False))


def _outcome(act: Mapping[str, Any], agent: str) -> AgentOutcome:
    """Return the agent's outcome. An unknown outcome raises `StageError`, whatever else the reply holds, because it
    does not tell whether the work may be graded."""
    outcome = act.get("outcome", AgentOutcome.COMPLETED)
    try:
        return AgentOutcome(outcome)
    except ValueError:
        reason = f"{agent}/act answered the unknown outcome {outcome!r}"[:MAX_REASON_CHARS]
        failure = StageFailure(StageName.RUN, FailureKind.AGENT_CRASHED, reason, retryable=False)
        raise StageError(failure) from None
