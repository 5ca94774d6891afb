"""The connection to an OpenSandbox server: its SDK, its boxes and its errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from nemo_gym.contract.errors import SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.base import BoxLabel, SandboxHandle
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.providers.opensandbox.config import OpenSandboxConfig

if TYPE_CHECKING:
    import httpx
    from opensandbox import SandboxManager
    from opensandbox.config import ConnectionConfig
    from opensandbox.models.sandboxes import SandboxInfo as BackendInfo
    from opensandbox.sandbox import Sandbox


# -- Labels as the server's metadata -------------------------------------------------------------------------------
# A box's labels as the backend's metadata, which takes only what Kubernetes takes: short words of few characters.
#
# So all labels travel together, encoded, in as many numbered entries as they need; beside them each one has an entry
# of its own, named by its digest, that the server can select by.

PREFIX = "nemo-gym"
KEY = f"{PREFIX}.key"
"""Digest of the create that made the box: of the spec's idempotency key, or a random one."""
_SELECT = f"{PREFIX}.is."
_DATA = f"{PREFIX}.data."
_PIECE = 60


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def labels_to_metadata(labels: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Metadata of a box with these labels, made by the create with this ``key``."""
    given = {str(name): str(value) for name, value in labels.items()} | {BoxLabel.MANAGED: "true"}
    packed = base64.b32encode(zlib.compress(json.dumps(given).encode(), 9)).decode().rstrip("=")
    metadata = {f"{_DATA}{n // _PIECE}": packed[n : n + _PIECE] for n in range(0, len(packed), _PIECE)}
    return metadata | select(given) | {KEY: digest(key)}


def select(labels: Mapping[str, str]) -> dict[str, str]:
    """The metadata that boxes with these labels have, to filter a listing by."""
    return {_SELECT + digest(f"{name}={value}"): "1" for name, value in labels.items()}


def metadata_to_labels(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """The labels that were encoded; ``None`` when this is no box of this suite."""
    held = metadata or {}
    pieces: list[str] = []
    while (piece := held.get(f"{_DATA}{len(pieces)}")) is not None:
        pieces.append(piece)
    packed = "".join(pieces)
    try:
        found = json.loads(zlib.decompress(base64.b32decode(packed + "=" * (-len(packed) % 8))))
    except (ValueError, zlib.error):
        return None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None


# -- Handle --------------------------------------------------------------------------------------------------------


class ServedDoor(Protocol):
    """A door that this process serves, see `RelayedDoor`."""

    @property
    def door(self) -> Door: ...

    @property
    def statistics(self) -> DoorStatistics: ...

    async def aclose(self, *, quits: bool) -> None: ...


@dataclass
class OpenSandboxBox:
    sandbox_id: str
    directory: str
    """Where in the box this suite's helper program lies."""
    sdk: Sandbox | None = field(default=None, repr=False)
    """The SDK's object, made on ``loop`` and of use only there."""
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    doors: dict[str, ServedDoor] = field(default_factory=dict, repr=False)
    """Those that this process serves, by name."""

    @property
    def tool(self) -> str:
        return f"{self.directory}/boxtool"

    def incoming(self, name: str) -> str:
        """Where a file is put that the helper program reads once and removes."""
        return f"{self.directory}/in/{name}"


def box_of(handle: SandboxHandle) -> OpenSandboxBox:
    if not isinstance(handle.raw, OpenSandboxBox):
        raise SandboxError(
            f"sandbox handle {handle.sandbox_id} of '{handle.provider_name}' is not the opensandbox provider's"
        )
    return handle.raw


# -- Connection ----------------------------------------------------------------------------------------------------

KEEPALIVE_S = 3.0
"""Below the 5 s after which common servers drop an idle connection: a request that meets one being closed would look
like a command that ended without a word."""
NEVER_STARTED = "BACKEND_CONNECTION_FAILED"
"""The one code by which the server's proxy says that a request did not reach the box."""
_PAGE = 200
_EGRESS_PORT = 18080
"""Where a box's egress sidecar answers, in the network they share."""
_CREATE_TIMEOUT_S = 600.0
_SWEEPS = 50


class Connection:
    """The SDK's objects of one provider, on one event loop."""

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
            # Connections of another event loop are of no use here, and cannot be closed from here either.
            self._loop, self._transport, self._manager = loop, None, None
            # What it logs as errors, with stack traces, it also raises; a lost command is not worth a page.
            logging.getLogger("opensandbox").setLevel(logging.CRITICAL)
        if self._transport is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
            inner = httpx.AsyncHTTPTransport(limits=limits)
            # It repeats only what may be repeated: GET, DELETE and PUT, and what never left this machine. Commands
            # do not pass through it at all.
            self._transport = RetryAsyncTransport(inner, RetryPolicy(max_retries=3), owns_inner=True)
        return self._transport

    async def sdk_config(self, *, timeout_s: float | None = None) -> ConnectionConfig:
        from opensandbox.config import ConnectionConfig

        url = urlsplit(self.config.url)
        # The key goes to the server alone: in its proxy's requests too, and never to an address of a box. Which of
        # both a request is the SDK knows by use_server_proxy; headers given here would go to either.
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

    async def attach(self, sandbox_id: str, *, timeout_s: float) -> Sandbox:
        """The SDK's object of a box that exists and answers."""
        from opensandbox.sandbox import Sandbox

        return await Sandbox.connect(
            sandbox_id, await self.sdk_config(), connect_timeout=timedelta(seconds=max(timeout_s, 0.1))
        )

    async def create_config(self) -> ConnectionConfig:
        """For creates, which last as long as the server pulls an image."""
        return await self.sdk_config(timeout_s=_CREATE_TIMEOUT_S)

    async def info(self, sandbox_id: str) -> BackendInfo | None:
        """What the server knows of a box; ``None`` when it knows nothing (any more)."""
        try:
            return await (await self.manager()).get_sandbox_info(sandbox_id)
        except sdk_errors() as error:
            if is_gone(error):
                return None
            raise

    async def egress(self, sdk: Sandbox) -> dict[str, Any]:
        """What the sidecar beside a box says it does. The SDK's own question leaves out how it does it."""
        import httpx

        endpoint = await sdk.get_endpoint(_EGRESS_PORT)
        config = await self.sdk_config()
        # Not closed: that would close the transport, which others use.
        client = httpx.AsyncClient(transport=await self._shared(), timeout=self.config.request_timeout_s)
        answer = await client.get(
            f"{config.protocol}://{endpoint.endpoint}/policy", headers=endpoint.build_request_headers(config)
        )
        answer.raise_for_status()
        found = answer.json()
        return found if isinstance(found, dict) else {}

    async def kill(self, sandbox_id: str) -> None:
        """Destroy a box; gone is as good."""
        try:
            await (await self.manager()).kill_sandbox(sandbox_id)
        except sdk_errors() as error:
            if is_gone(error):
                return
            # Two at once: the server fails the second while the first is under way.
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
        """All boxes with this metadata, over all pages."""
        from opensandbox.models.sandboxes import SandboxFilter

        found: dict[str, BackendInfo] = {}
        page = 1
        while True:
            wanted = SandboxFilter(metadata=metadata or None, page_size=_PAGE, page=page)
            answer = await (await self.manager()).list_sandbox_infos(wanted)
            found |= {info.id: info for info in answer.sandbox_infos}
            if not answer.pagination.has_next_page:
                return list(found.values())
            page += 1

    async def boxes_created_by(self, key: str) -> list[BackendInfo]:
        """The boxes that creates with this key have made."""
        return await self.list_boxes({KEY: digest(key)})

    async def aclose(self) -> None:
        transport, manager, same = self._transport, self._manager, self._loop is _running_loop()
        self._transport = self._manager = None
        if same and manager is not None:
            await manager.close()
        if same and transport is not None:
            await transport.aclose()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def sdk_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What the SDK raises, and ``more``, for ``except`` clauses."""
    import httpx
    from opensandbox.exceptions import SandboxException

    return (SandboxException, httpx.HTTPError, *more)


def status_of(error: BaseException) -> int | None:
    return getattr(error, "status_code", None)


def code_of(error: BaseException) -> str:
    """The server's own code, without the name of its backend in front (``DOCKER::SANDBOX_NOT_FOUND``)."""
    code = str(getattr(getattr(error, "error", None), "code", "") or "")
    body = getattr(error, "response_body", None)
    if body:
        with contextlib.suppress(ValueError):
            found: Any = json.loads(body)
            found = found.get("detail", found) if isinstance(found, dict) else {}
            if isinstance(found, dict) and found.get("code"):
                code = str(found["code"])
    return code.rpartition("::")[2]


def is_gone(error: BaseException) -> bool:
    """Whether the server says that there is no such box."""
    return status_of(error) == 404 and code_of(error) in ("SANDBOX_NOT_FOUND", "NOT_FOUND", "UNEXPECTED_RESPONSE")


def never_started(error: BaseException) -> bool:
    """Whether a request surely never reached the box. The SDK's own ``is_retryable`` says yes to every 502, also to
    one that came after the request was sent; it is not asked."""
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
    """The SDK's error as one of this suite."""
    said = str(error) or type(error).__name__
    if is_gone(error) and kind is SandboxError:
        return SandboxLostError(f"opensandbox: {doing}: the box is gone", **details)
    status = status_of(error)
    hint = ""
    if status in (401, 403):
        hint = "; set api_key, or OPEN_SANDBOX_API_KEY, to the server's key"
    return kind(
        f"opensandbox: {doing}: {said[:1000]}{hint}",
        retryable=status is None or status in (429, 500, 502, 503, 504),
        **details,
    )


@contextlib.asynccontextmanager
async def errors_translated(doing: str, *, kind: type[SandboxError] = SandboxError) -> AsyncIterator[None]:
    """Turns the SDK's errors into this suite's."""
    try:
        yield
    except sdk_errors() as error:
        raise translate(error, doing, kind=kind) from error
