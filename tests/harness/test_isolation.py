"""What an agent CLI finds in the very box that its agent server gives it: its world, its doors, and nothing else.

A probe is the CLI, in every topology; slow runs have Claude Code's policy start the same probe from its shell tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.base import PLACEHOLDER_KEY
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxSpec
from nemo_gym.contract.session import ActResponse, Topology
from nemo_gym.sandbox.base import BoxLabel, ExecRequest
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.server_utils import close_global_aiohttp_client, request
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from tests.acceptance.clis.place import REPOSITORY, installed
from tests.docker_engine import docker_engine
from tests.harness import probing, stage
from tests.servers.stack import Stack

__all__ = ["docker_engine"]
CASES = [
    *((name, "probe", topology) for name in ("local", "docker") for topology in Topology),
    *((name, "claude_code", Topology.AGENT_IN_ENV) for name in ("local", "docker")),
]
HARMLESS = ("PATH=", "LANG=", "LC_", "HOME=", "PWD=", "SHLVL=", "USER=", "LOGNAME=", "SHELL=")
"""What may be the same in a box and in the server's own environment, beside paths of certificates."""


@dataclass(frozen=True)
class Seen:
    """One attempt, as seen from inside and outside."""

    sandbox: str
    agent: str
    topology: Topology
    answer: ActResponse
    report: dict[str, Any]
    left: list[Any]
    """Boxes of the run after the act."""
    statuses: dict[str, int]
    """What became of requests from the host with an attempt's tokens."""


@pytest.fixture(scope="module")
def canary() -> Iterator[str]:
    """A secret in the environment of the process that the agent server and its provider run in."""
    with pytest.MonkeyPatch.context() as patch:
        value = f"sk-{secrets.token_hex(24)}"
        patch.setenv(probing.CANARY, value)
        yield value


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.full, pytest.mark.timeout(600)] if case[1] == "claude_code" else [])
        for case in CASES
    ],
    ids="-".join,
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, canary: str) -> Seen:
    sandbox, agent, topology = request.param
    directory = tmp_path_factory.mktemp("isolation")
    settings: dict[str, Any] = {"state_dir": str(directory / "state"), "image_dir": str(directory / "images")}
    if sandbox == "docker":
        settings = {"base_url": request.getfixturevalue("docker_engine")}
    if agent == "claude_code":
        installed("claude-code")
    return asyncio.run(look(sandbox, agent, topology, directory, settings))


async def look(sandbox: str, agent: str, topology: Topology, directory: Path, settings: dict[str, Any]) -> Seen:
    planted = [directory / "secret.txt", Path.home() / f".isolation-{secrets.token_hex(6)}"]
    provider = create_provider({sandbox: settings})
    by_tool = agent == "claude_code"
    kind = ClaudeCodeAgent if by_tool else probing.ProbeAgent
    try:
        for path in planted:
            path.write_text("of the host alone")
        if await provider.image_labels(stage.IMAGE) is None:  # type: ignore[attr-defined]
            await stage.commit_image(provider)
        with (
            probing.probing_stage(directory, {sandbox: settings}, kind) as stack,
            probing.abstract_listener() as abstract,
        ):
            attempt, other = [await probing.begin(stack, name) for name in ("r1", "r2")]
            files = [str(path) for path in (*planted, REPOSITORY / "pyproject.toml", Path(stage.__file__))]
            given = probing.probe_settings(stack, attempt, abstract, files)
            answer, report = await probing.probe(stack, attempt, topology, given, by_tool=by_tool)
            statuses = await from_the_host(stack, attempt, other)
        left = await provider.list({BoxLabel.RUN: stage.RUN})
    finally:
        for path in planted:
            path.unlink(missing_ok=True)
        await provider.aclose()
        await close_global_aiohttp_client()
    return Seen(sandbox, agent, topology, answer, report, left, statuses)


