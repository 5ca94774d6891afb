"""The suite's own handlers: SWE-bench and mathematics, as rollouts with the agents and environments of this suite.

init  opens the model session, pinned to the job's LLM server, and seeds the environment
run   lets the agent work, and harvests the artifacts; then no sandbox is left
eval  calls the environment's verify, which uses a fresh sandbox if it needs one
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from nemo_gym.contract.errors import RowError
from nemo_gym.contract.verdict import PARAMS_KEY, RESPONSE_KEY, SESSION_KEY, dataset_fields, without
from nemo_gym.gateway.dialects.responses import chat_messages
from nemo_gym.http.peers import PeerError
from nemo_gym.prorl.composed import ComposedServers
from nemo_gym.prorl.registry import AgentHandler, JobDetails, instance_id_of, register_agent_handler, row_of
from nemo_gym.rollout import CLOSE_TIMEOUT_S, Attempt, RolloutSettings, RolloutSteps

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Rollout:
    """A job's rollout; stored as `JobDetails.metadata`."""

    attempt: Attempt
    steps: RolloutSteps

    async def close(self) -> None:
        await self.attempt.close(CLOSE_TIMEOUT_S)


@dataclass(slots=True)
class World:
    """Where the agent works; stored as `JobDetails.runtime`. After the work, its sandboxes are gone: the agent
    harvests and destroys its own; the environment does so in its harvest. Only what the verdict needs stays open."""

    rollout: Rollout

    async def close(self) -> None:
        if not self.rollout.attempt.act:
            await self.rollout.close()


@dataclass(slots=True)
class _OfLoop:
    servers: ComposedServers
    run_id: str = field(default_factory=lambda: f"prorl-{secrets.token_hex(4)}")
    """The run id of the rollouts; it labels their sandboxes."""
    warned_of: set[str] = field(default_factory=set)
    """The ignored parameters that a warning has named."""


