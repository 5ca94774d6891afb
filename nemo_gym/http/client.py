"""The HTTP clients of every server: one connection pool per event loop, bounded retries, credentials attached.

`ServerClient` uses aiohttp by default, as NeMo Gym's does. `send` is for JSON that is already encoded: it takes 50 µs
of CPU per request where aiohttp takes 130, and it keeps no cookies, follows no redirects and uses no proxy.

Both retry by one rule (`Tries`): a request is sent again only if it certainly never started (the connection was
refused or could not be made), or if its method or its caller declares it idempotent. Any other POST that may have been
delivered is never repeated. The number of tries is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import weakref
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import orjson
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym._util.lazy import lazily
from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import NETWORK_JITTER, Backoff
from nemo_gym.config.launch import current_launch
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.credentials import CREDENTIAL_HEADER
from nemo_gym.contract.errors import ConfigError, ServerError, not_json
from nemo_gym.http.connections import (
    Connections,
    NoHttpError,
    NotConnectedError,
    Origin,
    Patience,
    Reply,
    TooLongError,
    is_own_timeout,
    watched_socket,
)
from nemo_gym.http.telemetry import (
    REPLICAS_HEADER,
    ROLLOUT_ID_HEADER,
    Chooser,
    bound,
    current_replicas,
    current_rollout_id,
    encode_replicas,
    inject,
)

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import ClientResponse
else:
    aiohttp = lazily("aiohttp")

MAX_NUM_TRIES = 6
FIRST_BACKOFF_S = 0.1
"""Doubled after every try, so the retries outlast a server restart of about six seconds."""
TOTAL_TIMEOUT_S = 30 * 86400.0
"""The limit for one request that sets no ``timeout``: longer than any stage, whose own deadlines must decide. A peer
that vanished is noticed by `watched_socket`."""
CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 30.0
"""Shorter than the servers' own keep-alive, so that a POST is not sent on a connection the server is just closing."""

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


class ServerUnreachableError(ServerError, ConnectionError):
    """No connection could be made, or it broke. ``details['started']`` is ``no`` or ``unknown``."""

    code = "server_unreachable"


@cache
def _not_started() -> tuple[type[Exception], ...]:
    """Errors that mean nothing was sent: refused, unresolvable, unroutable, or no reply to the connection attempt."""
    return (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, NotConnectedError)


@cache
def network_errors() -> tuple[type[Exception], ...]:
    """What either client raises when the peer cannot be reached or the connection breaks."""
    return (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, NoHttpError, OSError, *_not_started())


class Tries:
    """The tries of one request. It is sent again only if it certainly never started, or if it may be repeated:
    ``idempotent`` decides, and without it the method."""

    def __init__(self, method: str, url: str, *, idempotent: bool | None, max_tries: int) -> None:
        self._method, self._url = method, url
        self._repeatable = method in IDEMPOTENT_METHODS if idempotent is None else idempotent
        self._backoff = Backoff(first_s=FIRST_BACKOFF_S, tries=max_tries, jitter=NETWORK_JITTER)

    async def again(self, error: Exception) -> None:
        """Wait before the next try. ``error`` ended this try and is one of `network_errors`. Raises
        `ServerUnreachableError` if no try remains, and ``error`` itself if the request's own time limit is over."""
        if isinstance(error, _not_started()):
            started, repeatable = "no", True
        else:
            if is_own_timeout(error) and not isinstance(error, aiohttp.ClientError):
                raise error
            started, repeatable = "unknown", self._repeatable
        if not repeatable or not await self._backoff.again():
            raise self._unreachable(error, started) from error

    def _unreachable(self, error: Exception, started: str) -> ServerUnreachableError:
        parts = urlsplit(self._url)
        where = f"{parts.scheme}://{parts.hostname}:{parts.port or ''}{parts.path}"
        broke = "the connection broke after the request may have been delivered"
        problem = "could not connect" if started == "no" else broke
        message = f"{self._method} {where}: {problem} ({type(error).__name__}: {error})"
        return ServerUnreachableError(message, retryable=True, started=started, url=where)


