"""An agent the suite has never seen (the documentation's), a scripted policy, an MCP server, and real boxes."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    FilesHarvest,
    GitDiffHarvest,
    InferenceEndpoint,
    Limits,
    McpServer,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.base import SandboxProvider
from responses_api_models.scripted_model.app import ScriptedModel
from tests.architecture.docs import write_examples
from tests.servers.stack import Stack, running_stack

IMAGE = "harness-greeting"
REPOSITORY = """
set -e
mkdir -p /repo && cd /repo && printf 'hello wrld\\n' > greeting.txt
git init -q -b main . && git add -A
git -c user.name=t -c user.email=t@example.invalid commit -q -m first
"""
MCP_TOKEN = "Bearer mcp-of-this-attempt"
RUN = f"harness-tests-{os.getpid()}"
"""Of this process: others may run the same tests on the same engine."""


def bash(command: str, **turn: Any) -> dict[str, Any]:
    return {"text": "Next.", "tool_calls": [{"name": "bash", "arguments": {"command": command}}], **turn}


def task(words: str, *turns: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": words, "when": {"user": words}, "turns": list(turns), **options}


DONE = {"text": "All done."}


def nap(seconds: int) -> str:
    """A `sleep` that no other process of tests on this machine has in its command line, inside a box or out of it."""
    return f"sleep {seconds}.{os.getpid():07}"


FIX = bash("sed -i s/wrld/world/ greeting.txt; pwd")
KEEP = "echo kept >> greeting.txt; "
FLOOD = "(echo; head -c 30000000 /dev/zero | tr '\\0' x; echo)"
"""A line of 30 MB; nobody's buffer is to hold it."""
SCRIPT = {
    "model": "scripted",
    "tasks": [
        task("fix the greeting", bash("cat greeting.txt"), FIX, DONE),
        task("write the answer", bash("echo 42 > answer.txt; pwd"), DONE),
        task("ask the weather", {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}, DONE),
        task("look around", bash("cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/net/route; id -u"), DONE),
        task("never stop", bash("pwd"), repeat_last=True),
        task("hang", bash(KEEP + nap(273)), DONE),
        task("flood", bash(KEEP + "head -c 30000000 /dev/zero | tr '\\0' x >&2"), DONE),
        task("garbage among the events", bash(KEEP + FLOOD + " > /proc/$PPID/fd/1"), DONE),
        task("stop the agent", bash(KEEP + "kill -STOP $PPID; " + nap(274)), DONE),
        task("hold the output", bash(KEEP + f"(setsid {nap(275)} <&- >/proc/$PPID/fd/1 2>/proc/$PPID/fd/2 &)"), DONE),
        task("fork daemons", bash(KEEP + f"(setsid {nap(271)} >/dev/null &); {nap(272)} >/dev/null & true"), DONE),
        task("kill the agent", bash(KEEP + "kill -9 $PPID; sleep 5"), DONE),
        task("eat memory", bash(KEEP + "echo 1000 > /proc/$PPID/oom_score_adj; tail -n 7771 /dev/zero"), DONE),
        task("rate limit", bash("true"), {**DONE, "fault": {"status": 429, "times": 99, "retry_after_s": 0}}),
        task("server error", bash(KEEP), {**DONE, "fault": {"status": 500, "times": 99}}),
        task("one hiccup", bash("true"), {**DONE, "fault": {"status": 500, "times": 1}}),
        task("disconnect", bash("true"), {**DONE, "fault": {"disconnect": True, "times": 99}}),
        task("silent model", {**DONE, "fault": {"hang_s": 600}}),
    ],
}


