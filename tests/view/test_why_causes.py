"""Causes planted in real runs: `ng_why` names each, with its evidence and the log lines of the servers it befell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.view.serving import ROOT

KEY = "key-of-this-test-4711"
CRASHING = """
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.session import ActRequest, ActResponse


class CrashingConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class Crashing(SimpleResponsesAPIAgent):
    config: CrashingConfig

    async def act(self, request: ActRequest) -> ActResponse:
        raise RuntimeError("the harness divided by zero")


if __name__ == "__main__":
    Crashing.run_webserver()
"""
CRASHING_YAML = """
crashing:
  responses_api_agents:
    crashing:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: math}
      model_server: {type: responses_api_models, name: policy_model}
"""


class _Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that fails as the prompt says."""

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        if "WRONG-KEY" in asked:
            self._answer(401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}})
        elif "TOO-LONG" in asked:
            said = "This model's maximum context length is 16 tokens. However, you requested 400 tokens."
            self._answer(400, {"error": {"message": said, "code": "context_length_exceeded"}})
        elif "UNKNOWN-MODEL" in asked:
            self._answer(404, {"error": {"message": "The model `m` does not exist.", "code": "model_not_found"}})
        else:  # the engine is gone
            self.close_connection = True

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def endpoint(handler: type[BaseHTTPRequestHandler] = _Endpoint) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ng_run(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("ng_run")), f"output={folder / 'out.jsonl'}"]
    command += [f"run_dir={folder / 'run'}", "retry_delay_s=0.01", "max_attempts=2", *words]
    given = {**os.environ, "POLICY_API_KEY": KEY, **(env or {})}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 3), said
    return said


def ng_why(folder: Path, *words: str) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).with_name("ng_why")), str(folder / "out.jsonl"), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    classes: list[dict[str, Any]] = json.loads(done.stdout)["classes"]
    return classes


def write_questions(folder: Path, *names: str) -> Path:
    path = folder / "in.jsonl"
    rows = ({"id": name.lower(), "question": f"{name}: what is 1 + 1?", "expected_answer": "2"} for name in names)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ("TOO-LONG", "context_exceeded"),
        pytest.param("UNKNOWN-MODEL", "model_refused", marks=pytest.mark.full),
        # After these the gateway has its engine rest, and tries again for a minute.
        pytest.param("WRONG-KEY", "wrong_key", marks=pytest.mark.full),
        pytest.param("GONE", "engine_down", marks=pytest.mark.full),
    ],
)
def test_failure_of_the_models_endpoint_is_named(planted: str, cause: str, tmp_path: Path) -> None:
    rows = write_questions(tmp_path, planted)
    with endpoint() as url:
        said = finished(
            ng_run(
                tmp_path,
                *("agent=simple_agent", "environment=math", "model=gateway", f"policy_base_url={url}"),
                *("policy_model_name=m", f"input={rows}"),
            )
        )
    output = tmp_path / "out.jsonl"
    assert f"Explained: ng_why {output}" in said
    (found,) = ng_why(tmp_path)
    assert found["cause"] == cause, found
    assert {"simple_agent", "policy_model"} & {line["server"] for line in found["log_lines"]}, found
    assert found["log_folders"] == [str(tmp_path / "run" / "logs")]
    assert KEY not in json.dumps(found)
    # A failed row names its logs; ng_logs gathers them by the rollout's id, from the file or from the run's folder.
    (failed,) = map(json.loads, open_lines(tmp_path))
    assert failed["server_logs"] == str(tmp_path / "run" / "logs")
    for where in (f"output={output}", f"run_dir={tmp_path / 'run'}"):
        command = [str(Path(sys.executable).with_name("ng_logs")), f"rollout={failed['_ng_rollout_id']}", where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "simple_agent warning: the act left nothing to grade" in done.stdout


def open_lines(folder: Path) -> list[str]:
    return (folder / "out_failures.jsonl").read_text().splitlines()


@pytest.mark.full
def test_crashed_agent_is_named_with_its_traceback(tmp_path: Path) -> None:
    place = tmp_path / "root" / "responses_api_agents" / "crashing"
    place.mkdir(parents=True)
    (place / "app.py").write_text(CRASHING)
    (tmp_path / "crashing.yaml").write_text(CRASHING_YAML)
    rows = write_questions(tmp_path, "ANY")
    roots = f"{tmp_path / 'root'}{os.pathsep}{ROOT}"
    with endpoint() as url:
        words = ("model=gateway", f"policy_base_url={url}", "policy_model_name=m", "environment=math")
        configuration = f"+config_paths=[{tmp_path / 'crashing.yaml'}]"
        run = ng_run(
            tmp_path,
            *(configuration, *words, "agent_name=crashing", f"input={rows}"),
            env={"NEMO_GYM_EXTRA_ROOTS": roots},
        )
        finished(run)
    (found,) = ng_why(tmp_path)
    assert found["cause"] == "agent_crashed"
    assert any("divided by zero" in json.dumps(line) for line in found["log_lines"]), found


@pytest.mark.full
def test_missing_image_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    row = json.loads((ROOT / "resources_servers/swe_bench/data/example.jsonl").read_text().splitlines()[0])
    rows.write_text(json.dumps({**row, "instance_id": "examples__nowhere-1", "image": "examples/nowhere:none"}) + "\n")
    finished(
        ng_run(
            tmp_path,
            *("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted", f"input={rows}"),
        )
    )
    (found,) = ng_why(tmp_path)
    assert found["cause"] == "image_missing", found
    assert found["log_lines"], found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_tampering_is_named(tmp_path: Path) -> None:
    words = ("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted", "num_repeats=2")
    rows = tmp_path / "in.jsonl"
    lines = (ROOT / "resources_servers/swe_bench/data/example.jsonl").read_text().splitlines()
    rows.write_text("".join(f"{line}\n" for line in lines if "tabulon" in json.loads(line)["instance_id"]))
    prepare = [str(Path(sys.executable).with_name("ng_prepare")), "swe_bench", f"rows={rows}", "sandbox=local"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)
    finished(ng_run(tmp_path, *words, f"input={rows}"))
    (found,) = ng_why(tmp_path)
    assert (found["cause"], found["named"]) == ("tampering", ["examples__tabulon-1#1"])
    assert "values_not_confirmed" in found["evidence"][0]


@pytest.mark.full
def test_killed_agent_server_is_named(tmp_path: Path) -> None:
    rows = write_questions(tmp_path, *(f"SLOW-{number}" for number in range(3)))
    with slow_endpoint() as url:
        process = ng_run(
            tmp_path,
            *("agent=simple_agent", "environment=math", "model=gateway", f"policy_base_url={url}"),
            *("policy_model_name=m", f"input={rows}", "max_attempts=1"),
        )
        pid = _when_acting(tmp_path)
        os.kill(pid, signal.SIGKILL)
        finished(process)
    causes = {each["cause"] for each in ng_why(tmp_path)}
    assert causes == {"agent_lost"}


@contextmanager
def slow_endpoint() -> Iterator[str]:
    class Slow(_Endpoint):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            time.sleep(5)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _when_acting(folder: Path) -> int:
    """The agent server's process, once an agent has acted for a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.2)
        running = folder / "out_running.json"  # replaced as a whole
        attempts = json.loads(running.read_text())["running"] if running.exists() else []
        if any(attempt["stage"] == "run" and attempt["stage_seconds"] > 1 for attempt in attempts):
            servers = json.loads((folder / "run" / "stack.json").read_text())["servers"]
            return int(next(each["pid"] for each in servers if each["instance"] == "simple_agent"))
    raise AssertionError("no agent acted")