def close_with_the_loop(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Await ``close`` when the running event loop ends, or when the returned generator's ``aclose`` is awaited. Keep a
    reference to the generator for as long as the resource is in use."""
    owner = _close_at_the_end(close)
    with contextlib.suppress(StopIteration):
        owner.asend(None).send(None)
    return owner


async def _close_at_the_end(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """A properly ended event loop first closes its asynchronous generators. That is the only hook at a loop's end for
    code that did not start the loop."""
    try:
        yield
    finally:
        await close()


_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_FRAMING_HEADERS = frozenset({"content-length", "expect", "transfer-encoding", "upgrade"})
"""Framing headers. A duplicate would allow request smuggling."""
_IN_PATHS = "/%!$&'()*+,;=:@~"
_IN_ROUTES = f"{_IN_PATHS}?"


class RequestHeads:
    """Request heads for calls to one server. Only the request line, the length and a call's own headers differ."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        """``headers`` replace default headers of the same name, whatever its case. Raises `ConfigError` for a URL or
        header that cannot be sent."""
        parts = urlsplit(base_url)
        try:
            port, host = parts.port, (parts.hostname or "").encode("idna" if not base_url.isascii() else "ascii")
        except ValueError as error:
            raise ConfigError(f"'{base_url[:200]}' is not a valid server URL ({error})") from error
        tls = parts.scheme == "https"
        self.origin = Origin(parts.hostname or "", port or (443 if tls else 80), tls)
        name = f"[{host.decode()}]" if b":" in host else host.decode()
        by_name = {
            "host": ("Host", f"{name}:{port}" if port else name),
            "accept": ("Accept", "application/json, text/event-stream"),
            "accept-encoding": ("Accept-Encoding", "identity"),
            "content-type": ("Content-Type", "application/json"),
        }
        by_name |= {name.lower(): (name, value) for name, value in headers.items()}
        for name, _ in by_name.values():
            if name.lower() in _FRAMING_HEADERS:
                raise ConfigError(
                    f"header {name!r} is set by the client itself; remove it from the engine's 'headers'"
                )
            if not _NAME.fullmatch(name):
                raise ConfigError(f"header {name[:40]!r} is not a valid header name (a valid one: 'X-Tenant')")
        self._path = quote(parts.path, safe=_IN_PATHS)
        self._headers = _header_lines(dict(by_name.values())).encode()

    def of(self, method: str, route: str, length: int, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """Return the encoded head of one request. ``length`` is the body's in bytes; ``headers`` are added for this
        call alone. Raises `ConfigError` for a header that cannot be sent."""
        first = f"{method} {self._path}{quote(route, safe=_IN_ROUTES)} HTTP/1.1\r\n{_header_lines(headers)}"
        return b"%b%bContent-Length: %d\r\n\r\n" % (first.encode(), self._headers, length)


def _header_lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if _NO_VALUE.search(value):
            raise ConfigError(f"header {name[:40]!r}: a line break or control character in it cannot be sent")
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


MAX_REPLY_BYTES = 1 << 30
PATIENCE = Patience(CONNECT_TIMEOUT_S, TOTAL_TIMEOUT_S)

_OwnedConnections = tuple[Connections, AsyncGenerator[None]]
_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OwnedConnections] = weakref.WeakKeyDictionary()
"""Each event loop's connections, and the generator that closes them."""


def _connections_of_loop() -> Connections:
    loop = asyncio.get_running_loop()
    owned = _connections.get(loop)
    if owned is None:
        connections = Connections(keepalive_s=KEEPALIVE_S, socket_factory=watched_socket)
        _connections[loop] = owned = connections, close_with_the_loop(connections.aclose)
    return owned[0]


@lru_cache(maxsize=1024)
def _request_heads(origin: str) -> RequestHeads:
    return RequestHeads(origin, {})


async def send_once(
    method: str, url: str, *, headers: Mapping[str, str], data: bytes = b"", patience: Patience = PATIENCE
) -> Reply:
    """Send one request without retries. Raises what `Connections.send` raises. The caller must close the reply."""
    scheme, _, location = url.partition("://")
    host, _, path = location.partition("/")
    heads = _request_heads(f"{scheme}://{host}")
    head = heads.of(method, f"/{path}", len(data), headers)
    return await _connections_of_loop().send(heads.origin, head, data, patience)


async def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    data: bytes = b"",
    idempotent: bool | None = None,
    max_tries: int = MAX_NUM_TRIES,
) -> Reply:
    """`send_once` with the retries and errors of `request`."""
    tries = Tries(method, url, idempotent=idempotent, max_tries=max_tries)
    while True:
        try:
            return await send_once(method, url, headers=headers, data=data)
        except network_errors() as error:
            await tries.again(error)