async def from_the_host(stack: Stack, attempt: probing.Attempt, other: probing.Attempt) -> dict[str, int]:
    """Statuses of requests with an attempt's tokens, from a process that is in no box."""
    token = attempt.session["inference_token"]
    chat = {"model": attempt.session["model"], "messages": [{"role": "user", "content": probing.WORDS}]}
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    root = stack.url("policy")

    async def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        return (await request("POST", url, json=body, headers={**accept, **headers})).status

    async def ask(session: dict[str, Any], credential: str) -> int:
        return await post(f"{session['base_url']}/chat/completions", chat, {"Authorization": f"Bearer {credential}"})

    found = {
        "model, with the box's own key": await ask(attempt.session, PLACEHOLDER_KEY),
        "model, with the MCP token": await ask(attempt.session, attempt.mcp_token),
        "another rollout's session, with the model token": await post(
            f"{root}/sessions/{other.session['session_id']}/v1/chat/completions",
            chat,
            {"Authorization": f"Bearer {token}"},
        ),
        "a new session, with the model token": await post(
            f"{root}/sessions", {"rollout": attempt.rollout.model_dump()}, {"Authorization": f"Bearer {token}"}
        ),
        "finalize, with the model token": await post(
            f"{root}/sessions/{attempt.session['session_id']}/finalize", {}, {CONTROL_TOKEN_HEADER: token}
        ),
        "act, with the model token": await post(f"{stack.url('tiny')}/act", {}, {"Authorization": f"Bearer {token}"}),
        "MCP, with the model token": await post(attempt.mcp.url, listing, {"Authorization": f"Bearer {token}"}),
        "MCP, with the box's own key": await post(
            attempt.mcp.url, listing, {"Authorization": f"Bearer {PLACEHOLDER_KEY}"}
        ),
        **{
            f"{path} of the environment, with the MCP token": await post(
                stack.url("weather") + path, {}, dict(attempt.mcp.headers)
            )
            for path in ("/verify", "/seed_session", "/close", "/get_weather")
        },
    }
    assert await ask(attempt.session, token) == 200, "until here it was the rollout's own"
    assert await post(attempt.mcp.url, listing, dict(attempt.mcp.headers)) == 200
    await probing.close(stack, attempt)
    found["model, after the rollout"] = await ask(attempt.session, token)
    found["MCP, after the rollout"] = await post(attempt.mcp.url, listing, dict(attempt.mcp.headers))
    return found


def test_box_has_no_route_but_loopback_and_reaches_nothing_beyond_its_doors(seen: Seen) -> None:
    found = seen.report["network"]
    assert found["interfaces"] == ["lo"]
    reached = {kind: found[kind] for kind in ("routes", "routes_v6", "connected", "abstract_sockets", "datagrams")}
    assert not any(reached.values()), reached
    assert found["sockets"] == []


def test_box_has_no_name_service(seen: Seen) -> None:
    assert seen.report["network"]["resolved"] == []


def test_hosts_files_cannot_be_read_and_mounts_cannot_be_written(seen: Seen) -> None:
    found = seen.report["files"]
    assert found["host_files"] == []
    assert found["written"] == []
    assert found["descriptors"] == []
    assert found["devices"] == ["full", "null", "random", "tty", "urandom", "zero"]


def test_only_the_package_is_mounted_of_the_hosts_disk(seen: Seen) -> None:
    of_disks = {
        target: options.split(",")[0]
        for _, target, kind, options in seen.report["files"]["mounts"]
        if kind not in ("overlay", "proc", "tmpfs", "devtmpfs", "devpts", "mqueue", "sysfs", "cgroup", "cgroup2")
    }
    package = {"probe": "/opt/nemo-gym/agents/probe", "claude_code": "/opt/nemo-gym/agents/claude-code"}[seen.agent]
    assert of_disks.pop(package) == "ro"
    # The engine writes these three for each container.
    engine = {} if seen.sandbox == "local" else {"/etc/resolv.conf": "rw", "/etc/hostname": "rw", "/etc/hosts": "rw"}
    assert of_disks == engine | ({} if seen.sandbox == "local" else {"/.nemo-gym-init": "ro"})


