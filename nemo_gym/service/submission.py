"""Turns the body of a submission into jobs. Each job is checked by itself, so an error affects that job alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym._util.suggest import nearest
from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.contract.errors import ConfigError, ContractError, InvalidBodyError, NemoGymError, RowError
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.contract.verdict import PARAMS_KEY, TASK_INDEX_KEY, has_prompt, task_id_of
from nemo_gym.http.requests import require_shallow, validated
from nemo_gym.rollouts.core import RolloutCore
from nemo_gym.rollouts.interfaces import JobSpec, Offer
from nemo_gym.rollouts.routing import prompt_batches, unworded
from nemo_gym.rollouts.rows import MAX_INDEX, RowChecker, read_row
from nemo_gym.rollouts.store import SqlJobStore


class JobConflictError(ContractError):
    """The id belongs to a job with different content."""

    code = "job_conflict"


class DatasetRow(BaseModel):
    """Names a row of one of the service's data sets."""

    model_config = ConfigDict(extra="forbid")

    name: str
    row: int = Field(ge=1)
    """The row's line number in the file, from 1."""


class JobBody(BaseModel):
    """One job of a submission."""

    model_config = ConfigDict(extra="forbid")

    job_id: str = Field(pattern=IDENTIFIER.pattern, max_length=128)
    row: dict[str, Any] | None = None
    dataset: DatasetRow | None = None
    agent: str | None = None
    run_id: str | None = Field(None, pattern=IDENTIFIER.pattern, max_length=64)
    group_id: str | None = Field(None, pattern=IDENTIFIER.pattern, max_length=256)
    task_index: int = Field(0, ge=0, le=MAX_INDEX)
    sample_index: int = Field(0, ge=0, le=MAX_INDEX)
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    deadline_s: float | None = Field(None, gt=0, le=30 * 86400, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_one_row(self) -> JobBody:
        if (self.row is None) == (self.dataset is None):
            raise ValueError("a job needs exactly one of 'row' and 'dataset'")
        return self


class Submissions:
    """Checks jobs and puts them into a store.

    Args:
        run_id: the run of jobs that name none.
    """

    def __init__(self, core: RolloutCore, store: SqlJobStore, config: ServiceConfig, *, run_id: str) -> None:
        self._core = core
        self._store = store
        self._config = config
        self._run_id = run_id
        self._offsets: dict[str, list[int]] = {}
        self._checker = RowChecker(Path("row"), config, core.agents)

    async def submit(self, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Submit jobs, and return an outcome for each, in order: ``{job_id, state, new, digest}``, or
        ``{job_id, error}`` for a refused one. Raises `StoreError` if the store cannot write."""
        outcomes: dict[int, dict[str, Any]] = {}
        specs: dict[int, JobSpec] = {}
        for number, body in enumerate(bodies):
            try:
                specs[number] = await self._spec(body, number)
            except NemoGymError as error:
                job_id = body.get("job_id") if isinstance(body, Mapping) else None
                outcomes[number] = _refused(job_id if isinstance(job_id, str) else f"jobs[{number}]", error)
        for number, why in (await self._jobs_without_prompt(specs)).items():
            outcomes[number] = _refused(specs.pop(number).job_id, why)
        offers = await self._store.offer(list(specs.values())) if specs else []
        for number, offer in zip(specs, offers, strict=True):
            if offer.is_refused:
                outcomes[number] = _refused(offer.job_id, _conflict(offer))
                continue
            state = offer.state.value
            outcomes[number] = {"job_id": offer.job_id, "state": state, "new": offer.is_new, "digest": offer.digest}
        return [outcomes[number] for number in range(len(bodies))]

    async def _spec(self, body: Any, number: int) -> JobSpec:
        if isinstance(body, dict):
            require_shallow(body, f"jobs[{number}]")
        job = validated(JobBody, body, f"jobs[{number}]")
        row = job.row if job.dataset is None else await self._row_of(job.dataset)
        fields = {key: value for key, value in (row or {}).items() if key != TASK_INDEX_KEY}
        if job.agent is not None:
            fields["agent_ref"] = {"type": "responses_api_agents", "name": job.agent}
        try:
            line = orjson.dumps(fields)
        except TypeError as error:
            raise RowError(f"row: not JSON of this suite ({error})") from None
        checked, agent = self._checker.row_and_agent(0, line)
        await self._routed(agent)
        checked[TASK_INDEX_KEY] = job.task_index
        return JobSpec(
            job_id=job.job_id,
            run_id=job.run_id or self._run_id,
            task_id=task_id_of(checked, job.task_index),
            group_id=job.group_id or job.job_id,
            sample_index=job.sample_index,
            task_index=job.task_index,
            agent=agent,
            row=orjson.dumps(checked, option=orjson.OPT_SORT_KEYS),
            priority=job.priority,
            deadline_s=job.deadline_s,
        )

    async def _routed(self, agent: str) -> None:
        if agent in self._core.preflighted:
            return
        try:
            async with asyncio.timeout(self._config.check_s):
                await self._core.add_route(agent)
        except TimeoutError:
            raise ConfigError(
                f"agent '{agent}': its servers were not ready within {self._config.check_s:g} s (check_s); see GET"
                " /v1/status, and submit the job again when they are",
                key="agent",
            ) from None

    async def _row_of(self, dataset: DatasetRow) -> dict[str, Any]:
        datasets = self._config.datasets
        path = datasets.get(dataset.name)
        if path is None:
            names = list(datasets)
            raise ConfigError(
                f"dataset.name: the service has no data set '{dataset.name}'{nearest(dataset.name, names)}; it has:"
                f" {', '.join(names) or 'none (datasets in the serve block)'}",
                key="dataset.name",
            )
        line = await asyncio.to_thread(self._line, dataset.name, path, dataset.row)
        return read_row(line, f"dataset.row: '{dataset.name}'", dataset.row)

    def _line(self, name: str, path: Path, number: int) -> bytes:
        try:
            with path.open("rb") as lines:
                if name not in self._offsets:
                    found = [0]
                    for line in lines:
                        found.append(found[-1] + len(line))
                    self._offsets[name] = found  # complete, because other threads may look up rows meanwhile
                offsets = self._offsets[name]
                if number >= len(offsets):
                    raise RowError(f"dataset.row: '{name}' has {len(offsets) - 1} rows, and {number} is asked for")
                lines.seek(offsets[number - 1])
                return lines.readline()
        except OSError as error:
            raise ConfigError(f"dataset.name: '{name}' cannot be read ({error.strerror})", key="datasets") from error

    async def _jobs_without_prompt(self, specs: Mapping[int, JobSpec]) -> dict[int, NemoGymError]:
        """Return the errors of jobs for which neither the row nor the environment has a prompt."""
        refused: dict[int, NemoGymError] = {}
        without: dict[int, str] = {}
        rows = (
            (number, spec.agent, spec.row)
            for number, spec in specs.items()
            if not has_prompt(orjson.loads(spec.row).get(PARAMS_KEY))
        )
        for environment, batch in prompt_batches(rows, self._core.routes, without):
            try:
                reasons = await unworded(self._core.peers, environment, batch)
            except ConfigError as error:
                refused |= dict.fromkeys(batch, error)
                continue
            refused |= {number: RowError(f"row: {why}") for number, why in reasons.items()}
        return refused | {number: RowError(why) for number, why in without.items()}


def _refused(job_id: str, error: NemoGymError) -> dict[str, Any]:
    return {"job_id": job_id, "error": error.as_problem()}


def _conflict(offer: Offer) -> JobConflictError:
    return JobConflictError(
        f"job '{offer.job_id}' exists with a different body (stored {offer.known_digest}, given {offer.digest}): a job"
        " id is permanently bound to one body; submit the changed job under another id",
        job_id=offer.job_id,
        digest=offer.digest,
        known_digest=offer.known_digest,
    )


def jobs_of(body: Mapping[str, Any], at_most: int) -> list[Any]:
    """Return the jobs of a request's body. Raises `InvalidBodyError`."""
    jobs = body.get("jobs", [body] if "job_id" in body else None)
    if not isinstance(jobs, list) or not jobs:
        raise InvalidBodyError('jobs: the body holds a list of jobs, as in {"jobs": [{"job_id": …, "row": …}]}')
    if len(jobs) > at_most:
        raise InvalidBodyError(f"jobs: {len(jobs)} in one request; at most {at_most} (max_jobs_per_request)")
    return jobs
