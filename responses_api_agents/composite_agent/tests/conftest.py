"""Real boxes, and a policy that speaks to every process of an agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.composite_agent.app import CompositeAgent
from tests.docker_engine import docker_engine
from tests.harness import stage as staging
from tests.harness.conftest import weather
from tests.harness.stage import bash, task
from tests.servers.stack import Stack

__all__ = ["docker_engine", "weather"]

CODER, PLANNER = "You are the coder", "You are the planner"
EXAMPLE = {
    "name": "planner_and_coder",
    "program": str(Path(__file__).parents[1] / "example"),
    "command": ["python3", "-B", "$program/planner.py", "$task_file"],
    "runtime": "python",
}


def delegate(step: str) -> dict[str, Any]:
    return {"text": "The next step.", "tool_calls": [{"name": "delegate", "arguments": {"step": step}}]}


def spoken_to(system: str, made: dict[str, Any]) -> dict[str, Any]:
    return {**made, "name": f"{made['name']} ({system})", "when": {**made["when"], "system": system}}


def edit(path: str, old: str, new: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "edit_file", "arguments": {"path": path, "old": old, "new": new}}]}


DONE = {"text": "All done."}
KILL_CODER = 'for p in /proc/[0-9]*; do grep -qs "coder[.]py" $p/cmdline && kill -9 ${p#/proc/}; done; sleep 5'
TASKS = [
    spoken_to(
        CODER,
        task(
            "Look at the greeting",
            bash("echo $ADDED; cat greeting.txt"),
            {"text": "It says wrld."},
            edit("greeting.txt", "wrld", "world"),
            edit("greeting.txt", "wrld", "world"),
            bash("git diff | tail -2; id -u; cat /proc/self/environ | tr '\\0' '\\n'"),
            {"text": "It says world now."},
        ),
    ),
    spoken_to(CODER, task("Loop", bash("echo kept >> greeting.txt"), bash("pwd"), repeat_last=True)),
    spoken_to(CODER, task("Die", bash(f"echo kept >> greeting.txt; {KILL_CODER}"))),
    spoken_to(
        PLANNER,
        task(
            "fix the greeting",
            delegate("Look at the greeting"),
            delegate("Correct it"),
            bash("git status --short"),
            {"text": "The greeting is right now."},
        ),
    ),
    spoken_to(PLANNER, task("never stop", delegate("Loop"))),
    spoken_to(PLANNER, task("kill the coder", delegate("Die"), DONE)),
    spoken_to(
        PLANNER, task("ask the weather", {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}, DONE)
    ),
    spoken_to(PLANNER, task("write the answer", bash("echo 42 > answer.txt; pwd"), DONE)),
    task("say a word", {"text": "A word."}),
]


@contextmanager
def composite(directory: Path, sandbox: dict[str, Any], **settings: Any) -> Iterator[Stack]:
    """An agent server with the example, or with the ``harness`` that is given."""
    given = {"harness": EXAMPLE, "outer": {"env": {"ADDED": "by-the-agent"}}, **settings}
    with staging.stage(directory, sandbox, agent=CompositeAgent, tasks=TASKS, **given) as running:
        yield running


@pytest.fixture(scope="module")
def local_block(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("boxes")
    return {"local": {"state_dir": str(directory / "state"), "image_dir": str(directory / "images")}}


@pytest.fixture
async def local(local_block: dict[str, Any]) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(**local_block["local"])
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


@pytest.fixture
async def docker(docker_engine: str) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(base_url=docker_engine)
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


@pytest.fixture(params=["local", "docker"])
def boxes(request: pytest.FixtureRequest) -> tuple[SandboxProvider, dict[str, Any]]:
    """Each provider, and its block of configuration."""
    provider: SandboxProvider = request.getfixturevalue(request.param)
    if request.param == "docker":
        return provider, {"docker": {"base_url": request.getfixturevalue("docker_engine")}}
    block: dict[str, Any] = request.getfixturevalue("local_block")
    return provider, block