def test_no_process_of_the_box_has_a_capability_or_can_gain_one(seen: Seen) -> None:
    found = seen.report["privileges"]
    assert len(found["status"]) > 1
    for pid, status in found["status"].items():
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}, pid
        assert status["NoNewPrivs"] == "1", pid
        # The first process, a hundred bytes of ours, never starts a program: its bounding set has no effect.
        if pid != "1":
            assert (status["CapBnd"], status["Seccomp"]) == ("0" * 16, "2"), pid
    assert found["gained"] == []


def test_no_credential_of_the_server_is_in_the_box(seen: Seen, canary: str) -> None:
    found = seen.report["secrets"]
    assert {"environment variable", "inference token", "MCP token", "credential for policy"} <= found.keys()
    assert {name: places for name, places in found.items() if places} == {}
    shared = {f"{name}={value}" for name, value in os.environ.items()} & set(seen.report["environ"])
    assert {entry for entry in shared if not entry.startswith(HARMLESS) and not entry.endswith(".crt")} == set()
    assert canary not in seen.answer.model_dump_json()


def test_doors_put_the_attempts_own_tokens_in_the_place_of_any_other(seen: Seen) -> None:
    found = seen.report["doors"]
    assert found["model"][0] == 200
    assert set(found["model_refuses"].values()) == {403}
    assert [status for status, _ in found["mcp"].values()] == [200]
    assert all("get_weather" in said for _, said in found["mcp"].values())
    assert set(found["mcp_refuses"].values()) == {403}


def test_tokens_of_an_attempt_open_nothing_else_and_nothing_afterwards(seen: Seen) -> None:
    opened = {what: status for what, status in seen.statuses.items() if status not in (401, 403, 404, 405, 409)}
    assert opened == {}
    assert len(seen.statuses) > 10


def test_box_is_gone_after_the_act(seen: Seen) -> None:
    assert seen.left == []


async def test_probe_finds_what_a_box_with_holes_lets_through(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    shown, secret = tmp_path / "shared" / "secret.txt", "sk-of-the-host"
    shown.write_text(secret)
    provider = create_provider({"local": {"state_dir": str(tmp_path / "state"), "linger_s": 1}})
    with probing.abstract_listener() as abstract, socket.create_server(("127.0.0.1", 0)) as listener:
        settings = {
            **{"words": "", "model": "", "model_url": "http://127.0.0.1:9", "mcp": []},
            "addresses": [["127.0.0.1", port := listener.getsockname()[1]]],
            "abstract_sockets": [abstract],
            "host_files": [str(shown)],
            "secrets": probing.inverted({"leaked": secret, "kept": "sk-of-nobody"}),
            "read_only": ["/var/tmp"],
        }
        spec = SandboxSpec(
            image="host",
            network=NetworkPolicy.OPEN,
            mounts=(Mount(str(shown.parent), str(shown.parent)),),
            files={"/srv/probe.py": probing.PROBE.read_text()},
        )
        box = await provider.create(spec)
        try:
            holder = await provider.start_exec(
                box, ExecRequest(["sleep", "60"], env={"LEAK": secret, "PATH": "/usr/bin"})
            )
            done = await provider.exec(box, ["python3", "/srv/probe.py"], stdin=json.dumps(settings).encode())
            await holder.kill()
        finally:
            await provider.close(box)
            await provider.aclose()
    assert done.ok, done.stderr
    found = json.loads(done.stdout or "")
    assert found["network"]["connected"] == [f"127.0.0.1:{port}"]
    assert found["network"]["abstract_sockets"] == [abstract]
    assert str(shown) in found["files"]["host_files"]
    assert found["files"]["written"] == ["/var/tmp"]
    assert any(place.startswith("environ of") for place in found["secrets"]["leaked"])
    assert any(place.startswith("memory of") for place in found["secrets"]["leaked"])
    assert found["secrets"]["kept"] == []
