"""An agent and an environment from folders the suite has never seen, composed by name in every topology."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox.providers.local import LocalProvider
from tests.architecture.docs import write_examples
from tests.harness.stage import IMAGE, SCRIPT, commit_image, weather_server
from tests.topology.cells import APP, CONFIG, ENTANGLED

DEADLINE_S = 180.0
RUN = (
    "environment=greeting",
    "sandbox=mine",
    "model=scripted",
    "script=script.json",
    f"greeting.resources_servers.greeting.image={IMAGE}",
    "input=in.jsonl",
)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Path]:
    """A folder with both plugins, a script for the policy, and boxes of its own."""
    write_examples("add-an-agent.md", tmp_path)
    for name, app in (("greeting", APP), ("by_exec", ENTANGLED)):
        folder = tmp_path / "resources_servers" / name
        (folder / "configs").mkdir(parents=True)
        (folder / "app.py").write_text(app)
    (tmp_path / "resources_servers/greeting/configs/greeting.yaml").write_text(CONFIG)
    (tmp_path / "resources_servers/by_exec/configs/by_exec.yaml").write_text(
        "by_exec: {resources_servers: {by_exec: {entrypoint: app.py}}}\n"
    )
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    boxes = {"state_dir": str(tmp_path / "state"), "image_dir": str(tmp_path / "images")}
    (tmp_path / "configs/sandbox").mkdir(parents=True)
    (tmp_path / "configs/sandbox/mine.yaml").write_text(json.dumps({"sandbox": {"local": boxes}}))
    provider = LocalProvider(**boxes)
    await commit_image(provider)
    yield tmp_path
    await provider.aclose()


async def ng_run(place: Path, *words: str) -> tuple[int, str]:
    env = {**os.environ, "NEMO_GYM_EXTRA_ROOTS": str(place), "NEMO_GYM_CACHE_DIR": str(place / "cache")}
    command = [str(Path(sys.executable).with_name("ng_run")), "agent=tiny_agent", *words]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    shown, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, shown.decode()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_same_agent_works_in_every_topology_with_only_the_topology_changed(place: Path) -> None:
    cells = {
        "agent_in_env": ("fix the greeting", "hello world"),
        "whole_interaction": ("fix the greeting", "hello world"),
        "env_sandboxed": ("ask the weather", "snow"),
        "none": ("write the answer", "42"),
    }
    async for url in weather_server([]):
        for topology, (words, expected) in cells.items():
            row = {"id": topology, "responses_create_params": {"input": words}, "expected": expected}
            (place / "in.jsonl").write_text(json.dumps(row) + "\n")
            status, shown = await ng_run(
                place,
                *RUN,
                f"topology={topology}",
                f"greeting.resources_servers.greeting.mcp_url={url}",
                "+tiny_agent.responses_api_agents.tiny_agent.scratch={workdir: /tmp}",
                f"output={topology}.jsonl",
                f"run_dir=run-{topology}",
            )
            assert status == 0, shown
            (result,) = rows(place / f"{topology}.jsonl")
            got = (result["topology"], result["reward"], result["ng_agent_observations"]["harness"])
            assert got == (topology, 1.0, "tiny"), shown


async def test_agent_that_its_policy_kills_is_graded_and_not_tried_again(place: Path) -> None:
    row = {"id": "k", "responses_create_params": {"input": "kill the agent"}, "expected": "hello world"}
    (place / "in.jsonl").write_text(json.dumps(row) + "\n")
    async for url in weather_server([]):
        mcp = f"greeting.resources_servers.greeting.mcp_url={url}"
        status, shown = await ng_run(place, *RUN, mcp, "topology=C", "output=out.jsonl", "run_dir=run")
        assert status == 0, shown
    (result,) = rows(place / "out.jsonl")
    assert (result["outcome"], result["reward"], result["valid"]) == ("crashed", 0.0, True), shown
    assert result["_ng_attempt_index"] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("environment=by_exec", "sandbox=mine"), "reached by exec, and agent 'tiny_agent' can only use mcp"),
        (("environment=swe_bench", "sandbox=mine", "topology=B"), "use topology=agent_in_env"),
        (("environment=swe_bench", "sandbox=mine", "topology=A"), "does not support topology 'none'; use topology="),
        (("environment=greeting", "topology=A"), "needs a sandbox: add sandbox=local"),
        (
            (
                "environment=greeting",
                "sandbox=mine",
                "topology=D",
                "+tiny_agent.responses_api_agents.tiny_agent.requires=[nested_containers]",
            ),
            "nested_containers: processes in a box have no capabilities",
        ),
    ],
)
async def test_cell_that_cannot_work_is_refused_at_composition_with_the_reason(
    place: Path, words: tuple[str, ...], reason: str
) -> None:
    status, shown = await ng_run(place, *words, "model=scripted", "script=script.json")
    assert status != 0
    assert reason in " ".join(shown.split()), shown
