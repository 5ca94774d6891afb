"""Test compositions of only NeMo Gym's plugins: compose every YAML, and serve environments with a fake endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

MODELS = (
    "",
    "responses_api_models/openai_model/configs/openai_model.yaml",
    "responses_api_models/vllm_model/configs/vllm_model.yaml",
)
"""Tried in this order: a configuration may include its model, need one, or accept only some."""
POLICY = ("+policy_base_url=http://127.0.0.1:9/v1", "+policy_api_key=key", "+policy_model_name=policy")
VARIABLES = ("HF_TOKEN", "OPENSANDBOX_API_KEY", "OPENSANDBOX_DOMAIN", "TERMINAL_BENCH_2_1_DATASET_PATH")
"""Environment variables that configurations name; composing needs them to have any value."""
ROWS = 3
_NG_RUN = "from nemo_gym.cli.run import main; main()"
_FOLDERS = ("resources_servers/*/configs/**/*.yaml", "responses_api_agents/*/configs/**/*.yaml")
_MORE = ("environments/**/*.yaml", "benchmarks/**/*.yaml")


def configurations(plugins: Path, only: str | None) -> list[Path]:
    """Return every file that defines a server or includes other files."""
    found = []
    for pattern in (*_FOLDERS, *_MORE):
        for path in sorted(plugins.glob(pattern)):
            relative = path.relative_to(plugins)
            text = path.read_text(encoding="utf-8", errors="replace")
            is_configuration = re.search(
                r"^\s+(resources_servers|responses_api_\w+|environment_servers):|^config_paths:", text, re.M
            )
            if is_configuration and (only is None or re.search(only, str(relative))):
                found.append(relative)
    return found


def compose_all(plugins: Path, only: str | None, expected: Path | None) -> dict[str, Any]:
    """Compose each configuration in this process. ``expected``: a file with the names that count, one a line."""
    from nemo_gym.config.check import check_everything
    from nemo_gym.config.compose import compose
    from nemo_gym.contract.errors import ConfigError

    os.environ["NEMO_GYM_EXTRA_ROOTS"] = str(plugins)
    os.environ |= {name: os.environ.get(name, "set") for name in VARIABLES}
    counted = set(expected.read_text().split()) if expected else None
    composed: list[str] = []
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for path in configurations(plugins, only):
            if counted is not None and str(path) not in counted:
                continue
            for model in MODELS:
                files = ",".join(name for name in (model, str(path)) if name)
                try:
                    check_everything(compose([f"+config_paths=[{files}]", *POLICY]))
                except ConfigError as error:
                    refused.setdefault(str(path), error.message[:300])
                else:
                    composed.append(str(path))
                    refused.pop(str(path), None)
                    break
    return {
        "configurations": len(composed) + len(refused),
        "composed": len(composed),
        "by_folder": dict(Counter(name.split("/")[0] for name in composed)),
        "refused": refused,
    }


@dataclass
class Served:
    """One composition that was started, and its rows."""

    name: str
    rows: int = 0
    valid: int = 0
    seconds: float = 0.0
    problem: str = ""
    servers: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.valid == ROWS


def serveable(plugins: Path, only: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the configurations of environments with their own agent and existing example rows, and the rows' file."""
    for path in configurations(plugins, only):
        if path.parts[0] != "resources_servers" and path.parts[0] != "environments":
            continue
        for line in (plugins / path).read_text(encoding="utf-8").splitlines():
            match = re.search(r"jsonl_fpath:\s*['\"]?(\S*example\S*\.jsonl)", line)
            if match and (plugins / match[1]).is_file():
                yield path, plugins / match[1]
                break


def serve_all(plugins: Path, only: str | None, python: str, core: Path, jobs: int, timeout_s: float) -> list[Served]:
    """Start each composition with `ng_run` and a fake endpoint, and run three of its rows."""
    chosen = list(serveable(plugins, only))
    # One cache for the plugins' virtual environments: plugins with the same requirements share one.
    with tempfile.TemporaryDirectory(prefix="compat-cache-") as cache, fake_endpoint() as url:
        with ThreadPoolExecutor(jobs) as pool:
            return list(
                pool.map(lambda pair: serve(pair[0], pair[1], plugins, url, python, core, cache, timeout_s), chosen)
            )


def serve(
    config: Path, rows: Path, plugins: Path, url: str, python: str, core: Path, cache: str, timeout_s: float
) -> Served:
    served = Served(str(config))
    model = MODELS[2] if _wants_vllm(plugins / config) else MODELS[1]
    with tempfile.TemporaryDirectory(prefix="compat-serve-") as scratch:
        output = Path(scratch) / "rollouts.jsonl"
        argv = [
            *(python, "-c", _NG_RUN, f"+config_paths=[{config},{model}]"),
            *(f"+policy_base_url={url}", "+policy_api_key=key", "+policy_model_name=policy"),
            *(f"+input_jsonl_fpath={rows}", f"+output_jsonl_fpath={output}", f"+limit={ROWS}"),
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(core), str(plugins))),
            "NEMO_GYM_EXTRA_ROOTS": str(plugins),
            "NEMO_GYM_CACHE_DIR": cache,
        }
        started = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=scratch, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            console_text = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.terminate()
            console_text = process.communicate()[0].decode(errors="replace") + "\nstopped by the time limit"
        served.seconds = round(time.monotonic() - started, 1)
        if output.is_file():
            results = [json.loads(line) for line in output.read_text().splitlines() if line.strip()]
            served.rows = len(results)
            served.valid = sum(row.get("valid", True) is True and row.get("reward") is not None for row in results)
        if not served.ok:
            lines = [line for line in console_text.splitlines() if line.strip()]
            failures = output.with_name("rollouts_failures.jsonl")
            failure = json.loads(failures.read_text().splitlines()[0]) if failures.is_file() else {}
            served.problem = (failure.get("failure_reason") or " | ".join(lines[-3:]))[-400:]
    return served


def _wants_vllm(config: Path) -> bool:
    blocks = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    allowed = re.findall(r"'allowed_model_types': \[([^\]]*)\]", str(blocks))
    return any("vllm_model" in names and "openai_model" not in names for names in allowed)


def serve_report(served: list[Served]) -> dict[str, Any]:
    return {
        "compositions": len(served),
        "valid": sum(result.ok for result in served),
        "served": [asdict(result) | {"ok": result.ok} for result in served],
    }


class _Handler(BaseHTTPRequestHandler):
    """Responds to every inference request with one sentence, in the dialect of the request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "me"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        usage: dict[str, Any]
        if self.path.endswith("/responses"):
            usage = {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18}
            usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
            part = {"type": "output_text", "text": ANSWER, "annotations": []}
            message = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
            head = {"id": "resp", "object": "response", "created_at": 0, "model": "policy", "status": "completed"}
            more = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage}
            self._answer({**head, **more, "output": [message]})
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ANSWER}}
        head = {"id": "chat", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
        self._answer({**head, "choices": [choice]})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: thousands of lines would hide the report."""


ANSWER = "The answer is \\boxed{A}. Answer: A. [[A]] <action>stand</action>"
"""A response that many verifiers can parse."""


@contextlib.contextmanager
def fake_endpoint() -> Iterator[str]:
    """A model endpoint on loopback; yields its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
