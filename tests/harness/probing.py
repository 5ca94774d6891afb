"""An agent whose CLI is a probe, and what it saw of the box that an agent server gave it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.agent.bindings import FIRST_MCP_DOOR_PORT
from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, CliPackage, HarnessCommand, HarnessContext
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.session import (
    DEFAULT_MODEL_DOOR_PORT,
    ActRequest,
    ActResponse,
    AgentOutcome,
    InferenceEndpoint,
    McpServer,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    Topology,
)
from resources_servers.example_mcp_weather.app import WeatherEnvironment
from responses_api_agents.claude_code_agent.app import ClaudeCode
from tests.acceptance.clis.place import REPOSITORY
from tests.harness import stage as staging
from tests.harness.stage import DONE, RUN, descriptor, task
from tests.servers.stack import Stack

PROBE = Path(__file__).with_name("probe_cli") / "probe.py"
ROW = json.loads((REPOSITORY / "resources_servers/example_mcp_weather/data/example.jsonl").read_text().splitlines()[0])
WORDS, CLAUDE_WORDS = "answer the probe", "look around in your box"
IN_WORLD = {"probe": "/var/tmp/probe.py", "settings": "/var/tmp/probe-settings.json"}
LOOK = f"python3 {IN_WORLD['probe']} < {IN_WORLD['settings']}"
CANARY = "OPENAI_API_KEY"
"""An environment variable of the agent server's process, with a secret."""


class ProbeReader(EventReader):
    """The probe prints its report and nothing else."""

    def feed(self, line: bytes) -> None:
        self.transcript.says(line.decode())


class Probe(CliHarness):
    """A harness that the suite has never seen: its prompt is the probe's settings."""

    name = "probe"
    package = CliPackage(name="probe", version="1", command=PROBE.name, runtime="python", directory=PROBE.parent)

    def command(self, context: HarnessContext) -> HarnessCommand:
        settings = {
            **json.loads(context.prompt),
            "model_url": context.model_url,
            "model": context.model,
            "mcp": [server.url for server in context.mcp],
            "read_only": [context.install_dir],
        }
        return HarnessCommand(argv=("python3", context.executable), stdin=json.dumps(settings).encode())

    def reader(self) -> EventReader:
        return ProbeReader()


class ProbeAgent(CliAgent):
    harness_class = Probe


@dataclass(frozen=True)
class Attempt:
    """One attempt's identities and tokens, as the pipeline has them."""

    rollout: RolloutIdentity
    session: dict[str, Any]
    mcp: McpServer
    control_token: str
    """The environment's."""

    @property
    def inference(self) -> InferenceEndpoint:
        return InferenceEndpoint(
            base_url=self.session["base_url"], token=self.session["inference_token"], model=self.session["model"]
        )

    @property
    def mcp_token(self) -> str:
        return self.mcp.headers["Authorization"].removeprefix("Bearer ")


async def begin(stack: Stack, name: str) -> Attempt:
    """Open a session at the policy, and seed a real environment with tools."""
    rollout = RolloutIdentity(rollout_id=name, task_id=ROW["task_id"], group_id="g", run_id=RUN)
    client = stack.client()
    opened = await (await client.post("policy", "/sessions", json={"rollout": rollout.model_dump()})).json()
    body = {**ROW, "_ng_session": {"rollout": rollout.model_dump()}}
    seeded = await (await client.post("weather", "/seed_session", json=body)).json()
    (server,) = seeded["descriptor"]["mcp"]
    return Attempt(rollout, opened, McpServer.model_validate({**server, "name": "weather"}), seeded["control_token"])


async def close(stack: Stack, attempt: Attempt) -> None:
    """Finalize the session, and close the attempt at the environment."""
    client = stack.client()
    path = f"/sessions/{attempt.session['session_id']}/finalize"
    headers = {CONTROL_TOKEN_HEADER: attempt.session["control_token"]}
    assert (await client.post("policy", path, json={}, headers=headers)).status == 200
    body = {"rollout": attempt.rollout.model_dump()}
    headers = {CONTROL_TOKEN_HEADER: attempt.control_token}
    assert (await client.post("weather", "/close", json=body, headers=headers)).status == 200


