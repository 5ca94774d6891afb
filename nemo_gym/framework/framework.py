"""Runs the sessions of a trainer's prompts, and returns scored trajectories.

    batch ──▶ prompt × n sessions ──▶ gateway session ──▶ runner ──▶ finalize ──▶ score ──▶ rows ──▶ sink
                                        │ lost: abort, and run again as a new attempt
                                        └ failed: abort; sibling sessions continue

Everything that decides correctness happens here, in the parent process: a runner gets only the addresses of its
session, also if it runs as a Ray task.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import orjson
import structlog

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import finish
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import AgentError, ConfigError, RowError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.contract.verdict import PARAMS_KEY, RESPONSE_KEY, SESSION_KEY, StageError, StageName
from nemo_gym.framework.batch import Batch, PromptSample, partition_of, read_batch, uids_of
from nemo_gym.framework.config import CONFIG_PATH, FrameworkConfig, RolloutConfig, RunnerConfig, framework_block
from nemo_gym.framework.gateways import GatewayPool, OpenSession, SessionLostError
from nemo_gym.framework.runners import RayDispatch, Runner, call_runner, load_runner
from nemo_gym.framework.samples import RewardScorer, Score, TrajectoryRow, finished, score_session, trajectory_row
from nemo_gym.gateway.sessions import COMPLETION_TOKEN_PREFIX, INFERENCE_TOKEN_PREFIX
from nemo_gym.gateway.tokens.trajectories import Trajectory, write_jsonl
from nemo_gym.http.client import ServerClient
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollout import Attempt, ModelSession, RolloutSteps, Servers, failure_of, reward_of
from nemo_gym.rollouts.routing import agent_instances, checked_servers
from nemo_gym.stack.endpoints import StackEntry, find_stack, running_stacks
from nemo_gym.stack.stack import pipeline_client

log = structlog.get_logger(__name__)
_TOKENS = re.compile(rf"(?:{INFERENCE_TOKEN_PREFIX}|{COMPLETION_TOKEN_PREFIX})[\w-]+")
_CONNECTION_ERRORS = frozenset(
    {"APIConnectionError", "ConnectError", "ReadError", "RemoteProtocolError", "ClientConnectionError"}
)
"""Connection errors of clients that runners use, by class name, so that no client has to be imported."""
_NO_RUN = RolloutRunConfig(input=Path("unused.jsonl"), output=Path("unused.jsonl"))
"""A run configuration with default values, for checks that need one; nothing is run with it."""


class TrajectorySink(Protocol):
    """Receives trajectories and the states of prompts."""

    async def put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        """Write one session's rows, all or none. Returns or raises in bounded time."""
        ...

    async def tag(self, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        """Set the state of a prompt: ``running``, then ``finished`` or ``failure``."""
        ...


class AgentFramework(ABC):
    """The interface that a trainer calls."""

    @classmethod
    @abstractmethod
    def from_config(cls, *, config: Any, **parts: Any) -> AgentFramework:
        """Build the framework from a trainer's whole configuration."""

    @abstractmethod
    async def generate_sequences(self, prompts: Any) -> None:
        """Run the sessions of a batch, and write their trajectories."""


class AllSessionsFailedError(AgentError, RuntimeError):
    """No session of a batch produced a trajectory."""

    code = "all_sessions_failed"


@dataclass(slots=True)
class BatchSummary:
    """How a batch ended."""

    prompts: int = 0
    failed_prompts: int = 0
    sessions: int = 0
    failed_sessions: int = 0
    unfinished_sessions: int = 0
    trajectories: int = 0
    reasons: list[str] = field(default_factory=list)
    """The errors of failed sessions, as ``<error>: <message>``."""

    def add(self, other: BatchSummary) -> None:
        for name in ("failed_prompts", "sessions", "failed_sessions", "unfinished_sessions", "trajectories"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons += other.reasons


class OpenAICompatibleAgentFramework(AgentFramework):
    """Runs agents that speak an OpenAI or Anthropic API to a session of the gateway.

    Args:
        gateways: hold the sessions, and their tokens.
        sink: receives the trajectories.
        scorer: scores sessions that posted no reward.
        processor: the policy's processor, for conversations with images.
        agent_servers: makes the runner of an ``agent_server`` entry; replaced by tests.
    """

    def __init__(
        self,
        gateways: GatewayPool,
        sink: TrajectorySink,
        config: FrameworkConfig,
        rollout: RolloutConfig,
        *,
        scorer: RewardScorer | None = None,
        processor: Any = None,
        agent_servers: Callable[[RunnerConfig], AgentServerRunner] | None = None,
    ) -> None:
        self._gateways = gateways
        self._sink = sink
        self._config = config
        self._rollout = rollout
        self._scorer = scorer if config.use_reward_loop_worker else None
        self._processor = processor
        # Load all runners here, so that a failed import is reported before a session opens.
        self._runners: dict[str, Runner] = {}
        self._agent_servers: dict[str, AgentServerRunner] = {}
        for name, runner in config.agent_runners.items():
            if runner.agent_server is not None:
                make = agent_servers or _agent_server
                self._agent_servers[name] = make(runner)
            else:
                self._runners[name] = load_runner(runner, _where(name))
        uses_ray = any(runner.dispatch_mode == "ray_task" for runner in config.agent_runners.values())
        self._ray = RayDispatch() if uses_ray else None
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._slots_of: asyncio.AbstractEventLoop | None = None
        self._run_id = f"framework-{secrets.token_hex(4)}"
        self._batches = 0

    @classmethod
    def from_config(cls, *, config: Any, **parts: Any) -> Self:
        """Build the framework; ``parts`` are keyword arguments of the constructor, as ``gateways`` and ``sink``."""
        block, rollout = framework_block(config)
        return cls(config=block, rollout=rollout, **parts)

    async def generate_sequences(self, prompts: Any) -> None:
        """Run the sessions of a batch and write their trajectories; every prompt ends as ``finished`` or ``failure``.

        Raises `RowError` for a batch that cannot be run, and `AllSessionsFailedError`. If cancelled, it first aborts
        every session.
        """
        summary = await self.run_batch(prompts)
        log.info("batch ended", **{**asdict(summary), "reasons": summary.reasons[:3]})
        if not summary.trajectories:
            raise AllSessionsFailedError(
                f"all {summary.sessions} sessions of {summary.prompts} prompts failed;"
                f" the first reasons: {'; '.join(summary.reasons[:3])}"
            )

    async def run_batch(self, prompts: Any) -> BatchSummary:
        """Run a batch like `generate_sequences`, but return a summary, also if no session succeeded."""
        uids = uids_of(prompts)
        try:
            batch = read_batch(prompts)
        except RowError:
            for uid in uids:
                await self._sink.tag(partition_of(prompts), uid, {"status": "failure"})
            raise
        self._batches += 1
        run_id = f"{self._run_id}-{self._batches}"
        summary = BatchSummary(prompts=len(batch.samples))
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._prompt(batch, sample, run_id)) for sample in batch.samples]
        for task in running:
            summary.add(task.result())
        return summary

    async def aclose(self) -> None:
        """Stop using the gateways."""
        await self._gateways.aclose()

    # -- one prompt ----------------------------------------------------------------------------------------------

    async def _prompt(self, batch: Batch, sample: PromptSample, run_id: str) -> BatchSummary:
        """Run a prompt's sessions concurrently. An error of one prompt does not end another."""
        count = sample.sessions(self._rollout.sessions(batch.partition))
        summary = BatchSummary(sessions=count)
        try:
            await self._sink.tag(batch.partition, sample.uid, {"status": "running"})
            async with asyncio.TaskGroup() as group:
                sessions = [group.create_task(self._session(batch, sample, index, run_id)) for index in range(count)]
            for session in sessions:
                summary.add(session.result())
        except Exception as error:  # noqa: BLE001 - any error fails this prompt alone, and must become its state
            summary.failed_sessions = count
            summary.reasons.append(_reason(error))
        finally:
            tag: dict[str, Any] = {"status": "finished" if summary.trajectories else "failure"}
            if summary.failed_sessions:
                tag["failed_sessions"] = summary.failed_sessions
            try:
                # Even if cancelled meanwhile, because a trainer waits for this state.
                await finish(self._sink.tag(batch.partition, sample.uid, tag))
            except Exception as error:
                log.exception("the state of a prompt was not written", uid=sample.uid)
                summary.reasons.append(_reason(error))
        summary.failed_prompts = int(not summary.trajectories)
        return summary

    async def _session(self, batch: Batch, sample: PromptSample, index: int, run_id: str) -> BatchSummary:
        """Run one session and write its trajectories, or return why there are none."""
        try:
            name = self._runner_of(sample)
            rollout = RolloutIdentity(
                rollout_id=f"{sample.safe_uid}-{sample.index}-{index}",
                task_id=sample.uid[:256],
                group_id=f"{run_id}.{sample.safe_uid}",
                sample_index=index,
                run_id=run_id,
            )
            async with self._slot(name):
                while True:
                    try:
                        return await self._attempt(batch, sample, index, name, rollout)
                    except SessionLostError as error:
                        if rollout.attempt >= self._config.max_session_attempts:
                            raise
                        log.warning("session lost; a new attempt", rollout_id=rollout.rollout_id, error=_reason(error))
                        rollout = rollout.next_attempt()
        except Exception as error:  # noqa: BLE001 - runners are users' code; any error fails this session alone
            trace_text = _without_tokens("".join(traceback.format_exception(error)))
            log.warning("session failed", uid=sample.uid, session=index, error=_reason(error), traceback=trace_text)
            return BatchSummary(failed_sessions=1, reasons=[_reason(error)])

    def _runner_of(self, sample: PromptSample) -> str:
        """Return the name of a sample's runner; a single runner serves all samples. Raises `RowError`."""
        names = [*self._config.agent_runners]
        if len(names) == 1:
            return names[0]
        name = sample.fields.get("agent_name")
        if name is None:
            raise RowError(f"agent_name is missing for uid {sample.uid!r}; the runners are: {', '.join(names)}")
        if not isinstance(name, str):
            raise RowError(f"agent_name must be a string, got {name!r} for uid {sample.uid!r}")
        if name not in names:
            raise RowError(f"agent_name '{name}' is no runner{nearest(name, names)}; they are: {', '.join(names)}")
        return name

    @contextlib.asynccontextmanager
    async def _slot(self, name: str) -> AsyncIterator[None]:
        """Hold one of a runner's slots for concurrent sessions."""
        cap = self._config.agent_runners[name].max_concurrent_sessions
        if not cap:
            yield
            return
        loop = asyncio.get_running_loop()
        if self._slots_of is not loop:  # a trainer may use one framework in several loops in turn
            self._slots, self._slots_of = {}, loop
        async with self._slots.setdefault(name, asyncio.Semaphore(cap)):
            yield

    # -- one attempt at one session ------------------------------------------------------------------------------

    async def _attempt(
        self, batch: Batch, sample: PromptSample, index: int, name: str, rollout: RolloutIdentity
    ) -> BatchSummary:
        sampling = self._rollout.sampling_of(batch.partition, greedy=sample.greedy)
        session = await self._gateways.open(rollout, sampling, ttl_s=self._config.session_ttl_s)
        verdict: Score | None = None
        try:
            try:
                verdict = await self._run(name, session, sample)
            except Exception as error:
                if _is_connection_error(error) or not await self._gateways.answers(session.gateway):
                    raise SessionLostError(
                        f"gateway '{session.gateway.name}' was lost: {_reason(error)}", retryable=True
                    ) from error
                raise
            graded = (None, None) if verdict is None else (verdict.reward, verdict.extra)
            trajectories = await self._gateways.finalize(session, reward=graded[0], reward_info=graded[1])
        except BaseException:
            await self._gateways.abort(session)
            raise
        if not trajectories:
            raise AgentError(f"session {index} of uid {sample.uid!r} ended without a single model call")
        chosen = selected(trajectories, self._config.agent_runners[name].trajectory_selection)
        score = await score_session(chosen, sample, verdict=verdict, scorer=self._scorer)
        chosen = [replace(each, reward=score.reward) for each in chosen]
        if self._config.log_dir is not None:
            await self._write_log(batch, rollout, chosen)
        unfinished = finished(chosen[-1]) is False
        masked = unfinished and self._config.mask_unfinished_episode
        steps, processor = batch.global_steps, self._processor
        rows = [
            trajectory_row(sample, index, place, each, score, global_steps=steps, masked=masked, processor=processor)
            for place, each in enumerate(chosen)
        ]
        await self._sink.put(batch.partition, rows)
        return BatchSummary(trajectories=len(rows), unfinished_sessions=int(unfinished))

    async def _run(self, name: str, session: OpenSession, sample: PromptSample) -> Score | None:
        """Run the runner to its end. Return the verdict, if an environment gives one."""
        if (server := self._agent_servers.get(name)) is not None:
            return await server.run(session, sample)
        call = {
            "session": session.handle,
            "raw_prompt": sample.raw_prompt,
            "sample_index": sample.index,
            "tools_kwargs": sample.tools_kwargs,
        }
        config = self._config.agent_runners[name]
        if config.dispatch_mode == "ray_task":
            assert self._ray is not None
            await self._ray.run(config, _where(name), call)
        else:
            await call_runner(self._runners[name], call)
        return None

    async def _write_log(self, batch: Batch, rollout: RolloutIdentity, trajectories: Iterable[Trajectory]) -> None:
        """Write trajectories to the log folder, for people. An error is logged and does not fail the session."""
        assert self._config.log_dir is not None
        step = f"step_{batch.global_steps}" if batch.global_steps is not None else batch.partition
        folder = self._config.log_dir / step / rollout.attempt_id
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            await asyncio.to_thread(write_jsonl, folder / "trajectories.jsonl", list(trajectories))
        except OSError as error:
            log.warning("trajectories not logged", folder=str(folder), error=str(error))


