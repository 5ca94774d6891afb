"""The two ways in which the router's campaign calls the engines: the library itself, and the gateway over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from pydantic import TypeAdapter

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, CREDENTIAL_HEADER, Role
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.engines import EngineConfig, Sampling, TokenRequest
from nemo_gym.gateway.engines.calls import RetryConfig
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.engines.router import RoutingConfig
from tests.servers.stack import rollout, running_stack

CONFIG: TypeAdapter[Any] = TypeAdapter(EngineConfig)
GATEWAY = "policy_model"


class TurnError(Exception):
    """A turn that failed. ``status`` and ``retry_after`` are those that the harness received."""

    def __init__(self, message: str, status: int, retry_after: str | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_after = retry_after


class Session(Protocol):
    async def turn(self) -> None:
        """Play one more turn. Raises `TurnError`."""
        ...

    async def close(self) -> None: ...


class Door(Protocol):
    async def session(self) -> Session: ...

    async def status(self) -> Mapping[str, Any]:
        """Return what ``GET /engines`` returns."""
        ...

    async def add(self, config: Mapping[str, Any]) -> None: ...

    async def drain(self, name: str, timeout_s: float) -> None: ...

    async def undrain(self, name: str) -> None: ...

    async def remove(self, name: str, drain_timeout_s: float | None) -> None: ...


@dataclass
class Answered:
    """One response of the library, for the comparison with the engines' logs."""

    call: str
    token_ids: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass
class LibraryDoor:
    pool: EnginePool
    max_tokens: int = 16
    answers: list[Answered] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    async def session(self) -> LibrarySession:
        return LibrarySession(self, f"s{next(self._numbers)}")

    async def status(self) -> Mapping[str, Any]:
        return self.pool.status()

    async def add(self, config: Mapping[str, Any]) -> None:
        self.pool.add(CONFIG.validate_python(config))

    async def drain(self, name: str, timeout_s: float) -> None:
        await self.pool.router.drain(name, timeout_s=timeout_s)

    async def undrain(self, name: str) -> None:
        self.pool.router.undrain(name)

    async def remove(self, name: str, drain_timeout_s: float | None) -> None:
        await self.pool.remove(name, drain_timeout_s)


@dataclass
class LibrarySession:
    door: LibraryDoor
    name: str
    ids: list[int] = field(default_factory=list)
    turns: int = 0

    async def turn(self) -> None:
        chance = random.Random(f"{self.name}-{self.turns}")
        self.ids += [chance.randrange(10, 200) for _ in range(8)]
        call = f"{self.name}.{self.turns}"
        self.turns += 1
        try:
            answer = await self.door.pool.token_calls.generate(
                self.name, TokenRequest(call, self.ids, Sampling(self.door.max_tokens, ignore_eos=True))
            )
        except NemoGymError as error:
            after = error.details.get("retry_after_s")
            raise TurnError(error.message, error.status, None if after is None else str(after)) from error
        self.ids += answer.token_ids
        parts = tuple(part.tokens for part in answer.segments) or (len(answer.token_ids),)
        self.door.answers.append(Answered(call, tuple(answer.token_ids), parts))

    async def close(self) -> None:
        self.door.pool.forget(self.name)


@asynccontextmanager
async def library(
    configs: Sequence[Mapping[str, Any]],
    *,
    routing: Mapping[str, Any],
    retries: Mapping[str, Any],
    max_tokens: int = 16,
) -> AsyncIterator[LibraryDoor]:
    engine_configs = [CONFIG.validate_python(config) for config in configs]
    pool = EnginePool(
        engine_configs,
        kind="token",
        routing=RoutingConfig.model_validate(routing),
        retries=RetryConfig.model_validate(retries),
    )
    async with pool:
        yield LibraryDoor(pool, max_tokens)


