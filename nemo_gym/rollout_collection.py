"""Rollout collection under the names that NeMo Gym's plugins and trainers import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
from rich.console import Console

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.errors import ConfigError, RowError, not_json
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY,
    NG_TERMINAL_KEY,
    RESPONSE_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
    FailureKind,
    group_id_of,
    named_agent,
    new_run_id,
    task_id_of,
)
from nemo_gym.gateway.model_calls import CAPTURE_KEY, OBSERVATIONS_KEY
from nemo_gym.http.client import ServerClient
from nemo_gym.http.telemetry import maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ModelCallRecord,
    ObservationGap,
    ToolCallObservation,
    TrajectoryModelCall,
    TrajectoryRecord,
    TrajectoryResponseMetadata,
    TrajectoryTokenStats,
    TrajectoryToolCall,
)
from nemo_gym.rollouts.collection import CollectionResult, run_collection
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobSpec
from nemo_gym.rollouts.result_rows import has_tokens, masked_fields
from nemo_gym.rollouts.routing import agent_instances
from nemo_gym.rollouts.store import SqliteJobStore
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY
from nemo_gym.stack.background import started_here

__all__ = [
    "NG_FAILURE_CLASS_KEY",
    "NG_NO_PERSIST_KEY",
    "NG_TERMINAL_KEY",
    "RolloutCollectionConfig",
    "RolloutCollectionHelper",
    "_attach_trajectory_record",
    "_build_trajectory_record",
    "_trajectory_identity",
    "run_examples",
    "run_from_config",
]

RolloutCollectionConfig = RolloutRunConfig
Example = tuple[dict[str, Any], dict[str, Any]]
"""The row as the caller gave it, and its result row (or its failure row: ``reward`` null, ``mask_sample`` true)."""
MEMORY = Path(":memory:")
MaskedReward = Literal["null", "group_mean"]
"""The ``reward`` of a rollout without a verdict: null, or, for a trainer that computes with it before it masks, the
mean reward of the group's other rollouts (0 if none has a reward). The mean changes no sibling's advantage. Such a row
has ``reward_source`` ``group_mean``. There, a verdict whose tokens are missing does not count either, if the agent's
other rollouts have tokens: such a trainer cannot train on it."""


class RolloutCollectionHelper:
    """NeMo Gym's entry points for programs: a whole run from a configuration, or the rows of a trainer.

    ``client`` reaches the servers. By default they are those of the stack in ``run_dir``, or else of the stack that
    this process started with a run helper, or else of the stack on this machine. ``masked_reward`` is described at
    `MaskedReward`; with a run helper's stack it is by default ``group_mean``, which NeMo RL needs.
    """

    def __init__(
        self,
        client: ServerClient | None = None,
        *,
        run_dir: str | Path | None = None,
        masked_reward: MaskedReward | None = None,
    ) -> None:
        started = started_here()
        self._client = client
        self._run_dir = run_dir or (str(started) if started is not None and client is None else None)
        by_default: MaskedReward = "group_mean" if started is not None and client is None else "null"
        self._masked_reward: MaskedReward = masked_reward or by_default
        self._runs: list[ExampleRun] = []
        self._with_tokens: set[str] = set()

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """Return the client of a running stack. There is no head server here; its address is accepted and not used."""
        if self._client is None:
            from nemo_gym.stack.endpoints import find_stack
            from nemo_gym.stack.stack import pipeline_client

            self._client = pipeline_client(find_stack(str(self._run_dir) if self._run_dir else None))
        return self._client

    async def run_from_config(self, config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
        """Run a whole configuration, with its result files; see `run_collection`."""
        return await run_collection(self.setup_server_client(), config, console=Console())

    def run_examples(
        self,
        examples: list[dict[str, Any]],
        head_server_config: BaseServerConfig | None = None,
        **run_keys: Any,
    ) -> Iterator[asyncio.Future[Example]]:
        """Run rows now; yields awaitables of ``(row, result)`` in the order in which they end.

        Needs a running event loop. ``run_keys`` are those of `RolloutRunConfig` (``concurrency``, …). A rollout
        without a verdict has a result with ``mask_sample`` true and a masked response; the helper's ``masked_reward``
        determines its ``reward``.
        """
        unused = {"input": Path("examples.jsonl"), "output": Path("examples.jsonl")}
        # A trainer masks samples without a verdict and continues, so a batch of them must not stop the run.
        defaults = {"concurrency": max(1, len(examples)), "stop_after_same_failure": 0}
        config = RolloutRunConfig.parse({**defaults, **run_keys, **unused})
        client = self.setup_server_client(head_server_config)
        run = ExampleRun(client, examples, config, self._masked_reward, self._with_tokens)
        self._runs.append(run)
        return run.as_completed()

    async def aclose(self) -> None:
        """Stop all running example runs, and wait until their rollouts have released their sessions and sandboxes.
        Call it before the event loop or the HTTP client closes, also after the last result."""
        for run in self._runs:
            await run.aclose()
        self._runs.clear()


async def run_from_config(config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
    """Run a whole configuration against the stack on this machine."""
    return await RolloutCollectionHelper().run_from_config(config)


def run_examples(examples: list[dict[str, Any]], **run_keys: Any) -> Iterator[asyncio.Future[Example]]:
    """Run rows against the stack on this machine; see `RolloutCollectionHelper.run_examples`."""
    return RolloutCollectionHelper().run_examples(examples, **run_keys)


# Rollouts of rows in a program's memory, such as a trainer's: the same pipeline, without files


@dataclass(slots=True, eq=False)
class _Rollout:
    row: dict[str, Any]
    spec: JobSpec
    future: asyncio.Future[Example]
    result: dict[str, Any] = field(default_factory=dict)
    """The result row; empty until the rollout ends."""

    @property
    def is_trainable(self) -> bool:
        return self.result["reward"] is not None and has_tokens(self.result.get(RESPONSE_KEY))

    def mask(self) -> None:
        """Take away a verdict whose tokens are missing."""
        error = (self.result.get("ng_model_session") or {}).get("error")
        reason = "the tokens of its model calls are missing" + (f": {error}" if error else "")
        self.result |= masked_fields(FailureKind.INTERNAL, reason)

    def hand_out(self) -> None:
        if not self.future.done():
            self.future.set_result((self.row, self.result))


class ExampleRun:
    """One call of `run_examples`: a future per row that resolves when its rollout ends."""

    def __init__(
        self,
        client: ServerClient,
        rows: Sequence[dict[str, Any]],
        config: RolloutRunConfig,
        masked_reward: MaskedReward = "null",
        with_tokens: set[str] | None = None,
    ) -> None:
        """``with_tokens``: the agents whose model keeps tokens, as rollouts of earlier calls have shown; this one
        adds to them."""
        self._client = client
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._masked_reward = masked_reward
        self._rollouts: dict[str, _Rollout] = {}
        self._groups: dict[str, list[_Rollout]] = {}
        self._with_tokens = set() if with_tokens is None else with_tokens
        run_id = config.run_id or new_run_id()
        for number, row in enumerate(rows):
            spec = self._spec(run_id, number, row)
            rollout = self._rollouts[spec.job_id] = _Rollout(row, spec, self._loop.create_future())
            self._groups.setdefault(spec.group_id, []).append(rollout)
        self._driver = asyncio.create_task(self._drive(), name=f"examples-{run_id}")

    def as_completed(self) -> Iterator[asyncio.Future[Example]]:
        """Return the futures in the order in which rollouts end."""
        return asyncio.as_completed([each.future for each in self._rollouts.values()])

    async def aclose(self) -> None:
        """Stop the running rollouts, and wait until every rollout has released its resources: a result is handed out
        before that."""
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)

    def _spec(self, run_id: str, number: int, row: dict[str, Any]) -> JobSpec:
        agents = agent_instances(self._client.global_config_dict)
        name = named_agent(row)
        if name is not None and not isinstance(name, str):
            raise RowError(f"example {number}: '{AGENT_REF_KEY}' must be an agent's name or an object with a 'name'")
        agent = self._config.agent_of_all or name
        agent = agent or (agents[0] if len(agents) == 1 else None)
        if agent is None:
            raise ConfigError(f"example {number} names no agent; give it 'agent_ref'", key=AGENT_REF_KEY)
        task_index, sample = row.get(TASK_INDEX_KEY, number), row.get(ROLLOUT_INDEX_KEY, 0)
        # The position makes the id unique: a trainer may hold the same task and sample twice.
        data = {key: value for key, value in row.items() if key not in (ROLLOUT_INDEX_KEY, ROLLOUT_ID_KEY)}
        data[TASK_INDEX_KEY] = task_index
        data[AGENT_REF_KEY] = {"type": "responses_api_agents", "name": agent}
        if self._config.overrides:
            data["responses_create_params"] = {**data.get("responses_create_params", {}), **self._config.overrides}
        try:
            line = orjson.dumps(data)
        except TypeError as error:
            raise RowError(f"example {number}: {not_json(error)}") from None
        return JobSpec(
            job_id=f"{run_id}.{task_index}-{sample}.{number}",
            run_id=run_id,
            task_id=task_id_of(row, task_index),
            group_id=group_id_of(run_id, task_index),
            sample_index=sample,
            task_index=task_index,
            agent=agent,
            row=line,
        )

    def _sink(self, rows: list[tuple[str, bytes]]) -> None:
        """Receive result rows on the store's writer thread."""
        self._loop.call_soon_threadsafe(self._resolve, [row for _, row in rows])

    def _resolve(self, rows: list[bytes]) -> None:
        """Hand out results. With ``group_mean``, those without a reward or tokens wait until their group has ended."""
        for data in rows:
            result = orjson.loads(data)
            rollout = self._rollouts[result[ROLLOUT_ID_KEY]]
            rollout.result = result
            if self._masked_reward == "null":
                rollout.hand_out()
                continue
            if rollout.is_trainable:
                self._with_tokens.add(rollout.spec.agent)
                rollout.hand_out()
            group = self._groups[rollout.spec.group_id]
            if not all(each.result for each in group):
                continue
            for each in group:
                if not each.is_trainable and each.result["reward"] is not None:
                    if each.spec.agent in self._with_tokens:
                        each.mask()
                    else:
                        each.hand_out()
            rewards = [each.result["reward"] for each in group if each.result["reward"] is not None]
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            for each in group:
                if each.result["reward"] is None:
                    each.result |= {"reward": mean, "reward_source": "group_mean"}
                    each.hand_out()

    async def _drive(self) -> None:
        core = RolloutCore(self._client, self._config)
        store = SqliteJobStore(MEMORY, sink=self._sink)
        try:
            for agent in {each.spec.agent for each in self._rollouts.values()}:
                await core.add_route(agent, preflights=False)
            await store.submit([each.spec for each in self._rollouts.values()])
            dispatcher = core.dispatcher(store)
            await dispatcher.start()
            try:
                await dispatcher.drain()
            finally:
                await dispatcher.stop(for_good=True)  # the store is gone with this process
        except BaseException as error:
            for future in (each.future for each in self._rollouts.values()):
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            await store.aclose()


