"""One attempt on its way through the stages: who serves it, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import finish
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.identity import ROLLOUT_INDEX_KEY
from nemo_gym.contract.model_limits import REQUEST_TIMEOUT_S
from nemo_gym.rollouts.interfaces import AttemptCloser, Job

log = structlog.get_logger(__name__)

AGENT_TYPE = "responses_api_agents"
ENVIRONMENT_TYPE = "resources_servers"
MODEL_TYPE = "responses_api_models"


@dataclass(frozen=True, slots=True)
class Route:
    """The servers of one agent instance."""

    agent: str
    environment: str | None
    model: str | None
    row_access: str = "public"
    """``public``, ``validation`` (only with run key ``validation``) or ``full``."""
    needs_prompt: bool = False
    """A row without a prompt is no task for this agent."""
    words_prompts: bool = False
    """The environment may word a prompt for rows that bring none."""
    opaque_run: bool = False
    """The agent overrides NeMo Gym's ``run()``: RUN and EVAL are its one call."""
    box_needs: Mapping[str, Any] | None = None
    """What the agent needs in its box, where the environment makes the boxes."""
    skipped_reward: float | None = None
    """The agent is configured with ``skip_verification``: its rollouts get this reward, labelled so."""


def agent_instances(config: Mapping[str, Any]) -> list[str]:
    """Agent server instances of a global configuration."""
    return [str(name) for name, block in config.items() if isinstance(block, Mapping) and AGENT_TYPE in block]


def route_of(config: Mapping[str, Any], agent: str) -> Route:
    """The servers that ``agent`` is configured with; raises `ConfigError` when they do not exist."""
    block = _implementation(config, agent, AGENT_TYPE)

    def named(key: str, server_type: str) -> str | None:
        ref = block.get(key)
        if ref is None:
            return None
        name = str(ref.get("name") if isinstance(ref, Mapping) else ref)
        _implementation(config, name, server_type, referred_by=f"{agent}.{key}")
        return name

    return Route(
        agent=agent,
        environment=named("resources_server", ENVIRONMENT_TYPE),
        model=named("model_server", MODEL_TYPE),
        row_access=str(block.get("row_access") or "public"),
        skipped_reward=float(block.get("skip_verification_reward") or 0.0) if block.get("skip_verification") else None,
    )


def _implementation(
    config: Mapping[str, Any], name: str, server_type: str, referred_by: str | None = None
) -> Mapping[str, Any]:
    block = config.get(name)
    if not isinstance(block, Mapping) or server_type not in block:
        known = [str(key) for key, value in config.items() if isinstance(value, Mapping) and server_type in value]
        where = f"{referred_by}: " if referred_by else ""
        raise ConfigError(
            f"{where}no {server_type} instance is named '{name}'{nearest(name, known)}; there are:"
            f" {', '.join(known) or 'none'}",
            key=referred_by or name,
        )
    implementations = block[server_type]
    chosen: Mapping[str, Any] = implementations[next(iter(implementations))]
    return chosen


@dataclass(slots=True)
class GatewaySession:
    """The pipeline's half of a model session."""

    session_id: str
    base_url: str
    inference_token: str = field(repr=False)
    control_token: str = field(repr=False)
    model: str = "policy"
    request_timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(slots=True)
class Attempt:
    """A claimed job with everything opened for it; closed exactly once, in reverse order of opening."""

    job: Job
    route: Route
    rollout: Mapping[str, Any]
    """The `RolloutIdentity` as plain data."""
    control_token: str | None = field(default=None, repr=False)
    seed_refused: bool = False
    """The environment answered the seed with an error: nothing is open there."""
    cookies: Mapping[str, str] = field(default_factory=dict, repr=False)
    descriptor: Mapping[str, Any] = field(default_factory=dict)
    public_params: Mapping[str, Any] | None = None
    validation: Any = field(default=None, repr=False)
    row_ref: str | None = field(default=None, repr=False)
    public_row: Mapping[str, Any] | None = None
    """What an agent with its own ``run()`` gets of the row."""
    heartbeat: asyncio.Task[None] | None = None
    """Keeps the environment's box for this attempt alive, until it is harvested or the attempt is closed."""
    session: GatewaySession | None = None
    act: dict[str, Any] = field(default_factory=dict)
    """The agent's answer."""
    verified: dict[str, Any] | None = None
    """The verify response, once there is one."""
    evaluation_log: str | None = None
    """The file with what grading printed, beside the result file."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Which replica of each server has this attempt's sessions; a new attempt chooses anew."""
    timings: dict[str, float] = field(default_factory=dict)
    closers: list[AttemptCloser] = field(default_factory=list)
    salvage: Callable[[], Awaitable[dict[str, Any]]] | None = None
    """What is worth keeping of the attempt when it ends without a verdict; asked once, before it is closed."""
    cancelled: str | None = None
    """Why it is being cancelled for good."""
    lost: bool = False
    """Its lease is somebody else's by now."""
    has_result: bool = False
    """Its result is with the store, and its lease at an end; what is left is to close it."""

    @classmethod
    def of(cls, job: Job, route: Route) -> Attempt:
        spec = job.spec
        rollout = {
            "rollout_id": spec.job_id,
            "task_id": spec.task_id,
            "group_id": spec.group_id,
            "sample_index": spec.sample_index,
            "attempt": job.attempt,
            "run_id": spec.run_id,
        }
        return cls(job, route, rollout)

    def row_with(self, **members: Any) -> dict[str, Any]:
        """The row, its rollout index, and more members."""
        return {**orjson.loads(self.job.spec.row), ROLLOUT_INDEX_KEY: self.job.spec.sample_index, **members}

    async def close(self, timeout_s: float) -> None:
        """Release everything, also while being cancelled; a release that fails or hangs is logged, and its lease ends
        by itself."""
        if not self.closers:
            return
        await finish(self._close(timeout_s))

    async def _close(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.closers:
                    try:
                        await self.closers[-1]()
                    except Exception as error:  # noqa: BLE001 - one failed release must not keep the others
                        log.warning("release failed", rollout_id=self.job.job_id, error=str(error))
                    self.closers.pop()
        except TimeoutError:
            log.warning("release timed out", rollout_id=self.job.job_id, left=len(self.closers), timeout_s=timeout_s)
            self.closers.clear()


def public_params_of(row: bytes) -> dict[str, Any]:
    """A row's ``responses_create_params`` without ``metadata``: what an agent may see when the environment says
    nothing else."""
    params: dict[str, Any] = orjson.loads(row).get("responses_create_params") or {}
    params.pop("metadata", None)
    return params
