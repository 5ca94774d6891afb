"""The broker's API as tests call it: plain HTTP, with every header in the test's hand."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from nemo_gym.contract.credentials import Role
from nemo_gym.sandbox.wire.frames import FrameKind, FrameParser
from resources_servers.sandbox.tests.broker_process import BrokerProcess

PATIENCE_S = 60.0


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        """Of a problem; fails for anything else."""
        assert self.headers["Content-Type"] == "application/problem+json", (self.status, self.body[:500])
        problem = self.json
        assert problem["status"] == self.status
        assert problem["started"] in ("no", "yes", "unknown")
        assert problem["request_id"] == self.headers["X-Request-ID"]
        return str(problem["code"])


@dataclass
class Output:
    """What a stream of frames held."""

    stdout: bytes = b""
    stderr: bytes = b""
    ends: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any]:
        (end,) = self.ends
        return end


@dataclass
class LentBox:
    """A box and one lease of it."""

    api: Api
    sandbox_id: str
    token: str
    lease: dict[str, Any]

    @property
    def path(self) -> str:
        return f"/v1/sandboxes/{self.sandbox_id}"

    async def ask(self, method: str, below: str = "", **options: Any) -> Answer:
        headers = {"Authorization": f"Bearer {self.token}", **options.pop("headers", {})}
        return await self.api.ask(method, f"{self.path}{below}", headers=headers, **options)

    async def mint(self, scope: str, **body: Any) -> LentBox:
        answer = await self.ask("POST", "/leases", json={"scope": scope, **body})
        assert answer.status == 201, answer.body
        return LentBox(self.api, self.sandbox_id, answer.json["token"], answer.json)

    async def submit(self, command: str, exec_id: str | None = None, **body: Any) -> tuple[str, Answer]:
        exec_id = exec_id or f"e-{uuid.uuid4().hex}"
        return exec_id, await self.ask("PUT", f"/execs/{exec_id}", json={"command": command, **body})

    async def output(self, exec_id: str, offset: int = 0, *, chunks: int | None = None) -> Output:
        """Frames from ``offset`` to the end, or of the first ``chunks`` reads."""
        return await self.api.frames(
            "GET", f"{self.path}/execs/{exec_id}/output?offset={offset}", self.token, chunks=chunks
        )

    async def run(self, command: str, **body: Any) -> Output:
        exec_id, answer = await self.submit(command, **body)
        assert answer.status == 201, answer.body
        return await self.output(exec_id)


@dataclass
class Api:
    """One caller of one broker."""

    broker: BrokerProcess
    session: aiohttp.ClientSession
    caller: Mapping[str, str]

    async def ask(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> Answer:
        if "json" in options:
            options["data"] = orjson.dumps(options.pop("json"))
            headers = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.request(method, self.broker.url + path, headers=headers, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        """With the caller's credential."""
        return await self.ask(method, path, **{**options, "headers": {**self.caller, **options.get("headers", {})}})

    async def create(self, key: str | None = None, **body: Any) -> Answer:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return await self.call("POST", "/v1/sandboxes", json={"spec": {}, "ttl_s": 120, **body}, headers=headers)

    async def box(self, *, status: int = 201, **body: Any) -> LentBox:
        answer = await self.create(**body)
        assert answer.status == status, answer.body
        made = answer.json
        return LentBox(self, made["sandbox"]["sandbox_id"], made["lease"]["token"], made["lease"])

    async def ids(self, **labels: str) -> list[str]:
        """Ids of the boxes that the broker lists."""
        query = [("label", f"{name}={value}") for name, value in labels.items()]
        answer = await self.call("GET", "/v1/sandboxes", params=query)
        assert answer.status == 200, answer.body
        return [view["sandbox_id"] for view in answer.json["sandboxes"]]

    async def frames(self, method: str, path: str, token: str, *, chunks: int | None = None, **options: Any) -> Output:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/octet-stream"}
        output, parser = Output(), FrameParser()
        async with self.session.request(method, self.broker.url + path, headers=headers, **options) as response:
            assert response.status < 300, (response.status, await response.read())
            read = 0
            async for data in response.content.iter_any():
                for frame in parser.feed(data):
                    if frame.kind is FrameKind.STDOUT:
                        output.stdout += frame.payload
                    elif frame.kind is FrameKind.STDERR:
                        output.stderr += frame.payload
                    elif frame.end is not None:
                        output.ends.append(frame.end.model_dump(mode="json"))
                read += 1
                if chunks is not None and read >= chunks:
                    break
        return output


@asynccontextmanager
async def calling(broker: BrokerProcess, name: str = "tests", role: Role = Role.OPERATOR) -> AsyncIterator[Api]:
    """Call a broker as ``name``."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S * 3)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Api(broker, session, broker.caller(name, role))


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until the condition holds; fail naming what did not happen."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)
