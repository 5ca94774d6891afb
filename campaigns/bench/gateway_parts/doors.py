"""The targets of a conversation's calls: the engine itself, a raw proxy, a gateway, or a peer's gateway."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from campaigns.bench.gateway_parts.conversations import Chat, Load
from campaigns.bench.gateway_parts.processes import STOP_S, Running
from campaigns.bench.gateway_parts.wire import Connection, WireError

CHAT = "/v1/chat/completions"


class Talk(Protocol):
    """One conversation at one door."""

    async def turn(self) -> None:
        """Make one more call, and add the response to the history. Raises `WireError`."""
        ...

    async def close(self) -> dict[str, Any] | None:
        """End the conversation; return the door's summary of it, or ``None`` if the door gives none."""
        ...


class Door(Protocol):
    """One target of calls."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def server(self) -> Running | None:
        """The door's process, or ``None`` if there is nothing between caller and engine."""
        ...

    async def open(self, connection: Connection, number: int, **asked: Any) -> Talk: ...


class ChatTalk:
    """A conversation over Chat Completions."""

    def __init__(
        self,
        connection: Connection,
        chat: Chat,
        path: str = CHAT,
        headers: str = "",
        ending: tuple[str, str, bytes] | None = None,
    ) -> None:
        self.connection, self.chat = connection, chat
        self.path, self.headers = path, headers
        self._ending = ending

    async def turn(self) -> None:
        await self.ask(self.chat.body())

    async def ask(self, body: bytes) -> dict[str, Any]:
        reply = (await self.connection.post(self.path, body, self.headers)).json()
        message = reply["choices"][0]["message"]
        if not message.get("content"):
            raise WireError(f"an empty answer: {reply}")
        self.chat.add(message)
        usage: dict[str, Any] = reply["usage"]
        return usage

    async def close(self) -> dict[str, Any] | None:
        if self._ending is None:
            return None
        path, headers, body = self._ending
        summary: dict[str, Any] = (await self.connection.post(path, body, headers)).json()
        return summary


class PlainDoor:
    """An endpoint without sessions."""

    def __init__(
        self, name: str, url: str, server: Running | None = None, path: str = CHAT, headers: str = ""
    ) -> None:
        self.name, self.url, self.server = name, url, server
        self._path, self._headers = path, headers

    async def open(self, connection: Connection, number: int, **asked: Any) -> ChatTalk:
        return ChatTalk(connection, Chat(number, **asked), self._path, self._headers)


class PromptTalk:
    """A conversation with the engine itself, with the prompts that a gateway would send."""

    def __init__(self, connection: Connection, chat: Chat, prompts: list[bytes]) -> None:
        self._connection, self._chat = connection, chat
        self._prompts = iter(prompts)

    async def turn(self) -> None:
        self._chat.body()  # the caller's own work is part of the time of every door
        reply = (await self._connection.post("/v1/completions", next(self._prompts))).json()
        self._chat.add({"content": reply["choices"][0]["text"]})

    async def close(self) -> None:
        return None


class PromptDoor:
    """The engine itself, called with token ids."""

    def __init__(self, name: str, url: str, load: Load) -> None:
        self.name, self.url, self.server = name, url, None
        self._load = load

    async def open(self, connection: Connection, number: int, **asked: Any) -> PromptTalk:
        return PromptTalk(connection, Chat(number, **asked), self._load.prompts)


class GatewayDoor:
    """A gateway of this suite: every conversation is a session."""

    def __init__(self, name: str, server: Running, credential: str) -> None:
        self.name, self.server, self.url, self.credential = name, server, server.url, credential
        self._headers = f"X-NeMo-Gym-Credential: {credential}\r\n"
        self._opened = 0

    async def open(self, connection: Connection, number: int, **asked: Any) -> ChatTalk:
        self._opened += 1
        rollout = {"rollout_id": f"r{self._opened}", "task_id": f"t{number}", "group_id": f"t{number}", "attempt": 1}
        body = orjson.dumps({"rollout": rollout})
        opened = (await connection.post("/sessions", body, self._headers)).json()
        headers = f"Authorization: Bearer {opened['inference_token']}\r\n"
        ending = (
            f"/sessions/{opened['session_id']}/finalize",
            f"{self._headers}X-NeMo-Gym-Control-Token: {opened['control_token']}\r\n",
            b'{"reward": 1.0}',
        )
        return ChatTalk(connection, Chat(number, **asked), CHAT, headers, ending)


@dataclass(frozen=True)
class GatewayKind:
    """How the gateway is composed."""

    name: str
    words: tuple[str, ...]


def token_kind(engine: str, policy: Path) -> GatewayKind:
    keys = ("model=vllm", f"policy_base_url={engine}", "policy_model_name=policy", f"policy_path={policy}")
    return GatewayKind("gateway_tokens", (*keys, _gateway("policy.max_context_tokens=10000000")))


def text_kind(engine: str, *, logprobs: bool = False) -> GatewayKind:
    keys = ("model=gateway", f"policy_base_url={engine}/v1", "policy_model_name=policy")
    name = "gateway_text_logprobs" if logprobs else "gateway_text"
    return GatewayKind(name, (*keys, _gateway("engines.0.logprobs=true"))) if logprobs else GatewayKind(name, keys)


def _gateway(setting: str) -> str:
    return f"++policy_model.responses_api_models.gateway.{setting}"


@contextlib.contextmanager
def gateway(kind: GatewayKind, *words: str) -> Iterator[GatewayDoor]:
    """Run a gateway as ``ng_run`` starts it."""
    from nemo_gym.contract.credentials import Role, StackKeys
    from nemo_gym.stack.endpoints import read_stack

    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "run")
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ng_run"), *kind.words, *words, f"run_dir={run_dir}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NEMO_GYM_CACHE_DIR": f"{directory}/cache"},
        )
        try:
            assert process.stdout is not None
            if not any("servers ready" in line for line in process.stdout):
                raise RuntimeError(f"ng_run {' '.join(kind.words)} ended before its gateway was ready")
            stack = read_stack(run_dir)
            server = stack.server("policy_model")
            assert server.pid is not None
            credential = StackKeys.from_hex(stack.root_key).caller(Role.PIPELINE, "bench", "policy_model")
            yield GatewayDoor(kind.name, Running(server.url, server.pid), credential)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
