"""Causes planted in real runs with real boxes, tools and signals: `ng_why` names each, with the servers' log lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.service.client import RolloutClient
from tests.view.serving import ROOT
from tests.view.test_watched_service import question, service
from tests.view.test_why_causes import KEY, _Endpoint, endpoint, finished, ng_run, ng_why, write_questions

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SOURCE = "slugline/__init__.py"
SWE = ("agent=mini_swe_agent", "environment=swe_bench", "model=scripted", "max_attempts=1")


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One task of SWE-bench's kind, its image prepared."""
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    lines = (ROOT / "resources_servers/swe_bench/data/example.jsonl").read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if "slugline" in json.loads(line)["instance_id"]))
    prepare = [str(Path(sys.executable).with_name("ng_prepare")), "swe_bench", f"rows={path}", "sandbox=local"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)
    return path


def script_of(folder: Path, *turns: dict[str, Any]) -> str:
    """A policy that says these turns to whatever it is asked."""
    path = folder / "policy.yaml"
    task = {"name": "any", "when": {"user": "."}, "turns": turns}
    path.write_text(json.dumps({"model": "planted", "tasks": [task]}))
    return f"script={path}"


def shell(command: str) -> tuple[dict[str, Any], ...]:
    return {"tool_calls": [{"shell": command}]}, {"text": "done", "ends": True}


def until(condition: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def servers_of(found: dict[str, Any]) -> set[str]:
    return {line["server"] for line in found["log_lines"]}


OF_EVALUATION = "++swe_bench.resources_servers.swe_bench."


@pytest.mark.parametrize(
    ("added", "limit", "cause", "said"),
    [
        (
            'x = []\\nwhile True: x.append(b"x" * (1 << 24))',
            "eval_resources.memory_mib=256",
            "out_of_memory",
            "out of memory",
        ),
        ("import time; time.sleep(100000)", "eval_timeout_s=30", "grader_timeout", "timed out"),
    ],
    ids=["eats the memory", "hangs"],
)
def test_patch_that_its_evaluation_does_not_survive(
    tmp_path: Path, row: Path, added: str, limit: str, cause: str, said: str
) -> None:
    script = script_of(tmp_path, *shell(f"printf '{added}\\n' >> {SOURCE}"))
    finished(ng_run(tmp_path, *SWE, "sandbox=local", f"input={row}", script, OF_EVALUATION + limit))
    (found,) = ng_why(tmp_path)
    assert (found["cause"], found["rollouts"]) == (cause, 1), found
    assert said in " ".join(found["evidence"])
    assert found["log_lines"], found


def test_boxes_whose_supervisor_is_killed(tmp_path: Path, row: Path) -> None:
    state = tmp_path / "state"
    process = ng_run(
        tmp_path,
        *(*SWE, "sandbox=local", f"++sandbox.local.state_dir={state}", f"input={row}"),
        script_of(tmp_path, *shell("sleep 7713")),
    )
    until(lambda: _commands("sleep 7713"), "the command in the box")
    (held,) = state.rglob("supervisor.json")
    os.kill(json.loads(held.read_text())["pid"], signal.SIGKILL)
    finished(process)
    (found,) = ng_why(tmp_path)
    assert found["cause"] == "lost_box", found
    assert "mini_swe_agent" in servers_of(found), found


def _commands(wanted: str) -> list[int]:
    found = []
    for each in psutil.process_iter(["pid", "cmdline"]):
        if " ".join(each.info["cmdline"] or ()) == wanted:
            found.append(each.info["pid"])
    return found


def test_disk_that_is_full_under_the_boxes(tmp_path: Path, row: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(state)], check=True)
    try:
        process = ng_run(
            tmp_path,
            *(*SWE, "sandbox=local", f"++sandbox.local.state_dir={state}", f"input={row}"),
            script_of(tmp_path, *shell("echo never run")),
        )
        finished(process)
    finally:
        until(lambda: subprocess.run(["umount", str(state)], check=False).returncode == 0, "the disk to be free")
    (found,) = ng_why(tmp_path)
    assert found["cause"] == "disk_full", found
    assert found["log_lines"], found


TOOLS = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("ledger")

@server.tool()
def balance(account: str) -> str:
    return f"the balance of {account} is 12"

if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""
ENVIRONMENT = """
from typing import ClassVar

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.session import McpServer, Placement, SessionDescriptor, Topology
from nemo_gym.contract.verdict import Verdict


class LedgerConfig(BaseResourcesServerConfig):
    tools_url: str


class Ledger(SimpleResourcesServer):
    config: LedgerConfig
    topologies: ClassVar = (Topology.ENV_SANDBOXED,)
    tool_access: ClassVar = ("mcp",)

    async def open_session(self, row, rollout):
        return SessionDescriptor(
            environment=self.config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=Topology.ENV_SANDBOXED),
            mcp=(McpServer(name="ledger", url=self.config.tools_url),),
        )

    async def grade(self, row, response, artifacts, rollout):
        return Verdict.of(1.0)


if __name__ == "__main__":
    Ledger.run_webserver()
"""


