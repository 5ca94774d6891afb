"""Rollouts of rows in a program's memory, such as a trainer's: the same pipeline, without files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
    group_id_of,
    new_run_id,
    task_id_of,
)
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobSpec
from nemo_gym.rollouts.routing import agent_instances
from nemo_gym.rollouts.store import SqliteJobStore

Example = tuple[dict[str, Any], dict[str, Any]]
"""The row as the caller gave it, and its result row (or its failure row: ``reward`` null, ``mask_sample`` true)."""
MEMORY = Path(":memory:")
MaskedReward = Literal["null", "group_mean"]
"""The ``reward`` of a rollout without a verdict: null, or, for a trainer that computes with it before it masks, the
mean reward of the group's other rollouts (0 if none has a reward). The mean changes no sibling's advantage. Such a row
has ``reward_source`` ``group_mean``."""


class ExampleRun:
    """One call of `run_examples`: a future per row that resolves when its rollout ends."""

    def __init__(
        self,
        client: ServerClient,
        rows: Sequence[dict[str, Any]],
        config: RolloutRunConfig,
        masked_reward: MaskedReward = "null",
    ) -> None:
        self._client = client
        self._config = config
        self._rows = rows
        self._loop = asyncio.get_running_loop()
        run_id = config.run_id or new_run_id()
        self._specs = [self._spec(run_id, number, row) for number, row in enumerate(rows)]
        self._futures: dict[str, asyncio.Future[Example]] = {
            spec.job_id: self._loop.create_future() for spec in self._specs
        }
        self._masked_reward = masked_reward
        self._groups: dict[str, list[str]] = {}
        for spec in self._specs:
            self._groups.setdefault(spec.group_id, []).append(spec.job_id)
        self._group_of = {spec.job_id: spec.group_id for spec in self._specs}
        self._results: dict[str, dict[str, Any]] = {}
        self._given = {spec.job_id: row for spec, row in zip(self._specs, rows, strict=True)}
        self._driver = asyncio.create_task(self._drive(), name=f"examples-{run_id}")

    def as_completed(self) -> Iterator[asyncio.Future[Example]]:
        """Return the futures in the order in which rollouts end."""
        return asyncio.as_completed(self._futures.values())

    async def aclose(self) -> None:
        """Stop the running rollouts, and wait until every rollout has released its resources: a result is handed out
        before that."""
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)

    def _spec(self, run_id: str, number: int, row: dict[str, Any]) -> JobSpec:
        agents = agent_instances(self._client.global_config_dict)
        ref = row.get(AGENT_REF_KEY)
        agent = (ref.get("name") if isinstance(ref, Mapping) else None) or self._config.agent_name
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
        return JobSpec(
            job_id=f"{run_id}.{task_index}-{sample}.{number}",
            run_id=run_id,
            task_id=task_id_of(row, task_index),
            group_id=group_id_of(run_id, task_index),
            sample_index=sample,
            task_index=task_index,
            agent=agent,
            row=orjson.dumps(data),
        )

    def _sink(self, rows: list[tuple[str, bytes]]) -> None:
        """Receive result rows on the store's writer thread."""
        self._loop.call_soon_threadsafe(self._resolve, [row for _, row in rows])

    def _resolve(self, rows: list[bytes]) -> None:
        for data in rows:
            result = orjson.loads(data)
            job_id = result[ROLLOUT_ID_KEY]
            if self._masked_reward == "group_mean":
                self._fill(job_id, result)
            else:
                self._hand_out(job_id, result)

    def _hand_out(self, job_id: str, result: dict[str, Any]) -> None:
        if not (future := self._futures[job_id]).done():
            future.set_result((self._given[job_id], result))

    def _fill(self, job_id: str, result: dict[str, Any]) -> None:
        """Hand out a result with a reward at once, and results without a reward when their group has ended."""
        self._results[job_id] = result
        if result["reward"] is not None:
            self._hand_out(job_id, result)
        group = self._groups[self._group_of[job_id]]
        if not all(each in self._results for each in group):
            return
        results = [self._results.pop(each) for each in group]
        rewards = [each["reward"] for each in results if each["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        for each in results:
            if each["reward"] is None:
                filled = {**each, "reward": mean, "reward_source": "group_mean"}
                self._hand_out(each[ROLLOUT_ID_KEY], filled)

    async def _drive(self) -> None:
        core = RolloutCore(self._client, self._config)
        store = SqliteJobStore(MEMORY, sink=self._sink)
        try:
            for agent in {spec.agent for spec in self._specs}:
                await core.add_route(agent, preflights=False)
            await store.submit(self._specs)
            dispatcher = core.dispatcher(store)
            await dispatcher.start()
            try:
                await dispatcher.drain()
            finally:
                await dispatcher.stop()
        except BaseException as error:
            for future in self._futures.values():
                if not future.done():
                    if isinstance(error, asyncio.CancelledError):
                        future.cancel()
                    else:
                        future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            await store.aclose()
