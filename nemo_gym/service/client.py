"""Typed clients of the rollout service: `AsyncRolloutClient`, and `RolloutClient` for programs without an event loop.

If the service cannot be reached, requests are repeated. This is safe for submissions, because a job id names one job.
A stream of results resumes after the last result that was read.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import aiohttp
import orjson

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, LoopThread
from nemo_gym.contract.errors import ConfigError, InvalidBodyError, NemoGymError, not_json
from nemo_gym.http.client import new_session

ADDRESS_FILE = "service.json"
URL_VARIABLE = "NEMO_GYM_SERVICE_URL"
TOKEN_VARIABLE = "NEMO_GYM_SERVICE_TOKEN"
BATCH = 500
"""The most jobs of one request."""
BATCH_BYTES = 4 << 20
"""A request is sent once its jobs reach this size, however few they are. So even jobs full of empty lists, each of
which counts as four values in three bytes, stay within the service's `max_body_values`."""
PATIENCE_S = 60.0
"""How many seconds to retry if the service cannot be reached, because it may be restarting."""
WAIT_AT_ONCE_S = 60.0
MAX_EVENT_BYTES = 1 << 30
TERMINAL = frozenset({"done", "failed", "cancelled"})

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[["JobView"], None]
"""Receives each result as it arrives."""


class ServiceError(NemoGymError):
    """The service refused a request or could not be reached. ``details`` hold the problem of its response."""

    code = "service"
    status = 502


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the service refused one job of a batch."""

    job_id: str
    code: str
    detail: str
    problem: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of submitting a batch."""

    accepted: int
    known: int
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the service describes it."""

    job_id: str
    state: str
    run_id: str
    group_id: str
    task_id: str
    sample_index: int
    agent: str
    priority: int
    deadline_s: float | None
    attempt: int
    digest: str
    failures: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None = field(repr=False)
    cursor: str | None = None
    """The place of a result in the stream; the next result comes after it."""

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    @property
    def reward(self) -> float | None:
        """The reward; ``None`` if there is no verdict."""
        return None if self.result is None else self.result.get("reward")

    @classmethod
    def of(cls, described: Mapping[str, Any], cursor: str | None = None) -> JobView:
        return cls(**{**described, "failures": tuple(described["failures"])}, cursor=cursor)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The counts of a cancellation; see `nemo_gym.rollouts.interfaces.CancelReport`."""

    queued: int
    active: int
    released: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    token: str | None = field(repr=False)
    token_source: str = "the one given as token"
    """Where the token comes from, for the message that the service refuses it."""

    @classmethod
    def find(
        cls, url: str | None = None, token: str | None = None, run_dir: Path | None = None, role: str = "operate"
    ) -> Address:
        """Return the given address. Without one, return the address of the service in a run's directory, and without
        that directory, the address in the environment variables. Raises `ConfigError`."""
        source, variable = "the one given as token", os.environ.get(URL_VARIABLE)
        # The variables name one service: a directory names another one, which does not get their token.
        is_another = bool(variable) and not url and run_dir is not None
        if not token and not is_another and (token := os.environ.get(TOKEN_VARIABLE)):
            source = f"that of {TOKEN_VARIABLE} in the environment"
        if not url and run_dir is not None:
            path = run_dir / ADDRESS_FILE
            try:
                address = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"no service runs in '{run_dir}' ({path.name}: {error})", key="run_dir") from None
            url = str(address["url"])
            if not token:
                token, source = address["tokens"].get(role), f"that of {path}"
        if not (url := url or variable):
            raise ConfigError(f"no service is named: give url= or run_dir=, or set {URL_VARIABLE}", key="url")
        return cls(url.rstrip("/"), token, source)


