"""`OpenSandboxProvider`: boxes of an OpenSandbox server."""

from __future__ import annotations

import asyncio
import contextlib
from builtins import list as List  # noqa: N812 - the contract has a method of the builtin's name
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import structlog

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.contract.errors import SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import DEFAULT_READY_TIMEOUT_S, Door, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, ExecRequest, SandboxCapabilities, SandboxHandle, SandboxInfo, SandboxStatus
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.providers.opensandbox import tool
from nemo_gym.sandbox.providers.opensandbox.connection import (
    Connection,
    OpenSandboxBox,
    OpenSandboxConfig,
    backend_status,
    box_of,
    errors_translated,
    has_ended,
    metadata_to_labels,
    sdk_errors,
    select,
)
from nemo_gym.sandbox.providers.opensandbox.creation import NO_ENGINE, Creation, EngineImages
from nemo_gym.sandbox.providers.opensandbox.doors import RelayedDoor
from nemo_gym.sandbox.providers.opensandbox.tool import OpenSandboxExec
from nemo_gym.sandbox.streaming_provider import StreamingProvider

if TYPE_CHECKING:
    from opensandbox.models.sandboxes import SandboxInfo as BackendInfo

log = structlog.get_logger(__name__)


class OpenSandboxProvider(StreamingProvider):
    """Boxes of an OpenSandbox server, which enforces their leases.

    Args:
        options: see `OpenSandboxConfig`.
    """

    name = "opensandbox"
    image_store = "docker"
    """The provider that shares its images with this one, if both use the same engine."""

    def __init__(self, **options: Any) -> None:
        self.config = OpenSandboxConfig.from_mapping(options)
        self._connection = Connection(self.config)
        self._background = BackgroundTasks()
        self._doors: dict[RelayedDoor, None] = {}  # in order of opening
        self._images = EngineImages(self.config)

    @cached_property
    def capabilities(self) -> SandboxCapabilities:
        """The server's abilities according to the configuration, because the server cannot be asked. Sends nothing."""
        config = self.config
        abilities = {
            "memory_limit": "memory" in config.limits,
            "cpu_limit": "cpu" in config.limits,
            "endpoint": not config.use_server_proxy,
            "snapshot": config.engine is not None,
        }
        limit = "the configuration says (limits) that the server does not enforce it"
        reasons = {
            "memory_limit": limit,
            "cpu_limit": limit,
            "pids_limit": "the server limits processes for all its boxes alike, not for one (docker.pids_limit)",
            "disk_limit": "the backend has no limit of what a box writes",
            "gpu": "not offered by this provider",
            "user_limits": "whether the server's backend keeps its boxes' users apart is not known here",
            "nested_containers": "the server drops the privileges that containers in a box would need",
            "endpoint": "behind the server's proxy a box's port is reached with the server's own key alone, which "
            "must not be handed on",
            "snapshot": NO_ENGINE,
            "network_none": "the server's boxes have a network; where it puts an egress sidecar beside them, set "
            "egress_policy: true",
        }
        policies = {NetworkPolicy.OPEN} | ({NetworkPolicy.NONE} if config.egress_policy else set())
        if config.egress_policy:
            del reasons["network_none"]
        if not config.exec_user:
            reasons["exec_user"] = "the configuration says (exec_user) that the server's daemon may not switch users"
        return SandboxCapabilities(
            network_policies=frozenset(policies),
            loopback_door=True,
            connect=True,
            reasons={name: why for name, why in reasons.items() if not abilities.get(name, False)},
            default_limits=SandboxResources(),
            **abilities,
        ).with_default_limits(config.default_resources, host_memory_mib=None)

    # ------------------------------------------------------------------------------------------- life of a box

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        spec = spec.replace(resources=self.capabilities.limits(spec.resources))
        self.capabilities.check(spec, self.name)
        timeout_s = DEFAULT_READY_TIMEOUT_S if spec.ready_timeout_s is None else spec.ready_timeout_s
        deadline = asyncio.timeout(timeout_s)
        creation = Creation(self._connection, self._images, spec, deadline)
        creation.check()
        # The server finishes a create even if its client disconnects. So an abandoned create continues here as well,
        # until it knows the box to destroy.
        creating = asyncio.ensure_future(self._make(creation, spec))
        try:
            async with deadline:
                box = await asyncio.shield(creating)
        except BaseException as error:
            taking_back = self._take_back(creation, creating)
            is_late = isinstance(error, TimeoutError | asyncio.CancelledError)
            if is_late or (isinstance(error, SandboxCreateError) and error.retryable):
                # The server's box may appear only later; do not make the caller wait for it.
                self._in_background(taking_back)
            else:
                await taking_back
            if isinstance(error, TimeoutError):
                text = f"opensandbox: the box was not ready after ready_timeout_s={timeout_s:g} seconds"
                raise SandboxCreateError(text, retryable=True) from error
            raise
        return SandboxHandle(sandbox_id=box.sandbox_id, provider_name=self.name, raw=box)

    async def _make(self, creation: Creation, spec: SandboxSpec) -> OpenSandboxBox:
        box = await creation.run()
        try:
            for door in spec.doors:
                await self._open_door(box, door)
        except BaseException as error:
            await self._close_doors(box)
            if isinstance(error, SandboxError):
                raise SandboxCreateError(error.message, retryable=isinstance(error, SandboxLostError)) from error
            raise
        return box

    async def _take_back(self, creation: Creation, creating: asyncio.Future[OpenSandboxBox]) -> None:
        creation.abandoned.set()
        await asyncio.wait({creating})
        if not creating.cancelled() and creating.exception() is None:
            await self._close_doors(creating.result())
        try:
            await creation.discard()
        except SandboxError as error:
            log.warning("opensandbox_create_not_taken_back", error=str(error), key=creation.key)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            info = await self._connection.info(handle.sandbox_id)
        except sdk_errors():
            return SandboxStatus.UNKNOWN
        return SandboxStatus.STOPPED if info is None else backend_status(info)

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        """End the lease ``ttl_s`` seconds from now, whether that is later or earlier than before."""
        await self._running(handle.sandbox_id, "renewing the lease of")
        async with errors_translated(f"renewing the lease of box {handle.sandbox_id}"):
            manager = await self._connection.manager()
            await manager.renew_sandbox(handle.sandbox_id, timedelta(seconds=ttl_s))

    async def close(self, handle: SandboxHandle) -> None:
        await self._close_doors(box_of(handle))
        async with errors_translated(f"destroying box {handle.sandbox_id}"):
            await self._connection.kill(handle.sandbox_id)

    async def list(self, labels: Mapping[str, str] | None = None) -> List[SandboxInfo]:
        required_labels = {**(labels or {}), BoxLabel.MANAGED: "true"}
        async with errors_translated("listing boxes"):
            boxes = await self._connection.list_boxes(select(required_labels))
        infos = [info for box in boxes if (info := _info(box)) is not None]
        return [info for info in infos if required_labels.items() <= info.labels.items()]

    async def reap(self, labels: Mapping[str, str]) -> List[str]:
        if not labels:
            raise SandboxError("reap needs at least one label, as without any it would destroy every box")
        ids = [info.sandbox_id for info in await self.list(labels)]
        async with errors_translated("destroying boxes"):
            await asyncio.gather(*(self._connection.kill(sandbox_id) for sandbox_id in ids))
        return ids

    async def aclose(self) -> None:
        """Finish background work (removing unwanted boxes, killing abandoned commands), then close the connections."""
        loop = asyncio.get_running_loop()
        own_doors = [door for door in self._doors if door.loop is loop]
        self._doors.clear()
        await asyncio.gather(*(door.aclose(quits=True) for door in own_doors))
        await self._background.join()
        await self._connection.aclose()
        self._images.close()

    # ------------------------------------------------------------------------------------------------ commands

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> OpenSandboxExec:
        process = OpenSandboxExec(box_of(handle), request, in_background=self._in_background)
        await process.start()
        return process

    # --------------------------------------------------------------------------------------------------- files

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        await tool.put(box_of(handle), path, tar)

    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        return tool.get(box_of(handle), path, exclude=exclude, max_bytes=max_bytes)

    # --------------------------------------------------------------------------------------------------- images

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        """Store the box's files as an image, including the server's and this suite's programs in the box."""
        engine, images = self._images.connected()
        await engine.transfer(images.commit, f"sandbox-{handle.sandbox_id}", image, labels)

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        engine, images = self._images.connected()
        return await engine.call(images.labels, image)

    async def remove_image(self, image: str) -> None:
        engine, images = self._images.connected()
        await engine.transfer(images.remove, image)

    # ------------------------------------------------------------------------------------------- loopback doors

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        await self._open_door(box_of(handle), door)

    async def close_door(self, handle: SandboxHandle, name: str) -> None:
        door = self._doors_of(box_of(handle)).get(name)
        if door is not None:
            self._doors.pop(door, None)
            await door.aclose(quits=True)

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        return {name: door.statistics for name, door in self._doors_of(box_of(handle)).items()}

    def _doors_of(self, box: OpenSandboxBox) -> dict[str, RelayedDoor]:
        return {served.door.name: served for served in self._doors if served.box is box}

    async def _open_door(self, box: OpenSandboxBox, door: Door) -> None:
        """Serve a door in this process. A helper in the box accepts and relays connections on the box's loopback."""
        for other in self._doors_of(box).values():
            if other.door.name == door.name:
                raise SandboxError(f"opensandbox: the box already has a door named '{door.name}'")
            if other.door.port == door.port:
                raise SandboxError(
                    f"opensandbox: the door '{door.name}' could not be opened on port {door.port} of the box: door "
                    f"'{other.door.name}' is there"
                )
        relayed = RelayedDoor(box, door)
        self._doors[relayed] = None
        try:
            await relayed.start()
        except BaseException:
            self._doors.pop(relayed, None)
            raise

    async def _close_doors(self, box: OpenSandboxBox) -> None:
        """Close all doors of a box that is about to be destroyed, so its ports need not become free."""
        doors = self._doors_of(box).values()
        for door in doors:
            self._doors.pop(door, None)
        await asyncio.gather(*(door.aclose(quits=False) for door in doors))

    # -------------------------------------------------------------------------------- ports and other processes

    async def endpoint(self, handle: SandboxHandle, port: int) -> str:
        """Return the URL of a box's port. Raises `SandboxError` with ``use_server_proxy``; see `capabilities`."""
        if self.config.use_server_proxy:
            raise SandboxError(
                f"opensandbox: the URL of a box's port cannot be given out: {self.capabilities.reasons['endpoint']}"
            )
        async with errors_translated(f"asking for port {port} of box {handle.sandbox_id}"):
            address = await (await box_of(handle).sdk()).get_endpoint(port)
        scheme = self.config.url.partition("://")[0]
        return f"{scheme}://{address.endpoint}"

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]:
        """Plain data that identifies the box, without the server's key: a process that connects needs its own key."""
        box = box_of(handle)
        return {
            "provider": self.name,
            "url": self.config.url,
            "sandbox_id": box.sandbox_id,
            "directory": box.directory,
            "scope": scope,
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        sandbox_id = descriptor.get("sandbox_id")
        if descriptor.get("provider") != self.name or not isinstance(sandbox_id, str):
            raise SandboxError("opensandbox: this is not a descriptor of a box of the opensandbox provider")
        if descriptor.get("url") != self.config.url:
            raise SandboxError(
                f"opensandbox: the box is at {descriptor.get('url')}, and this provider talks to {self.config.url}; "
                "configure its url"
            )
        info = await self._running(sandbox_id, "connecting to")
        if metadata_to_labels(info.metadata) is None:
            raise SandboxError(f"opensandbox: {sandbox_id} is not a box of this suite")
        directory = str(descriptor.get("directory") or self.config.box_directory).rstrip("/")
        return SandboxHandle(sandbox_id, self.name, OpenSandboxBox(self._connection, sandbox_id, directory))

    # ----------------------------------------------------------------------------------------------- internals

    async def _running(self, sandbox_id: str, doing: str) -> BackendInfo:
        """The server's description of a running box. Raises `SandboxLostError` if the box does not run."""
        async with errors_translated(f"{doing} box {sandbox_id}"):
            info = await self._connection.info(sandbox_id)
        if info is None or has_ended(info):
            state = "gone" if info is None else info.status.state
            raise SandboxLostError(f"opensandbox: {doing} box {sandbox_id}: it is {state}")
        return info

    def _in_background(self, work: Awaitable[None]) -> None:
        self._background.start(self._errors_logged(work))

    @staticmethod
    async def _errors_logged(work: Awaitable[None]) -> None:
        # No caller waits for this work, so log its errors. A box that could not be destroyed ends with its lease.
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except sdk_errors(SandboxError) as error:
                log.warning("opensandbox_background", error=str(error))


def _info(info: BackendInfo) -> SandboxInfo | None:
    """Convert the server's description of a box; ``None`` if the box does not belong to this suite."""
    labels = metadata_to_labels(info.metadata)
    if labels is None:
        return None
    return SandboxInfo(
        sandbox_id=info.id,
        status=backend_status(info),
        labels=labels,
        expires_at=info.expires_at.timestamp() if info.expires_at else None,
        created_at=info.created_at.timestamp(),
        termination_reason=(info.status.message or info.status.reason) if has_ended(info) else None,
    )