def selected(trajectories: Sequence[Trajectory], selection: str) -> list[Trajectory]:
    """Return all trajectories, or only the one with the most sampled tokens (of equal ones the longest, then the
    latest)."""
    if selection == "all":
        return list(trajectories)
    return [max(trajectories, key=lambda each: (each.sampled_count, len(each.response_ids), each.index))]


def _agent_server(config: RunnerConfig) -> AgentServerRunner:
    assert config.agent_server is not None
    return AgentServerRunner(config.agent_server, run_dir=config.stack_run_dir)


def _where(name: str) -> str:
    return f"{CONFIG_PATH}.agent_runners.{name}"


def _reason(error: BaseException) -> str:
    return _without_tokens(f"{type(error).__name__}: {error}")[:512]


def _without_tokens(text: str) -> str:
    """Mask a session's tokens, which are in the URLs that clients quote in their errors."""
    return _TOKENS.sub("***", text)


def _is_connection_error(error: BaseException | None) -> bool:
    """Return whether the runner failed because the connection to its gateway broke; the gateway may be back by now."""
    depth = 0
    while error is not None and depth < 10:
        names = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, ConnectionError) or names & _CONNECTION_ERRORS:
            return True
        error, depth = error.__cause__ or error.__context__, depth + 1
    return False


