"""`LocalProvider`: boxes on this machine, held by a supervisor process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import uuid
from builtins import list as List  # noqa: N812 - the contract has a method of the builtin's name
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from socket import socket
from typing import Any, Literal

from nemo_gym._util.tasks import finish, paused
from nemo_gym.contract.errors import (
    SandboxCapabilityError,
    SandboxCreateError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import DEFAULT_READY_TIMEOUT_S, Door, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import ExecRequest, SandboxCapabilities, SandboxHandle, SandboxInfo, SandboxStatus, absolute
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.doors import DoorServer, door_server
from nemo_gym.sandbox.egress import EgressProxy
from nemo_gym.sandbox.providers.local.client import (
    EndedEarlyError,
    LocalOptions,
    LocalProcess,
    SupervisedOptions,
    SupervisorClient,
    argv,
    create_request,
    greeting_of,
    stdin_file,
)
from nemo_gym.sandbox.providers.local.images import ImageError, ImageStore
from nemo_gym.sandbox.providers.local.protocol import BASE_ENV, close_all, read_stream, write_stream
from nemo_gym.sandbox.streaming_provider import StreamingProvider

_NO_NESTING = (
    "processes in a box have no capabilities and cannot make namespaces, so no containers either; sandbox=docker has"
    " settings that let them"
)
_LIMIT_NAMES = {"memory": "memory_limit", "pids": "pids_limit", "cpu": "cpu_limit"}


@dataclasses.dataclass
class _LocalBox:
    """This process's data on a box."""

    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    doors: dict[str, DoorServer | EgressProxy] = dataclasses.field(default_factory=dict)