class SuiteHandler(AgentHandler):
    """Instances of one data source, as rollouts of one composition.

    Args:
        name: the data source.
        words: the composition, as for ``ng_run``; its servers start with the first job.
        run_dir: the run directory of servers that ``ng_run`` started; replaces ``words``.
    """

    def __init__(self, name: str, words: Sequence[str] = (), *, run_dir: str | None = None) -> None:
        self._name, self._words, self._run_dir = name, tuple(words), run_dir
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        return self._name

    def row(self, instance: Any) -> dict[str, Any]:
        """Return the instance as a row of the environment. Raises `RowError` naming the field that is missing."""
        return row_of(instance)

    def is_nothing(self, act: Mapping[str, Any]) -> bool:
        """Return whether an agent's response holds nothing to evaluate."""
        return False

    # Stages

    async def check(self, instance: Any, llm_config: Mapping[str, Any]) -> None:
        self.row(instance)
        await self._here.servers.access(llm_config)

    async def init(
        self, instance: Any, llm_config: Any = None, sid: str | None = None, max_iterations: int = 1
    ) -> tuple[World, Rollout, dict[str, Any]]:
        here, row = self._here, self.row(instance)
        llm = await here.servers.access(llm_config)
        if new := {*llm.unused} - here.warned_of:
            here.warned_of |= new
            log.warning("sampling parameters that mean nothing here", names=sorted(new), handler=self.name)
        running = await here.servers.running(llm)
        limits = {"max_turns": max_iterations}
        task = instance_id_of(instance)
        while True:
            was_registered = llm.engine in running.engines
            engine = await running.engine_for(llm)
            identity = {
                # The suffix is random because a job that is submitted again after an error is a new rollout.
                "rollout_id": f"{sid or task}-{secrets.token_hex(4)}",
                "task_id": task,
                "group_id": task,
                "sample_index": 0,
                "attempt": 1,
                "run_id": here.run_id,
            }
            settings = RolloutSettings(limits=limits, sampling=llm.sampling, engine=engine)
            steps = RolloutSteps(running.peers, settings)
            rollout = Rollout(Attempt(running.servers, identity, orjson.dumps(row)), steps)
            try:
                await steps.prepare(rollout.attempt)
            except BaseException as error:
                await rollout.close()
                if was_registered and isinstance(error, PeerError) and error.problem.get("code") == "unknown_engine":
                    running.engines.clear()  # the gateway has restarted
                    continue
                raise
            config = {"engine": engine, "max_iterations": max_iterations, "unused": list(llm.unused)}
            return World(rollout), rollout, config

    async def run(self, runtime: World, metadata: Rollout, config: Any, instance: Any) -> dict[str, Any]:
        attempt = metadata.attempt
        await metadata.steps.work(attempt)
        act = attempt.act
        return {
            "git_patch": _patch(act),
            "messages": _messages(attempt),
            RESPONSE_KEY: act[RESPONSE_KEY],
            "outcome": str(act.get("outcome", "completed")),
            "outcome_detail": act.get("outcome_detail"),
            "finish": act.get("outcome", "completed") == "completed",
            "observations": act.get("observations") or {},
            "error": None,
        }

    async def eval(self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True) -> dict[str, Any]:
        rollout: Rollout = job_details.metadata
        attempt = rollout.attempt
        if allow_skip and self.is_nothing(attempt.act):
            attempt.verified = {"reward": 0.0, "verification_skipped": True}
        verified = await rollout.steps.judge(attempt)
        row = {*dataset_fields(orjson.loads(attempt.row)), RESPONSE_KEY, PARAMS_KEY, SESSION_KEY}
        report = without(verified, row)
        return {"report": {**report, "resolved": verified["reward"] >= 1}}

    async def release(self, job_details: JobDetails) -> None:
        if isinstance(job_details.metadata, Rollout):
            await job_details.metadata.close()

    async def aclose(self) -> None:
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is not None:
            await here.servers.aclose()

    @property
    def _here(self) -> _OfLoop:
        """The servers for the running event loop, because each `OpenHandsServer` has its own loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _OfLoop(ComposedServers(self._words, self._run_dir))
        return self._loops[loop]


class SweBenchHandler(SuiteHandler):
    """Rows of SWE-bench as published, and of data sets in the same form whose images have been prepared."""

    WORDS = ("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=gateway")

    def __init__(self, words: Sequence[str] = WORDS, *, run_dir: str | None = None) -> None:
        super().__init__("swebench", words, run_dir=run_dir)

    def row(self, instance: Any) -> dict[str, Any]:
        row = super().row(instance)
        if PARAMS_KEY not in row:
            for name in ("instance_id", "problem_statement"):
                if not isinstance(row.get(name), str) or not row[name]:
                    raise RowError(
                        f"instance '{instance_id_of(instance)}': '{name}' is missing; a SWE-bench instance has the"
                        " fields of the published data set",
                        field=name,
                    )
        return row

    def is_nothing(self, act: Mapping[str, Any]) -> bool:
        patches = [each for each in act.get("artifacts") or [] if each.get("kind") == "git_diff"]
        return bool(patches) and not any(each.get(name) for each in patches for name in ("size", "error", "truncated"))


class MathHandler(SuiteHandler):
    """Questions with an expected answer, in this suite's form or in that of common data sets."""

    WORDS = ("agent=simple_agent", "environment=math", "model=gateway")
    QUESTIONS = ("question", "problem", "problem_statement")
    ANSWERS = ("expected_answer", "answer", "ground_truth")

    def __init__(self, words: Sequence[str] = WORDS, *, run_dir: str | None = None) -> None:
        super().__init__("math", words, run_dir=run_dir)

    def row(self, instance: Any) -> dict[str, Any]:
        row = super().row(instance)
        judge = row.get("reward_model")
        fields = {**(judge if isinstance(judge, dict) else {}), **row}
        answer = next((fields[name] for name in self.ANSWERS if fields.get(name) not in (None, "")), None)
        if answer is None:
            raise RowError(
                f"instance '{instance_id_of(instance)}': the expected answer is missing; give 'expected_answer'",
                field="expected_answer",
            )
        row["expected_answer"] = answer
        if PARAMS_KEY in row:
            return row
        if isinstance(messages := row.pop("prompt", None), str | list) and messages:
            return {**row, PARAMS_KEY: {"input": messages}}
        question = next((row[name] for name in self.QUESTIONS if isinstance(row.get(name), str) and row[name]), None)
        if question is None:
            raise RowError(
                f"instance '{instance_id_of(instance)}': the question is missing; give 'question', or a 'prompt'",
                field="question",
            )
        return {**row, "question": question}


def _patch(act: Mapping[str, Any]) -> str:
    for artifact in act.get("artifacts") or []:
        if artifact.get("kind") == "git_diff":
            data: str = artifact.get("data") or ""
            if artifact.get("encoding") != "base64":
                return data
            return base64.b64decode(data).decode("utf-8", "replace")
    return ""


def _messages(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the conversation as chat messages: the prompt and the agent's output."""
    params = attempt.agent_params()
    prompt = params.get("input") or []
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    output = attempt.act[RESPONSE_KEY].get("output") or []
    return chat_messages([*items, *output], params.get("instructions"))


register_agent_handler(SweBenchHandler())
register_agent_handler(MathHandler())
