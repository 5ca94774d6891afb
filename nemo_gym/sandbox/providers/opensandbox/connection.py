"""Configuration of the provider, and the connection to an OpenSandbox server: its SDK, its boxes and its errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import waiting_s
from nemo_gym.contract.errors import ConfigError, SandboxError, SandboxLostError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.sandbox.base import BoxLabel, SandboxHandle, SandboxStatus

if TYPE_CHECKING:
    import httpx
    from opensandbox import SandboxManager
    from opensandbox.config import ConnectionConfig
    from opensandbox.models.sandboxes import SandboxInfo as BackendInfo
    from opensandbox.sandbox import Sandbox


# -- Configuration -------------------------------------------------------------------------------------------------

LIMITS = ("cpu", "memory")
ARCHITECTURES = ("amd64", "arm64")


@dataclass(frozen=True)
class OpenSandboxConfig:
    """Options of `OpenSandboxProvider`; all have defaults."""

    url: str = "http://127.0.0.1:8080"
    """The server's root, ``http://`` or ``https://``."""
    api_key: str | None = field(default=None, repr=False)
    """The server's key; ``None`` takes ``OPEN_SANDBOX_API_KEY``. Never sent into a box."""
    use_server_proxy: bool = False
    """Access boxes through the server. Needed if this process cannot reach the addresses that the server returns."""
    default_image: str | None = None
    """Image of specs that name none. ``None`` means ``host`` if ``engine`` is set; else such specs are refused."""
    engine: str | None = None
    """The Docker Engine behind the server, if this process can reach it (``unix:///path``, ``tcp://host:port``). It
    stores committed boxes as images with the docker provider's names and labels, and it has the ``host`` image."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    limits: Sequence[str] = LIMITS
    """The limits (``cpu``, ``memory``) that the server really enforces. The server offers no way to ask it."""
    egress_policy: bool = False
    """Whether the server puts an egress sidecar beside its boxes, which ``network: none`` requires. After each create
    with that policy, the provider checks that the sidecar denies everything, and otherwise destroys the box."""
    exec_user: bool = True
    """Whether commands can run as other users than the one that the server's daemon runs as in the boxes."""
    request_timeout_s: float = 60.0
    """Longest time that the server may send nothing during one request that does not wait for a box."""
    silence_s: float = 45.0
    """A command counts as lost after this time without any message. The helper sends a heartbeat every 10 seconds."""
    box_directory: str = "/.nemo-gym"
    """Directory in each box of this suite's helper program. The users of commands must be able to run programs there,
    and the server's own daemon must be able to write there."""
    box_architecture: str | None = None
    """``amd64`` or ``arm64``; ``None`` selects this machine's architecture."""

    def __post_init__(self) -> None:
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise ConfigError(f"opensandbox: url '{self.url}' must be http(s)://host:port without a path", key="url")
        for name in self.limits:
            if name not in LIMITS:
                raise ConfigError(f"opensandbox: limits holds '{name}'; known are {', '.join(LIMITS)}", key="limits")
        if self.box_architecture not in (None, *ARCHITECTURES):
            raise ConfigError(
                f"opensandbox: box_architecture must be {' or '.join(ARCHITECTURES)}, not '{self.box_architecture}'"
                f"{nearest(str(self.box_architecture), ARCHITECTURES)}"
            )
        if not self.box_directory.startswith("/") or len(self.box_directory.rstrip("/")) < 2:
            raise ConfigError("opensandbox: box_directory must be an absolute path other than /", key="box_directory")
        for name in ("request_timeout_s", "silence_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"opensandbox: {name} must be a positive number of seconds, not {value!r}", key=name)

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get("OPEN_SANDBOX_API_KEY") or None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> OpenSandboxConfig:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="opensandbox sandbox")
        options = dict(values)
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        return cls(**options)


# -- Labels as the server's metadata -------------------------------------------------------------------------------
# A box's labels as the backend's metadata, which accepts only what Kubernetes does: short words of few characters.
#
# So all labels are encoded together and split into as many numbered entries as needed. In addition, each label has an
# entry of its own, named by its digest, by which the server can select boxes.

