"""Options of the remote provider, the brokers that they name, and HTTP to a broker: one session per event loop,
bounded retries, and conversion of problems into errors.

A request is retried if it had no effect (no connection could be made, or the broker responded with ``started: no``
and a retryable code), or if it is *repeatable*: repeating it changes nothing, because an id that the client chose
identifies its effect. All other requests are sent once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import structlog
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError
from yarl import URL

from nemo_gym._util.suggest import validation_problems
from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, retry_after_s
from nemo_gym.contract.errors import ConfigError, InvalidBodyError, NemoGymError, SandboxError, reject_unknown_keys
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.client import close_with_the_loop, new_session
from nemo_gym.http.telemetry import Chooser
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.base import SandboxCapabilities, SandboxHandle
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.wire.models import CapabilitiesView, DoorsView
from nemo_gym.sandbox.wire.problems import Problem, error_of, parse_problem

log = structlog.get_logger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

# -- Handle --------------------------------------------------------------------------------------------------------


@dataclass
class RemoteBox:
    """The type of ``SandboxHandle.raw`` of the remote provider."""

    broker_url: str
    sandbox_id: str
    token: str = field(repr=False)
    scope: LeaseScope
    expires_at: float
    """End of the lease by the broker's clock, as of the last response."""
    lent: set[str] = field(default_factory=set)
    """Ids of leases that were created with this handle."""
    doors: dict[str, DoorStatistics] = field(default_factory=dict)
    """Doors that this process opened, and their latest statistics."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def url(self, *parts: str) -> str:
        """The URL of the box, or of something below it; see `wire.sandbox`."""
        return self.broker_url + wire.sandbox(self.sandbox_id, *parts)


def box_of(handle: SandboxHandle) -> RemoteBox:
    """Raises `SandboxError` for another provider's handle."""
    if not isinstance(handle.raw, RemoteBox):
        raise SandboxError(f"sandbox {handle.sandbox_id} is not a handle of the remote provider")
    return handle.raw


# -- Connection ----------------------------------------------------------------------------------------------------

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 3.0
"""Less than the 5 s or more for which servers keep idle connections: requests rarely use one that is being closed."""
_WAITS = frozenset({"quota", "no_room", "draining", "create_in_progress", "backend_unreachable", "not_a_problem"})
"""Codes that are retried here after a pause. Other retryable errors are raised, for the caller to decide."""


class BrokerUnreachableError(SandboxError):
    """The broker did not respond to any of the attempts. ``details['started']`` is ``no`` or ``unknown``."""

    code = "broker_unreachable"


