"""Configuration of the provider, and one Docker Engine: blocking SDK calls on threads, the attached streams of an
exec, errors, and names and labels of boxes and images.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args
from urllib.parse import urlsplit

from nemo_gym._util.lazy import lazily
from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, SandboxError, SandboxLostError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.http.connections import probe
from nemo_gym.sandbox.base import BoxLabel, ExecOutput
from nemo_gym.sandbox.providers.docker.watchdog import DISK_BYTES

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")


# -- Configuration -------------------------------------------------------------------------------------------------

PullPolicy = Literal["never", "missing", "always"]

BUILD_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""The Linux capabilities that package managers need to install packages as root."""


@dataclass(frozen=True)
class DockerConfig:
    """Options of `DockerProvider`; all have defaults."""

    base_url: str | None = None
    """The engine: ``unix:///path``, ``tcp://host:port`` or ``https://host:port``. ``None`` tries ``DOCKER_HOST``, then
    the default socket, then the engine that ``scripts/dockerd`` starts."""
    default_image: str = "host"
    """Image of specs that name none. ``host`` is built from this machine's own packages on first use."""
    pull: PullPolicy = "missing"
    """When to pull an image from a registry."""
    pull_timeout_s: float = 1800.0
    """Longest time of one pull. The default ``ready_timeout_s`` leaves it out. A create whose spec sets one ends then,
    and the pull goes on for later creates, until the provider is closed."""
    request_timeout_s: float = 120.0
    """Longest time that the engine may send nothing during one request."""
    max_concurrent_creates: int = 8
    """Containers created and started at once. Others wait; the wait counts towards their ``ready_timeout_s``.
    As many images are pulled at once."""
    capabilities: Sequence[str] = ()
    """Linux capabilities added to every box; all others are dropped."""
    build_capabilities: Sequence[str] = BUILD_CAPABILITIES
    """Linux capabilities added as well to boxes with ``network: open``, because these install packages."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    runtime: str | None = None
    """The engine's name of a container runtime (for example ``runsc``); ``None`` selects the engine's default."""
    seccomp: Literal["suite", "engine"] = "suite"
    """The system call profile: this suite's, if the engine supports it, or the engine's own."""
    watchdog: bool = True
    """Start the process that removes boxes when their lease ends or they wrote more than their disk limit. Turn this
    off only where something else removes them."""

    def __post_init__(self) -> None:
        if self.pull not in get_args(PullPolicy):
            raise ConfigError(
                f"docker sandbox: pull must be one of {', '.join(get_args(PullPolicy))}, not '{self.pull}'"
                f"{nearest(str(self.pull), get_args(PullPolicy))}"
            )
        if self.seccomp not in ("suite", "engine"):
            raise ConfigError(f"docker sandbox: seccomp must be suite or engine, not '{self.seccomp}'")
        if self.base_url is not None and not self.base_url.startswith(("unix://", "tcp://", "http://", "https://")):
            raise ConfigError(
                f"docker sandbox: base_url must begin with unix://, tcp://, http:// or https://, not '{self.base_url}'"
            )
        for name in ("pull_timeout_s", "request_timeout_s", "max_concurrent_creates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"docker sandbox: {name} must be a positive number, not {value!r}")

    @property
    def lets_boxes_nest(self) -> bool:
        """Whether processes in a box may create namespaces and mounts, as container engines do."""
        names = {name.upper().removeprefix("CAP_") for name in self.capabilities}
        return bool(names & {"SYS_ADMIN", "ALL"}) and self.seccomp == "engine"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DockerConfig:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="docker sandbox")
        options = dict(values)
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        return cls(**options)


# -- Engine --------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")

_TRANSFERS = 32
_THREADS = 2 * _TRANSFERS
"""More than transfers: a request about a container whose files are being read waits until the engine unlocks it."""
DEFAULT_SOCKET = "/var/run/docker.sock"
START_HINT = "start one with 'scripts/dockerd start', or point DOCKER_HOST (or the provider's base_url) at one"


def private_engine_socket() -> str:
    """The path of the socket of the engine that ``scripts/dockerd`` starts."""
    state = os.environ.get("NEMO_GYM_DOCKER_DIR")
    directory = Path(state) if state else Path("~").expanduser() / ".cache" / "nemo-gym" / "docker"
    return str(directory / "engine.sock")


def engine_url(configured: str | None) -> str:
    """The engine's URL: as configured, else ``DOCKER_HOST``, else the default or the private engine's socket."""
    if configured:
        return configured
    if host := os.environ.get("DOCKER_HOST"):
        return host
    for path in (DEFAULT_SOCKET, private_engine_socket()):
        if Path(path).is_socket():
            return f"unix://{path}"
    return f"unix://{DEFAULT_SOCKET}"


def tls_certificates(url: str) -> Path | None:
    """Return the directory of the certificates for an engine that is reached by TLS (an ``https://`` URL, or ``tcp://``
    with ``DOCKER_TLS_VERIFY`` set), or ``None``. It is ``DOCKER_CERT_PATH``, by default ``~/.docker``."""
    if not (url.startswith("https://") or (url.startswith("tcp://") and os.environ.get("DOCKER_TLS_VERIFY"))):
        return None
    return Path(os.environ.get("DOCKER_CERT_PATH") or Path("~/.docker").expanduser())


class Engine:
    """One engine. Blocking functions run on small pools of threads through `call` and `transfer`."""

    def __init__(self, base_url: str | None, *, request_timeout_s: float) -> None:
        self.url = engine_url(base_url)
        self._request_timeout_s = request_timeout_s
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._transfers: ThreadPoolExecutor | None = None

    @property
    def client(self) -> Any:
        """The SDK's client (``docker.APIClient``, whose type stubs are out of date), connected on first use.

        Raises:
            SandboxError: the ``docker`` package is missing, or no engine responds.
        """
        if self._client is None:
            try:
                import docker
                from docker.tls import TLSConfig
            except ModuleNotFoundError as error:
                raise SandboxError(
                    "the docker sandbox needs the 'docker' package: pip install 'nemo-gym-suite[docker]'"
                ) from error
            tls: TLSConfig | bool = False
            if (certificates := tls_certificates(self.url)) is not None:
                tls = TLSConfig(
                    client_cert=(str(certificates / "cert.pem"), str(certificates / "key.pem")),
                    ca_cert=str(certificates / "ca.pem"),
                    verify=True,
                )
            try:
                self._client = docker.APIClient(
                    base_url=self.url,
                    version="auto",
                    timeout=int(self._request_timeout_s),
                    tls=tls,
                    max_pool_size=_THREADS + _TRANSFERS,
                )
            except docker.errors.DockerException as error:
                raise SandboxError(
                    f"no Docker Engine answers at {self.url} ({_cause(error)}); {START_HINT}",
                    retryable=True,
                    base_url=self.url,
                ) from error
        return self._client

    @cached_property
    def release(self) -> str:
        """The engine's version, for example ``20.10.24``; requested once."""
        return str(self.client.version().get("Version", ""))

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on the pool. Cancelling the caller does not stop the function."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def transfer(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as `call` with a function that takes as long as files or images are large. It has other threads:
        the renewal of a lease must not wait for them."""
        if self._transfers is None:
            self._transfers = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="docker-transfer")
        return await asyncio.get_running_loop().run_in_executor(self._transfers, lambda: function(*args, **kwargs))

    def session(self) -> aiohttp.ClientSession:
        """A session for requests that end when their caller is cancelled, unlike `call`. It has no time limits."""
        connector: aiohttp.BaseConnector
        if self.url.startswith("unix://"):
            base, connector = "http://docker", aiohttp.UnixConnector(self.url.removeprefix("unix://"))
        else:
            host, port, tls = _address(self.url)
            base = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
            connector = aiohttp.TCPConnector(ssl=tls or True)
        return aiohttp.ClientSession(base, connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    def close(self) -> None:
        for threads in (self._threads, self._transfers):
            if threads is not None:
                threads.shutdown(wait=False)
        self._threads = self._transfers = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def is_local(self) -> bool:
        """Whether the engine's processes, and thus those of its containers, have process ids on this machine."""
        if not self.url.startswith("unix://"):
            return False
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self.url.removeprefix("unix://"))
                pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return False
        return bool(pid > 0)