async def read_whole(reply: Reply, max_bytes: int = MAX_REPLY_BYTES) -> bytes:
    """Read the body, and close the reply. A body that came compressed unasked is inflated; ``max_bytes`` bounds the
    body both before and after."""
    try:
        body = bytes(await reply.read(max_bytes))
    finally:
        reply.close()
    coding = reply.headers.get("content-encoding", "identity")
    if coding == "identity":
        return body
    if coding not in ("gzip", "deflate"):
        raise NoHttpError(f"the body has content-encoding {coding[:40]!r}, which was not requested")
    return await asyncio.to_thread(_inflate, body, max_bytes)


def _inflate(body: bytes, max_bytes: int) -> bytes:
    inflating = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # accepts a gzip or a zlib header
    try:
        inflated = inflating.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise NoHttpError(f"the compressed body cannot be decompressed ({error})") from error
    if len(inflated) > max_bytes:
        raise TooLongError(f"a body of more than {max_bytes} bytes")
    if not inflating.eof:
        raise NoHttpError("the compressed body is truncated")
    if inflating.unused_data:
        raise NoHttpError("there are extra bytes after the compressed body")
    return inflated


TRIES_OF_ONE_REPLICA = 2
"""Tries on one replica of a request that another replica could take."""
CONNECTION_LIMIT = 0
"""No limit: the scheduler bounds concurrency, and a second bound here would deadlock agents that call back."""

ServerStatus = Literal["success", "connection_error", "timeout", "unknown_error"]

T = TypeVar("T")


class _Exchange(Protocol):
    def unreachable(self, said: str) -> None: ...

    def answers(self, status: int, headers: Mapping[str, str]) -> None: ...

    def ends(self) -> None: ...


_NewExchange: TypeAlias = Callable[[], contextlib.AbstractContextManager[_Exchange]]
_Owned: TypeAlias = "tuple[aiohttp.ClientSession, AsyncGenerator[None]]"
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Owned] = weakref.WeakKeyDictionary()
"""Each event loop's session, and the generator that closes it."""
_attached: ContextVar[Mapping[str, Mapping[str, str]]] = ContextVar("nemo_gym_attached_headers")
_counted: ContextVar[tuple[str, _NewExchange | None]] = ContextVar("nemo_gym_counted_calls", default=("", None))


def attach_headers(server_name: str, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Add ``headers`` to `ServerClient` calls made inside the block to ``server_name``, and to no other server."""
    attached = _attached.get({})
    return bound(_attached, {**attached, server_name: {**attached.get(server_name, {}), **headers}})


def inference_context(server_name: str, token: str) -> contextlib.AbstractContextManager[None]:
    """Attach this attempt's inference token to calls to the model server ``server_name``."""
    return attach_headers(server_name, {"Authorization": f"Bearer {token}"})


def count_calls(server_name: str, exchange: _NewExchange) -> contextlib.AbstractContextManager[None]:
    """Tell an ``exchange`` of its own what becomes of each `ServerClient.request` to ``server_name`` inside the
    block."""
    return bound(_counted, (server_name, exchange))


def new_session(
    timeout: aiohttp.ClientTimeout, *, force_close: bool = False, keepalive_s: float = KEEPALIVE_S, **options: Any
) -> aiohttp.ClientSession:
    """Create an HTTP session with this suite's settings and aiohttp's ``options``.

    It keeps no cookies, ignores proxies in the environment, limits no connections, and notices a peer that vanished.
    """
    keepalive: dict[str, Any] = {"force_close": True} if force_close else {"keepalive_timeout": keepalive_s}
    connector = aiohttp.TCPConnector(
        limit=CONNECTION_LIMIT, limit_per_host=0, ttl_dns_cache=60, socket_factory=watched_socket, **keepalive
    )
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, **options
    )


