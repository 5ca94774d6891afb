"""A root of plugins that the core has never seen, and ``ng_run`` over it as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

DEADLINE_S = 90.0
"""For things that take a second on an idle machine."""

SUM_APP = '''
"""Adds numbers; keeps a count, crashes and hangs on request."""

import os
import sys
import time
from typing import Any

from fastapi import FastAPI

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.contract.errors import ConfigError
from helper import expected_of  # beside this file, as plugins do


class SumConfig(BaseResourcesServerConfig):
    bonus: float = 0.0
    judge_api_key: str = ""
    crash_at_start: bool = False
    hang_at_stop: bool = False
    slow_start_s: float = 0.0
    waits_for: str = ""
    finds_wrong: str = ""


class SumVerifyRequest(BaseVerifyRequest):
    expected: str


class SumVerifyResponse(SumVerifyRequest, BaseVerifyResponse):
    pass


class SumServer(SimpleResourcesServer):
    config: SumConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        print("print from the plugin")
        print("passed on:", "MY_API_KEY" in os.environ)
        import structlog

        structlog.get_logger().info("starting", key_in_use=self.config.judge_api_key)
        if self.config.crash_at_start:
            raise RuntimeError("the plugin is broken on purpose")
        if self.config.hang_at_stop:
            import signal

            signal.signal = lambda *_: None  # uvicorn cannot install its handlers,
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # and the default one does not act
        time.sleep(self.config.slow_start_s)
        return app

    async def ready(self) -> dict | None:
        if self.config.finds_wrong:
            raise ConfigError(self.config.finds_wrong)
        return {"detail": self.config.waits_for} if self.config.waits_for else await super().ready()

    async def verify(self, body: SumVerifyRequest) -> SumVerifyResponse:
        is_right = body.response.output_text.strip() == expected_of(body)
        return SumVerifyResponse(**body.model_dump(), reward=float(is_right) + self.config.bonus)


if __name__ == "__main__":
    SumServer.run_webserver()
'''
HELPER = """
def expected_of(body):
    return body.expected
"""

ADDER_APP = '''
"""A NeMo Gym style agent: one call of the model answers."""

from fastapi import Request

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status


class AdderConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class Adder(SimpleResponsesAPIAgent):
    config: AdderConfig

    async def responses(self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        reply = await self.server_client.post(
            self.config.model_server.name, "/v1/responses", json=body, cookies=request.cookies
        )
        await raise_for_status(reply)
        return NeMoGymResponse.model_validate(await get_response_json(reply))


if __name__ == "__main__":
    Adder.run_webserver()
'''
CALCULATOR_APP = '''
"""A model that adds; told to, it adds wrongly."""

import re

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming


class CalculatorConfig(BaseResponsesAPIModelConfig):
    offset: int = 0
    api_key: str = ""


class Calculator(SimpleResponsesAPIModel):
    config: CalculatorConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        prompt = body.input if isinstance(body.input, str) else str(body.input)
        total = sum(map(int, re.findall(r"\\d+", prompt))) + self.config.offset
        text = {"type": "output_text", "text": str(total), "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        return NeMoGymResponse.model_validate(
            {
                "id": "r", "object": "response", "created_at": 0, "model": "calculator", "output": [message],
                "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
            }
        )


if __name__ == "__main__":
    Calculator.run_webserver()
'''
ADDER_YAML = """
adder:
  responses_api_agents:
    adder:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: "${composition.environment}"}
      model_server: {type: responses_api_models, name: "${composition.model}"}