def _cause(error: BaseException) -> str:
    """The innermost cause of an SDK error, without the wrappers of request libraries."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the engine's response; ``None`` if there was no response."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def explain(error: BaseException) -> str:
    """The engine's own error text."""
    text = getattr(error, "explanation", None)
    return str(text.decode(errors="replace") if isinstance(text, bytes) else text or error).strip()


def is_missing_box(error: BaseException) -> bool:
    """Whether the box itself is gone. Only the beginning of the engine's text says so: the rest may name a path that
    the box chose."""
    return status_of(error) == 404 and explain(error).lower().startswith("no such container")


def is_missing_path(error: BaseException) -> bool:
    """Whether the box exists, but the path that was asked for does not."""
    return status_of(error) == 404 and not is_missing_box(error)


def is_full_disk(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


def translate(
    error: Exception, doing: str, *, kind: type[SandboxError] = SandboxError, **details: Any
) -> SandboxError:
    """Convert an SDK or transport error into one of ours; ``doing`` completes the phrase "while …" in its message."""
    error_text = explain(error)
    if is_full_disk(error_text):
        return kind(
            f"docker: the engine's disk is full while {doing}; free space there, for example with "
            "'docker image prune' (docker info shows the directory as Docker Root Dir)",
            retryable=True,
            **details,
        )
    status = status_of(error)
    if status is None:
        return kind(f"docker: the engine stopped answering while {doing} ({_cause(error)}); {START_HINT}", **details)
    if is_missing_box(error):
        lost = SandboxLostError if kind is SandboxError else kind
        return lost(f"docker: the box is gone while {doing}", **details)
    return kind(f"docker: the engine refused while {doing}: {error_text}", retryable=status >= 500, **details)


def sdk_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """The exceptions that SDK calls raise (the engine's errors and transport errors), plus ``more``."""
    import docker.errors
    import requests

    return (docker.errors.DockerException, requests.RequestException, OSError, *more)


# -- An exec's attached streams ------------------------------------------------------------------------------------
# The attached streams of one exec: the engine's upgraded HTTP connection, read on the event loop.
#
# The SDK's own streams block a thread as long as the command runs, and drop bytes that arrive together with the
# response's header. aiodocker's cannot close standard input without losing the output (measured with version 0.27).

_READ_LIMIT = 1024 * 1024
_STREAMS: dict[int, Literal["stdout", "stderr"]] = {1: "stdout", 2: "stderr"}


class AttachRefused(Exception):
    """The engine did not start the exec; ``status`` is its HTTP status."""

    def __init__(self, status: int, error_text: str) -> None:
        super().__init__(error_text)
        self.status = status


class _Reader(asyncio.StreamReader):
    """Keeps what had arrived when its connection broke, which asyncio's own reader loses."""

    error: Exception | None = None
    """Why the connection broke; ``None`` if the engine ended the stream."""
    _ended = False

    def set_exception(self, exc: Exception) -> None:
        if not self._ended:
            self.error = exc
        self.feed_eof()

    def feed_eof(self) -> None:
        self._ended = True
        super().feed_eof()


class Attachment:
    """Output frames of a started exec, and its standard input."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._is_local = writer.get_extra_info("socket").family == socket.AF_UNIX
        self._fed = False
        self._cut = False

    async def frames(self) -> AsyncIterator[ExecOutput]:
        """Yield output as it arrives, until the stream ends for any reason."""
        try:
            while True:
                header = await self._reader.readexactly(8)
                remaining = int.from_bytes(header[4:], "big")
                stream = _STREAMS.get(header[0], "stderr")
                while remaining:
                    data = await self._reader.read(min(remaining, _READ_LIMIT))
                    if not data:
                        self._cut = True
                        return
                    remaining -= len(data)
                    yield ExecOutput(stream, data)
        except asyncio.IncompleteReadError as error:
            self._cut = bool(error.partial)

    @property
    def broken(self) -> bool:
        """Whether output may be missing: the connection broke before the engine ended the stream. Valid once `frames`
        has ended."""
        # A socket of this machine is reset for one reason only: a server closes it, and the command left input unread.
        is_own_end = self._fed and self._is_local
        return self._cut or (self._reader.error is not None and not is_own_end)

    async def feed(self, data: bytes) -> None:
        """Write all of standard input, and close it if `can_half_close`. It is no error if the command does not read
        it."""
        self._fed = True
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()
            if self._writer.can_write_eof():
                self._writer.write_eof()

    def close(self) -> None:
        """Drop the connection. The command goes on; `frames` ends."""
        self._writer.transport.abort()  # `close` would keep it until the command has read all of its input
        self._reader.feed_eof()


def _address(engine_url: str) -> tuple[str, int, ssl.SSLContext | None]:
    """Host, port and TLS settings of an engine that is reached by TCP."""
    url = urlsplit(engine_url)
    context = None
    if (certificates := tls_certificates(engine_url)) is not None:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return url.hostname or "", url.port or (2375 if context is None else 2376), context


def can_half_close(engine_url: str) -> bool:
    """Whether standard input can be closed while output stays open, which TLS does not support."""
    return tls_certificates(engine_url) is None


async def attach(engine_url: str, api_version: str, engine_exec_id: str) -> Attachment:
    """Start a previously created exec, and attach to its streams.

    Raises:
        AttachRefused: the engine responded with an error; the command was not started.
        OSError: the engine could not be reached.
    """
    loop, reader = asyncio.get_running_loop(), _Reader(limit=_READ_LIMIT)
    protocol = asyncio.StreamReaderProtocol(reader)
    if engine_url.startswith("unix://"):
        path = engine_url.removeprefix("unix://")
        transport, _ = await loop.create_unix_connection(lambda: protocol, path)
    else:
        host, port, tls = _address(engine_url)
        transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=tls)
        # No limit on missing acknowledgements: the kernel also applies it to a command that does not read its input.
        probe(transport.get_extra_info("socket"))
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    body = json.dumps({"Detach": False, "Tty": False})
    try:
        writer.write(
            f"POST /v{api_version}/exec/{engine_exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(head.split(" ", 2)[1])
        if status not in (101, 200):
            raise AttachRefused(status, (await reader.read(4096)).decode(errors="replace"))
    except BaseException as error:
        writer.close()
        if isinstance(error, (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError)):
            raise ConnectionError("the engine closed the connection before it answered") from error
        raise
    return Attachment(reader, writer)


# -- Names and labels ----------------------------------------------------------------------------------------------
# Names and labels of boxes and images in the engine, which is the only record of them.
#
# A container's labels cannot change, but its name can. So a label holds the end of the first lease, and a renewal
# renames the container to ``<base>.<unix seconds>``. Everyone who can list containers sees the current lease; there is
# no state outside the engine. What the watchdog needs too is defined in ``watchdog.py``, because that cannot import
# this module.

SPEC_ENV = "nemo_gym.docker.env"
"""The spec's environment, as JSON. Each exec gets it; images committed from the box do not."""
GIVEN_LABELS = "nemo_gym.docker.labels"
"""The creator's labels, as JSON, to tell them from the labels that the container inherits from its image."""
SPEC_KEY = "nemo_gym.docker.key"
"""Digest of the spec's idempotency key."""
IMAGE_LABELS = "nemo_gym.docker.image_labels"
"""Label of a committed image: the caller's labels, as JSON."""
EXEC_MARK = "NEMO_GYM_EXEC_ID"
"""Environment variable that identifies the processes of one exec."""

_REFERENCE = re.compile(
    r"(?=.{1,255}\Z)"
    r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?\Z"
)


def key_digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]