# Trajectory records, for people and metrics: what agents recorded and observed, and the captured model calls. Training
# uses the chains of a gateway (`nemo_gym.rollouts.trajectories`), which a row holds under the same key


def _attach_trajectory_record(row: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Put the trajectory record of a rollout into its result row, unless the row holds a gateway's chains."""
    if not isinstance(result.get(TRAJECTORY_KEY), list):
        result[TRAJECTORY_KEY] = _build_trajectory_record(row, result).model_dump(mode="json")


def _trajectory_identity(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of a row's task and rollout for its trajectory. The task id is the row's ``task_id``, or else
    derived from its index. Raises ``ValueError`` for a row that names no rollout."""
    rollout_id = maybe_rollout_id_from_run_body(row)
    if rollout_id is None:
        raise ValueError(f"the row names no rollout: it needs '{TASK_INDEX_KEY}' and '_ng_rollout_index'")
    named = row.get("task_id")
    if isinstance(named, str) and named:
        return named, rollout_id
    return task_id_of(dict(row), int(row.get(TASK_INDEX_KEY) or 0)), rollout_id


def _build_trajectory_record(row: Mapping[str, Any], result: Mapping[str, Any]) -> TrajectoryRecord:
    """Return the agent's own record, joined with its separate observations and the captured model calls."""
    recorded = result.get(TRAJECTORY_KEY)
    if recorded is None:
        task_id, rollout_id = _trajectory_identity(row)
        record = TrajectoryRecord(task_id=task_id, rollout_id=rollout_id)
    else:
        record = TrajectoryRecord.model_validate(recorded)
    observed = result.get(OBSERVATIONS_KEY)
    bundle = None if observed is None else AgentObservationBundle.model_validate(observed)
    captured = (result.get(CAPTURE_KEY) or {}).get("calls") or ()
    calls = [ModelCallRecord.model_validate(call) for call in captured]
    gaps = [*record.gaps, *(bundle.gaps if bundle is not None else ())]
    if not record.turns:
        gaps.append(ObservationGap(code="turns_unavailable"))
    return TrajectoryRecord(
        task_id=record.task_id,
        rollout_id=record.rollout_id,
        invocations=_invocations(record, bundle),
        turns=record.turns,
        model_calls=[_trajectory_call(call) for call in calls] or record.model_calls,
        tool_calls=_tool_calls(record, bundle),
        gaps=[gap for index, gap in enumerate(gaps) if gap not in gaps[:index]],
    )


def _invocations(record: TrajectoryRecord, bundle: AgentObservationBundle | None) -> list[AgentInvocation]:
    """Merge recorded and observed invocations. The observed one of a pair wins, with the recorded conversation and
    model calls if it has none of its own."""
    merged = {invocation.invocation_id: invocation for invocation in record.invocations}
    for observed in bundle.records if bundle is not None else ():
        if isinstance(observed, AgentInvocation):
            recorded = merged.get(observed.invocation_id)
            items = observed.conversation or (recorded.conversation if recorded is not None else [])
            calls = observed.model_calls or (recorded.model_calls if recorded is not None else [])
            merged[observed.invocation_id] = observed.model_copy(update={"conversation": items, "model_calls": calls})
    return list(merged.values())


def _tool_calls(record: TrajectoryRecord, bundle: AgentObservationBundle | None) -> list[TrajectoryToolCall]:
    """Return the recorded tool calls, then those that were only observed, with their outputs if a conversation holds
    them."""
    merged = {(call.invocation_id, call.tool_call_id): call for call in record.tool_calls}
    outputs = {
        (invocation.invocation_id, item.get("call_id")): item.get("output")
        for invocation in _invocations(record, bundle)
        for item in invocation.conversation
        if isinstance(item, Mapping) and item.get("type") == "function_call_output"
    }
    for observed in bundle.records if bundle is not None else ():
        if isinstance(observed, ToolCallObservation):
            key = (observed.invocation_id, observed.tool_call_id)
            merged.setdefault(key, TrajectoryToolCall(**observed.model_dump(), output=outputs.get(key)))
    return list(merged.values())


def _trajectory_call(call: ModelCallRecord) -> TrajectoryModelCall:
    status = call.response.get("status") if isinstance(call.response, Mapping) else None
    has_tokens = call.tokens_in is not None and call.tokens_out is not None
    return TrajectoryModelCall(
        model_call_id=call.model_call_id,
        started_at=call.started_at,
        completed_at=call.completed_at,
        duration_ms=call.duration_ms,
        request=call.request,
        response=call.response,
        response_metadata=TrajectoryResponseMetadata(
            response_id=call.response_id,
            model_ref=call.model_ref,
            model=call.model,
            dialect=call.dialect,
            status_code=call.status_code,
            response_status=call.response_status or (status if isinstance(status, str) else None),
            finish_reason=call.finish_reason,
            error_category=call.error_category,
        ),
        token_stats=TrajectoryTokenStats(
            prompt_tokens=call.tokens_in,
            completion_tokens=call.tokens_out,
            reasoning_tokens=call.tokens_reasoning,
            total_tokens=(call.tokens_in or 0) + (call.tokens_out or 0) if has_tokens else None,
            cached_tokens=call.cached_tokens,
        ),
    )