class AsyncRolloutClient:
    """Use it as ``async with AsyncRolloutClient(url, token) as client``."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        run_dir: Path | str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.address = Address.find(url, token, Path(run_dir) if run_dir is not None else None)
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = new_session(aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def submit(self, jobs: Iterable[Mapping[str, Any]]) -> Submission:
        """Submit jobs (see the service's page for their members), in batches. Refused jobs are listed in the result;
        they do not affect the others."""
        accepted = known = 0
        refused: list[Refusal] = []
        for batch in _batches(jobs, refused):
            response = await self._call("POST", "/v1/jobs", {"jobs": batch}, accepts=lambda body: "jobs" in body)
            accepted += response["accepted"]
            known += response["known"]
            refused += [
                Refusal(each["job_id"], each["error"]["code"], each["error"]["detail"], each["error"])
                for each in response["jobs"]
                if "error" in each
            ]
        return Submission(accepted, known, tuple(refused))

    async def job(self, job_id: str, *, wait_s: float = 0.0) -> JobView:
        """Return a job, waiting up to ``wait_s`` seconds for its result."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        while True:
            left_s = max(0.0, give_up - loop.time())
            wait = f"?wait_s={min(left_s, WAIT_AT_ONCE_S):.3f}" if left_s else ""
            view = JobView.of(await self._call("GET", f"/v1/jobs/{job_id}{wait}"))
            if view.is_over or loop.time() >= give_up:
                return view

    async def jobs(
        self, *, group: str | None = None, run: str | None = None, state: str | None = None
    ) -> AsyncIterator[JobView]:
        """Yield every matching job, without its result, in order of submission."""
        cursor: str | None = None
        while True:
            page = await self._call(
                "GET", "/v1/jobs", query={"group": group, "run": run, "state": state, "cursor": cursor}
            )
            for each in page["jobs"]:
                yield JobView.of(each)
            if (cursor := page["cursor"]) is None:
                return

    async def results(
        self, *, after: str | None = None, group: str | None = None, run: str | None = None, follow: bool = True
    ) -> AsyncIterator[JobView]:
        """Yield results in the order in which they were recorded, each once, also across restarts of the service.
        ``after`` is the ``cursor`` of the last result already read. Without ``follow``, end after the last result
        recorded so far."""
        query = {"group": group, "run": run, "follow": None if follow else "false"}
        backoff = self._backoff()
        while True:
            try:
                async for view in self._stream(query, after):
                    after = view.cursor
                    yield view
                    backoff = self._backoff()
                if not follow:
                    return
                await asyncio.sleep(0.2)  # the service is stopping
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                if not await backoff.again():
                    raise self._unreachable("/v1/results", error) from error

    async def _stream(self, query: Mapping[str, Any], after: str | None) -> AsyncIterator[JobView]:
        assert self._session is not None, "use it in 'async with'"
        headers = {**self._headers(), **({} if after is None else {"Last-Event-ID": after})}
        params = {key: value for key, value in query.items() if value is not None}
        url = self.address.url + "/v1/results"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        async with self._session.get(url, params=params, headers=headers, timeout=timeout) as response:
            if response.status >= 300:
                raise self._refused("/v1/results", response.status, await response.read())
            buffer = bytearray()
            async for piece in response.content.iter_any():
                buffer += piece
                if len(buffer) > MAX_EVENT_BYTES:
                    raise ServiceError("a result of the service is larger than 1 GiB")
                if b"\n\n" not in piece and b"\n\n" not in buffer[-len(piece) - 1 :]:
                    continue
                *events, tail = bytes(buffer).split(b"\n\n")
                buffer = bytearray(tail)
                for event in events:
                    if (view := _view_of(event)) is not None:
                        yield view

    async def wait(
        self,
        *,
        run: str | None = None,
        group: str | None = None,
        after: str | None = None,
        on_result: Progress | None = None,
    ) -> dict[str, int]:
        """Read results until every job that ``run`` or ``group`` has now has ended. Return the counts by state of the
        results that were read: those behind ``after``."""
        pending = {view.job_id async for view in self.jobs(run=run, group=group) if after is None or not view.is_over}
        counts: dict[str, int] = {}
        # The results of jobs that are over may lie before `after`: read those that are there, and wait for the others.
        for follow in (False, True):
            if follow and not pending:
                break
            async for view in self.results(run=run, group=group, after=after, follow=follow):
                after = view.cursor
                if on_result is not None:
                    on_result(view)
                counts[view.state] = counts.get(view.state, 0) + 1
                pending.discard(view.job_id)
                if follow and not pending:
                    break
        return counts

    async def cancel(
        self,
        *,
        job_ids: Sequence[str] | None = None,
        group: str | None = None,
        run: str | None = None,
        reason: str | None = None,
    ) -> Cancelled:
        """Cancel jobs; return when their attempts are closed. Agents remove their sandboxes a moment later."""
        fields = {"job_ids": None if job_ids is None else list(job_ids), "group": group, "run": run, "reason": reason}
        body = {key: value for key, value in fields.items() if value is not None}
        return Cancelled(**await self._call("POST", "/v1/cancel", body))

    async def drain(self, *, wait_s: float = 0.0, resume: bool = False) -> dict[str, Any]:
        """Have the service stop claiming jobs, or with ``resume`` claim them again."""
        return await self._call("POST", "/v1/drain", {"wait_s": wait_s, "resume": resume})

    async def runs(self) -> dict[str, Any]:
        """Return the progress of each run, and the running attempts with their servers and times."""
        return await self._call("GET", "/v1/runs")

    async def status(self) -> dict[str, Any]:
        return await self._call("GET", "/v1/status")

    async def register_server(
        self, instance: str, url: str, *, capacity: int | None = None, credential: str | None = None
    ) -> dict[str, Any]:
        """Add a replica of one of the service's servers."""
        body = {"instance": instance, "url": url, "capacity": capacity, "credential": credential}
        return await self._call("POST", "/v1/servers", body)

    async def remove_server(self, server_id: str) -> dict[str, Any]:
        """Stop using a server; its attempts go to other servers."""
        return await self._call("DELETE", f"/v1/servers/{server_id}")

    # Requests

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str | None] | None = None,
        accepts: Callable[[Mapping[str, Any]], bool] = lambda body: False,
    ) -> dict[str, Any]:
        """Send a request, repeating it if the service cannot be reached, and return the response. ``accepts`` selects
        responses that are not raised as errors despite their status."""
        assert self._session is not None, "use it in 'async with'"
        backoff = self._backoff()
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        params = {key: value for key, value in (query or {}).items() if value is not None}
        headers = {**self._headers(), "Content-Type": "application/json"}
        while True:
            try:
                async with self._session.request(
                    method, self.address.url + path, data=data, params=params, headers=headers, allow_redirects=False
                ) as response:
                    content = await response.read()
                    if response.status >= 300:
                        error = self._refused(path, response.status, content)
                        if not accepts(error.details["problem"]):
                            raise error
                        return dict(error.details["problem"])
                    payload: dict[str, Any] = orjson.loads(content)
                    return payload
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                if not await backoff.again():
                    raise self._unreachable(path, error) from error

    def _headers(self) -> dict[str, str]:
        return {} if self.address.token is None else {"Authorization": f"Bearer {self.address.token}"}

    def _backoff(self) -> Backoff:
        return Backoff(first_s=0.1, longest_s=2.0, patience_s=self._patience_s, jitter=NETWORK_JITTER)

    def _refused(self, path: str, status: int, content: bytes) -> ServiceError:
        try:
            problem = orjson.loads(content)
        except orjson.JSONDecodeError:
            problem = {"detail": content[:300].decode(errors="replace")}
        if not isinstance(problem, dict):
            problem = {"detail": str(problem)[:300]}
        detail = problem.get("detail") or f"status {status}"
        if status == 401 and self.address.token is not None:
            detail = f"{detail}; the token is {self.address.token_source}"
        error = ServiceError(str(detail), retryable=bool(problem.get("retryable", status >= 500)), problem=problem)
        error.details |= {"status": status, "path": path, "problem": problem}
        return error

    def _unreachable(self, path: str, error: Exception) -> ServiceError:
        return ServiceError(
            f"the service at {self.address.url} cannot be reached ({path}: {type(error).__name__}: {error})",
            retryable=True,
        )


