"""The trainer's side: effective groups from ProRL servers, through the suite's own sampler.

with prorl_sampler(loader, {"output": "results/train.jsonl"}, sampling_params={...}) as sampler:
    batch = sampler.next_batch(requested_batch_size=32)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import (
    TASK_INDEX_KEY,
    FailureKind,
    StageError,
    StageFailure,
    StageName,
    dataset_fields,
)
from nemo_gym.prorl.client import ProRLClient
from nemo_gym.prorl.registry import data_source_of
from nemo_gym.rollout import Servers, failure_of
from nemo_gym.rollouts.interfaces import JobAttempt, JobListener
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.result_rows import result_row
from nemo_gym.rollouts.store import SqlJobStore
from nemo_gym.sampling.groups import DEFAULT_FILTERS, GroupFilter
from nemo_gym.sampling.opening import BlockingSampler, refuse_keys, run_config, sampler_at
from nemo_gym.sampling.sampler import RolloutSampler


def prorl_sampler(
    loader: Iterable[Any],
    run: RolloutRunConfig | Mapping[str, Any],
    *,
    urls: str | Iterable[str] | None = None,
    llm_servers: Iterable[str] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    sampling: SamplingConfig | Mapping[str, Any] | None = None,
    filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
) -> BlockingSampler:
    """`open_prorl_sampler` for blocking trainers, such as NeMo RL's; it takes the same arguments."""
    return BlockingSampler(
        loader,
        run,
        opened_by=open_prorl_sampler,
        urls=urls,
        llm_servers=llm_servers,
        sampling_params=sampling_params,
        sampling=sampling,
        filters=filters,
    )


@asynccontextmanager
async def open_prorl_sampler(
    loader: Iterable[Any],
    run: RolloutRunConfig | Mapping[str, Any],
    *,
    urls: str | Iterable[str] | None = None,
    llm_servers: Iterable[str] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    sampling: SamplingConfig | Mapping[str, Any] | None = None,
    filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
) -> AsyncIterator[RolloutSampler]:
    """Sample from ``loader``, whose rows are instances, with the servers of ``PRORL_SERVER_URLS``.

    Args:
        run: keys of ``ng_run``, as for `open_sampler`. ``concurrency`` is by default the number of jobs that the
            servers take at once. ``responses_create_params``, ``temperature``, ``top_p``, ``top_k``,
            ``max_output_tokens``, ``stop``, ``seed`` and ``max_turns`` go to the servers and override
            ``sampling_params``; keys that only the servers could obey are refused.
        urls: the servers; they replace ``PRORL_SERVER_URLS``.
        llm_servers: assign these to the servers (see `assign_llm_servers`); by default they keep what they have.

    Raises `ConfigError` before anything runs.
    """
    run_keys = dict(run) if isinstance(run, Mapping) else run.model_dump(exclude_unset=True)
    # The dispatcher, and not the client, retries a failed job, as a new attempt.
    async with ProRLClient(urls, max_tries=1) as client:
        if not client.places:
            problems = "; ".join(f"{url}: {status.get('problem')}" for url, status in (await client.status()).items())
            raise ConfigError(f"no ProRL server is there: {problems}", key="PRORL_SERVER_URLS")
        config = run_config({"concurrency": client.places, **run_keys}, loader)
        refuse_keys(config, _OF_THE_SERVERS)
        if llm_servers is not None:
            await client.set_llm_servers(list(llm_servers))
        async with sampler_at(
            _ProRLServers(client, config, sampling_params or {}), config, loader, sampling=sampling, filters=filters
        ) as sampler:
            yield sampler


_COMPOSED = "set it in the compositions of the ProRL servers, or leave it out"
_COUNTED = "concurrency limits all jobs at once, and max_run_workers those of a server"
_OF_THE_SERVERS = {
    **dict.fromkeys(("wall_clock_s", "max_output_bytes", "memory_mib", "cpu"), _COMPOSED),
    **dict.fromkeys(("model_connect_timeout_s", "model_idle_timeout_s", "model_request_timeout_s"), _COMPOSED),
    **dict.fromkeys(("agent_caps", "environment_caps"), _COUNTED),
    "validation": "leave it out; ng_run validates environments",
    "agent_name": "leave it out; a row's data_source names its handler",
}
"""Run keys that the interface of ProRL servers has no place for."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A stage of a pipeline whose work is done by ProRL servers; see `Stage`."""

    name: StageName
    workers: int
    timeout_s: float
    work: Callable[[JobAttempt], Awaitable[bytes]]

    async def run(self, attempt: JobAttempt) -> bytes:
        return await self.work(attempt)

    def classify(self, error: BaseException) -> StageFailure:
        if isinstance(error, ConfigError):
            return StageFailure(self.name, FailureKind.SEED_FAILED, error.message, retryable=False)
        return failure_of(self.name, error)


