"""Rollouts of rows in a program's memory, such as a trainer's: the same pipeline, without files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError, RowError, not_json
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
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
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobSpec
from nemo_gym.rollouts.result_rows import has_tokens, masked_fields
from nemo_gym.rollouts.routing import agent_instances
from nemo_gym.rollouts.store import SqliteJobStore

Example = tuple[dict[str, Any], dict[str, Any]]
"""The row as the caller gave it, and its result row (or its failure row: ``reward`` null, ``mask_sample`` true)."""
MEMORY = Path(":memory:")
MaskedReward = Literal["null", "group_mean"]
"""The ``reward`` of a rollout without a verdict: null, or, for a trainer that computes with it before it masks, the
mean reward of the group's other rollouts (0 if none has a reward). The mean changes no sibling's advantage. Such a row
has ``reward_source`` ``group_mean``. There, a verdict whose tokens are missing does not count either, if the agent's
other rollouts have tokens: such a trainer cannot train on it."""


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