class SourceError(Exception):
    """The caller's stream, not the connection, failed with ``error`` while it was being sent."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def retries(patience_s: float) -> Backoff:
    """The pauses between attempts of one request, for ``patience_s`` seconds in all."""
    return Backoff(first_s=0.05, longest_s=2.0, patience_s=patience_s, jitter=NETWORK_JITTER)


class BrokerConnection:
    """Requests to one or more brokers.

    Args:
        request_timeout_s: longest time without data within a request.
        patience_s: for how long a failed request is retried.
    """

    def __init__(self, *, request_timeout_s: float, patience_s: float) -> None:
        self.request_timeout_s, self.patience_s = request_timeout_s, patience_s
        self._sessions: dict[
            tuple[asyncio.AbstractEventLoop, bool], tuple[aiohttp.ClientSession, AsyncGenerator[None]]
        ] = {}
        """(Event loop, whether connections are fresh) → the session, and the generator that closes it."""

    async def aclose(self) -> None:
        """Close the running loop's connections. Those of ended loops were closed together with their loop."""
        for fresh in (False, True):
            _, owner = self._sessions.pop((asyncio.get_running_loop(), fresh), (None, None))
            if owner is not None:
                await owner.aclose()

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, Any] | list[tuple[str, str]] | None = None,
        body: BaseModel | bytes | None = None,
        stream: Callable[[], AsyncIterator[bytes]] | None = None,
        repeatable: bool = False,
        silence_s: float | None = None,
        patience_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful response, whose body the caller reads. A body that breaks off raises aiohttp's errors.

        Args:
            stream: returns the request's body in chunks. It can be read only once, so such a request is retried only
                if reading has not begun.
            silence_s: overrides ``request_timeout_s``.
            patience_s: overrides the connection's value; 0 means a single attempt.

        Raises:
            BrokerUnreachableError: there was no response.
            SourceError: ``stream`` raised an error.
            NemoGymError: the broker responded with this error; see `nemo_gym.sandbox.wire.problems`.
        """
        backoff = retries(self.patience_s if patience_s is None else patience_s)
        sent = _Sent(stream)
        headers = {wire.REQUEST_ID_HEADER: uuid.uuid4().hex, **headers}
        data: Any = None
        if isinstance(body, BaseModel):
            data, headers["Content-Type"] = encode(body), wire.JSON
        elif body is not None:
            data, headers["Content-Type"] = body, wire.OCTET_STREAM
        elif stream is not None:
            headers["Content-Type"] = wire.TAR
        while True:
            try:
                response = await self._session(fresh=stream is not None).request(
                    method,
                    _url(url, query),
                    headers=headers,
                    data=data if stream is None else sent.chunks(),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s or self.request_timeout_s
                    ),
                )
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                sent.raise_its_own()
                no_connection = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
                never_started = no_connection or (stream and not sent.taken)
                if not (never_started or repeatable) or not await backoff.again():
                    raise _unreachable(method, url, error, started="no" if never_started else "unknown") from error
                continue
            if response.status < 300:
                break
            problem, retry_after_s = await _problem(response)
            sent.raise_its_own()
            may_repeat = (repeatable or problem.started == "no") and not sent.taken
            waits = problem.retryable and problem.code in _WAITS
            if not (may_repeat and waits and await backoff.again(at_least_s=retry_after_s)):
                raise error_of(problem)
        try:
            yield response
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def ask(self, method: str, url: str, **options: Any) -> bytes:
        """Return the whole body of a successful response; options as in `open`. Retries a broken-off body too, if the
        request is repeatable."""
        backoff = retries(self.patience_s if (patience_s := options.pop("patience_s", None)) is None else patience_s)
        while True:
            try:
                async with self.open(method, url, **options, patience_s=max(backoff.left_s, 0)) as response:
                    return await response.read()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if not options.get("repeatable") or not await backoff.again():
                    raise _unreachable(method, url, error, started="unknown") from error

    async def ask_box(
        self, box: RemoteBox, method: str, *parts: str, repeatable: bool = True, **options: Any
    ) -> bytes:
        """Send a request to a box, with its lease, or to something below the box; options as in `open`."""
        return await self.ask(method, box.url(*parts), headers=box.headers, repeatable=repeatable, **options)

    def _session(self, *, fresh: bool) -> aiohttp.ClientSession:
        """The session to use. ``fresh`` selects one without keepalive, for requests that are sent only once: a kept
        connection may be closed by the broker just as it is reused."""
        key = (asyncio.get_running_loop(), fresh)
        session, _ = self._sessions.get(key, (None, None))
        if session is None or session.closed:
            self._sessions = {used: owned for used, owned in self._sessions.items() if not used[0].is_closed()}
            session = new_session(
                aiohttp.ClientTimeout(total=5 * 60, sock_connect=30),  # aiohttp's own; requests set theirs
                force_close=fresh,
                keepalive_s=KEEPALIVE_S,
                auto_decompress=False,
                read_bufsize=2**20,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
            self._sessions[key] = session, close_with_the_loop(session.close)
        return session


class _Sent:
    """A streamed request body, which records whether reading has begun and the error that the stream raised."""

    def __init__(self, stream: Callable[[], AsyncIterator[bytes]] | None) -> None:
        self._stream = stream
        self._error: Exception | None = None
        self.taken = False

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._stream is not None
        self.taken = True
        try:
            async for chunk in self._stream():
                if chunk:  # an empty chunk would end a chunked body
                    yield chunk
        except Exception as error:  # the stream's own error, which its creator gets back
            self._error = error
            raise

    def raise_its_own(self) -> None:
        if self._error is not None:
            raise SourceError(self._error) from self._error


def encode(body: BaseModel) -> bytes:
    """Encode a body as JSON. Raises `InvalidBodyError` for lone surrogates and for values without a JSON form."""
    try:
        return body.model_dump_json(exclude_defaults=True).encode()
    except (PydanticSerializationError, UnicodeError) as error:
        raise InvalidBodyError(f"{type(body).__name__} cannot be sent to the broker: {error}") from error


@contextlib.contextmanager
def refusals() -> Any:
    """Convert a body's validation errors in the ``with`` block into the suite's error."""
    try:
        yield
    except ValidationError as error:
        problems = validation_problems(error)
        raise InvalidBodyError(f"invalid request to the broker: {problems}", started="no") from error


def _url(url: str, query: Mapping[str, Any] | list[tuple[str, str]] | None) -> URL:
    """Raises `InvalidBodyError` for lone surrogates, which would be left out: a path would be another's."""
    for _, value in query.items() if isinstance(query, Mapping) else query or ():
        try:
            str(value).encode()
        except UnicodeError as error:
            raise InvalidBodyError(f"{value!r} cannot be sent to the broker: {error}", started="no") from error
    return URL(url, encoded=True).with_query(query) if query else URL(url, encoded=True)


