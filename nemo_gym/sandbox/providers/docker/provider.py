"""`DockerProvider`: boxes as containers of one Docker Engine."""

from __future__ import annotations

import asyncio
import os
import time
from builtins import list as List  # noqa: N812 - the contract has a method of the builtin's name
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_gym._util.tasks import finish, paused
from nemo_gym.contract.errors import SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import DEFAULT_READY_TIMEOUT_S, Door, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, ExecRequest, SandboxCapabilities, SandboxHandle, SandboxInfo, SandboxStatus
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.doors import door_server
from nemo_gym.sandbox.linux import listen_in_network_namespace
from nemo_gym.sandbox.providers.docker import archives
from nemo_gym.sandbox.providers.docker.creation import Creation, ensure_watchdog, overrun
from nemo_gym.sandbox.providers.docker.engine import (
    DockerConfig,
    Engine,
    public_labels,
    renewed_name,
    sdk_errors,
    status_of,
    translate,
)
from nemo_gym.sandbox.providers.docker.execution import DockerBox, DockerExec, box_of
from nemo_gym.sandbox.providers.docker.images import Images
from nemo_gym.sandbox.providers.docker.watchdog import lease_end
from nemo_gym.sandbox.streaming_provider import StreamingProvider

_STATES = {
    "created": SandboxStatus.STARTING,
    "running": SandboxStatus.RUNNING,
    "restarting": SandboxStatus.STARTING,
    "paused": SandboxStatus.RUNNING,
    "removing": SandboxStatus.STOPPED,
    "exited": SandboxStatus.STOPPED,
    "dead": SandboxStatus.ERROR,
}
_CAP_SYS_ADMIN = 1 << 21
_MIB = 1024 * 1024
_NO_NESTING = (
    "processes in a box may make no namespaces and no mounts, so no containers either; where its policy may be trusted"
    " with the host, the settings capabilities: [SYS_ADMIN] and seccomp: engine let them"
)


def why_users_are_shared(info: Mapping[str, Any]) -> str:
    """Why a box can exhaust the resources that the kernel counts per user, given the engine's ``info``."""
    options = (str(option).split(",") for option in info.get("SecurityOptions") or ())
    remapped = any("name=userns" in option for option in options)
    whose = (
        "userns-remap gives all boxes of this engine one range of users: those of the host are apart, boxes share"
        if remapped
        else "user ids of boxes are the host's: the host's root and all boxes of one user share"
    )
    return f"{whose} inotify instances, epoll watches and pipe buffers, and no engine limits them; use sandbox=local"