# An agent server of this suite as a runner


class AgentServerRunner:
    """Runs samples with one agent server.

    A sample's row is its ``extra_info`` with the prompt as ``responses_create_params.input``. Only the environment
    receives the private part of the row.
    """

    def __init__(self, agent: str, *, client: ServerClient | None = None, run_dir: Path | None = None) -> None:
        self._agent = agent
        self._client = client or pipeline_client(_stack_of(agent, run_dir))
        self._peers = Peers(self._client)
        self._servers: Servers | None = None

    async def run(self, session: OpenSession, sample: PromptSample) -> Score:
        """Run one session's rollout, and return the environment's verdict. Raises `SessionLostError` for a retryable
        failure, and otherwise the original error, such as `StageError`."""
        servers = await self._checked()
        stage = StageName.INIT
        attempt = Attempt(
            servers=servers,
            rollout=session.rollout.model_dump(mode="json"),
            row=orjson.dumps(row_of(sample), default=str),
            session=ModelSession(
                session.session_id, session.base_url, session.inference_token, "", session.handle.model
            ),
        )
        steps = RolloutSteps(self._peers)
        try:
            await steps.prepare(attempt)
            stage = StageName.RUN
            await steps.work(attempt)
            stage = StageName.EVAL
            verified = await steps.verify(attempt)
        except (StageError, PeerError, TimeoutError) as error:
            failure = failure_of(stage, error)
            if failure.retryable:
                raise SessionLostError(f"{failure.kind}: {failure.reason}", retryable=True) from error
            raise
        finally:
            await attempt.close(30.0)
        reward_fields = reward_of(verified)
        return Score(float(reward_fields["reward"]), "environment", _extra(verified, reward_fields["reward_info"]))

    async def _checked(self) -> Servers:
        if self._servers is None:
            servers = await checked_servers(self._client, self._peers, self._agent, _NO_RUN)
            if servers.own_run:
                raise ConfigError(
                    f"agent '{self._agent}' overrides run(): it opens sessions of its own; name another agent server",
                    key="agent_server",
                )
            # The framework holds the model session, so the agent's own model server is not used.
            self._servers = replace(servers, model=None)
        return self._servers


