"""A model call that hangs ends at the limits of one table, as a masked row, whichever model server and agent ask."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaigns.bench.composition_parts.nothing import NothingProvider
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S
from nemo_gym.http.server import SimpleServer
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.sandbox.facade import register_provider
from resources_servers.mcqa.app import McqaEnvironment
from responses_api_agents.mini_swe_agent.app import MiniSWEAgent
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.gateway.app import Gateway
from responses_api_models.openai_model.app import SimpleModelServer
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.stack import Stack, rollout, running_stack

FAULTS = ("accepts and hangs", "sends one chunk and stalls", "never accepts")
LIMITS = {"connect_timeout_s": 0.2, "idle_timeout_s": 0.2, "request_timeout_s": 0.8}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
QUESTION = "What is the capital of Australia?"
ROW = {"task_id": "t", "question": QUESTION, "options": ["Sydney", "Canberra"], "expected_answer": "B"}


@contextmanager
def endpoint(fault: str) -> Iterator[str]:
    """The base URL of a server that never gives a whole answer."""
    with ExitStack() as held:
        if fault == "never accepts":
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(8):  # the queue of those that wait to be accepted is full
                waiting = held.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
        else:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            threading.Thread(target=_serve, args=(listener, fault == FAULTS[1]), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        # Wakes the thread: a closed socket does not.
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, begins: bool) -> None:
    taken = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        taken.append(connection)
        if begins:
            kind = b"text/event-stream" if b'"stream":true' in connection.recv(1 << 20) else b"application/json"
            connection.sendall(HEAD % kind + b'6\r\n{"id":\r\n')
    for connection in taken:
        connection.close()


MODELS = {"openai": SimpleModelServer, "gateway": Gateway}


def model_block(kind: str, url: str, directory: Path) -> tuple[type[SimpleServer], dict[str, Any]]:
    if kind == "openai":
        return SimpleModelServer, {"openai_base_url": url, "openai_api_key": "none", "openai_model": "m"}
    if kind == "gateway":
        engines = [{"type": "openai", "base_url": url, "model": "m"}]
        return Gateway, {"model": "m", "engines": engines, "journal_dir": str(directory / "journal")}
    script = directory / "script.json"
    turn = {"text": "\\boxed{B}", "fault": {"hang_s": 600, "times": 99}}
    script.write_text(json.dumps({"model": "m", "tasks": [{"name": "t", "when": {"user": "."}, "turns": [turn]}]}))
    return ScriptedModel, {"script": str(script)}


@contextmanager
def stack(
    kind: str, fault: str, directory: Path, agent: type[SimpleServer] = SimpleAgent, **block: Any
) -> Iterator[Stack]:
    with endpoint(fault) as url, running_stack() as running:
        server, settings = model_block(kind, url, directory)
        running.add("policy", server, Role.MODEL, **settings)
        running.add("mcqa", McqaEnvironment, Role.ENVIRONMENT)
        references = {
            "resources_server": {"type": "resources_servers", "name": "mcqa"},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        running.add("agent", agent, Role.AGENT, ("policy", "mcqa"), model_max_tries=1, **references, **block)
        yield running


@pytest.fixture
def _unchecked_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asks its endpoints first whether they are there, and waits five seconds for one that hangs: once
    each, with boxed agents, is enough."""

    async def skipped(*routes: object, **options: object) -> None:
        return

    monkeypatch.setattr("nemo_gym.rollouts.core.preflight", skipped)


async def masked_row(running: Stack, directory: Path) -> dict[str, Any]:
    """What a collection of one row leaves, with limits as run keys."""
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text(json.dumps(ROW) + "\n")
    keys = {f"model_{name}": value for name, value in LIMITS.items()}
    result = await run_collection(
        running.client(), {"input": source, "output": output, "agent_name": "agent", "max_attempts": 1, **keys}
    )
    assert (result.valid, result.invalid) == (0, 1)
    (row,) = [json.loads(line) for line in (directory / "out_failures.jsonl").read_text().splitlines()]
    return dict(row)


