"""Real CLIs in images without glibc, and in one without a shell: they work, or say what the image lacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.provision.fetch import fetch
from nemo_gym.contract.session import AgentOutcome, FilesHarvest, SandboxClause, SandboxSpecModel, Topology
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.local.images import ImageStore, copy_layer
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from responses_api_agents.codex_agent.app import CodexAgent
from responses_api_agents.opencode_agent.app import OpencodeAgent
from responses_api_agents.openhands_agent.app import OpenHandsAgent
from responses_api_agents.qwen_code_agent.app import QwenCodeAgent
from tests.docker_engine import docker_engine
from tests.harness.odd_images import (
    BARE,
    MUSL,
    NO_BASH,
    bare_root,
    import_into_docker,
    musl_root,
    remove_from_docker,
    root_without_bash,
)
from tests.harness.stage import DONE, RUN, act, descriptor, stage, task
from tests.servers.stack import Stack

__all__ = ["docker_engine"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# To a file: not every CLI shows all that a command prints.
WORK = "sed -i s/wrld/world/ greeting.txt; { which-libc; ls -l /lib64; } > seen.txt 2>&1"


@dataclass(frozen=True)
class Cli:
    agent: type[CliAgent]
    shell: str
    command: str = "command"
    arguments: tuple[tuple[str, Any], ...] = ()

    def tasks(self) -> list[dict[str, Any]]:
        arguments = {self.command: WORK, **dict(self.arguments)}
        return [
            task(
                "fix the greeting",
                {"text": "Next.", "tool_calls": [{"name": self.shell, "arguments": arguments}]},
                DONE,
            )
        ]


CLIS = {
    "claude_code": Cli(ClaudeCodeAgent, "Bash"),
    "codex": Cli(CodexAgent, "exec_command", "cmd"),
    "opencode": Cli(OpencodeAgent, "bash", arguments=(("description", "Work"),)),
    "qwen_code": Cli(QwenCodeAgent, "run_shell_command", arguments=(("is_background", False),)),
    "openhands": Cli(OpenHandsAgent, "terminal"),
}
NEED_GLIBC = ("claude_code", "opencode", "qwen_code")


@dataclass(frozen=True)
class Place:
    provider: SandboxProvider
    block: dict[str, Any]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("roots")
    made = {MUSL: musl_root, NO_BASH: root_without_bash, BARE: bare_root}
    return {name: make(directory / name) for name, make in made.items()}


@pytest.fixture(params=["local", "docker"])
async def place(
    request: pytest.FixtureRequest, roots: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    if request.param == "local":
        directory = tmp_path_factory.mktemp("boxes")
        settings = {"state_dir": str(directory / "state"), "image_dir": str(directory / "images")}
        for name, root in roots.items():
            with ImageStore(directory / "images").building(name, {}) as staged:
                copy_layer(root, staged / "root")
        made: SandboxProvider = LocalProvider(**settings)
    else:
        settings = {"base_url": request.getfixturevalue("docker_engine")}
        for name, root in roots.items():
            import_into_docker(root, name)
        made = DockerProvider(**settings)
    yield Place(made, {request.param: settings})
    await made.aclose()
    if request.param == "docker":
        remove_from_docker(*roots)
    await close_global_aiohttp_client()


@contextmanager
def playing(name: str, directory: Path, place: Place) -> Iterator[Stack]:
    cli = CLIS[name]
    fetch(cli.agent.harness_class.package)
    with stage(directory, place.block, agent=cli.agent, tasks=cli.tasks()) as running:
        yield running


def asked(image: str, **spec: Any) -> Any:
    world = SandboxClause(spec=SandboxSpecModel(image=image, workdir="/repo", **spec))
    return descriptor(
        Topology.AGENT_IN_ENV, sandbox=world, harvest=(FilesHarvest(paths=("/repo/greeting.txt", "/repo/seen.txt")),)
    )


@pytest.mark.parametrize("name", CLIS)
async def test_cli_works_where_the_image_has_musl_and_no_node_and_no_python(
    tmp_path: Path, place: Place, name: str
) -> None:
    with playing(name, tmp_path, place) as running:
        answer = await act(running, "fix the greeting", asked(MUSL), wall_clock_s=120)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    harvested = answer.artifacts[0].content()
    assert b"hello world" in harvested
    assert b"this is musl" in harvested, "programs of the image still find their own C library"
    assert (b"ld-linux" in harvested) is (name in NEED_GLIBC)
    assert await place.provider.list({BoxLabel.RUN: RUN}) == []


async def refusal(running: Stack, asking: Any) -> str:
    with pytest.raises(AssertionError) as refused:
        await act(running, "fix the greeting", asking)
    return str(refused.value)


async def test_image_without_a_shell_is_refused_by_name(tmp_path: Path, place: Place) -> None:
    with playing("claude_code", tmp_path, place) as running:
        said = await refusal(running, asked(BARE, entrypoint=["/idle"]))
    assert f"image '{BARE}' cannot run claude_code: it has no /bin/sh; use an image with a shell" in said
    assert await place.provider.list({BoxLabel.RUN: RUN}) == []


@pytest.mark.parametrize("name", ["claude_code", "qwen_code", "openhands"])
async def test_image_without_bash_is_refused_where_the_cli_runs_commands_by_it(
    tmp_path: Path, place: Place, name: str
) -> None:
    with playing(name, tmp_path, place) as running:
        said = await refusal(running, asked(NO_BASH))
    assert f"image '{NO_BASH}' cannot run {name}: it has no bash, which" in said


@pytest.mark.parametrize("name", ["codex", "opencode"])
async def test_cli_works_by_the_images_plain_shell_where_it_can(tmp_path: Path, place: Place, name: str) -> None:
    with playing(name, tmp_path, place) as running:
        answer = await act(running, "fix the greeting", asked(NO_BASH), wall_clock_s=120)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert b"hello world" in answer.artifacts[0].content()


@pytest.mark.parametrize("name", NEED_GLIBC[:1])
async def test_ordinary_user_cannot_link_a_glibc_in_and_is_told_so(tmp_path: Path, place: Place, name: str) -> None:
    with playing(name, tmp_path, place) as running:
        said = await refusal(running, asked(MUSL, user="1000"))
    assert f"image '{MUSL}' cannot run {name}: it has no glibc, which claude-code needs, and its root cannot" in said
    assert "use an image with glibc, or run as root" in said


async def test_ordinary_user_runs_what_brings_its_own_libraries(tmp_path: Path, place: Place) -> None:
    with playing("openhands", tmp_path, place) as running:
        asking = asked(MUSL, user="1000").model_copy(update={"harvest": ()})
        answer = await act(running, "fix the greeting", asking, wall_clock_s=120)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