class _ProRLServers:
    """ProRL servers as a sampler's `Workplace`: the RUN stage does the whole rollout."""

    def __init__(self, client: ProRLClient, config: RolloutRunConfig, sampling_params: Mapping[str, Any]) -> None:
        self._client, self._config = client, config
        turns = {"max_iterations": config.max_turns} if config.max_turns is not None else {}
        self._params = {**sampling_params, **config.overrides, **config.sampling, **turns}
        self._checked_agents: set[str] = set()

    async def prepare(self, agent: str | None) -> None:
        if agent is None or agent in self._checked_agents:
            return
        statuses = await self._client.status()
        for url, status in statuses.items():
            sources = status.get("data_sources")
            if sources is not None and agent not in sources:
                raise ConfigError(
                    f"data_source '{agent}' has no handler on {url}; there are: {', '.join(sources)}",
                    key="data_source",
                )
        self._checked_agents.add(agent)

    def check(self, number: int, line: bytes, /) -> tuple[dict[str, Any], str]:
        row: dict[str, Any] = orjson.loads(line)
        return row, data_source_of(row)

    def dispatcher(
        self, store: SqlJobStore, *, listener: JobListener, logs: Path, on_run: Callable[[JobAttempt], None]
    ) -> AsyncDispatcher:
        config = self._config
        init, run, eval_ = config.workers
        stages = (
            _Step(StageName.INIT, init, config.init_timeout_s, self._init),
            _Step(StageName.RUN, run, config.run_timeout_s, self._run),
            _Step(StageName.EVAL, eval_, config.eval_timeout_s, self._eval),
        )
        return AsyncDispatcher(
            store, stages, config, lambda agent: Servers(agent, None, None), listener=listener, on_run=on_run
        )

    async def _init(self, attempt: JobAttempt) -> bytes:
        return b""

    async def _run(self, attempt: JobAttempt) -> bytes:
        instance = orjson.loads(attempt.row)
        instance.pop(TASK_INDEX_KEY, None)
        name = f"{attempt.job.job_id}-a{attempt.job.attempt}"
        params = self._params
        if self._config.base_seed is not None:
            params = {**params, "seed": self._config.base_seed + attempt.rollout["sample_index"]}
        result = await self._client.process(instance, params, name)
        if (failure := result.get("failure")) is not None:
            raise StageError(_failure(failure, result["llm_server"]))
        if result.get("reward") is None:
            reason = f"the handler of '{result['data_source']}' gave no reward: {result.get('eval_results')!r}"[:500]
            raise StageError(StageFailure(StageName.RUN, FailureKind.VERIFIER_FAILED, reason, retryable=False))
        attempt.timings |= result.pop("timing", {})
        attempt.act = {"outcome": result.get("outcome", "completed")}
        report = result.pop("eval_results") or {}
        attempt.verified = {**result, **report, "reward": result["reward"]}
        return orjson.dumps({"act": attempt.act, "verified": attempt.verified})

    async def _eval(self, attempt: JobAttempt) -> bytes:
        verified = {**dataset_fields(orjson.loads(attempt.row)), **(attempt.verified or {})}
        return result_row(attempt, verified, validation=None)


def _failure(reported: Mapping[str, Any], llm_server: str) -> StageFailure:
    """Return a job's failure as a failure of the RUN stage, which does the whole job."""
    kind = FailureKind(reported["kind"]) if reported.get("kind") in [*FailureKind] else FailureKind.INTERNAL
    reason = f"{reported.get('stage')}: {reported.get('reason')}"
    details: dict[str, Any] = {"llm_server": llm_server}
    if reported.get("status") == 0:  # a server of that machine did not respond
        details["status"] = 0
    return StageFailure(StageName.RUN, kind, reason, retryable=bool(reported.get("retryable")), details=details)