def _batches(jobs: Iterable[Mapping[str, Any]], refused: list[Refusal]) -> Iterator[list[orjson.Fragment]]:
    """Yield the jobs as JSON, as many as one request takes. Those that are no JSON are added to ``refused``."""
    batch: list[orjson.Fragment] = []
    size = 0
    for number, job in enumerate(jobs):
        try:
            encoded = orjson.dumps(job, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            problem = InvalidBodyError(f"the job is not JSON: {not_json(error)}")
            job_id = str(job.get("job_id", f"jobs[{number}]"))
            refused.append(Refusal(job_id, problem.code, problem.message, problem.as_problem()))
            continue
        if batch and (len(batch) == BATCH or size + len(encoded) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(orjson.Fragment(encoded))
        size += len(encoded)
    if batch:
        yield batch


def _view_of(event: bytes) -> JobView | None:
    """Return the result in one event of a stream; ``None`` for a keep-alive message."""
    cursor = data = None
    for line in event.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"id":
            cursor = value.decode()
        elif name == b"data":
            data = value
    return None if data is None else JobView.of(orjson.loads(data), cursor)


def _blocking(
    method: Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RolloutClient, P], T]:
    """Return a method of `AsyncRolloutClient` for programs without an event loop."""

    @functools.wraps(method)
    def call(client: RolloutClient, /, *given: P.args, **named: P.kwargs) -> T:
        return client._call(method(client._client, *given, **named))

    return call


def _blocking_each(
    method: Callable[Concatenate[AsyncRolloutClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[RolloutClient, P], Iterator[T]]:
    """`_blocking` for a method that yields."""

    @functools.wraps(method)
    def each(client: RolloutClient, /, *given: P.args, **named: P.kwargs) -> Iterator[T]:
        return client._each(method(client._client, *given, **named))

    return each


class RolloutClient:
    """`AsyncRolloutClient` for programs without an event loop; thread-safe."""

    def __init__(self, url: str | None = None, token: str | None = None, **options: Any) -> None:
        self._client = AsyncRolloutClient(url, token, **options)
        self._thread = LoopThread("rollout-client")
        self._call = self._thread.run
        self._call(self._client.__aenter__())

    submit = _blocking(AsyncRolloutClient.submit)
    job = _blocking(AsyncRolloutClient.job)
    jobs = _blocking_each(AsyncRolloutClient.jobs)
    results = _blocking_each(AsyncRolloutClient.results)
    wait = _blocking(AsyncRolloutClient.wait)
    cancel = _blocking(AsyncRolloutClient.cancel)
    drain = _blocking(AsyncRolloutClient.drain)
    runs = _blocking(AsyncRolloutClient.runs)
    status = _blocking(AsyncRolloutClient.status)
    register_server = _blocking(AsyncRolloutClient.register_server)
    remove_server = _blocking(AsyncRolloutClient.remove_server)

    def close(self) -> None:
        """Close the connection and the thread; idempotent."""
        if not self._thread.loop.is_closed():
            self._call(self._client.__aexit__())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        end = object()

        async def following() -> Any:
            return await anext(items, end)

        async def closing() -> None:
            if (close := getattr(items, "aclose", None)) is not None:
                await close()

        try:
            while (item := self._call(following())) is not end:
                yield item
        finally:
            self._call(closing())