class DockerProvider(StreamingProvider):
    """Boxes as containers. A watchdog process enforces their leases.

    Args:
        options: see `DockerConfig`.
    """

    name = "docker"

    def __init__(self, **options: Any) -> None:
        self.config = DockerConfig.from_mapping(options)
        self._engine = Engine(self.config.base_url, request_timeout_s=self.config.request_timeout_s)
        self._images = Images(self._engine, self.config)
        self._creating = asyncio.Semaphore(self.config.max_concurrent_creates)
        self._boxes: dict[str, DockerBox] = {}

    @cached_property
    def _local(self) -> bool:
        return self._engine.is_local()

    @cached_property
    def capabilities(self) -> SandboxCapabilities:
        """The engine's abilities, asked for once. Raises `SandboxError` if no engine responds."""
        try:
            info = self._engine.client.info()
        except sdk_errors() as error:
            raise translate(error, "asking what it can do") from error
        doors = self._local and _may_enter_namespaces()
        abilities = {
            "memory_limit": bool(info.get("MemoryLimit")),
            "cpu_limit": bool(info.get("CpuCfsQuota")),
            "pids_limit": bool(info.get("PidsLimit", True)),
            "disk_limit": self.config.watchdog,
            "loopback_door": doors,
            "nested_containers": self.config.lets_boxes_nest,
        }
        reasons = {
            "memory_limit": "the engine's kernel has no memory control group",
            "cpu_limit": "the engine's kernel has no CPU quota",
            "pids_limit": "the engine's kernel has no pids control group",
            "disk_limit": "the watchdog, which ends boxes that write too much, is switched off by watchdog: false",
            "gpu": "not offered by this provider",
            "nested_containers": _NO_NESTING,
            "endpoint": "boxes have no network that could be reached from outside; use a door",
            "user_limits": why_users_are_shared(info),
            "background_output": "the engine closes a command's output soon after the command ends; redirect the"
            " output of what it leaves in the background",
            "loopback_door": "entering a container's network needs root on the engine's own machine"
            if self._local
            else f"the engine at {self._engine.url} runs where its containers' namespaces cannot be entered from here",
        }
        return SandboxCapabilities(
            network_policies=frozenset(NetworkPolicy),
            snapshot=True,
            connect=True,
            reasons={name: why for name, why in reasons.items() if not abilities.get(name, False)},
            default_limits=SandboxResources(),
            **abilities,
        ).with_default_limits(
            self.config.default_resources, host_memory_mib=int(info.get("MemTotal") or 0) // _MIB or None
        )

    # ------------------------------------------------------------------------------------------- life of a box

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        timeout_s = DEFAULT_READY_TIMEOUT_S if spec.ready_timeout_s is None else spec.ready_timeout_s
        creation: Creation | None = None
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                # A large image would fail by the default, time after time, so it leaves out the pull.
                of_pulls = deadline if spec.ready_timeout_s is None else None
                capabilities = await self._engine.call(lambda: self.capabilities)
                spec = spec.replace(resources=capabilities.limits(spec.resources))
                capabilities.check(spec, self.name)
                creation = Creation(self._engine, self._images, self.config, spec)
                await self._engine.call(creation.prepare)
                creation.image = await self._images.reference(spec.image)
                if creation.pulls_always:
                    with paused(of_pulls):
                        await self._images.pull(creation.image)
                if self.config.watchdog:
                    await self._engine.call(ensure_watchdog, self._engine.url)
                handle: SandboxHandle | None = None
                try:
                    inspection = await self._inspection_of(creation, pulled=False)
                    if inspection is None:
                        with paused(of_pulls):
                            await self._images.pull(creation.image)
                        inspection = await self._inspection_of(creation, pulled=True)
                    assert inspection is not None
                    handle = await self._handle_of(inspection)
                    for door in spec.doors:
                        await self.open_door(handle, door)
                    if self.config.watchdog:
                        # At the first check the watchdog may have been about to exit.
                        await self._engine.call(ensure_watchdog, self._engine.url)
                except BaseException:
                    # The engine has finished what was asked of it, so this finds whatever it created.
                    await finish(self._abandon(handle, creation))
                    raise
        except TimeoutError as error:
            text = f"docker: the box was not ready after ready_timeout_s={timeout_s:g} seconds"
            if creation is not None and self._images.is_pulling(creation.image):
                text += f"; its image '{creation.image}' is still being pulled, for a later create"
            raise SandboxCreateError(text, retryable=True) from error
        self._boxes[handle.sandbox_id] = box_of(handle)
        return handle

    async def _inspection_of(self, creation: Creation, *, pulled: bool) -> Mapping[str, Any] | None:
        """Find or create the container, see `Creation.run`."""
        async with self._creating:
            if (existing := await self._engine.call(creation.find_existing)) is not None:
                return existing
            return await finish(self._engine.call(creation.run, pulled=pulled))

    async def _handle_of(self, inspection: Mapping[str, Any]) -> SandboxHandle:
        box = await self._engine.call(DockerBox.from_inspection, inspection, local=self._local)
        return SandboxHandle(sandbox_id=box.container_id, provider_name=self.name, raw=box)

    async def _abandon(self, handle: SandboxHandle | None, creation: Creation) -> None:
        if handle is not None:
            await self._close_connections(box_of(handle))
        await self._engine.call(creation.discard)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            inspection = await self._engine.call(self._engine.client.inspect_container, handle.sandbox_id)
        except sdk_errors() as error:
            return SandboxStatus.STOPPED if status_of(error) == 404 else SandboxStatus.UNKNOWN
        except SandboxError:
            return SandboxStatus.UNKNOWN
        return _STATES.get(inspection["State"]["Status"], SandboxStatus.UNKNOWN)

    async def overrun(self, handle: SandboxHandle) -> str | None:
        return await self._engine.call(overrun, self._engine.url, handle.sandbox_id)

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        box = box_of(handle)
        name = renewed_name(box.name, time.time() + ttl_s)

        def rename() -> None:
            client = self._engine.client
            inspection = client.inspect_container(box.container_id)
            if not inspection["State"]["Running"]:
                raise SandboxLostError(f"docker: the box {box.container_id[:12]} has stopped; it cannot be renewed")
            if inspection["Name"].lstrip("/") == name:
                return
            try:
                client.rename(box.container_id, name)
            except sdk_errors():
                # A concurrent renewal, in this or another process, may have given the container the same name.
                if client.inspect_container(box.container_id)["Name"].lstrip("/") != name:
                    raise

        try:
            await self._engine.call(rename)
        except sdk_errors() as error:
            raise translate(error, f"renewing the lease of box {box.container_id[:12]}") from error
        box.name = name
        if self.config.watchdog:
            await self._engine.call(ensure_watchdog, self._engine.url)

    async def close(self, handle: SandboxHandle) -> None:
        box = box_of(handle)
        await self._close_connections(box)
        await self._engine.call(self._remove, box.container_id)
        self._boxes.pop(box.container_id, None)

    def _remove(self, container_id: str) -> None:
        deadline = time.monotonic() + self.config.request_timeout_s
        while True:
            try:
                self._engine.client.remove_container(container_id, force=True, v=True)
                return
            except sdk_errors() as error:
                if status_of(error) == 404:
                    return
                # 409 means that another removal is in progress: wait until it is complete.
                if status_of(error) != 409 or time.monotonic() > deadline:
                    raise translate(error, f"removing box {container_id[:12]}") from error
            time.sleep(0.05)

    async def list(self, labels: Mapping[str, str] | None = None) -> List[SandboxInfo]:
        required_labels = {**(labels or {}), BoxLabel.MANAGED: "true"}
        filters = {"label": [f"{key}={value}" for key, value in required_labels.items()]}
        try:
            containers = await self._engine.call(self._engine.client.containers, all=True, filters=filters)
        except sdk_errors() as error:
            raise translate(error, "listing boxes") from error
        infos = [_info(container) for container in containers]
        # The engine also matches labels that a container inherited from its image.
        return [info for info in infos if required_labels.items() <= info.labels.items()]

    async def reap(self, labels: Mapping[str, str]) -> List[str]:
        if not labels:
            raise SandboxError("reap needs at least one label, as without any it would destroy every box")
        ids = [info.sandbox_id for info in await self.list(labels)]
        for container_id in ids:
            if (box := self._boxes.pop(container_id, None)) is not None:
                await self._close_connections(box)
        await asyncio.gather(*(self._engine.call(self._remove, container_id) for container_id in ids))
        return ids

    async def aclose(self) -> None:
        for box in [*self._boxes.values()]:
            await self._close_connections(box)
        self._boxes.clear()
        await self._images.cancel_pulls()
        self._engine.close()

    # ------------------------------------------------------------------------------------------------ commands

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> DockerExec:
        process = DockerExec(self._engine, box_of(handle), request)
        await process.start()
        return process

    # --------------------------------------------------------------------------------------------------- files

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        upload = archives.Upload(path)
        try:
            async for chunk in tar:
                await asyncio.to_thread(upload.feed, chunk)
            upload.feed(None)
            await self._engine.transfer(upload.send, self._engine, box_of(handle).container_id)
        finally:
            upload.close()

    def _owner_of_uploads(self, handle: SandboxHandle) -> int | None:
        # A box's root has no rights over the files of other users, such as the one who runs this process.
        return 0 if box_of(handle).user.partition(":")[0] in ("", "0", "root") else None

    async def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        chunks = archives.download(
            self._engine, box_of(handle).container_id, path, exclude=exclude, max_bytes=max_bytes
        )
        reading: asyncio.Future[bytes | None] | None = None

        async def close() -> None:
            # A cancelled reader leaves its read running on a thread, and a running generator cannot be closed.
            if reading is not None and not reading.done():
                await asyncio.wait({reading})
            await self._engine.call(chunks.close)

        try:
            while True:
                reading = asyncio.ensure_future(self._engine.transfer(next, chunks, None))
                if (chunk := await asyncio.shield(reading)) is None:
                    break
                yield chunk
        finally:
            await finish(close())

    # ------------------------------------------------------------------------------------------- loopback doors

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        """Serve a door on a listener created in the container's network namespace."""
        box = box_of(handle)
        if door.name in box.doors:
            raise SandboxError(f"docker: the box already has a door named '{door.name}'")
        if not box.init_pid:
            raise SandboxError(f"docker: no door can be opened: {self.capabilities.reasons.get('loopback_door', '')}")
        try:
            listener = await self._engine.call(listen_in_network_namespace, box.init_pid, door.port)
        except OSError as error:
            raise SandboxError(
                f"docker: the door '{door.name}' could not be opened on port {door.port} of the box: {error}"
            ) from error
        server = door_server(door, listener)
        await server.start()
        box.doors[door.name] = server

    async def close_door(self, handle: SandboxHandle, name: str) -> None:
        server = box_of(handle).doors.pop(name, None)
        if server is not None:
            await server.aclose()

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        return {name: server.statistics for name, server in box_of(handle).doors.items()}

    async def _close_connections(self, box: DockerBox) -> None:
        for process in [*box.running.values()]:
            process.close_unread()
        servers = [*box.doors.values()]
        box.doors.clear()
        await asyncio.gather(*(server.aclose() for server in servers))

    # --------------------------------------------------------------------------------------------------- images

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        await self._engine.transfer(self._images.commit, box_of(handle).container_id, image, labels)

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        return await self._engine.call(self._images.labels, image)

    async def remove_image(self, image: str) -> None:
        await self._engine.transfer(self._images.remove, image)

    # ------------------------------------------------------------------------------------------ other processes

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]:
        return {
            "provider": self.name,
            "base_url": self._engine.url,
            "container_id": box_of(handle).container_id,
            "scope": scope,
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        if descriptor.get("provider") != self.name or not isinstance(descriptor.get("container_id"), str):
            raise SandboxError("docker: this is not a descriptor of a box of the docker provider")
        if descriptor.get("base_url") != self._engine.url:
            raise SandboxError(
                f"docker: the box is in the engine at {descriptor.get('base_url')}, and this provider talks to "
                f"{self._engine.url}; configure its base_url"
            )
        container_id = descriptor["container_id"]
        try:
            inspection = await self._engine.call(self._engine.client.inspect_container, container_id)
        except sdk_errors() as error:
            raise translate(error, f"connecting to box {container_id[:12]}") from error
        if (inspection["Config"].get("Labels") or {}).get(BoxLabel.MANAGED) != "true":
            raise SandboxError(f"docker: the container {container_id[:12]} is not a box of this suite")
        if not inspection["State"]["Running"]:
            raise SandboxLostError(f"docker: the box {container_id[:12]} has stopped")
        return await self._handle_of(inspection)


def _info(container: Mapping[str, Any]) -> SandboxInfo:
    name = str((container.get("Names") or [""])[0]).lstrip("/")
    labels = container.get("Labels") or {}
    state = str(container.get("State", ""))
    return SandboxInfo(
        sandbox_id=container["Id"],
        status=_STATES.get(state, SandboxStatus.UNKNOWN),
        labels=public_labels(labels),
        expires_at=lease_end(name, labels),
        created_at=float(container["Created"]) if container.get("Created") else None,
        termination_reason=container.get("Status") if state in ("exited", "dead") else None,
    )


def _may_enter_namespaces() -> bool:
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_SYS_ADMIN)
    return False
