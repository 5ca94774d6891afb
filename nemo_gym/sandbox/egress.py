"""The spec of an attempt's box, and the egress door: a forward proxy for an allow-list of hosts.

The spec is the environment's, with the harness's needs merged in; a conflict raises an error that names both sides.

The proxy connects only to the hosts and ports that a task names. A box without a network reaches it on its loopback
(``HTTPS_PROXY``, ``HTTP_PROXY``). ``CONNECT`` opens a tunnel; a plain ``http://`` request is forwarded. Names are
resolved here, not in the box, and the proxy dials exactly the address that it checked. An address that is not public
is refused, whichever name resolves to it, unless the allow-list contains the address or its network.

The proxy does not inspect tunnelled data. If several sites share an address, a box that may reach one of them can also
reach the others.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import AllowedHosts, Door, Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.session import BoxNeeds, Egress, EgressPolicy, Limits, SessionDescriptor
from nemo_gym.sandbox.door_statistics import DoorStatistics, Exchange

EGRESS_DOOR = "egress"
"""Name of the egress door."""
DEFAULT_EGRESS_DOOR_PORT = 3128

_CONNECT_TIMEOUT_S = 10.0
_LOOKUPS = 4
"""Names that one proxy looks up at once."""
PATIENCE_S = 75.0
"""Seconds that the head of a request may take to arrive."""
IDLE_S = 600.0
"""Seconds without data in either direction after which a connection is closed."""
MAX_CONNECTIONS = 512
MAX_HEAD_BYTES = 64 * 1024
_MAX_LENGTH_DIGITS = 18
_PIECE = 64 * 1024
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*)")
_NOT_FORWARDED = frozenset(
    [b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"upgrade", b"host"]
)


class _Refused(Exception):
    """The proxy refuses a request; carries the status, code and detail of the error response."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


