"""A client that repeats every request until it has an answer, and can be held while the broker is looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from nemo_gym.sandbox.wire.frames import FrameError, FrameKind, FrameParser
from resources_servers.sandbox.tests.api import Answer

BREAKS = (aiohttp.ClientError, ConnectionError, TimeoutError, FrameError)
"""What a network or a broker that dies does to a request."""
_LATER = {"create_in_progress", "sandbox_not_ready", "backend_unreachable", "draining", "quota", "no_room"}
_SILENCE_S = 45.0


class RefusedError(Exception):
    """An answer that is final."""

    def __init__(self, said: str, answer: Answer) -> None:
        super().__init__(f"{said}: {answer.status} {answer.body[:300]!r}")
        self.answer = answer

    @property
    def code(self) -> str:
        return str(self.answer.json.get("code", "")) if self.answer.body[:1] == b"{" else ""


@dataclass
class Said:
    """What was received of an exec's output, and its end."""

    stdout: bytes = b""
    stderr: bytes = b""
    end: dict[str, Any] | None = None

    @property
    def offset(self) -> int:
        return len(self.stdout) + len(self.stderr)


@dataclass
class Client:
    """Requests of one campaign.

    Args:
        url: where the broker, or what is before it, listens.
    """

    url: str
    session: aiohttp.ClientSession
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, requests wait before they are sent."""
    under_way: int = 0
    asked: int = 0
    """Requests of the workload so far, each counted once however often it was sent."""
    broken: int = 0
    """Requests that got no whole answer."""

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self.may_ask.wait()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def quiet(self, within_s: float = 60.0) -> None:
        """Wait until nothing is under way. Raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while self.under_way:  # noqa: ASYNC110 - many requests end; no one event tells that all have
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        """Ask until the broker says that it is ready."""
        while (answer := await self.once("GET", "/readyz", {})) is None or answer.status != 200:  # noqa: ASYNC110 - a server
            await asyncio.sleep(0.05)

    async def once(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes | None = None
    ) -> Answer | None:
        """One try; ``None`` where it broke."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S, sock_connect=10)
        async with self._turn():
            try:
                async with self.session.request(
                    method, self.url + path, headers=headers, data=data, timeout=timeout
                ) as response:
                    return Answer(response.status, response.headers, await response.read())
            except BREAKS:
                self.broken += 1
                return None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        data: bytes | None = None,
        body: Any = None,
        copies: int = 1,
    ) -> Answer:
        """The final answer; with ``copies``, of the same request sent so often at once. Raises `RefusedError`."""
        self.asked += 1
        if body is not None:
            data, headers = orjson.dumps(body), {**headers, "Content-Type": "application/json"}
        answers = await asyncio.gather(*(self.final(method, path, headers, data) for _ in range(copies)))
        for answer in answers:
            if answer.status >= 400:
                raise RefusedError(f"{method} {path}", answer)
        return answers[0]

    async def final(self, method: str, path: str, headers: Mapping[str, str], data: bytes | None) -> Answer:
        """Sent until an answer comes that says something else than: later."""
        while True:
            answer = await self.once(method, path, headers, data)
            if answer is not None and not _again(answer):
                return answer
            await asyncio.sleep(0.05)

    async def read(self, path: str, token: str, said: Said) -> None:
        """Output from where ``said`` is to the end, over as many connections as it takes. Raises `RefusedError`."""
        self.asked += 1
        while said.end is None:
            with contextlib.suppress(*BREAKS):
                await self._some(path, token, said)
            if said.end is None:
                await asyncio.sleep(0.05)

    async def _some(self, path: str, token: str, said: Said) -> None:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S, sock_connect=10)
        url = f"{self.url}{path}?offset={said.offset}"
        async with self._turn(), self.session.get(url, headers=headers, timeout=timeout) as response:
            if response.status >= 400:
                answer = Answer(response.status, response.headers, await response.read())
                if _again(answer):
                    return
                raise RefusedError(f"GET {path} from {said.offset}", answer)
            parser = FrameParser()
            async for data in response.content.iter_any():
                for frame in parser.feed(data):
                    if frame.kind is FrameKind.STDOUT:
                        said.stdout += frame.payload
                    elif frame.kind is FrameKind.STDERR:
                        said.stderr += frame.payload
                    elif frame.end is not None:
                        said.end = frame.end.model_dump(mode="json")


def _again(answer: Answer) -> bool:
    if answer.status not in (409, 429, 503):
        return False
    try:
        return answer.json.get("code") in _LATER
    except ValueError:
        return True


@contextlib.asynccontextmanager
async def client(url: str, *, fresh: bool = False) -> AsyncIterator[Client]:
    """``fresh``: a connection for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=fresh)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        made = Client(url, session)
        made.may_ask.set()
        yield made