class _KillsTools(_Endpoint):
    """A model that asks for the balance; where the prompt says so its tools' server is killed just before."""

    tools: subprocess.Popen[bytes]

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        asked = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        if '"role":"tool"' in asked.replace(" ", ""):
            message: dict[str, Any] = {"role": "assistant", "content": "It is 12."}
        else:
            if "KILL" in asked:
                self.tools.kill()
                self.tools.wait()
            call = {"name": "balance", "arguments": '{"account": "mine"}'}
            calls = [{"id": "c1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        why = "tool_calls" if message.get("tool_calls") else "stop"
        choices = [{"index": 0, "message": message, "finish_reason": why}]
        usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
        held = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        self._answer(200, {**held, "choices": choices, "usage": usage})


@contextmanager
def model_and_tools(folder: Path, port: int) -> Iterator[str]:
    (folder / "tools.py").write_text(TOOLS)
    tools = subprocess.Popen([sys.executable, str(folder / "tools.py"), str(port)])
    try:
        with endpoint(type("Handler", (_KillsTools,), {"tools": tools})) as url:
            yield url
    finally:
        tools.kill()
        tools.wait()


def test_tools_whose_server_is_killed(tmp_path: Path, unused_tcp_port: int) -> None:
    place = tmp_path / "root" / "resources_servers" / "ledger"
    place.mkdir(parents=True)
    (place / "app.py").write_text(ENVIRONMENT)
    url = f"http://127.0.0.1:{unused_tcp_port}/mcp"
    block = {"entrypoint": "app.py", "tools_url": url, "domain": "other"}
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "ledger"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    configuration = tmp_path / "ledger.yaml"
    blocks = {"ledger": {"resources_servers": {"ledger": block}}}
    configuration.write_text(json.dumps({**blocks, "teller": {"responses_api_agents": {"simple_agent": agent}}}))
    rows = tmp_path / "in.jsonl"
    prompts = ("What is my balance?", "KILL the tools, then: what is my balance?")
    rows.write_text(
        "".join(
            json.dumps({"id": f"t{number}", "responses_create_params": {"input": [{"role": "user", "content": text}]}})
            + "\n"
            for number, text in enumerate(prompts)
        )
    )
    with model_and_tools(tmp_path, unused_tcp_port) as model:
        run = ng_run(
            tmp_path,
            *(f"+config_paths=[{configuration}]", "model=gateway", f"policy_base_url={model}", "policy_model_name=m"),
            *("agent_name=teller", f"input={rows}", "concurrency=1", "max_attempts=1"),
            env={"NEMO_GYM_EXTRA_ROOTS": f"{tmp_path / 'root'}{os.pathsep}{ROOT}"},
        )
        finished(run)
    (worked,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert worked["reward"] == 1.0
    (found,) = ng_why(tmp_path)
    assert (found["cause"], found["named"]) == ("mcp_down", ["t1#0"]), found
    assert "teller" in servers_of(found), found


def test_run_that_is_interrupted(tmp_path: Path) -> None:
    rows = write_questions(tmp_path, *(f"SLOW-{number}" for number in range(3)))
    process = ng_run(
        tmp_path,
        *("agent=simple_agent", "environment=math", "model=scripted", f"input={rows}", "concurrency=2"),
        script_of(tmp_path, {"text": "2", "delay_s": 500}),
    )
    running = tmp_path / "out_running.json"

    def acting() -> bool:
        try:
            told = json.loads(running.read_text())["running"]
            return sum(each["stage"] == "run" and each["works"] for each in told) == 2
        except (OSError, ValueError):
            return False

    until(acting, "two rollouts to act")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert not running.exists()
    (found,) = ng_why(tmp_path)
    assert (found["cause"], found["rollouts"]) == ("stopped", 3), found
    assert found["evidence"][1].startswith("begun: slow-0#0 in attempt 1, ")
    assert found["log_folders"] == [str(tmp_path / "run" / "logs")]


def test_job_that_its_caller_cancels(tmp_path: Path) -> None:
    with service(tmp_path) as run_dir, RolloutClient(run_dir=run_dir) as client:
        client.submit([{"job_id": "slow", "run_id": "first", "row": question(7, "SLOW")}])
        until(lambda: client.runs()["running"], "the job to be under way")
        client.cancel(run="first", reason="not needed any more")
        results = [view.result for view in client.results(run="first", follow=False)]
    assert [each["server_logs"] for each in results if each] == [str(run_dir / "logs")]
    (tmp_path / "out.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in results))
    (found,) = ng_why(tmp_path)
    assert (found["cause"], found["named"]) == ("cancelled", ["task-7#0"]), found
    assert "not needed any more" in " ".join(found["evidence"])
    assert KEY not in json.dumps(found)
