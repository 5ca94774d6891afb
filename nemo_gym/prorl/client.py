"""A client of several ProRL servers: each free server gets the next job, and jobs of a dead server go to another.

process ──▶ a place at a free server (a faster server is free more often) ──POST /process──▶ result
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import orjson
import structlog

from nemo_gym._util.secrets import without_password
from nemo_gym._util.tasks import BackgroundTasks, Backoff
from nemo_gym.contract.errors import ConfigError, ServerError, require_whole
from nemo_gym.http.client import is_server_url, new_session
from nemo_gym.prorl.llm_servers import NoLlmServerError, parse_address
from nemo_gym.prorl.registry import instance_id_of, row_of

URLS_ENV = "PRORL_SERVER_URLS"
TOKEN_ENV = "PRORL_SERVER_TOKEN"
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
"""The timeout of all requests but /process, which takes as long as its job."""
LOOK_AGAIN_S = 1.0
LOOK_AGAIN_AT_MOST_S = 30.0
PATIENCE_S = 600.0
_NO_LLM_SERVER = "it has no LLM server (POST /add_llm_server)"
_SEPARATORS = re.compile(r"[+,\s]+")

log = structlog.get_logger(__name__)


def server_urls(urls: str | Iterable[str] | None = None) -> list[str]:
    """Return ``urls``, or those in ``PRORL_SERVER_URLS``, separated by ``+``, ``,`` or space. Raises `ConfigError`."""
    given = urls if urls is not None else os.environ.get(URLS_ENV, "")
    found = [url.rstrip("/") for url in (_SEPARATORS.split(given) if isinstance(given, str) else given) if url]
    if not found:
        raise ConfigError(f"no ProRL server: set {URLS_ENV}=http://node-1:8006+http://node-2:8006", key=URLS_ENV)
    for url in found:
        if not is_server_url(url):
            raise ConfigError(
                f"{URLS_ENV}: '{without_password(url)}' is not a valid server URL; give for example http://node-1:8006",
                key=URLS_ENV,
            )
    return list(dict.fromkeys(found))


def assign_llm_servers(addresses: Sequence[str], urls: Sequence[str]) -> dict[str, list[str]]:
    """Assign LLM servers to ProRL servers. Each ProRL server uses those of its own node; if its node has none, it gets
    an even share of all. LLM servers on nodes without a ProRL server are shared out evenly as well."""
    hosts = {url: urlsplit(url).hostname for url in urls}
    assigned: dict[str, list[str]] = {url: [] for url in urls}
    unassigned = []
    for address in addresses:
        local_urls = [url for url in urls if hosts[url] == urlsplit(address).hostname]
        for url in local_urls:
            assigned[url].append(address)
        if not local_urls:
            unassigned.append(address)
    for url, address in zip(cycle(urls), unassigned, strict=False):
        assigned[url].append(address)
    unserved = [url for url in urls if not assigned[url]]
    if addresses:
        for url, address in zip(unserved, islice(cycle(addresses), len(unserved)), strict=True):
            assigned[url].append(address)
    return assigned


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    places: int = 0
    """How many jobs the server takes at once."""
    life: int = 0
    """Grows when the server is given up, which invalidates its earlier places."""
    problem: str | None = None
    """Why the server gets no jobs; ``None`` if it does."""
    done: int = 0
    llm_servers: list[str] | None = None
    """The LLM servers that this client has set. A server that was restarted gets them again."""
    setting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while they are sent."""


@dataclass(frozen=True, slots=True)
class _Place:
    server: _Server
    life: int

    @property
    def is_there(self) -> bool:
        return self.server.problem is None and self.server.life == self.life


@dataclass(slots=True)
class JobLost(Exception):
    """The job was lost because its server is gone or has stopped."""

    problem: str


class _NoLlmServerError(ServerError):
    """The server refused the job because it has no LLM server."""