@dataclass
class GatewayDoor:
    """The gateway's own server, on a socket."""

    url: str
    http: aiohttp.ClientSession
    credential: str
    max_tokens: int = 16
    rows: list[dict[str, Any]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        sent = {CREDENTIAL_HEADER: self.credential, **headers}
        async with self.http.request(method, self.url + path, json=body, headers=sent) as reply:
            content = await reply.json(content_type=None)
            if reply.status >= 300:
                raise TurnError(str(content), reply.status, reply.headers.get("Retry-After"))
            return content

    async def session(self) -> GatewaySession:
        identity = rollout(f"r{next(self._numbers)}")
        body = {"rollout": identity.model_dump(mode="json"), "sampling": {"max_output_tokens": self.max_tokens}}
        return GatewaySession(self, await self.call("POST", "/sessions", body))

    async def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self.call("GET", "/engines")
        return found

    async def add(self, config: Mapping[str, Any]) -> None:
        await self.call("POST", "/engines", config)

    async def drain(self, name: str, timeout_s: float) -> None:
        await self.call("POST", f"/engines/{name}/drain", {"timeout_s": timeout_s})

    async def undrain(self, name: str) -> None:
        await self.call("POST", f"/engines/{name}/undrain")

    async def remove(self, name: str, drain_timeout_s: float | None) -> None:
        query = "" if drain_timeout_s is None else f"?drain_timeout_s={drain_timeout_s}"
        await self.call("DELETE", f"/engines/{name}{query}")


@dataclass
class GatewaySession:
    door: GatewayDoor
    facts: Mapping[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self) -> None:
        self.messages.append({"role": "user", "content": f"step {len(self.messages)}"})
        headers = {"Authorization": f"Bearer {self.facts['inference_token']}"}
        body = {"model": "policy", "messages": self.messages}
        url = self.facts["base_url"] + "/chat/completions"
        async with self.door.http.post(url, json=body, headers=headers) as reply:
            content = await reply.json(content_type=None)
            if reply.status != 200:
                self.messages.pop()
                raise TurnError(str(content), reply.status, reply.headers.get("Retry-After"))
        self.messages.append(content["choices"][0]["message"])

    async def close(self) -> None:
        headers = {CONTROL_TOKEN_HEADER: self.facts["control_token"]}
        summary = await self.door.call("POST", f"/sessions/{self.facts['session_id']}/finalize", {}, **headers)
        self.door.rows += summary["trajectories"]


@asynccontextmanager
async def gateway(
    configs: Sequence[Mapping[str, Any]],
    *,
    policy: Path,
    workspace: Path,
    routing: Mapping[str, Any],
    retries: Mapping[str, Any],
    max_tokens: int = 16,
) -> AsyncIterator[GatewayDoor]:
    from responses_api_models.gateway.app import Gateway

    with running_stack(str(workspace)) as stack:
        url = stack.add(
            GATEWAY,
            Gateway,
            Role.MODEL,
            engines=[*configs],
            policy={"path": str(policy), "max_context_tokens": 32768},
            routing=dict(routing),
            retries=dict(retries),
            journal_dir=str(workspace / "journal"),
        )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            yield GatewayDoor(url, http, stack.keys.caller(Role.PIPELINE, "campaign", GATEWAY), max_tokens)


@dataclass
class Load:
    """Sessions that run turn after turn."""

    door: Door
    turns_done: int = 0
    lost: list[str] = field(default_factory=list)
    """One entry per session that got an error; no harness here retries."""
    sessions_done: int = 0
    stopped: bool = False

    async def run(self, sessions: int, turns: int, *, width: int | None = None) -> None:
        """Run ``sessions`` sessions of ``turns`` turns each, ``width`` at a time."""
        room = asyncio.Semaphore(width or sessions)

        async def run_session() -> None:
            async with room:
                if not self.stopped:
                    await self._session(turns)

        await asyncio.gather(*(run_session() for _ in range(sessions)))

    async def _session(self, turns: int) -> None:
        session = await self.door.session()
        try:
            for _ in range(turns):
                await session.turn()
                self.turns_done += 1
                if self.stopped:
                    break
        except TurnError as error:
            self.lost.append(str(error))
        else:
            self.sessions_done += 1
        await session.close()

    async def reached(self, turns: int) -> None:
        await until(lambda: self.turns_done >= turns)


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], deadline_s: float = 120.0) -> float:
    """Wait until a condition is true; return the seconds that took."""
    began = asyncio.get_running_loop().time()
    while True:
        met = condition()
        if met if isinstance(met, bool) else await met:
            return asyncio.get_running_loop().time() - began
        assert asyncio.get_running_loop().time() - began < deadline_s, "the condition never came true"
        await asyncio.sleep(0.01)