def get_global_aiohttp_client() -> aiohttp.ClientSession:
    """The running event loop's shared session, closed with the loop. It keeps no cookies; callers pass their own."""
    loop = asyncio.get_running_loop()
    session, _ = _sessions.get(loop, (None, None))
    if session is None or session.closed:
        timeout = aiohttp.ClientTimeout(total=TOTAL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        session = new_session(timeout, read_bufsize=2**18)
        _sessions[loop] = session, close_with_the_loop(session.close)
    return session


async def close_global_aiohttp_client() -> None:
    """Close the running loop's session, if it has one, before the loop ends."""
    _, owner = _sessions.pop(asyncio.get_running_loop(), (None, None))
    if owner is not None:
        await owner.aclose()


_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_MAX_LEVELS = 200


def encode_json(value: Any) -> bytes:
    """Encode plain data and pydantic models as JSON, without a model's unset fields. Raises `InvalidBodyError` for
    data that cannot be encoded."""
    if isinstance(value, BaseModel):
        # A model built without validation may hold anything; the receiver validates it and names the wrong fields.
        return value.model_dump_json(exclude_unset=True, warnings=False).encode()
    try:
        return orjson.dumps(value, default=_encode_other, option=_OPTIONS)
    except TypeError as error:
        raise not_json(error) from error


def encode_as_text(value: Any) -> bytes:
    """Encode a plugin's result, which may be anything, as JSON; a value that JSON cannot hold becomes its text."""
    try:
        return orjson.dumps(value, default=str, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_with_texts(value, _MAX_LEVELS), option=_OPTIONS)


def _with_texts(value: Any, levels: int, around: frozenset[int] = frozenset()) -> Any:
    """Return the value with text in place of what orjson refuses: integers beyond 64 bits, deep nesting, objects that
    hold themselves, and lone surrogates, as in the output of a program that is not UTF-8. ``around`` has the ids of
    the objects that hold the value."""
    if isinstance(value, Mapping | list | tuple):
        if not levels or id(value) in around:
            return _text(value)
        around |= {id(value)}
        if isinstance(value, Mapping):
            return {_key(key): _with_texts(each, levels - 1, around) for key, each in value.items()}
        return [_with_texts(each, levels - 1, around) for each in value]
    try:
        return orjson.Fragment(orjson.dumps(value, default=str, option=_OPTIONS))
    except (TypeError, ValueError):
        return _text(value)


def _key(key: Any) -> Any:
    try:
        orjson.dumps({key: None}, option=_OPTIONS)
    except TypeError:
        return _text(key)
    return key


def _text(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):  # an integer of thousands of digits; thousands of levels
        return f"<{type(value).__name__}>"


def _encode_other(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


async def request(
    method: str,
    url: str,
    _internal: bool = False,
    *,
    idempotent: bool | None = None,
    max_tries: int = MAX_NUM_TRIES,
    session: aiohttp.ClientSession | None = None,
    **options: Any,
) -> ClientResponse:
    """Send one request through ``session``, by default the running loop's. The caller checks the response's status.

    ``idempotent`` defaults to the method's idempotence; ``True`` allows a POST to be sent again after its connection
    broke. ``_internal`` is ignored; NeMo Gym plugins pass it. Other options are aiohttp's. Raises
    `ServerUnreachableError` when the peer cannot be reached.
    """
    method = method.upper()
    if "json" in options:
        body = options.pop("json")
        if body is not None:
            options["data"] = encode_json(body)
            options["headers"] = {"Content-Type": "application/json", **(options.get("headers") or {})}
    session = session if session is not None else get_global_aiohttp_client()
    tries = Tries(method, url, idempotent=idempotent, max_tries=max_tries)
    while True:
        try:
            return await session.request(method=method, url=url, **options)
        except network_errors() as error:
            await tries.again(error)


async def raise_for_status(response: ClientResponse) -> None:
    """Raise aiohttp's ``ClientResponseError`` for a status of 300 or more, with the body as ``response_content``.
    Redirects are not followed, so they are errors too."""
    if _is_success(response):
        return
    content = await response.content.read()
    if not issubclass(type(response), aiohttp.ClientResponse) and hasattr(response, "raise_for_status"):
        # A stub from a NeMo Gym plugin's tests, which may implement little else of a response.
        try:
            response.raise_for_status()
        except aiohttp.ClientResponseError as raised:
            raised.response_content = content  # type: ignore[attr-defined]
            raise
    error = aiohttp.ClientResponseError(
        response.request_info,
        getattr(response, "history", ()),
        status=response.status,
        message=getattr(response, "reason", None) or "",
        headers=getattr(response, "headers", None),
    )
    error.response_content = content  # type: ignore[attr-defined]
    if issubclass(type(response), aiohttp.ClientResponse):
        response.release()
    raise error


def _is_success(response: ClientResponse) -> bool:
    """Tests of NeMo Gym's plugins pass stubs that may define only ``ok``."""
    if issubclass(type(response), aiohttp.ClientResponse) or not hasattr(response, "ok"):
        return response.status < 300
    return bool(response.ok)


async def get_response_json(response: ClientResponse) -> Any:
    """The response's body as plain data."""
    return orjson.loads(await response.read())


async def expect_json(response: ClientResponse, server_name: str) -> dict[str, Any]:
    """Return a peer's JSON object. An error status, or a body that is no object, raises `ServerError` with the peer's
    own code, detail and retryability."""
    body = await response.read()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = {"detail": body[:300].decode(errors="replace")}
    if response.status < 300 and isinstance(value, dict):
        return value
    problem = value if isinstance(value, dict) else {"detail": f"answered {type(value).__name__}, not an object"}
    raise ServerError(
        f"{server_name}{response.url.path}: {problem.get('detail') or response.reason}",
        retryable=bool(problem.get("retryable", response.status >= 500)),
        peer=server_name,
        peer_status=response.status,
        peer_code=problem.get("code"),
    )


def server_path(global_config_dict: Mapping[str, Any], server_name: str) -> str:
    """The dotted path of a server instance's innermost block, as written on the command line."""
    path, block = [server_name], global_config_dict[server_name]
    for _ in ("server type", "implementation"):
        path.append(str(next(iter(block))))
        block = block[path[-1]]
    return ".".join(path)


def server_config_of(global_config_dict: Mapping[str, Any], server_name: str) -> Mapping[str, Any]:
    """The innermost block (``host``, ``port``, …) of a server instance. Raises `ConfigError`, which suggests the
    nearest configured name."""
    try:
        block = global_config_dict[server_name]
        for _ in ("server type", "implementation"):
            block = block[next(iter(block))]
    except (KeyError, StopIteration, TypeError, IndexError):
        names = [str(key) for key in global_config_dict]
        raise ConfigError(
            f"server '{server_name}' is not configured{nearest(server_name, names)}", key=server_name
        ) from None
    return block  # type: ignore[no-any-return]


class ServerClient(BaseModel):
    """Calls other servers of the stack by instance name."""

    model_config = ConfigDict(arbitrary_types_allowed=True, ignored_types=(cached_property,))

    head_server_config: BaseServerConfig | None = None
    global_config_dict: Any = Field(default_factory=dict, repr=False)
    """The configuration this process may see, as OmegaConf or plain mappings."""

    # Cached properties, because reading a pydantic private attribute takes some µs, and every request reads all four.

    @cached_property
    def _replica_urls(self) -> dict[str, tuple[str, ...]]:
        return {}

    @cached_property
    def _removed_replicas(self) -> set[tuple[str, str]]:
        return set()

    @cached_property
    def _chooser(self) -> Chooser:
        return Chooser()

    @cached_property
    def _credentials(self) -> dict[str, str]:
        return {}

    @cached_property
    def _credentials_by_url(self) -> dict[str, str]:
        return {}

    @classmethod
    def load_head_server_config(cls) -> BaseServerConfig:
        from nemo_gym.global_config import get_global_config_dict

        head = get_global_config_dict().get("head_server") or {}
        return BaseServerConfig(host=head.get("host", "127.0.0.1"), port=head.get("port", 0))

    @classmethod
    def load_from_global_config(cls, head_server_config: BaseServerConfig | None = None) -> Self:
        """A client for this process's configuration: its launch's, else the one named by NeMo Gym's variables."""
        launch = current_launch()
        if launch is not None:
            client = cls(head_server_config=head_server_config, global_config_dict=launch.config)
            if launch.url is not None:
                client._replica_urls[launch.instance] = (launch.url,)
            if launch.credentials is not None:
                client.use_credentials(launch.credentials.outgoing)
            return client
        from nemo_gym.global_config import get_global_config_dict

        return cls(head_server_config=head_server_config, global_config_dict=get_global_config_dict())

    def use_credentials(self, outgoing: Mapping[str, str]) -> None:
        """Replace all credentials by ``outgoing`` (by target instance) and attach them to every request."""
        self._credentials.clear()
        self._credentials.update(outgoing)

    def _build_server_base_url(self, server_config_dict: Mapping[str, Any]) -> str:
        if url := server_config_dict.get("url"):
            return str(url).rstrip("/")
        return f"http://{url_host(str(server_config_dict['host']))}:{server_config_dict['port']}"

    def replica_urls(self, server_name: str) -> tuple[str, ...]:
        """Where ``server_name`` listens, without trailing slashes: one URL per replica, at least one."""
        urls = self._replica_urls.get(server_name)
        if urls is None:
            block = server_config_of(self.global_config_dict, server_name)
            configured = block.get("urls") or ()
            urls = tuple(str(url).rstrip("/") for url in configured) or (self._build_server_base_url(block),)
            self._replica_urls[server_name] = urls
        return urls

    def add_replica(self, server_name: str, url: str, credential: str | None = None) -> int:
        """Add a replica of ``server_name`` if it is new; returns its number either way. Pass ``credential`` if it
        differs from the other replicas'."""
        urls, url = self.replica_urls(server_name), url.rstrip("/")
        if url not in urls:
            self._replica_urls[server_name] = urls = (*urls, url)
        if credential is not None:
            self._credentials_by_url[url] = credential
        self._removed_replicas.discard((server_name, url))
        return urls.index(url)

    def remove_replica(self, server_name: str, url: str) -> None:
        """Choose a replica no more. It keeps its number, and requests for which it was chosen still go to it."""
        self._removed_replicas.add((server_name, url))

    def _ordered(self, server_name: str, urls: tuple[str, ...], key: str | None = None) -> list[int]:
        order = self._chooser.order(urls, key)
        return [number for number in order if (server_name, urls[number]) not in self._removed_replicas] or order

    def base_url(self, server_name: str) -> str:
        """Where the current rollout's replica of ``server_name`` listens, without a trailing slash."""
        urls = self.replica_urls(server_name)
        return urls[self._replicas_for(server_name, urls)[0]]

    def _replicas_for(self, server_name: str, urls: tuple[str, ...]) -> list[int]:
        """The replica already chosen for the current context, or all replicas in the order to try them."""
        if len(urls) == 1:
            return [0]
        chosen = current_replicas().get(server_name)
        if chosen is not None and chosen < len(urls):
            return [chosen]
        return self._ordered(server_name, urls, current_rollout_id())

    def choose_replica(self, server_name: str) -> int:
        """The replica for a new attempt: not known to be unreachable, and with the fewest open requests of this
        client."""
        urls = self.replica_urls(server_name)
        return self._ordered(server_name, urls)[0] if len(urls) > 1 else 0

    async def request(self, server_name: str, url_path: str, method: str, **options: Any) -> ClientResponse:
        """Send a request to ``url_path`` of a server; options as in `request`. If no replica was chosen and one cannot
        be connected to, the next is tried."""
        # Credentials are for this address only, so redirects are returned, not followed.
        options = {**options, "allow_redirects": False}
        counted_server, new_exchange = _counted.get()
        if new_exchange is None or counted_server != server_name:
            return await self.send(request, server_name, url_path, method, **options)
        with new_exchange() as exchange:
            try:
                response = await self.send(request, server_name, url_path, method, **options)
            except Exception as error:
                exchange.unreachable(f"{type(error).__name__}: {error}")
                raise
            exchange.answers(response.status, {})
            exchange.ends()
            return response

    async def send(
        self, send: Callable[..., Awaitable[T]], server_name: str, url_path: str, method: str, **options: Any
    ) -> T:
        """Like `request`, through the function ``send``. Its options are passed through, except that this method fills
        in ``headers`` and ``max_tries``."""
        headers = dict(options.pop("headers", None) or {})
        if credential := self._credentials.get(server_name):
            headers.setdefault(CREDENTIAL_HEADER, credential)
        headers = {**_attached.get({}).get(server_name, {}), **headers}
        if (rollout_id := current_rollout_id()) is not None:
            headers.setdefault(ROLLOUT_ID_HEADER, rollout_id)
        urls = self.replica_urls(server_name)
        if (replicas := current_replicas()) and REPLICAS_HEADER not in headers:
            headers[REPLICAS_HEADER] = encode_replicas(replicas)
        inject(headers)
        *earlier, last = self._replicas_for(server_name, urls)
        for number in earlier:
            try:
                options_of_one = {**options, "max_tries": TRIES_OF_ONE_REPLICA}
                return await self._send_to(send, method, urls[number], url_path, headers, options_of_one)
            except ServerUnreachableError as error:
                if error.details.get("started") != "no":
                    raise
        return await self._send_to(send, method, urls[last], url_path, headers, options)

    async def _send_to(
        self,
        send: Callable[..., Awaitable[T]],
        method: str,
        url: str,
        url_path: str,
        headers: dict[str, str],
        options: dict[str, Any],
    ) -> T:
        if (credential := self._credentials_by_url.get(url)) is not None:
            headers = {**headers, CREDENTIAL_HEADER: credential}
        with self._chooser.busy(url):
            try:
                return await send(method, url + url_path, headers=headers, **options)
            except ServerUnreachableError as error:
                if error.details.get("started") == "no":
                    self._chooser.unreachable(url)
                raise

    async def get(self, server_name: str, url_path: str, **options: Any) -> ClientResponse:
        return await self.request(server_name, url_path, "GET", **options)

    async def post(self, server_name: str, url_path: str, **options: Any) -> ClientResponse:
        return await self.request(server_name, url_path, "POST", **options)

    def poll_for_status(self, server_name: str) -> ServerStatus:
        """Check whether the server answers at all; any status counts. Each socket operation blocks for at most 5 s."""
        import http.client

        parts = urlsplit(self.base_url(server_name))
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
        except TimeoutError:
            return "timeout"
        except ConnectionError:
            return "connection_error"
        except (OSError, http.client.HTTPException):
            return "unknown_error"
        finally:
            connection.close()
        return "success"


def url_host(host: str) -> str:
    """Return ``host`` for use in a URL: a wildcard address becomes loopback, an IPv6 address gets brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{host}]" if address.version == 6 else host


def is_server_url(url: str) -> bool:
    """Return whether ``url`` names an HTTP server to which a connection can be tried. A user, a query and a fragment
    are not part of such a URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:  # a port that is no number or too large; a host label that is empty or too long
        return False
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.query or parts.fragment:
        return False
    return bool(host) and port != 0 and not any(char.isspace() or not char.isprintable() for char in url)


def get_server_url(server_name: str) -> str:
    """The base URL of a server in this process's stack."""
    return ServerClient.load_from_global_config().base_url(server_name)
