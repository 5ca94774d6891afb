"""Servers over real sockets, each in a thread of its own, with the credentials a run would give them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn

from nemo_gym.config.launch import ServerLaunch
from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.http.protocol import WatchedHttpProtocol
from nemo_gym.http.server import SimpleServer
from nemo_gym.http.webserver import WebServer
from nemo_gym.server_utils import ServerClient


class Served:
    """One application in a thread; stops with the test."""

    def __init__(self, server: SimpleServer, listener: socket.socket) -> None:
        app = server.application()
        http: Any = partial(WatchedHttpProtocol, slow_request_timeout_s=server.config.slow_request_timeout_s)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=60, lifespan="on", http=http)
        self.server = WebServer(config, on_stop=server.stopping)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"


@dataclass
class Stack:
    """Instances of a run, wired with credentials."""

    state_dir: str | None = None
    keys: StackKeys = field(default_factory=StackKeys.generate)
    config: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Served] = field(default_factory=dict)
    servers: dict[str, SimpleServer] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)

    def add(self, name: str, cls: type[SimpleServer], role: Role, targets: tuple[str, ...] = (), **block: Any) -> str:
        """Start a server and return its URL."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", block.pop("port", 0)))
        listener.listen(256)
        port = listener.getsockname()[1]
        kind = {Role.ENVIRONMENT: "resources_servers", Role.AGENT: "responses_api_agents"}.get(
            role, "responses_api_models"
        )
        self.config[name] = {kind: {name: {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **block}}}
        credentials = self.keys.for_server(name, role, targets)
        launch = ServerLaunch(
            instance=name, config=self.config, credentials=credentials, state_dir=self.state_dir, run_id="run"
        )
        client = ServerClient(global_config_dict=self.config)
        try:
            server = cls(config=cls.config_from(name, self.config), server_client=client)
            server.secure(credentials, launch)
            self.served[name] = Served(server, listener)
        except BaseException:
            listener.close()
            raise
        self.servers[name] = server
        self.roles[name] = role
        return self.url(name)

    def url(self, name: str) -> str:
        return ServerClient(global_config_dict=self.config).base_url(name)

    def client(self, role: Role = Role.PIPELINE, name: str = "collector") -> ServerClient:
        """A caller of this role, with a credential for every server."""
        client = ServerClient(global_config_dict=self.config)
        client.use_credentials(self.keys.outgoing(role, name, [*self.config]))
        return client

    def stop(self, name: str) -> None:
        self.served.pop(name).stop()

    def close(self) -> None:
        for served in self.served.values():  # all at once: each needs 0.2 s
            served.server.should_exit = True
        for name in [*self.served]:
            self.stop(name)


@contextmanager
def running_stack(state_dir: str | None = None) -> Iterator[Stack]:
    stack = Stack(state_dir=state_dir)
    try:
        yield stack
    finally:
        stack.close()


def rollout(rollout_id: str = "r1", attempt: int = 1, **fields: Any) -> RolloutIdentity:
    return RolloutIdentity(
        **{"rollout_id": rollout_id, "task_id": "t1", "group_id": "t1", "attempt": attempt} | fields
    )


def response(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A Responses object as an agent returns it."""
    said = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "content": [said], "status": "completed"}
    head = {"object": "response", "id": "resp_1", "created_at": 1.0, "model": "m"}
    return {**head, "output": [message], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, **fields}


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)
