"""A run against a model endpoint that refuses: what its user reads, without opening a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.stack.stacks import ng_run, no_traceback

WORDS = ("agent=simple_agent", "environment=math", "input=rows.jsonl", "output=out.jsonl", "max_attempts=1")
TOO_LONG = "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."


class Endpoint(ThreadingHTTPServer):
    """Lists ``my-model`` and answers completions as it is told."""

    daemon_threads = True

    def __init__(self, *, status: int, message: str, lists: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.message, self.lists = status, message, lists
        self.completions = 0

    @property
    def words(self) -> tuple[str, ...]:
        return f"policy_base_url=http://127.0.0.1:{self.server_port}/v1", "policy_model_name=my-model"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        refuses = self.server.status == 401
        cards = [{"id": "my-model"}] if self.server.lists else [{"id": "my-modal"}]
        self._answer(401 if refuses else 200, {} if refuses else {"data": cards})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.completions += 1
        self._answer(self.server.status, {"error": {"message": self.server.message}})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


StartEndpoint = Callable[..., Endpoint]


@pytest.fixture
def start() -> Iterator[StartEndpoint]:
    started: list[Endpoint] = []

    def make(status: int, message: str = "no", *, lists: bool = True) -> Endpoint:
        endpoint = Endpoint(status=status, message=message, lists=lists)
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        started.append(endpoint)
        return endpoint

    yield make
    for endpoint in started:
        endpoint.shutdown()
        endpoint.server_close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    row = {"responses_create_params": {"input": "What is 2 + 2?"}, "expected_answer": 4}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": f"q{n}", **row}) + "\n" for n in range(3)))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "status", "lists", "message"),
    [
        ("gateway", 401, True, "refused its API key (401)"),
        ("openai", 404, False, "has no model 'my-model' (did you mean 'my-modal'?)"),
    ],
    ids=["key", "name"],
)
def test_run_does_not_begin_when_the_engine_refuses_key_or_name(
    rows: Path, start: StartEndpoint, model: str, status: int, lists: bool, message: str
) -> None:
    endpoint = start(status, "The model `my-model` does not exist.", lists=lists)
    with ng_run(rows, *WORDS, f"model={model}", *endpoint.words) as stack:
        assert stack.wait_end() == 2
        assert "ng_run: error: model server 'policy_model': engine '" in stack.stderr
        assert message in stack.stderr
        assert no_traceback(stack.stderr)
    assert endpoint.completions <= 1
    assert not (rows / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (400, TOO_LONG, "3 × no verdict, context_exceeded: the first request does not fit"),
        (400, "tools are not supported", "3 × no verdict, model_refused: the policy endpoint answered 400"),
        (403, "no", "3 × no verdict, model_refused: the policy endpoint answered"),
    ],
    ids=["context", "request", "forbidden"],
)
def test_cause_of_failed_rollouts_is_read_from_the_output_of_the_run(
    rows: Path, start: StartEndpoint, status: int, said: str, reason: str
) -> None:
    with ng_run(rows, *WORDS, "model=openai", *start(status, said).words) as stack:
        assert stack.wait_end() != 0
        assert reason in stack.stdout
        assert said == "no" or said in stack.stdout
        assert ("does not fit the model's context. Serve the model" in stack.stdout) is (said is TOO_LONG)
        assert no_traceback(stack.stderr)