class LocalProvider(StreamingProvider):
    """Boxes of bubblewrap, overlayfs, cgroups and namespaces on this machine.

    Args:
        options: the fields of `LocalOptions`. Unknown options raise `ConfigError`.
    """

    name = "local"
    options_class: type[SupervisedOptions] = LocalOptions

    def __init__(self, **options: Any) -> None:
        self.options: SupervisedOptions = self.options_class.from_mapping(options)
        self._images = ImageStore(self.options.image_dir)
        self._clients: dict[asyncio.AbstractEventLoop, SupervisorClient] = {}
        self._capabilities: SandboxCapabilities | None = None

    @property
    def capabilities(self) -> SandboxCapabilities:
        """The abilities of this machine. Starts a supervisor to ask it, and caches its answer.

        Raises:
            SandboxLostError: several supervisors in a row exited before they answered, so the abilities are unknown.
        """
        if self._capabilities is not None:
            return self._capabilities
        reasons = {
            "endpoint": "nothing outside reaches a box's network; use exec, or a door for the way out",
            "nested_containers": _NO_NESTING,
            "gpu": "device nodes are not passed into boxes",
        }
        try:
            self.options.program()
            greeting = greeting_of(self.options)
        except EndedEarlyError as error:
            raise SandboxLostError(error.message, retryable=True) from error
        except SandboxError as error:
            others = ("loopback_door", "snapshot", "connect", "disk_limit", "network_none", "network_open")
            return SandboxCapabilities(reasons=reasons | dict.fromkeys((*others, *_LIMIT_NAMES.values()), str(error)))
        if not greeting["max_uid"]:
            reasons["exec_user"] = "boxes of an ordinary user have user 0 alone; run as root for others"
        reasons |= {_LIMIT_NAMES[name]: reason for name, reason in greeting["reasons"].items()}
        self._capabilities = SandboxCapabilities(
            network_policies=frozenset({NetworkPolicy.NONE, NetworkPolicy.OPEN}),
            loopback_door=True,
            snapshot=True,
            connect=True,
            memory_limit="memory" in greeting["limits"],
            cpu_limit="cpu" in greeting["limits"],
            pids_limit="pids" in greeting["limits"],
            disk_limit=True,
            user_limits=True,
            reasons=reasons,
        ).with_default_limits(self.options.default_resources, host_memory_mib=greeting["memory_mib"])
        return self._capabilities

    @property
    def supervisor_dir(self) -> Path:
        """Directory of this provider's supervisor, below ``state_dir``. It contains the supervisor's log."""
        return SupervisorClient(self.options).state_dir

    # -------------------------------------------------------------------------------------------------- life

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        spec = await self._checked(spec)
        client = self._client()
        timeout_s = spec.ready_timeout_s or DEFAULT_READY_TIMEOUT_S
        box_id: str | None = None
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                # A large image would fail by the default, time after time, so it leaves out the unpacking.
                with paused(deadline if spec.ready_timeout_s is None else None):
                    spec = await self._with_image(spec)
                request = create_request(spec, self.options)
                box_id = request["spec"]["box"]
                answer = await client.request(request)
        except SandboxLostError as error:
            raise SandboxCreateError(f"the box was lost while it was made: {error}", retryable=True) from error
        except (TimeoutError, asyncio.CancelledError) as error:
            if box_id is not None:
                client.notify({"op": "close", "box": box_id})
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"the box was not ready within {timeout_s:g} s"
            if box_id is None:
                text += "; its image is still being unpacked, for a later create"
            raise SandboxCreateError(text, provider=self.name, retryable=True) from error
        handle = SandboxHandle(
            str(answer["box"]), self.name, _LocalBox({**answer["env"], **spec.env}, spec.workdir, spec.user)
        )
        try:
            for door in spec.doors:
                await self.open_door(handle, door)
        except BaseException:
            await finish(self.close(handle))
            raise
        return handle

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            answer = await self._client().request({"op": "status", "box": handle.sandbox_id})
        except SandboxLostError:
            return SandboxStatus.UNKNOWN
        return SandboxStatus(answer["status"])

    async def overrun(self, handle: SandboxHandle) -> str | None:
        try:
            answer = await self._client().request({"op": "status", "box": handle.sandbox_id})
        except SandboxLostError:  # the supervisor is gone, and no limit of the box is why
            return None
        reason = answer.get("termination_reason") or ""
        return f"the box was ended: {reason}" if "disk_gib" in reason else None

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        if ttl_s <= 0:
            raise SandboxError(f"ttl_s must be positive, not {ttl_s}")
        await self._client().request({"op": "renew", "box": handle.sandbox_id, "ttl_s": ttl_s})

    async def close(self, handle: SandboxHandle) -> None:
        box = _box_of(handle)
        with contextlib.suppress(SandboxLostError):  # if the supervisor is gone, so is every box of it
            await self._client().request({"op": "close", "box": handle.sandbox_id})
        for name in list(box.doors):
            await self.close_door(handle, name)

    async def list(self, labels: Mapping[str, str] | None = None) -> List[SandboxInfo]:
        answer = await self._client().request({"op": "list", "labels": dict(labels or {})})
        return [
            SandboxInfo(
                sandbox_id=box["box"],
                status=SandboxStatus.RUNNING,
                labels=box["labels"],
                expires_at=box["expires_at"],
                created_at=box["created_at"],
            )
            for box in answer["boxes"]
        ]

    async def reap(self, labels: Mapping[str, str]) -> List[str]:
        if not labels:
            raise SandboxError("reap needs at least one label, so that nobody destroys every box by accident")
        answer = await self._client().request({"op": "reap", "labels": dict(labels)})
        return [str(box_id) for box_id in answer["boxes"]]

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for loop, client in clients.items():
            if loop is asyncio.get_running_loop():
                await client.close()

    # ---------------------------------------------------------------------------------------------- commands

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> LocalProcess:
        box = _box_of(handle)
        client = self._client()
        exec_id = uuid.uuid4().hex[:16]
        words = argv(request.command)
        process = LocalProcess(client, handle.sandbox_id, exec_id, max_output_bytes=request.max_output_bytes)
        names: tuple[Literal["stdout", "stderr"], ...] = ("stdout",) if request.merge_stderr else ("stdout", "stderr")
        command_fds: list[int] = []
        try:
            command_fds.append(stdin_file(request.stdin))
            for name in names:
                read_end, write_end = os.pipe()
                command_fds.append(write_end)
                process.add_stream(name, read_end)
        except BaseException:
            close_all(command_fds)
            process.abandon()
            raise
        client.on_end[exec_id] = process.ended
        try:
            await client.request(
                {
                    "op": "exec",
                    "box": handle.sandbox_id,
                    "exec": exec_id,
                    "argv": words,
                    "cwd": request.cwd or box.workdir or "/",
                    "env": {**BASE_ENV, **box.env, **request.env},
                    "user": request.user or box.user,
                    "timeout_s": request.timeout_s,
                    "merge_stderr": request.merge_stderr,
                },
                command_fds,
            )
        except BaseException:
            process.abandon()
            raise
        return process

    # ------------------------------------------------------------------------------------------------- files

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        request = {"op": "put", "box": handle.sandbox_id, "path": absolute(path)}
        read_end, write_end = os.pipe()
        writing = asyncio.create_task(write_stream(write_end, tar))
        unpacking = asyncio.create_task(self._client().request(request, [read_end]))
        try:
            await asyncio.wait({writing, unpacking}, return_when=asyncio.FIRST_EXCEPTION)
            if writing.done():
                writing.result()  # if the caller's stream failed, the supervisor reports only a damaged archive
            await unpacking
        finally:
            writing.cancel()  # closes the pipe, which ends the unpacking
            await _settle(writing, unpacking)

    async def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        request = {
            "op": "get",
            "box": handle.sandbox_id,
            "path": absolute(path),
            "exclude": list(exclude),
            "max_bytes": max_bytes,
        }
        read_end, write_end = os.pipe()
        packing = asyncio.create_task(self._client().request(request, [write_end]))
        try:
            async with contextlib.aclosing(read_stream(read_end)) as chunks:
                async for chunk in chunks:
                    yield chunk
            await packing
        finally:
            await _settle(packing)

    # ------------------------------------------------------------------------------------------------- doors

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        """Serve a door from this process, on a listener inside the box, until the box or this process ends."""
        box = _box_of(handle)
        if door.name in box.doors:
            raise SandboxError(f"sandbox {handle.sandbox_id} has a door '{door.name}' already")
        _, descriptors = await self._client().request_with_descriptors(
            {"op": "listen", "box": handle.sandbox_id, "port": door.port}
        )
        server = door_server(door, socket(fileno=descriptors[0]))
        await server.start()
        box.doors[door.name] = server

    async def close_door(self, handle: SandboxHandle, name: str) -> None:
        server = _box_of(handle).doors.pop(name, None)
        if server is not None:
            await server.aclose()

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        return {name: server.statistics for name, server in _box_of(handle).doors.items()}

    # ---------------------------------------------------------------------------------- images and connecting

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        await self._client().request(
            {
                "op": "commit",
                "box": handle.sandbox_id,
                "image": image,
                "labels": dict(labels),
                "image_dir": str(self.options.image_dir),
            }
        )

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        try:
            manifest = await asyncio.to_thread(self._images.manifest, image)
        except ImageError as error:
            raise SandboxError(str(error)) from error
        return manifest.labels if manifest is not None else None

    async def remove_image(self, image: str) -> None:
        try:
            await asyncio.to_thread(self._images.remove, image)
        except ImageError as error:
            raise SandboxError(str(error)) from error

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]:
        """Plain data for `connect` by the same user on this machine. The supervisor checks the user, not the scope."""
        box = _box_of(handle)
        return {
            "provider": self.name,
            "sandbox_id": handle.sandbox_id,
            "state_dir": str(self.options.state_dir),
            "scope": scope,
            "env": dict(box.env),
            "workdir": box.workdir,
            "user": box.user,
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        if descriptor.get("state_dir") != str(self.options.state_dir):
            raise SandboxError(
                f"the box is held by the supervisor of {descriptor.get('state_dir')}, but this provider's state_dir "
                f"is {self.options.state_dir}; configure the same"
            )
        box = _LocalBox(dict(descriptor.get("env") or {}), descriptor.get("workdir"), descriptor.get("user"))
        handle = SandboxHandle(str(descriptor["sandbox_id"]), self.name, box)
        if await self.status(handle) is not SandboxStatus.RUNNING:
            raise SandboxLostError(f"sandbox {handle.sandbox_id} is gone")
        return handle

    # ---------------------------------------------------------------------------------------------- internals

    def _client(self) -> SupervisorClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients = {other: client for other, client in self._clients.items() if not other.is_closed()}
            self._clients[loop] = SupervisorClient(self.options)
        return self._clients[loop]

    async def _with_image(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with the supervisor's name for its image. Work on the image goes on if this is cancelled."""
        return spec

    async def _checked(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with all limits filled in; raise if this provider cannot serve the spec."""
        capabilities = await asyncio.to_thread(lambda: self.capabilities)
        if not capabilities.network_policies:
            raise SandboxCreateError(capabilities.reasons["network_none"], provider=self.name)
        if spec.provider_options:
            raise SandboxCapabilityError(
                f"sandbox provider '{self.name}' has no provider_options; the spec gives "
                + ", ".join(spec.provider_options)
            )
        spec = spec.replace(resources=capabilities.limits(spec.resources))
        capabilities.check(spec, self.name)
        return spec


async def _settle(*tasks: asyncio.Task[Any]) -> None:
    """Wait until the tasks have ended, and ignore how."""
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


def _box_of(handle: SandboxHandle) -> _LocalBox:
    if not isinstance(handle.raw, _LocalBox):
        raise SandboxError(f"sandbox {handle.sandbox_id} was not made by this kind of provider")
    return handle.raw