class ProRLClient:
    """Distributes jobs over ProRL servers. Use it with ``async with``, in one event loop.

    Args:
        urls: the servers; by default those of ``PRORL_SERVER_URLS``.
        token: the servers' token; by default ``PRORL_SERVER_TOKEN``.
        places: how many jobs each server gets at once; by default as many as it has workers.
        max_tries: how often to try a job that ends with an infrastructure error. A job that was lost with its server
            goes to another server, without a limit.
        patience_s: how many seconds jobs wait while no server is available.
    """

    def __init__(
        self,
        urls: str | Iterable[str] | None = None,
        *,
        token: str | None = None,
        places: int | None = None,
        max_tries: int = 3,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._servers = [_Server(url) for url in server_urls(urls)]
        bearer_token = token or os.environ.get(TOKEN_ENV)
        self._headers = {"Authorization": f"Bearer {bearer_token}"} if bearer_token else {}
        self._places = None if places is None else require_whole("places", places, 1)
        self._max_tries, self._patience_s = require_whole("max_tries", max_tries, 1), patience_s
        self._free: asyncio.Queue[_Place] = asyncio.Queue()
        self._tasks = BackgroundTasks()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._http = new_session(timeout, headers=self._headers)
        try:
            await asyncio.gather(*(self._begin(server) for server in self._servers))
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; the servers then cancel the running jobs."""
        await self._tasks.cancel()
        if self._http is not None:
            await self._http.close()

    @property
    def places(self) -> int:
        """How many jobs all available servers take at once."""
        return sum(server.places for server in self._servers if server.problem is None)

    @property
    def done(self) -> dict[str, int]:
        """The number of jobs that each server has finished."""
        return {server.url: server.done for server in self._servers}

    # Jobs

    async def process(
        self, instance: Any, sampling_params: Mapping[str, Any] | None = None, job_id: str | None = None
    ) -> dict[str, Any]:
        """Run one instance on a free server, and return its result. Raises `ConfigError` if a server refuses it, and
        `ServerError` if no server has an LLM server, or none was available for ``patience_s``."""
        body = {"instance": row_of(instance), "sampling_params": dict(sampling_params or {})}
        tries = 0
        while True:
            place = await self._place()
            server = place.server
            # A new id for each try: after a lost connection, the server may still be running the earlier try.
            name = job_id or f"{instance_id_of(instance)[:67]}-{uuid.uuid4().hex}"
            try:
                result = await self._ask(server, "/process", {**body, "job_id": name})
            except JobLost as lost:
                self._give_up(place, lost.problem)
                continue
            except BaseException as error:
                if isinstance(error, _NoLlmServerError) and self._can_others_be_better(server):
                    # It would refuse every job at once, so always be free, and be given most of the jobs.
                    self._give_up(place, _NO_LLM_SERVER)
                    continue
                self._put_back(place)
                raise
            server.done += 1
            self._put_back(place)
            tries += 1
            failure = result.get("failure")
            if failure is None or not failure.get("retryable") or tries >= self._max_tries:
                return result
            log.warning("job failed, trying again", job_id=name, server=server.url, error=result.get("error"))

    async def process_all(
        self, instances: Iterable[Any], sampling_params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the number and result of each instance, in the order in which they end."""
        waiting = {
            asyncio.create_task(self.process(instance, sampling_params)): number
            for number, instance in enumerate(instances)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield waiting.pop(task), task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    # Servers

    async def set_llm_servers(self, addresses: Sequence[str]) -> dict[str, list[str]]:
        """Replace the LLM servers of all ProRL servers, as `assign_llm_servers` distributes them; a server that was
        restarted gets its own again. Return the assignment."""
        assigned = assign_llm_servers(addresses, [server.url for server in self._servers])
        parsed = {url: [parse_address(address)[0] for address in each] for url, each in assigned.items()}
        for server in self._servers:
            server.llm_servers = list(dict.fromkeys(parsed[server.url]))
        for server in self._servers:
            try:
                await self._send_llm_servers(server)
            except JobLost as lost:
                raise ServerError(f"{server.url}: {lost.problem}", retryable=True) from None
        return assigned

    async def status(self) -> dict[str, dict[str, Any]]:
        """Return the status of each server; ``{problem}`` for a server that is not available."""

        async def status_of(server: _Server) -> dict[str, Any]:
            try:
                return await self._ask(server, "/status")
            except (JobLost, ConfigError) as error:
                return {"problem": str(error)}

        statuses = await asyncio.gather(*map(status_of, self._servers))
        return {server.url: each for server, each in zip(self._servers, statuses, strict=True)}

    # Inside

    async def _begin(self, server: _Server) -> None:
        """Start a server if it is available and not started. If it is not available, keep trying in the background."""
        try:
            await self._open(server)
        except JobLost as lost:
            server.problem = lost.problem
            self._tasks.start(self._find_again(server))

    async def _open(self, server: _Server) -> None:
        status = await self._ask(server, "/status")
        if not status.get("running"):
            try:
                await self._ask(server, "/start", {})
            except ConfigError:  # another client may have started it meanwhile
                if not (await self._ask(server, "/status")).get("running"):
                    raise
        if server.llm_servers is not None:
            if status.get("llm_servers") != server.llm_servers:
                await self._send_llm_servers(server)
        elif server.problem == _NO_LLM_SERVER and status.get("llm_servers") == []:
            raise JobLost(_NO_LLM_SERVER)
        workers = (int(status[f"max_{stage}_workers"]) for stage in ("init", "run", "eval"))
        server.places, server.problem = self._places or sum(workers), None
        for _ in range(server.places):
            self._free.put_nowait(_Place(server, server.life))

    async def _send_llm_servers(self, server: _Server) -> None:
        async with server.setting:
            await self._ask(server, "/clear_llm_server", {})
            for address in server.llm_servers or ():
                await self._ask(server, "/add_llm_server", {"address": address})

    async def _find_again(self, server: _Server) -> None:
        backoff = Backoff(first_s=LOOK_AGAIN_S, longest_s=LOOK_AGAIN_AT_MOST_S)
        while await backoff.again():
            try:
                await self._open(server)
            except (JobLost, ConfigError, ServerError) as error:
                server.problem = str(error)
            else:
                log.info("server is there again", server=server.url)
                return

    async def _place(self) -> _Place:
        while True:
            nobody = all(server.problem is not None for server in self._servers)
            try:
                async with asyncio.timeout(self._patience_s if nobody else LOOK_AGAIN_S):
                    place = await self._free.get()
            except TimeoutError:
                if not nobody:
                    continue  # look again: the last server may have been given up meanwhile
                listed = "; ".join(f"{server.url}: {server.problem}" for server in self._servers)
                raise ServerError(
                    f"no ProRL server was there for {self._patience_s:g} s: {listed}", retryable=True
                ) from None
            if place.is_there:
                return place

    def _can_others_be_better(self, server: _Server) -> bool:
        """Return whether to leave out a server without an LLM server: it gets those of this client again, or another
        server may have one. If none has, the caller is to know at once."""
        others = [other for other in self._servers if other is not server]
        return bool(server.llm_servers) or any(other.problem != _NO_LLM_SERVER for other in others)

    def _put_back(self, place: _Place) -> None:
        if place.is_there:
            self._free.put_nowait(place)

    def _give_up(self, place: _Place, problem: str) -> None:
        server = place.server
        if not place.is_there:
            return
        log.warning("server lost; its jobs go to others", server=server.url, problem=problem)
        server.problem = problem
        server.life += 1
        self._tasks.start(self._find_again(server))

    async def _ask(self, server: _Server, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return the response's JSON object. Raises `JobLost` if the server is not available or
        not running, `ConfigError` if it refuses the request, and `ServerError` for other server errors."""
        assert self._http is not None, "use the client as: async with ProRLClient() as client"
        options: dict[str, Any] = {} if path == "/process" else {"timeout": aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)}
        if body is not None:
            options |= {"data": orjson.dumps(body), "headers": {"Content-Type": "application/json"}}
        try:
            async with self._http.request("GET" if body is None else "POST", server.url + path, **options) as reply:
                answer, status = await reply.read(), reply.status
            payload = orjson.loads(answer)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise JobLost(f"{type(error).__name__}: {error}") from error
        except orjson.JSONDecodeError:
            raise JobLost(f"{path} answers {status} and no JSON") from None
        detail = payload.get("detail") if isinstance(payload, dict) else None
        if status >= 500 and path != "/start":
            code = payload.get("code") if isinstance(payload, dict) else None
            if code not in ("not_running", None):
                kind = _NoLlmServerError if code == NoLlmServerError.code else ServerError
                raise kind(f"{server.url}{path}: {detail}", retryable=bool(payload.get("retryable")))
            raise JobLost(f"{path} answers {status}: {detail}")
        if status >= 400 or not isinstance(payload, dict):
            raise ConfigError(f"{server.url}{path}: {detail or f'status {status}'}", key=path)
        return payload