def _stack_of(agent: str, run_dir: Path | None) -> StackEntry:
    """Return the stack of a run directory, or by default the only running one that has the agent server: the
    trainer's own gateways run as a stack, too. Raises `ConfigError`."""
    if run_dir is not None:
        return find_stack(str(run_dir))
    stacks = running_stacks()
    found = [stack for stack in stacks if agent in agent_instances(stack.config)]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(stack.run_dir for stack in found)
        raise ConfigError(
            f"{len(found)} running stacks have a server '{agent}'; choose one with stack_run_dir: {choices}",
            key="stack_run_dir",
        )
    names = {name for stack in stacks for name in agent_instances(stack.config)}
    raise ConfigError(
        f"no running stack has a server '{agent}'{nearest(agent, names)}; start it by ng_run, or set stack_run_dir",
        key="agent_server",
    )


def row_of(sample: PromptSample) -> dict[str, Any]:
    """Return the dataset row of a sample."""
    extra_info = sample.fields.get("extra_info")
    row = dict(extra_info) if isinstance(extra_info, Mapping) else {}
    params = row.get(PARAMS_KEY)
    row[PARAMS_KEY] = {"input": sample.raw_prompt, **(params if isinstance(params, Mapping) else {})}
    return row


def _extra(verified: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and flags of a verdict, which trainers log beside the reward."""
    left_out = {"reward", RESPONSE_KEY, PARAMS_KEY, SESSION_KEY}
    numbers = {
        name: value
        for name, value in verified.items()
        if name not in left_out and not name.startswith("_") and isinstance(value, bool | int | float)
    }
    return {**numbers, **info}