def assert_masked(row: dict[str, Any]) -> None:
    assert (row["reward"], row["valid"], row["mask_sample"]) == (None, False, True)
    assert row["failure_kind"] == "model_unreachable", row


@pytest.mark.usefixtures("_unchecked_endpoints")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", MODELS)
async def test_row_is_masked_when_the_models_endpoint_hangs(kind: str, fault: str, tmp_path: Path) -> None:
    with stack(kind, fault, tmp_path) as running:
        assert_masked(await masked_row(running, tmp_path))


@pytest.mark.usefixtures("_unchecked_endpoints")
async def test_row_is_masked_when_the_scripted_model_hangs(tmp_path: Path) -> None:
    with stack("scripted", FAULTS[0], tmp_path) as running:
        row = await masked_row(running, tmp_path)
    assert_masked(row)
    assert "longer than 0.8 s" in row["failure_reason"]


@pytest.mark.parametrize("kind", [*MODELS, "scripted"])
async def test_row_is_masked_when_the_model_of_a_boxed_agent_hangs(kind: str, tmp_path: Path) -> None:
    register_provider("nothing", NothingProvider)
    names = ("system_template", "instance_template", "observation_template", "format_error_template")
    templates = dict.fromkeys(names, "{{ task }}")
    boxes = {"sandbox_provider": "nothing", "scratch": {"image": "none", "workdir": "/"}}
    with stack(kind, FAULTS[1], tmp_path, MiniSWEAgent, **boxes, **templates) as running:
        assert_masked(await masked_row(running, tmp_path))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stream", [False, True])
async def test_call_ends_within_the_limits_of_its_session(kind: str, fault: str, stream: bool, tmp_path: Path) -> None:
    with stack(kind, fault, tmp_path) as running:
        client = running.client()
        opening = {"rollout": rollout().model_dump(), "limits": LIMITS}
        opened = await (await client.post("policy", "/sessions", json=opening)).json()
        assert opened["request_timeout_s"] == LIMITS["request_timeout_s"]
        base, token = opened["base_url"].removeprefix(client.base_url("policy")), opened["inference_token"]
        reply = await client.post(
            "policy",
            f"{base}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream},
            headers={"Authorization": f"Bearer {token}"},
        )
        async with asyncio.timeout(60):
            said = b""
            try:
                said = await reply.read()
            except Exception as error:
                assert stream, error
        if reply.status == 200:
            assert stream and b"[DONE]" not in said
        else:
            assert reply.status in (502, 503, 504), said
            if fault != "never accepts":  # of another connection it may be worth a try
                assert (reply.status, reply.headers["x-should-retry"]) == (504, "false"), said


@pytest.mark.parametrize("limits", [{"request_timeout_s": 0}, {"patience_s": 5}, {"idle_timeout_s": "long"}])
@pytest.mark.parametrize("kind", MODELS)
async def test_limits_that_are_none_are_refused_by_name(kind: str, limits: dict[str, Any], tmp_path: Path) -> None:
    with stack(kind, FAULTS[0], tmp_path) as running:
        opening = {"rollout": rollout().model_dump(), "limits": limits}
        reply = await running.client().post("policy", "/sessions", json=opening)
        assert reply.status == 422
        assert next(iter(limits)) in (await reply.json())["detail"]


async def test_limits_without_a_choice_are_those_of_the_table(tmp_path: Path) -> None:
    assert (CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S) == (10, 120, 600)
    for kind in MODELS:
        with stack(kind, FAULTS[0], tmp_path) as running:
            reply = await running.client().post("policy", "/sessions", json={"rollout": rollout().model_dump()})
            assert (await reply.json())["request_timeout_s"] == REQUEST_TIMEOUT_S
            config = running.servers["policy"].config
            found = config.engines[0] if isinstance(running.servers["policy"], Gateway) else config  # type: ignore[attr-defined]
            assert (found.connect_timeout_s, found.idle_timeout_s) == (CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S)  # type: ignore[union-attr]