def plugin(directory: Path) -> type[CliAgent]:
    """Write the documentation's CLI agent below ``directory`` and import it from there."""
    write_examples("add-an-agent.md", directory)
    path = directory / "responses_api_agents" / "tiny_agent" / "app.py"
    spec = importlib.util.spec_from_file_location("tiny_agent_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    agent: type[CliAgent] = module.TinyAgent
    return agent


async def commit_image(provider: SandboxProvider) -> None:
    """Make `IMAGE`: a small repository at /repo."""
    box = await provider.create(SandboxSpec(image="host"))
    try:
        made = await provider.exec(box, REPOSITORY)
        assert made.ok, made.stderr
        await provider.commit(box, IMAGE, {})  # type: ignore[attr-defined]
    finally:
        await provider.close(box)


@contextmanager
def stage(
    directory: Path,
    sandbox: dict[str, Any],
    *,
    agent: type[CliAgent] | None = None,
    tasks: list[dict[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[Stack]:
    """``agent`` in place of the documentation's, with ``tasks`` of its own tools in place of `SCRIPT`'s."""
    script = directory / "script.json"
    script.write_text(json.dumps({**SCRIPT, "tasks": tasks or SCRIPT["tasks"]}))
    fields = {
        "resources_server": {"type": "resources_servers", "name": "env"},
        "model_server": {"type": "responses_api_models", "name": "policy"},
        "sandbox_provider": sandbox,
        "scratch": {"image": "host", "workdir": "/tmp"},
        **settings,
    }
    with running_stack() as running:
        running.add("policy", ScriptedModel, Role.MODEL, script=str(script))
        running.add("tiny", agent or plugin(directory / "plugins"), Role.AGENT, ("policy",), **fields)
        yield running


WORLD = SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo"))


def descriptor(topology: Topology, mcp: str | None = None, **fields: Any) -> SessionDescriptor:
    """What an environment that serves every topology says. ``mcp``: root URL of its MCP server."""
    in_world = topology in (Topology.AGENT_IN_ENV, Topology.WHOLE_INTERACTION)
    given: dict[str, Any] = {
        "environment": "env",
        "task_id": "t",
        "rollout": RolloutIdentity(rollout_id="r", task_id="t", group_id="g", run_id=RUN),
        "placement": Placement(topology=topology),
        "sandbox": WORLD if in_world else None,
        "harvest": (GitDiffHarvest(path="/repo"),) if in_world else (FilesHarvest(paths=("/tmp/answer.txt",)),),
        "mcp": (McpServer(name="weather", url=f"{mcp}/mcp", headers={"Authorization": MCP_TOKEN}),) if mcp else (),
        **fields,
    }
    return SessionDescriptor(**given)


async def act(
    stack: Stack, words: str, asked: SessionDescriptor, *, run: Limits | None = None, **limits: Any
) -> ActResponse:
    """One attempt, with ``limits`` of its environment and those of its ``run``, as a seed puts them together."""
    run = run or Limits()
    asked = asked.model_copy(update={"limits": run.over(asked.limits)})
    if limits:
        asked = asked.model_copy(update={"limits": run.over(Limits(**limits))})
    client = stack.client()
    opened = await (await client.post("policy", "/sessions", json={"rollout": asked.rollout.model_dump()})).json()
    request = ActRequest(
        responses_create_params={"input": [{"role": "user", "content": words}]},
        descriptor=asked,
        inference=InferenceEndpoint(
            base_url=opened["base_url"], token=opened["inference_token"], model=opened["model"]
        ),
        limits=run,
    )
    reply = await client.post("tiny", "/act", json=request.model_dump(mode="json"))
    body = await reply.json()
    assert reply.status == 200, body
    return ActResponse.model_validate(body)


async def patience_s(attempt: Awaitable[Any], at_least_s: float = 3.0) -> float:
    """A wall clock in which an agent surely comes to what a test is about, however busy the machine is now: many times
    what a whole ``attempt`` takes."""
    began = time.monotonic()
    await attempt
    return max(at_least_s, 6 * (time.monotonic() - began))


def outputs(answer: ActResponse) -> list[str]:
    return [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]


async def weather_server(seen: list[str]) -> AsyncIterator[str]:
    """A stateless MCP server over streamable HTTP with one tool, for whoever has the token."""

    async def handle(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != MCP_TOKEN:
            return web.json_response({"error": "invalid token"}, status=401)
        call = await request.json()
        if "id" not in call:
            return web.Response(status=202)  # a notification
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "weather", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "weather", "description": "Of a city.", "inputSchema": schema}]},
            "tools/call": {"content": [{"type": "text", "text": "Oslo: snow"}]},
        }
        answer = {"jsonrpc": "2.0", "id": call["id"]}
        if call["method"] not in results:
            return web.json_response({**answer, "error": {"code": -32601, "message": "Method not found"}})
        seen.append(call["method"])
        return web.json_response({**answer, "result": results[call["method"]]})

    app = web.Application()
    app.router.add_post("/mcp", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