async def _problem(response: aiohttp.ClientResponse) -> tuple[Problem, float]:
    try:
        body = await response.content.read(1024 * 1024)
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        body = b""
    response.close()
    return parse_problem(response.status, body), retry_after_s(response.headers.get("Retry-After")) or 0.0


def answer_as(model: type[ModelT], answer: bytes) -> ModelT:
    """Read the body of a successful response. Raises `SandboxError` for one that no broker sends."""
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        if answer.lstrip().startswith(b"{"):
            problem = validation_problems(error, whole="body")  # without values: a lease's token is among them
        else:
            problem = answer[:300].decode("utf-8", "replace").strip() or "it is empty"
        raise SandboxError(
            f"the response is not a broker's {model.__name__}: {problem}; check that the URL is a broker's",
            started="unknown",
        ) from error


def _unreachable(method: str, url: str, error: BaseException, *, started: str) -> BrokerUnreachableError:
    parts = URL(url)
    what_happened = "cannot be reached" if started == "no" else "did not answer"
    return BrokerUnreachableError(
        f"the broker at {parts.origin()} {what_happened}: {method} {parts.path} ({type(error).__name__}: {error})",
        retryable=True,
        started=started,
    )


# -- Doors ---------------------------------------------------------------------------------------------------------

_DOORS_POLL_S = 0.5
_DOORS_PATIENCE_S = 1.0


class DoorCounts:
    """Refreshes the statistics of a box on request, and regularly while the box is watched."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def refresh(self, box: RemoteBox) -> None:
        """Fetch the statistics now. Failures are only logged, because results are valid without statistics."""
        if not box.doors:
            return
        try:
            answer = await self._connection.ask_box(box, "GET", "doors", patience_s=_DOORS_PATIENCE_S)
            view = answer_as(DoorsView, answer)
        except NemoGymError as error:
            log.info("remote_doors_not_heard", sandbox_id=box.sandbox_id, error=str(error))
            return
        for name, counted in view.doors.items():
            if counted is None:
                box.doors.pop(name, None)
            else:  # into the existing object, which callers may hold
                box.doors.setdefault(name, DoorStatistics()).__dict__.update(counted.__dict__)

    def watch(self, box: RemoteBox) -> None:
        """Refresh the statistics about twice a second until `forget`."""
        if box.doors and box.sandbox_id not in self._watching:
            self._watching[box.sandbox_id] = asyncio.create_task(self._watch(box), name=f"doors {box.sandbox_id}")

    async def forget(self, box: RemoteBox) -> None:
        await self._end(self._watching.pop(box.sandbox_id, None))

    async def aclose(self) -> None:
        while self._watching:
            await self._end(self._watching.popitem()[1])

    async def _watch(self, box: RemoteBox) -> None:
        while True:
            await self.refresh(box)
            await asyncio.sleep(_DOORS_POLL_S)

    @staticmethod
    async def _end(task: asyncio.Task[None] | None) -> None:
        if task is None:
            return
        task.cancel()
        if task.get_loop() is asyncio.get_running_loop():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})


# -- Options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `RemoteProvider`. Either ``url`` or ``server`` selects the broker. Without both, boxes can be
    borrowed (a reference contains its broker's URL), but not created."""

    url: str | None = None
    """The broker's root, ``http://`` or ``https://``."""
    server: str | Mapping[str, Any] | None = None
    """The broker as a server of the same stack: its instance name, or ``{type: resources_servers, name: …}``. This
    process gets the broker's address and credential at launch."""
    token: str | None = field(default=None, repr=False)
    """One of the broker's ``caller_tokens``, for a process that is not a server of the broker's stack."""
    request_timeout_s: float = 60.0
    """Longest time that the broker may send nothing within a request that does not wait for a box."""
    patience_s: float = 60.0
    """For how long to retry an unreachable broker before its boxes and commands count as lost."""

    def __post_init__(self) -> None:
        if self.url is not None and self.server is not None:
            raise ConfigError("remote sandbox: give 'url' or 'server', not both", key="url")
        if self.url is not None:
            url = URL(self.url)
            if url.scheme not in ("http", "https") or not url.host:
                raise ConfigError(f"remote sandbox: url '{self.url}' is not an http:// or https:// URL", key="url")
        for name in ("request_timeout_s", "patience_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"remote sandbox: {name} must be a positive number of seconds, not {value!r}")
        if self.server is not None and not self.server_name:
            raise ConfigError("remote sandbox: server must be an instance's name, or {type, name}", key="server")

    @property
    def server_name(self) -> str | None:
        """The broker's instance name if it is a server of the stack, else ``None``."""
        if isinstance(self.server, Mapping):
            return str(self.server.get("name") or "") or None
        return self.server or None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RemoteOptions:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="remote sandbox")
        return cls(**values)


