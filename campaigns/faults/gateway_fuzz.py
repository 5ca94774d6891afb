#!/usr/bin/env python3
"""Send the gateway malformed requests on every route, and check its error responses.

    python -m campaigns.faults.gateway_fuzz --json [--examples 400] [--seed 1] [--parts mutated damaged schema raw]

No response may be a 5xx, none may hang, and each refusal on an inference route has the dialect's error format. Four
parts: valid bodies with a few changes; valid bodies with damaged bytes; valid and invalid bodies generated from the
SDKs' own types (schemathesis); and malformed HTTP requests. Prints figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import faulthandler
import http.client
import json
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.faults.gateway import bodies, raw_http
from campaigns.faults.gateway.answers import WrongAnswerError, check
from campaigns.faults.gateway.openapi import document
from campaigns.faults.gateway.processes import EngineProcess, GatewayProcess, policy_in
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER
from nemo_gym.gateway.dialects.errors import dialect_of
from nemo_gym_testing.gateway import FakeOpenAIEngine

TIMEOUT_S = 30.0
IDLE_S = 20.0
"""A connection that is idle for longer is replaced, because a server may close it."""
SCRIPT = {"rules": [{"steps": [{"say": "Yes."}]}]}
BACKENDS = ("token", "text")
PARTS = ("mutated", "damaged", "schema", "raw")
INFERENCE = {
    "/v1/chat/completions": bodies.CHAT,
    "/v1/responses": bodies.RESPONSES,
    "/v1/messages": bodies.MESSAGES,
    "/v1/messages/count_tokens": bodies.MESSAGES,
}
CONTROL = {
    "/sessions": bodies.OPEN,
    "/sessions/{session_id}/complete": bodies.REWARD,
    "/sessions/{session_id}/finalize": bodies.REWARD,
    "/sessions/{session_id}/abort": {},
    "/engines": bodies.ENGINE,
    "/engines/{name}/drain": {"timeout_s": 0},
    "/engines/{name}/undrain": {},
    "/engines/{name}/weight": {"weight": 2.0},
    "/weights": {"version": "v", "engines": ["e0"]},
}


@dataclass
class Target:
    """The gateway under test. It gets a new session whenever a request has ended one."""

    gateway: GatewayProcess
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    _connection: http.client.HTTPConnection | None = None
    _used_at: float = 0.0
    _session: dict[str, Any] = field(default_factory=dict)

    def post(self, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if self._connection is not None and time.monotonic() - self._used_at > IDLE_S:
            self._connection.close()
            self._connection = None
        self._used_at = time.monotonic()
        connection = self._connection or http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=TIMEOUT_S)
        self._connection = connection
        self.sent += 1
        try:
            connection.request("POST", path, body=data, headers={"Content-Type": "application/json", **headers})
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._connection = None
            raise WrongAnswerError(f"{path}: no answer: {type(error).__name__}: {error}") from error
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, body

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def session(self) -> dict[str, Any]:
        if not self._session:
            rollout = {**bodies.ROLLOUT, "rollout_id": f"r{self.sent}"}
            status, _, body = self.post("/sessions", orjson.dumps({"rollout": rollout}), self.gateway.headers())
            assert status == 200, body
            self._session = orjson.loads(body)
        return self._session

    def try_body(self, path: str, data: bytes, **more: str) -> None:
        """Send a body with the credentials that its route needs, and check the response."""
        inference = dialect_of(path) is not None
        if inference:
            headers = {"Authorization": f"Bearer {self.session()['inference_token']}"}
        elif path.startswith("/sessions/{"):
            headers = {**self.gateway.headers(), CONTROL_TOKEN_HEADER: self.session()["control_token"]}
        else:
            headers = self.gateway.headers()
        url = path.replace("{session_id}", self.session()["session_id"] if "{session_id}" in path else "")
        url = url.replace("{name}", "e0")
        status, given, body = self.post(url, data, {**headers, **more})
        self.statuses[f"{status // 100}xx"] += 1
        if "{session_id}" in path and not inference and status == 200:
            self._session = {}
        check(url, status, given, body)


@dataclass
class Findings:
    """Failures, each shrunk to its smallest cause."""

    wrong: list[str] = field(default_factory=list)
    examples: int = 0

    def run(
        self, name: str, strategy: st.SearchStrategy[Any], attempt: Callable[[Any], None], *, examples: int, seed: int
    ) -> None:
        last: list[Any] = []

        @seeded(seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
        )
        @given(strategy)
        def every(value: Any) -> None:
            self.examples += 1
            last[:] = [value]
            attempt(value)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                every()
        except WrongAnswerError as error:
            shown = (
                last[0]
                if isinstance(last[0], bytes)
                else bodies.encoded(last[0])
                if isinstance(last[0], dict)
                else repr(last[0]).encode()
            )
            self.wrong.append(f"{name}: {error} — sent {shown[:1500]!r}")


def mutated(target: Target, findings: Findings, examples: int, seed: int) -> None:
    for path, valid in {
        **INFERENCE,
        **{f"/sessions/{{session_id}}{p}": b for p, b in INFERENCE.items()},
        **CONTROL,
    }.items():
        findings.run(
            f"mutated {path}",
            bodies.mutated(valid),
            lambda body, path=path: target.try_body(path, bodies.encoded(body)),  # type: ignore[misc]
            examples=examples,
            seed=seed,
        )


def damaged(target: Target, findings: Findings, examples: int, seed: int) -> None:
    for path, valid in {**INFERENCE, **CONTROL}.items():
        findings.run(
            f"damaged {path}",
            bodies.damaged(valid),
            lambda data, path=path: target.try_body(path, data),  # type: ignore[misc]
            examples=examples,
            seed=seed,
        )


def schema(target: Target, findings: Findings, examples: int, seed: int) -> None:
    """Send valid and invalid bodies, generated from the routes' OpenAPI document."""
    import schemathesis
    from schemathesis.core.result import Ok
    from schemathesis.generation import GenerationMode

    described = schemathesis.openapi.from_dict(document())
    for result in described.get_all_operations():
        assert isinstance(result, Ok), "the description of the routes is right"
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            def attempt(case: Any, path: str = operation.path) -> None:
                if isinstance(case.body, bytes | str):
                    data = case.body if isinstance(case.body, bytes) else case.body.encode("utf-8", "surrogatepass")
                else:
                    try:
                        data = bodies.encoded(case.body)
                    except (TypeError, ValueError):
                        return  # no body at all
                target.try_body(path, data)

            findings.run(
                f"schema {operation.path} {mode.value}",
                operation.as_strategy(generation_mode=mode),
                attempt,
                examples=max(1, examples // 8),
                seed=seed,
            )


def raw(target: Target, findings: Findings, examples: int, seed: int) -> None:
    """Send malformed headers and framing."""
    body = orjson.dumps({**bodies.CHAT, "stream": False})
    for path in INFERENCE:
        for headers in (
            {"Content-Encoding": "gzip"},
            {"Content-Encoding": "br, zstd"},
            {"Content-Type": "text/plain"},
            {"Content-Type": "multipart/form-data; boundary=x"},
            {"Accept": "text/event-stream"},
            {"x-stainless-retry-count": "9" * 400},
            {"x-stainless-retry-count": "²"},
            {"idempotency-key": "k" * 8000},
            {"idempotency-key": ""},
            {"anthropic-beta": ",,," * 100},
            {"X-NeMo-Gym-Rollout-Id": "../../x"},
            {"Cookie": "a=" + "b" * 4000},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic ngi1_x"},
            {"Authorization": "Bearer ngi1_" + "x" * 5000},
            {"Authorization": "Bearer ngi1_\xe9\xff"},
            {"x-api-key": "\xff"},
            {"Expect": "100-continue"},
        ):
            try:
                target.try_body(path, body, **headers)
            except WrongAnswerError as error:
                findings.wrong.append(f"raw {headers}: {error}")
            findings.examples += 1
    draw = random.Random(seed)
    token = target.session()["inference_token"]
    for number in range(max(1, examples // 4)):
        request = raw_http.request(draw, body, token)
        findings.examples += 1
        try:
            raw_http.send(target.gateway.port, request)
        except WrongAnswerError as error:
            findings.wrong.append(f"raw {number}: {error} — sent {request[:400]!r}")


@contextmanager
def fuzzed(folder: Path, backend: str = "token") -> Iterator[Target]:
    """A gateway in front of an engine that takes token ids, or of an endpoint that takes text."""
    folder.mkdir(exist_ok=True)
    policy = policy_in(folder)
    if backend == "text":
        with _text_endpoint() as url:
            gateway = GatewayProcess(folder, [url], None, wire="openai", max_body_bytes=1 << 20)
            try:
                gateway.start()
                with closing(Target(gateway)) as target:
                    yield target
            finally:
                gateway.close()
        return
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    engine = EngineProcess(policy, folder / "engine.jsonl", "--script", str(script), wire="sglang")
    gateway = GatewayProcess(folder, [engine.url], policy, wire="sglang", path_tokens=True, max_body_bytes=1 << 20)
    try:
        gateway.start()
        with closing(Target(gateway)) as target:
            yield target
    finally:
        gateway.close()
        engine.stop()


@contextmanager
def _text_endpoint() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = FakeOpenAIEngine()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(20)
    try:
        yield engine.url
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def campaign(
    folder: Path, parts: list[str], examples: int, seed: int, backend: str = "token"
) -> tuple[dict[str, Any], list[Bar]]:
    works = {"mutated": mutated, "damaged": damaged, "schema": schema, "raw": raw}
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    with fuzzed(folder, backend) as target:
        pid, before = target.gateway.pid, target.gateway.memory_mib()
        for part in parts:
            findings = Findings()
            target.statuses.clear()
            works[part](target, findings, examples, seed)
            figures[part] = {"requests": findings.examples, "answers": dict(target.statuses)}
            if findings.wrong:
                figures[part]["wrong"] = findings.wrong
            bars.append(
                Bar.at_most(f"{backend}, {part}: answers that are 5xx, hang, or have no form", len(findings.wrong), 0)
            )
        # The same process must still answer a valid request.
        target._session = {}
        status, _, _ = target.post(
            "/v1/chat/completions",
            orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
            {"Authorization": f"Bearer {target.session()['inference_token']}"},
        )
        alive = target.gateway.pid == pid and status == 200
        bars.append(
            Bar(f"{backend}, afterwards: a right request is answered by the same process", status, "", "= 200", alive)
        )
        figures["memory_mib"] = [round(before), round(target.gateway.memory_mib())]
        log = target.gateway.log_path.read_text()
        failed = log.count('"event": "route failed"')
        bars.append(Bar.at_most(f"{backend}: unexpected errors in the gateway's log", failed, 0))
    return figures, bars


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=400, help="per route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(3000, exit=True)  # a campaign that hangs prints where
    sys.setrecursionlimit(20_000)  # to copy bodies that are nested more deeply than the default allows
    figures: dict[str, Any] = {"seed": chosen.seed}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="gateway-fuzz-") as folder:
        for backend in chosen.backends:
            found = campaign(Path(folder) / backend, chosen.parts, chosen.examples, chosen.seed, backend)
            figures[backend], bars = found[0], bars + found[1]
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
