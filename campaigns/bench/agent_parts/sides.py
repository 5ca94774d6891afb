"""The two sides that are compared: the CLI on the host, and a whole act of its agent server."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from campaigns.bench.agent_parts import task
from nemo_gym.agent.harness.base import HarnessContext
from nemo_gym.agent.harness.provision import installed
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    AgentOutcome,
    GitDiffHarvest,
    InferenceEndpoint,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.server_utils import ServerClient
from responses_api_agents.claude_code_agent.app import ClaudeCode

AGENT, MODEL = "claude_code_agent", "policy_model"
RUN_DEADLINE_S = 600.0


class RunFailedError(Exception):
    """A run did not complete as it must; the message holds its output."""


@dataclass
class Sessions:
    """Gateway sessions, one for each run of either side."""

    client: ServerClient
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def open(self) -> tuple[RolloutIdentity, InferenceEndpoint]:
        name = f"bench-{os.getpid()}-{next(self._numbers)}"
        rollout = RolloutIdentity(rollout_id=name, task_id="t", group_id="g", run_id=f"bench-{os.getpid()}")
        reply = await self.client.post(MODEL, "/sessions", json={"rollout": rollout.model_dump()})
        opened = await reply.json()
        return rollout, InferenceEndpoint(
            base_url=opened["base_url"], token=opened["inference_token"], model=opened["model"]
        )


@dataclass
class InBox:
    """One attempt of the agent server (box, doors, CLI, harvest), timed as the pipeline waits for it."""

    client: ServerClient
    sessions: Sessions

    async def run(self, turns: int) -> tuple[float, ActResponse]:
        """Return the seconds and the act's response. Raises `RunFailedError` if the response is wrong."""
        rollout, inference = await self.sessions.open()
        descriptor = SessionDescriptor(
            environment="bench",
            task_id="t",
            rollout=rollout,
            placement=Placement(topology=Topology.AGENT_IN_ENV),
            sandbox=SandboxClause(spec=SandboxSpecModel(image=task.IMAGE, workdir=task.WORKDIR)),
            harvest=(GitDiffHarvest(path=task.WORKDIR),),
        )
        request = ActRequest(
            responses_create_params={"input": [{"role": "user", "content": task.prompt(turns)}]},
            descriptor=descriptor,
            inference=inference,
        )
        body = request.model_dump(mode="json")
        started = time.perf_counter()
        reply = await self.client.post(AGENT, "/act", json=body)
        answer = await reply.json()
        seconds = time.perf_counter() - started
        if reply.status != 200:
            raise RunFailedError(f"{reply.status}: {str(answer)[:500]}")
        return seconds, _checked(ActResponse.model_validate(answer), turns)


def _checked(answer: ActResponse, turns: int) -> ActResponse:
    if answer.outcome is not AgentOutcome.COMPLETED or answer.observations["turns"] != turns:
        raise RunFailedError(f"{answer.outcome} after {answer.observations.get('turns')}: {answer.outcome_detail}")
    expected, patch = task.expected_in_patch(turns), answer.artifacts[0].content().decode()
    if answer.artifacts[0].error or (expected or "") not in patch:
        raise RunFailedError(f"the patch is {patch[:300]!r}, {answer.artifacts[0].error}")
    return answer


@dataclass
class OnHost:
    """The same program with the same command line on the host, in a copy of the repository, at the same policy."""

    sessions: Sessions
    folder: Path
    repository: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, turns: int) -> tuple[float, None]:
        _, inference = await self.sessions.open()
        place = self.folder / f"run-{next(self._numbers)}"
        workdir, home = place / "work", place / "home"
        await asyncio.to_thread(shutil.copytree, self.repository, workdir, symlinks=True)
        harness = ClaudeCode()
        directory = installed(harness.package)
        command = harness.command(
            HarnessContext(
                prompt=task.prompt(turns),
                system="",
                model=inference.model,
                model_url=inference.base_url.rstrip("/").removesuffix("/v1"),
                mcp=(),
                home=str(home),
                workdir=str(workdir),
                install_dir=str(directory),
                executable=str(directory / harness.package.command),
                session_uuid=f"00000000-0000-4000-8000-{next(self._numbers):012d}",
                max_turns=200,
                api_key=inference.token,
            )
        )
        (home / "tmp").mkdir(parents=True)
        for path, content in command.files.items():
            await asyncio.to_thread(Path(path).write_bytes, content)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home / "tmp"), **command.env}
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            cwd=workdir,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(RUN_DEADLINE_S):
            output, errors = await process.communicate(command.stdin)
        seconds = time.perf_counter() - started
        _result_of(output, errors, turns)
        if (expected := task.expected_in_patch(turns)) and expected[1:] not in (workdir / "greeting.txt").read_text():
            raise RunFailedError("on the host: greeting.txt was not changed")
        await asyncio.to_thread(shutil.rmtree, place)
        return seconds, None


def _result_of(output: bytes, errors: bytes, turns: int) -> dict[str, Any]:
    events = [orjson.loads(line) for line in output.splitlines() if line.strip()]
    result: dict[str, Any] | None = next((event for event in events if event.get("type") == "result"), None)
    if result is None or result.get("is_error") or result.get("num_turns") != turns:
        raise RunFailedError(f"on the host: {str(result)[:500]}; {errors[-500:].decode('utf-8', 'replace')}")
    return result