@dataclass(frozen=True)
class Broker:
    """A broker's address, and the headers with this process's credential."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers for the routes that require a caller's credential; sent to this broker only."""


def find_brokers(options: RemoteOptions) -> Brokers | None:
    """The configured brokers, or ``None``. Raises `ConfigError` if ``server`` is not in this stack."""
    headers = {} if options.token is None else {"Authorization": f"Bearer {options.token}"}
    if options.url is not None:
        return Brokers([Broker(options.url.rstrip("/"), headers)])
    name = options.server_name
    if name is None:
        return None
    from nemo_gym.config.launch import current_launch
    from nemo_gym.contract.credentials import CREDENTIAL_HEADER
    from nemo_gym.http.client import ServerClient

    launch = current_launch()
    credential = None
    if launch is not None and launch.credentials is not None:
        credential = launch.credentials.outgoing.get(name)
    if credential is not None:
        headers[CREDENTIAL_HEADER] = credential
    return Brokers([Broker(url, headers) for url in ServerClient.load_from_global_config().replica_urls(name)])


# -- Brokers -------------------------------------------------------------------------------------------------------

NEXT_BROKER_AFTER_S = 5.0
"""For how long to retry a broker that cannot be reached, or has no capacity, before trying the next one."""


_CARRIED: Mapping[str, str | None] = {
    "connect": None,
    "idempotent_create": None,
    "endpoint": "a port of a box is reached from the broker's host only; use exec, or a door for the way out",
}
"""Abilities that do not depend on the broker's backend; see `CapabilitiesView.to_capabilities`."""


class Brokers:
    """Brokers with backends of the same kind. A box stays with the broker that made it."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self.all = tuple(brokers)
        self._urls = [broker.url for broker in brokers]
        self._chooser = Chooser()
        self.abilities: SandboxCapabilities | None = None
        """What the backend can do, once a broker was asked."""

    def in_order(self, key: str | None = None) -> Iterator[tuple[Broker, float | None]]:
        """Yield each broker and its retry time (``None``: as configured), in the order to try them for a new box. The
        order is the same for the same ``key``; without a key, brokers take turns."""
        *others, last = (self.all[number] for number in self._chooser.order(self._urls, key))
        yield from ((broker, NEXT_BROKER_AFTER_S) for broker in others)
        yield last, None

    def patience_of(self, broker: Broker) -> float | None:
        """For how long to retry a request to a broker where others could serve instead (``None``: as configured)."""
        if len(self.all) == 1:
            return None
        return 0.0 if self._chooser.is_left_out(broker.url) else NEXT_BROKER_AFTER_S

    def unreachable(self, broker: Broker) -> None:
        """For a while, try the other brokers first."""
        self._chooser.unreachable(broker.url)

    def url_of(self, told: str) -> str | None:
        """The configured address of the broker with the URL ``told`` in a reference. A single broker's address may
        differ from ``told`` (between machines, say); several brokers must include ``told``, else return ``None``."""
        if len(self.all) == 1:
            return self.all[0].url
        url = told.rstrip("/")
        return url if url in self._urls else None

    def ask_abilities_blocking(self, connection: BrokerConnection) -> SandboxCapabilities:
        """Like `ask_abilities`, with one attempt per broker and for any thread, also one that runs an event loop."""
        if self.abilities is not None:
            return self.abilities
        with ThreadPoolExecutor(1) as thread:
            own = BrokerConnection(request_timeout_s=connection.request_timeout_s, patience_s=0.0)
            return thread.submit(asyncio.run, self.ask_abilities(own, patience_s=0.0)).result()

    async def ask_abilities(
        self, connection: BrokerConnection, *, patience_s: float | None = None
    ) -> SandboxCapabilities:
        """Return the abilities, for which one broker is asked once. ``patience_s`` overrides for how long to retry a
        broker. Raises `BrokerUnreachableError` if no broker can be reached, or the broker's error."""
        if self.abilities is None:
            for broker, broker_patience_s in self.in_order():
                try:
                    answer = await connection.ask(
                        "GET",
                        broker.url + wire.CAPABILITIES,
                        headers=broker.headers,
                        repeatable=True,
                        patience_s=broker_patience_s if patience_s is None else patience_s,
                    )
                    break
                except BrokerUnreachableError:
                    if broker_patience_s is None:  # it was the last one
                        raise
                    self.unreachable(broker)
            self.abilities = answer_as(CapabilitiesView, answer).to_capabilities(carried=_CARRIED)
        return self.abilities