def container_name(idempotency_key: str | None) -> str:
    """The name for creating a box: always the same for one idempotency key, random if there is no key."""
    return f"nemo-gym-{key_digest(idempotency_key) if idempotency_key else uuid.uuid4().hex}"


def renewed_name(name: str, expires_at: float) -> str:
    """The container name for a lease that ends at ``expires_at`` (Unix seconds, rounded up)."""
    return f"{name.lstrip('/').partition('.')[0]}.{int(-(-expires_at // 1))}"


def image_reference(image: str) -> str:
    """The engine's name of an image: ``image`` itself if it is a valid reference, else a name derived from it."""
    if _REFERENCE.match(image):
        return image
    return f"nemo-gym/named:{hashlib.sha256(image.encode()).hexdigest()[:32]}"


def container_labels(
    metadata: Mapping[str, str],
    *,
    expires_at: float,
    env: Mapping[str, str],
    idempotency_key: str | None,
    disk_bytes: int | None = None,
) -> dict[str, str]:
    labels = {str(key): str(value) for key, value in metadata.items()}
    labels[GIVEN_LABELS] = json.dumps(labels)
    labels |= {BoxLabel.MANAGED: "true", BoxLabel.EXPIRES_AT: repr(expires_at), SPEC_ENV: json.dumps(dict(env))}
    if idempotency_key:
        labels[SPEC_KEY] = key_digest(idempotency_key)
    # Always set, to override the value that the box would inherit from an image committed from a container.
    labels[DISK_BYTES] = "" if disk_bytes is None else str(disk_bytes)
    return labels


def public_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """A container's labels as its creator gave them, plus the labels that every box of this suite has."""
    all_labels = labels or {}
    given_labels: dict[str, Any] = json.loads(all_labels.get(GIVEN_LABELS) or "{}")
    public = {str(key): str(value) for key, value in given_labels.items()}
    return public | {key: all_labels[key] for key in (BoxLabel.MANAGED, BoxLabel.EXPIRES_AT) if key in all_labels}


def spec_env(labels: Mapping[str, str]) -> dict[str, str]:
    """The environment in the spec that a container was created for."""
    stored: dict[str, Any] = json.loads(labels.get(SPEC_ENV) or "{}")
    return {str(key): str(value) for key, value in stored.items()}