PREFIX = "nemo-gym"
KEY = f"{PREFIX}.key"
"""Metadata entry with the digest of the key of the create: the spec's idempotency key, or a random key."""
_SELECT = f"{PREFIX}.is."
_DATA = f"{PREFIX}.data."
_PIECE = 60


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def labels_to_metadata(labels: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Encode the metadata of a box with these labels that the create with this ``key`` makes."""
    all_labels = {str(name): str(value) for name, value in labels.items()} | {BoxLabel.MANAGED: "true"}
    packed = base64.b32encode(zlib.compress(json.dumps(all_labels).encode(), 9)).decode().rstrip("=")
    metadata = {f"{_DATA}{n // _PIECE}": packed[n : n + _PIECE] for n in range(0, len(packed), _PIECE)}
    return metadata | select(all_labels) | {KEY: digest(key)}


def select(labels: Mapping[str, str]) -> dict[str, str]:
    """The metadata entries of boxes with these labels, to filter a listing."""
    return {_SELECT + digest(f"{name}={value}"): "1" for name, value in labels.items()}


def metadata_to_labels(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Decode the labels; ``None`` if the box does not belong to this suite."""
    entries = metadata or {}
    pieces: list[str] = []
    while (piece := entries.get(f"{_DATA}{len(pieces)}")) is not None:
        pieces.append(piece)
    packed = "".join(pieces)
    try:
        labels = json.loads(zlib.decompress(base64.b32decode(packed + "=" * (-len(packed) % 8))))
    except (ValueError, zlib.error):
        return None
    return {str(name): str(value) for name, value in labels.items()} if isinstance(labels, dict) else None


# -- Connection ----------------------------------------------------------------------------------------------------

KEEPALIVE_S = 3.0
"""Less than the 5 s after which common servers close an idle connection: a request on a connection that is just being
closed would look like a command that ended without any message."""
NEVER_STARTED = "BACKEND_CONNECTION_FAILED"
"""The only code of the server's proxy which means that a request did not reach the box."""
_PAGE = 200
_EGRESS_PORT = 18080
"""Port of a box's egress sidecar, in the network namespace that both share."""
_SWEEPS = 50


class Connection:
    """One provider's SDK objects, for one event loop at a time."""

    def __init__(self, config: OpenSandboxConfig) -> None:
        self.config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: httpx.AsyncBaseTransport | None = None
        self._manager: SandboxManager | None = None

    async def _shared(self) -> httpx.AsyncBaseTransport:
        import httpx
        from opensandbox.transport import RetryAsyncTransport, RetryPolicy

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Connections of another event loop can neither be used nor be closed here.
            self._loop, self._transport, self._manager = loop, None, None
            # The SDK logs errors with stack traces and also raises them; a lost command needs no page of log.
            logging.getLogger("opensandbox").setLevel(logging.CRITICAL)
        if self._transport is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
            inner = httpx.AsyncHTTPTransport(limits=limits)
            # This transport retries only GET, DELETE and PUT, and requests that never left this machine. Commands do
            # not use it at all.
            self._transport = RetryAsyncTransport(inner, RetryPolicy(max_retries=3), owns_inner=True)
        return self._transport

    async def sdk_config(self, *, timeout_s: float | None = None) -> ConnectionConfig:
        from opensandbox.config import ConnectionConfig

        url = urlsplit(self.config.url)
        # The key must go only to the server, including its proxy, and never to a box's own address. The SDK tells
        # these apart by use_server_proxy; headers passed here would be sent to both.
        return ConnectionConfig(
            api_key=self.config.key,
            domain=url.netloc,
            protocol=url.scheme,
            request_timeout=timedelta(seconds=timeout_s or self.config.request_timeout_s),
            transport=await self._shared(),
            use_server_proxy=self.config.use_server_proxy,
            disable_metrics=True,
        )

    async def manager(self) -> SandboxManager:
        await self._shared()
        if self._manager is None:
            from opensandbox import SandboxManager

            self._manager = await SandboxManager.create(await self.sdk_config())
        return self._manager

    async def info(self, sandbox_id: str) -> BackendInfo | None:
        """The server's description of a box; ``None`` if the server does not know the box."""
        try:
            return await (await self.manager()).get_sandbox_info(sandbox_id)
        except sdk_errors() as error:
            if is_gone(error):
                return None
            raise

    async def egress(self, sdk: Sandbox) -> dict[str, Any]:
        """The policy that a box's egress sidecar reports. The SDK's own request omits the enforcement mode."""
        import httpx

        endpoint = await sdk.get_endpoint(_EGRESS_PORT)
        config = await self.sdk_config()
        # Do not close this client: that would close the shared transport.
        client = httpx.AsyncClient(transport=await self._shared(), timeout=self.config.request_timeout_s)
        answer = await client.get(
            f"{config.protocol}://{endpoint.endpoint}/policy", headers=endpoint.build_request_headers(config)
        )
        answer.raise_for_status()
        policy = answer.json()
        return policy if isinstance(policy, dict) else {}

    async def kill(self, sandbox_id: str) -> None:
        """Destroy a box. It is no error if the box is gone."""
        try:
            await (await self.manager()).kill_sandbox(sandbox_id)
        except sdk_errors() as error:
            if is_gone(error):
                return
            # The server rejects a second removal while the first is in progress.
            if await self._vanishes(sandbox_id):
                return
            raise translate(error, f"destroying box {sandbox_id}") from error

    async def _vanishes(self, sandbox_id: str) -> bool:
        for _ in range(_SWEEPS):
            with contextlib.suppress(*sdk_errors()):
                if await self.info(sandbox_id) is None:
                    return True
            await asyncio.sleep(0.1)
        return False

    async def list_boxes(self, metadata: dict[str, str]) -> list[BackendInfo]:
        """List all boxes with this metadata, on all pages."""
        from opensandbox.models.sandboxes import SandboxFilter

        boxes: dict[str, BackendInfo] = {}
        page, total = 1, 0
        while True:
            page_filter = SandboxFilter(metadata=metadata or None, page_size=_PAGE, page=page)
            answer = await (await self.manager()).list_sandbox_infos(page_filter)
            boxes |= {info.id: info for info in answer.sandbox_infos}
            fewer, total = total - answer.pagination.total_items, answer.pagination.total_items
            if page > 1 and fewer > 0:
                # The server numbers the boxes anew for each page, the latest first. So boxes may have moved forward,
                # over the end of the page before, into the place of those that ended meanwhile.
                page = max(1, page - -(-fewer // _PAGE))
            elif answer.pagination.has_next_page:
                page += 1
            else:
                return list(boxes.values())

    async def aclose(self) -> None:
        transport, manager = self._transport, self._manager
        self._transport = self._manager = None
        if self._loop is not asyncio.get_running_loop():
            return
        if manager is not None:
            await manager.close()
        if transport is not None:
            await transport.aclose()


# -- Boxes ---------------------------------------------------------------------------------------------------------

_STATES = {
    "pending": SandboxStatus.STARTING,
    "running": SandboxStatus.RUNNING,
    "pausing": SandboxStatus.RUNNING,
    "paused": SandboxStatus.RUNNING,
    "resuming": SandboxStatus.RUNNING,
    "stopping": SandboxStatus.STOPPED,
    "terminated": SandboxStatus.STOPPED,
    "failed": SandboxStatus.ERROR,
}
_ATTACH_S = 30.0


def backend_status(info: BackendInfo) -> SandboxStatus:
    return _STATES.get(info.status.state.lower(), SandboxStatus.UNKNOWN)


def has_ended(info: BackendInfo | None) -> bool:
    """Whether a box is gone or will not run again. A state that is not known here does not count as an end."""
    return info is None or backend_status(info) in (SandboxStatus.STOPPED, SandboxStatus.ERROR)


def is_alive(info: BackendInfo | None) -> bool:
    return info is not None and backend_status(info) in (SandboxStatus.STARTING, SandboxStatus.RUNNING)


@dataclass(eq=False)
class OpenSandboxBox:
    connection: Connection = field(repr=False)
    sandbox_id: str
    directory: str
    """Directory in the box of this suite's helper program."""
    _sdk: Sandbox | None = field(default=None, repr=False)
    """The SDK's object, created on ``_loop`` and usable only there."""
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)

    @property
    def tool(self) -> str:
        return f"{self.directory}/boxtool"

    async def sdk(self, *, timeout_s: float = _ATTACH_S) -> Sandbox:
        """The SDK's object of this box, which must respond, for the running event loop."""
        from opensandbox.sandbox import Sandbox

        loop = asyncio.get_running_loop()
        if self._sdk is None or self._loop is not loop:
            patience = timedelta(seconds=max(timeout_s, 0.1))
            config = await self.connection.sdk_config()
            self._sdk, self._loop = await Sandbox.connect(self.sandbox_id, config, connect_timeout=patience), loop
        return self._sdk

    async def info(self) -> BackendInfo | None:
        return await self.connection.info(self.sandbox_id)

    async def put_file(self, data: Any, name: str) -> str:
        """Write bytes, or the content of an open binary file, for the helper program to read once; return the path in
        the box. ``name`` may be an absolute path, in a directory that the helper has named.

        Raises:
            SandboxLostError: the box is gone, or cannot be reached.
        """
        path = name if name.startswith("/") else f"{self.directory}/in/{name}"
        try:
            await (await self.sdk()).files.write_file(path, data, mode=600)
        except sdk_errors() as error:
            try:
                info = await self.info()
            except sdk_errors() as info_error:
                raise SandboxLostError(
                    f"opensandbox: the state of box {self.sandbox_id} cannot be determined: {info_error}"
                ) from error
            if not is_alive(info):
                state = (
                    "gone" if info is None else f"{info.status.state} ({info.status.message or info.status.reason})"
                )
                raise SandboxLostError(f"opensandbox: the box {self.sandbox_id} is {state}") from error
            raise translate(error, f"writing a file into box {self.sandbox_id}") from error
        return path


def box_of(handle: SandboxHandle) -> OpenSandboxBox:
    if not isinstance(handle.raw, OpenSandboxBox):
        raise SandboxError(
            f"sandbox handle {handle.sandbox_id} of '{handle.provider_name}' is not the opensandbox provider's"
        )
    return handle.raw


# -- Errors --------------------------------------------------------------------------------------------------------


def sdk_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """The exceptions that the SDK raises, plus ``more``, for ``except`` clauses."""
    import httpx
    from opensandbox.exceptions import SandboxException

    return (SandboxException, httpx.HTTPError, *more)


def status_of(error: BaseException) -> int | None:
    return getattr(error, "status_code", None)


def requested_wait_s(error: BaseException) -> float:
    """The wait that the server requested with ``Retry-After``; 0 if it requested none."""
    wait = getattr(error, "retry_after", None)
    return waiting_s(wait.total_seconds()) or 0.0 if isinstance(wait, timedelta) else 0.0


def code_of(error: BaseException) -> str:
    """The server's error code, without the prefix of its backend (as in ``DOCKER::SANDBOX_NOT_FOUND``)."""
    code = str(getattr(getattr(error, "error", None), "code", "") or "")
    body = getattr(error, "response_body", None)
    if body:
        with contextlib.suppress(ValueError):
            decoded: Any = json.loads(body)
            decoded = decoded.get("detail", decoded) if isinstance(decoded, dict) else {}
            if isinstance(decoded, dict) and decoded.get("code"):
                code = str(decoded["code"])
    return code.rpartition("::")[2]


def is_gone(error: BaseException) -> bool:
    """Whether the error means that there is no such box."""
    return status_of(error) == 404 and code_of(error) in ("SANDBOX_NOT_FOUND", "NOT_FOUND", "UNEXPECTED_RESPONSE")


def never_started(error: BaseException) -> bool:
    """Whether a request certainly never reached the box. Does not use the SDK's ``is_retryable``, which is true for
    every 502, even for one that arrived after the request was sent."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return True
    cause = error.__cause__
    if status_of(error) is None and isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        return True
    return status_of(error) == 502 and code_of(error) == NEVER_STARTED


def translate(
    error: BaseException, doing: str, *, kind: type[SandboxError] = SandboxError, **details: Any
) -> SandboxError:
    """Convert the SDK's error into one of this suite's."""
    error_text = str(error) or type(error).__name__
    if is_gone(error) and kind is SandboxError:
        return SandboxLostError(f"opensandbox: {doing}: the box is gone", **details)
    status = status_of(error)
    hint = ""
    if status in (401, 403):
        hint = "; set api_key, or OPEN_SANDBOX_API_KEY, to the server's key"
    return kind(
        f"opensandbox: {doing}: {error_text[:1000]}{hint}",
        retryable=status is None or status in (429, 500, 502, 503, 504),
        **details,
    )


@contextlib.asynccontextmanager
async def errors_translated(doing: str, *, kind: type[SandboxError] = SandboxError) -> AsyncIterator[None]:
    """Convert the SDK's errors in the ``with`` block into this suite's."""
    try:
        yield
    except sdk_errors() as error:
        raise translate(error, doing, kind=kind) from error