@dataclass(frozen=True)
class _Request:
    """The head of a proxy request."""

    method: str
    host: str
    port: int
    head: bytes = b""
    """The head to forward; empty for a tunnel."""
    body_bytes: int = 0

    @classmethod
    def parse(cls, raw: bytes) -> _Request:
        line, *header_lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
        fields = line.decode("latin-1").split(" ")
        if len(fields) != 3 or not fields[0].isalpha() or fields[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise _Refused(400, "bad_request", "this is not an HTTP/1.1 request to a proxy")
        method, target = fields[0].upper(), fields[1]
        url = f"//{target}" if method == "CONNECT" else target
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _Refused(400, "bad_request", "the host or port of this request cannot be read") from None
        if method == "CONNECT":
            if host is None or port is None or target != parts.netloc or "@" in target:
                raise _Refused(400, "bad_request", "CONNECT needs host:port")
            return cls(method, host, port)
        if parts.scheme.lower() != "http" or host is None or "@" in parts.netloc:
            raise _Refused(
                400, "bad_request", "a request to a proxy needs the URL http://host/path, or CONNECT for https"
            )
        headers, body_bytes = _headers(header_lines)
        path = f"{parts.path or '/'}" + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: " + parts.netloc.encode("latin-1"), *headers]
        head = b"\r\n".join([*lines, b"Connection: close", b"", b""])
        return cls(method, host, port or 80, head, body_bytes)


def _headers(lines: Sequence[bytes]) -> tuple[list[bytes], int]:
    """Return the header lines to forward, and the length of the body in bytes."""
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        matched = _HEADER.fullmatch(line)
        if matched is None:
            raise _Refused(400, "bad_request", "a header line cannot be read")
        headers.append((matched[1].lower(), line))
    values = {name: line.partition(b":")[2].strip() for name, line in headers}
    if b"transfer-encoding" in values:
        raise _Refused(411, "length_required", "a body through this door needs a Content-Length")
    lengths = {line.partition(b":")[2].strip() for name, line in headers if name == b"content-length"}
    if len(lengths) > 1 or any(not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS for length in lengths):
        raise _Refused(400, "bad_request", "Content-Length is not a single number")
    dropped = _NOT_FORWARDED | {token.strip().lower() for token in values.get(b"connection", b"").split(b",")}
    return [line for name, line in headers if name not in dropped], int(next(iter(lengths), b"0"))


class EgressProxy:
    """Serves an allow-list on a bound socket; the counterpart of `DoorServer` for doors of kind ``proxy``.

    Raises:
        ConfigError: the door has a field that proxies do not use (``target``, ``headers``, ``counted``,
            ``max_answers``), or an entry of its allow-list is malformed.
    """

    def __init__(
        self,
        door: Door,
        sock: socket.socket,
        *,
        patience_s: float = PATIENCE_S,
        idle_s: float = IDLE_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if door.target or door.headers or door.counted or door.max_answers is not None:
            raise ConfigError(f"door '{door.name}': a door of kind 'proxy' accepts only 'allow'")
        self.door = door
        self.statistics = DoorStatistics()
        self._hosts = AllowedHosts(door.allow)
        self._socket = sock
        self._patience_s, self._idle_s, self._max_connections = patience_s, idle_s, max_connections
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Nothing ends a lookup, and whatever the box asks for, no other work of this process may wait for its lookups.
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="egress")

    async def start(self) -> None:
        """Start accepting connections. If the start fails or is cancelled, the socket is closed."""
        try:
            # Two steps: one call that also accepts could be cancelled half-way, and the event loop would go on
            # accepting for a server that no caller can close.
            self._server = await asyncio.start_server(
                self._serve, sock=self._socket, limit=MAX_HEAD_BYTES, backlog=1024, start_serving=False
            )
            await self._server.start_serving()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop accepting, and close every connection and the socket. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lookups.shutdown(wait=False)
        self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None or len(self._tasks) >= self._max_connections:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # one side closed the connection, or was silent for too long
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    raw = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise _Refused(
                    431, "head_too_large", f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
                ) from None
            request = _Request.parse(raw)
            if not self._hosts.names(request.host, request.port):
                raise self._forbidden(request, "is not among them")
            with self.statistics.exchange() as exchange:
                await self._forward(request, reader, writer, exchange)
        except _Refused as refused:
            self.statistics.forbidden += refused.status == HTTPStatus.FORBIDDEN
            writer.write(_problem(refused))
            await writer.drain()

    def _forbidden(self, request: _Request, reason: str) -> _Refused:
        detail = f"this box reaches {self._hosts}; {request.host[:253]}:{request.port} {reason}"
        return _Refused(403, "egress_not_allowed", detail)

    async def _forward(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exchange: Exchange
    ) -> None:
        addresses = await self._addresses(request, exchange)
        upstream_reader, upstream = await self._connect_upstream(request, addresses, exchange)
        try:
            exchange.answers(200, {})
            if request.method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(request.head)
            limit = None if request.method == "CONNECT" else request.body_bytes
            async with asyncio.timeout(self._idle_s) as idle:
                sending = asyncio.create_task(self._pump(reader, upstream, idle, limit))
                try:
                    await self._pump(upstream_reader, writer, idle, None)
                    if request.method == "CONNECT":
                        await sending
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
            exchange.ends()
        finally:
            upstream.close()

    async def _addresses(self, request: _Request, exchange: Exchange) -> list[str]:
        """Resolve the host; return those of its addresses that the allow-list permits."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                resolved = await loop.run_in_executor(
                    self._lookups,
                    functools.partial(socket.getaddrinfo, request.host, request.port, type=socket.SOCK_STREAM),
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            exchange.unreachable(error_text := f"{request.host[:253]} has no address: {error or type(error).__name__}")
            raise _Refused(502, "name_not_resolved", error_text) from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in resolved))
        allowed = [
            address for address in addresses if self._hosts.reaches(ipaddress.ip_address(address), request.port)
        ]
        if not allowed:
            raise self._forbidden(
                request, f"is at {', '.join(addresses)}, which is neither public nor in an allowed network"
            )
        return allowed

    async def _connect_upstream(
        self, request: _Request, addresses: Sequence[str], exchange: Exchange
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        error_text = ""
        for address in addresses:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    return await asyncio.open_connection(address, request.port)
            except (OSError, TimeoutError) as error:
                error_text = f"{request.host[:253]}:{request.port} cannot be reached: {error or type(error).__name__}"
        exchange.unreachable(error_text)
        raise _Refused(502, "unreachable", error_text)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle: asyncio.Timeout,
        remaining: int | None,
    ) -> None:
        """Copy data from ``reader`` to ``writer`` until its end, or at most ``remaining`` bytes."""
        loop = asyncio.get_running_loop()
        while remaining is None or remaining > 0:
            data = await reader.read(_PIECE if remaining is None else min(_PIECE, remaining))
            if not data:
                break
            idle.reschedule(loop.time() + self._idle_s)
            remaining = None if remaining is None else remaining - len(data)
            writer.write(data)
            await writer.drain()
        if remaining is None and writer.can_write_eof():
            writer.write_eof()


def problem_body(status: int, code: str, detail: str, **members: Any) -> bytes:
    """Encode the body of a door's own error response."""
    title = HTTPStatus(status).phrase
    problem = {"type": "about:blank", "title": title, "status": status, "code": code, "detail": detail}
    return orjson.dumps({**problem, **members})


def _problem(refused: _Refused) -> bytes:
    body = problem_body(refused.status, refused.code, refused.detail)
    head = (
        f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True)
class HarnessNeeds:
    """What a harness adds to the spec of a box so that it can run there."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    requires: tuple[str, ...] = ()
    model_in_box: bool = False
    """Whether the harness's own process runs in the box, so that the model must be reachable from there."""
    max_model_answers: int | None = None
    """Maximum number of responses that the model's door forwards to any process in the box; ``None`` is no limit."""

    @classmethod
    def of(cls, needs: BoxNeeds) -> HarnessNeeds:
        """Convert the `BoxNeeds` that the owner of a box receives."""
        mounts = tuple(Mount(source=mount.source, target=mount.target) for mount in needs.mounts)
        return cls(env=dict(needs.env), mounts=mounts, requires=needs.requires)


def merge_env(environment: Mapping[str, str], agent: Mapping[str, str], *, name: str) -> dict[str, str]:
    """Return both environments merged. Raises `ConfigError` if they set one variable to different values."""
    for key in environment.keys() & agent.keys():
        if environment[key] != agent[key]:
            raise ConfigError(
                f"environment '{name}' sets {key}={environment[key]!r} in the box and the agent needs {agent[key]!r};"
                " change one of them",
                key=key,
            )
    return {**environment, **agent}


def world_spec(spec: SandboxSpec, descriptor: SessionDescriptor, needs: HarnessNeeds) -> SandboxSpec:
    """Return the spec of the attempt's box: the environment's spec with egress rules and harness needs added. Its only
    door is the egress door, and only if the egress policy needs one."""
    doors, proxies = egress_door(descriptor.egress)
    env = merge_env(spec.env, descriptor.egress.env, name=descriptor.environment)
    env = merge_env(merge_env(env, needs.env, name=descriptor.environment), proxies, name=descriptor.environment)
    mounts_by_target = {mount.target: mount for mount in spec.mounts}
    for mount in needs.mounts:
        if mount.target in mounts_by_target and mounts_by_target[mount.target] != mount:
            raise ConfigError(
                f"environment '{descriptor.environment}' and the agent both mount {mount.target}:"
                f" {mounts_by_target[mount.target].source} and {mount.source}",
                key="mounts",
            )
    mounts = tuple({**mounts_by_target, **{mount.target: mount for mount in needs.mounts}}.values())
    requires = tuple(dict.fromkeys((*spec.requires, *descriptor.placement.requires, *needs.requires)))
    return spec.replace(
        env=env,
        mounts=mounts,
        requires=requires,
        resources=bounded(spec.resources, descriptor.limits),
        network=network_policy(descriptor.egress),
        doors=doors,
    )


def bounded(resources: SandboxResources, limits: Limits) -> SandboxResources:
    """Return a box's resources, with the attempt's CPU and memory limits in place of the requested ones."""
    limited = {name: value for name in ("cpu", "memory_mib") if (value := getattr(limits, name)) is not None}
    unlimited = tuple(name for name in resources.unlimited if name not in limited)
    return replace(resources, unlimited=unlimited, **limited)


def network_policy(egress: Egress) -> NetworkPolicy:
    """Return the policy of the box's own network. The model and the hosts of an allow-list are reached through doors,
    not through that network."""
    return NetworkPolicy.OPEN if egress.policy is EgressPolicy.OPEN else NetworkPolicy.NONE


def egress_door(egress: Egress) -> tuple[tuple[Door, ...], dict[str, str]]:
    """Return the door that an allow-list needs, and the environment variables by which programs in the box find it."""
    if egress.policy is not EgressPolicy.ALLOWLIST:
        return (), {}
    ports = {request.name: request.port for request in egress.doors}
    port = ports.get(EGRESS_DOOR, DEFAULT_EGRESS_DOOR_PORT)
    while EGRESS_DOOR not in ports and port in ports.values():
        port += 1
    proxy, direct = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": direct}
    # Programs differ in which spelling they read; curl reads HTTP_PROXY only in lower case.
    env = {**names, **{name.lower(): value for name, value in names.items()}}
    return (Door(name=EGRESS_DOOR, port=port, target="", allow=egress.allow, kind="proxy"),), env