"""
CALCULATOR_YAML = "policy_model: {responses_api_models: {calculator: {entrypoint: app.py}}}\n"
GROUPS = ("agent=adder", "environment=sums", "model=calculator")


def write_root(root: Path) -> Path:
    """An environment, an agent and a model, each with its group file."""
    plugin = root / "resources_servers" / "sums"
    plugin.mkdir(parents=True)
    (plugin / "app.py").write_text(SUM_APP)
    (plugin / "helper.py").write_text(HELPER)
    (plugin / "configs").mkdir()
    (plugin / "configs" / "sums.yaml").write_text("sums: {resources_servers: {sums: {entrypoint: app.py}}}\n")
    write(root / "responses_api_agents/adder/app.py", ADDER_APP)
    write(root / "responses_api_agents/adder/configs/adder.yaml", ADDER_YAML)
    write(root / "responses_api_models/calculator/app.py", CALCULATOR_APP)
    write(root / "responses_api_models/calculator/configs/calculator.yaml", CALCULATOR_YAML)
    return root


def write_rows(path: Path, count: int) -> Path:
    """Tasks with their right answers."""
    rows = [
        {"responses_create_params": {"input": f"What is {n} + {n + 1}?"}, "expected": str(2 * n + 1), "id": f"sum-{n}"}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s:g} s: {what}")


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        pending += map(int, text.split())
        found += map(int, text.split())
    return found


@dataclass
class Stack:
    """A running ``ng_run``."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path
    errors: Path
    environment: dict[str, str] = field(repr=False)

    @property
    def entry(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "stack.json").read_text())  # type: ignore[no-any-return]

    def server(self, instance: str) -> dict[str, Any]:
        return next(server for server in self.entry["servers"] if server["instance"] == instance)

    @property
    def stderr(self) -> str:
        return self.errors.read_text()

    @property
    def stdout(self) -> str:
        return self.output.read_text()

    def log(self, instance: str) -> str:
        return (self.run_dir / "logs" / f"{instance}.log").read_text()

    def wait_ready(self) -> None:
        until(lambda: "servers ready" in self.stdout or self.process.poll() is not None, "servers ready")
        assert "servers ready" in self.stdout, self.stderr

    def wait_end(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ng_run did not end: {self.stderr}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def environment(root: Path, **extra: str) -> dict[str, str]:
    """The environment of a user whose plugins are in ``root`` and whose cache is beside them."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NEMO_GYM")}
    return {**kept, "NEMO_GYM_EXTRA_ROOTS": str(root), "NEMO_GYM_CACHE_DIR": str(root / "cache"), **extra}


@contextmanager
def none_ignored() -> Iterator[None]:
    """What starts in this block ignores no signal, also if `nohup` or a shell's background started the tests."""
    ignored = [each for each in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, signal.SIG_DFL)
    try:
        yield
    finally:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)


@contextmanager
def ng_run(
    root: Path, *words: str, run_dir: Path | None = None, streams: Mapping[str, int] | None = None, **extra: str
) -> Iterator[Stack]:
    """Start ``ng_run`` in ``root``; killed with everything it started when the block ends. ``streams`` are those that
    it gets in place of the files of ``stdout`` and ``stderr``."""
    directory = run_dir or root / "run"
    output, errors = root / "stdout.txt", root / "stderr.txt"
    variables, given = environment(root, **extra), streams or {}
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words, f"run_dir={directory}"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=given.get("stdout", out),
            stderr=given.get("stderr", err),
            text=True,
            env=variables,
            start_new_session=True,
        )
    try:
        yield Stack(process, directory, output, errors, variables)
    finally:
        descendants = children_of(process.pid)
        if process.poll() is None:
            process.kill()
            process.wait()
        until(lambda: not any(map(is_alive, descendants)), f"processes {descendants} to end", 30)


@contextmanager
def unwritable(how: str) -> Iterator[int]:
    """A stream on a ``full disk``, or one with ``no reader``."""
    if how == "full disk":
        stream = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stream = os.pipe()
        os.close(reader)
    try:
        yield stream
    finally:
        os.close(stream)


def command(root: Path, module: str, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run another command of the suite to its end, in ``root``. ``module`` is ``module`` or ``module:function``."""
    module, _, main = module.partition(":")
    main = main or "main"
    return subprocess.run(
        [sys.executable, "-c", f"from nemo_gym.cli.{module} import {main}; {main}()", *words],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(root, **extra),
        check=False,
    )


def no_traceback(text: str) -> bool:
    return "Traceback" not in text


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path