@contextmanager
def probing_stage(directory: Path, sandbox: dict[str, Any], agent: type[CliAgent], **settings: Any) -> Iterator[Stack]:
    look = {"text": "Next.", "tool_calls": [{"name": "Bash", "arguments": {"command": LOOK, "timeout": 120000}}]}
    tasks = [task(WORDS, DONE), task(CLAUDE_WORDS, look, DONE)]
    with staging.stage(directory, sandbox, agent=agent, tasks=tasks, **settings) as running:
        running.add("weather", WeatherEnvironment, Role.ENVIRONMENT)
        yield running


@contextmanager
def abstract_listener() -> Iterator[str]:
    """The name of a listening socket in the host's abstract namespace, which belongs to a network namespace."""
    name = f"nemo-gym-probe-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        yield name


def host_secrets(stack: Stack, attempt: Attempt) -> dict[str, str]:
    """What the agent server, its environment and the pipeline know, and no box may."""
    return {
        "environment variable": os.environ[CANARY],
        "inference token": attempt.session["inference_token"],
        "control token": attempt.session["control_token"],
        "environment's control token": attempt.control_token,
        "MCP token": attempt.mcp_token,
        **{
            f"credential for {name}": credential
            for name, credential in stack.keys.outgoing(Role.AGENT, "tiny", ["policy", "weather"]).items()
        },
    }


def probe_settings(stack: Stack, attempt: Attempt, abstract: str, host_files: list[str]) -> dict[str, Any]:
    ports = [block[kind][name]["port"] for name, block in stack.config.items() for kind in block]
    return {
        "words": WORDS,
        "addresses": [
            *(["127.0.0.1", port] for port in ports),
            *([host, port] for host in ("172.17.0.1", "10.0.2.2") for port in (22, ports[0])),
            *(["169.254.169.254", 80], ["1.1.1.1", 443], ["2606:4700:4700::1111", 443]),
        ],
        "abstract_sockets": [abstract],
        "host_files": host_files,
        "secrets": inverted(host_secrets(stack, attempt)),
    }


def inverted(secrets: dict[str, str]) -> dict[str, str]:
    """As the probe takes them, so that their plain form is nowhere in the box because of it."""
    return {name: bytes(255 - byte for byte in secret.encode()).hex() for name, secret in secrets.items()}


async def probe(
    stack: Stack, attempt: Attempt, topology: Topology, settings: dict[str, Any], *, by_tool: bool
) -> tuple[ActResponse, dict[str, Any]]:
    """The act's answer, and the probe's report. ``by_tool``: the agent is a real CLI whose policy runs the probe."""
    asked = descriptor(topology, harvest=(), task_id=attempt.rollout.task_id, rollout=attempt.rollout)
    asked = asked.model_copy(update={"mcp": (attempt.mcp,)})
    if by_tool:
        model_url, mcp = (f"http://127.0.0.1:{port}" for port in (DEFAULT_MODEL_DOOR_PORT, FIRST_MCP_DOOR_PORT))
        where = {"model_url": model_url, "model": attempt.session["model"], "mcp": [f"{mcp}/mcp"]}
        given = {**settings, **where, "read_only": [ClaudeCode.package.install_dir]}
        files = {IN_WORLD["probe"]: PROBE.read_text(), IN_WORLD["settings"]: json.dumps(given)}
        clause = SandboxClause(spec=SandboxSpecModel(image=staging.IMAGE, workdir="/repo", files=files))
        asked = asked.model_copy(update={"sandbox": clause})
    words = CLAUDE_WORDS if by_tool else json.dumps(settings)
    request = ActRequest(
        responses_create_params={"input": [{"role": "user", "content": words}]},
        descriptor=asked,
        inference=attempt.inference,
    )
    reply = await stack.client().post("tiny", "/act", json=request.model_dump(mode="json"))
    body = await reply.json()
    assert reply.status == 200, body
    answer = ActResponse.model_validate(body)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    (said,) = staging.outputs(answer) if by_tool else [answer.response["output"][0]["content"][0]["text"]]
    report: dict[str, Any] = json.loads(said)
    return answer, report
