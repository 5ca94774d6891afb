"""Creation of one box of an OpenSandbox server for one spec, and its reversal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, paused
from nemo_gym.contract.errors import (
    SandboxCapabilityError,
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxError,
    SandboxLostError,
    reject_unknown_keys,
)
from nemo_gym.contract.sandbox import DEFAULT_TTL_S, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import absolute
from nemo_gym.sandbox.providers.docker.engine import DockerConfig, Engine
from nemo_gym.sandbox.providers.docker.images import Images
from nemo_gym.sandbox.providers.opensandbox import connection
from nemo_gym.sandbox.providers.opensandbox.connection import (
    Connection,
    OpenSandboxBox,
    OpenSandboxConfig,
    errors_translated,
    has_ended,
    requested_wait_s,
    sdk_errors,
    status_of,
    translate,
)
from nemo_gym.sandbox.providers.opensandbox.tool import request_argument, run_helper
from nemo_gym.sandbox.tar_stream import END_OF_ARCHIVE

if TYPE_CHECKING:
    from opensandbox.models.sandboxes import SandboxInfo as BackendInfo


# -- Images --------------------------------------------------------------------------------------------------------

NO_ENGINE = (
    "the server's own snapshots have neither names of our choice nor labels to find them by; where the Docker Engine "
    "behind it can be reached from here, set engine to its URL"
)


class EngineImages:
    """Images in the Docker Engine that the option ``engine`` names, with the docker provider's names.

    Raises:
        SandboxCapabilityError: the configuration names no engine.
        SandboxError: the engine does not respond, or refused.
    """

    def __init__(self, config: OpenSandboxConfig) -> None:
        self._config = config
        self._images: Images | None = None
        self._engine: Engine | None = None

    def connected(self) -> tuple[Engine, Images]:
        if self._config.engine is None:
            raise SandboxCapabilityError(f"opensandbox: no images can be kept: {NO_ENGINE}", provider="opensandbox")
        if self._engine is None or self._images is None:
            config = DockerConfig(base_url=self._config.engine)
            self._engine = Engine(config.base_url, request_timeout_s=config.request_timeout_s)
            self._images = Images(self._engine, config)
        return self._engine, self._images

    async def reference(self, image: str | None) -> str | None:
        """The server's name for an image. Without a configured engine, ``image`` itself."""
        if self._config.engine is None:
            return image
        return await self.connected()[1].reference(image)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = self._images = None


# -- Creation ------------------------------------------------------------------------------------------------------
# Creation of a box that runs commands, on a backend whose create cannot be retried safely or cancelled.
#
# Each create stores its key in the box's metadata: the spec's idempotency key, or a random one. If the response to a
# create is lost, the key identifies the box, which is adopted if the spec has an idempotency key, else destroyed.

_SHORTEST_TIMEOUT_S = 60
"""The shortest lease that the server accepts in a create. A renewal may set a shorter one."""
# Waits, and reaps the orphans of the box, which the backend's usual first process does not.
_IDLE = ["/bin/sh", "-c", "trap : TERM INT; while :; do sleep 86400 & wait $!; done"]
_LATE_S = 20.0
"""How long to look for the box of a create that failed without a response: the server may still be creating it."""
_ADOPT_S = 10.0
_LONGEST_PAUSE_S = 10.0
"""Longest pause between two creates that a server without room refuses, unless it requests a longer one."""
_CREATE_TIMEOUT_S = 600.0
"""Limit on the silence of a create, which takes as long as the server needs to pull the image. A spec's
``ready_timeout_s`` may end it earlier; the default one begins with the server's answer."""


class Creation:
    """Creates the box of one spec, within its caller's ``deadline``. `discard` destroys the box at any stage of its
    creation."""

    def __init__(
        self, connection: Connection, images: EngineImages, spec: SandboxSpec, deadline: asyncio.Timeout
    ) -> None:
        self._connection = connection
        self._images = images
        self._config = connection.config
        self._spec = spec
        self._deadline = deadline
        self.key = spec.idempotency_key or uuid.uuid4().hex
        self._image = spec.image or connection.config.default_image
        self.created: str | None = None
        """The id of the box that this object created. Another call with the same idempotency key may have made it."""
        self._late_s: float | None = None
        """Seconds during which a box of this create may still appear; ``None`` if none can."""
        self.abandoned = asyncio.Event()
        """Set when the caller has left: a create that the server refused is not sent again."""

    def check(self) -> None:
        """Check everything that can be checked without the server.

        Raises:
            ConfigError: an unknown provider option.
            SandboxCreateError: the spec names no image and there is no default, or a file's path is not absolute.
        """
        reject_unknown_keys(self._spec.provider_options, ["extensions"], where="opensandbox provider_options")
        if self._image is None and self._config.engine is None:
            raise SandboxCreateError(
                "opensandbox: the spec names no image; name one, or set sandbox.opensandbox.default_image (or engine)"
            )
        for path in self._spec.files:
            absolute(path)

    async def run(self) -> OpenSandboxBox:
        """Return the box of the spec's idempotency key, or create one. The returned box is ready for commands."""
        if self._spec.idempotency_key and (existing := await self._oldest_box()) is not None:
            return await self._adopt(existing.id)
        self._image = await self._images.reference(self._image)
        lease_s = max(self._ttl_s, _SHORTEST_TIMEOUT_S)
        backoff = Backoff(first_s=1.0, longest_s=_LONGEST_PAUSE_S, patience_s=self._left_s(), jitter=NETWORK_JITTER)
        while True:
            began = time.monotonic()
            try:
                sandbox_id = await self._create(lease_s)
                break
            except SandboxCreateError as error:
                # The server has no room; it created nothing, and says when to ask again.
                refusal = error.__cause__
                if refusal is None or status_of(refusal) != 429 or self.created is not None:
                    raise
                pause_s = backoff.next_pause_s(at_least_s=requested_wait_s(refusal))
                if pause_s is None:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self.abandoned.wait()
                if self.abandoned.is_set():
                    raise
        if time.monotonic() - began > lease_s / 2:
            # The server counts the lease from the request, so its pull may have used all of it. It has the image now.
            await self.discard()
            sandbox_id = await self._create(lease_s)
        if self._spec.idempotency_key:
            winner = await self._oldest_box()
            if winner is not None and winner.id != sandbox_id:
                # A concurrent create with the same key made an older box.
                await self.discard()
                return await self._adopt(winner.id)
        return await self._install_helper(sandbox_id, files=True)

    def _left_s(self) -> float:
        ends_at = self._deadline.when()
        # The caller left during the request, in which its deadline stood still.
        return 0.0 if ends_at is None else ends_at - asyncio.get_running_loop().time()

    async def _oldest_box(self) -> BackendInfo | None:
        """The oldest live box with this key, which all creates with the key use."""
        async with errors_translated("looking for a box with the same idempotency key", kind=SandboxCreateError):
            boxes = [info for info in await self._boxes() if not has_ended(info)]
        return min(boxes, key=lambda info: (info.created_at, info.id), default=None)

    async def _boxes(self) -> list[BackendInfo]:
        return await self._connection.list_boxes({connection.KEY: connection.digest(self.key)})

    @property
    def _ttl_s(self) -> float:
        return DEFAULT_TTL_S if self._spec.ttl_s is None else self._spec.ttl_s

    async def _create(self, lease_s: float) -> str:
        from opensandbox.adapters.factory import AdapterFactory
        from opensandbox.models.sandboxes import Host, SandboxImageSpec, Volume
        from opensandbox.models.sandboxes import NetworkPolicy as EgressPolicy

        spec = self._spec
        resource: dict[str, str] = {}
        if spec.resources.cpu is not None:
            resource["cpu"] = f"{round(spec.resources.cpu * 1000)}m"
        if spec.resources.memory_mib is not None:
            resource["memory"] = f"{int(spec.resources.memory_mib)}Mi"
        self._late_s = _LATE_S
        try:
            # Not `Sandbox.create`, which sets limits on every box even if the spec has none.
            config = await self._connection.sdk_config(timeout_s=_CREATE_TIMEOUT_S)
            service = AdapterFactory(config).create_sandbox_service()
            # A large image would fail by the default, time after time, so it leaves out the server's pull.
            with paused(self._deadline if spec.ready_timeout_s is None else None):
                box = await service.create_sandbox(
                    SandboxImageSpec(str(self._image)),
                    list(spec.entrypoint or _IDLE),
                    {str(name): str(value) for name, value in spec.env.items()} if spec.entrypoint else {},
                    connection.labels_to_metadata(spec.metadata, key=self.key),
                    timedelta(seconds=lease_s),
                    resource,
                    EgressPolicy(default_action="deny", egress=[]) if _denies_network(spec) else None,
                    dict(spec.provider_options.get("extensions") or {}),
                    [
                        Volume(name=f"m{n}", host=Host(path=mount.source), mount_path=mount.target, read_only=True)
                        for n, mount in enumerate(spec.mounts)
                    ]
                    or None,
                )
        except sdk_errors() as error:
            # After a response of the server itself, no box can appear later; a refused request created no box at all.
            status = status_of(error)
            if status is not None and status not in (502, 503, 504):
                self._late_s = 0.0 if status >= 500 else None
            raise translate(
                error, f"creating a box of image '{self._image}'", kind=SandboxCreateError, image=self._image
            ) from error
        self.created, self._late_s = str(box.id), None
        if self._ttl_s < lease_s:
            async with errors_translated("setting the lease of a new box", kind=SandboxCreateError):
                await (await self._connection.manager()).renew_sandbox(box.id, timedelta(seconds=self._ttl_s))
        return str(box.id)

    async def _install_helper(self, sandbox_id: str, *, files: bool) -> OpenSandboxBox:
        """Write this call's helper and (with ``files``) the spec's files into the box, and finally the ready mark."""
        from opensandbox.models.filesystem import WriteEntry

        spec = self._spec
        directory = f"{self._config.box_directory.rstrip('/')}/{uuid.uuid4().hex[:12]}"
        box = OpenSandboxBox(self._connection, sandbox_id, directory)
        program = await asyncio.to_thread(helper_program, self._config.box_architecture)
        defaults = {"env": dict(spec.env), "workdir": spec.workdir or "", "user": spec.user or ""}
        async with errors_translated("making a new box ready", kind=SandboxCreateError):
            sdk = await box.sdk(timeout_s=self._left_s())
            entries = [
                WriteEntry(path=absolute(path), data=text.encode("utf-8", "surrogateescape"), mode=644)
                for path, text in (spec.files.items() if files else ())
            ]
            for name in ("in", "runs"):
                entries.append(WriteEntry(path=f"{box.directory}/{name}/.keep", data=b"", mode=600))
            data = json.dumps(defaults).encode("utf-8", "surrogateescape")
            entries.append(WriteEntry(path=f"{box.directory}/box.json", data=data, mode=600))
            entries.append(WriteEntry(path=box.tool, data=program, mode=755))
            entries.append(WriteEntry(path=f"{box.directory}/empty.tar", data=END_OF_ARCHIVE, mode=600))
            await sdk.files.write_files(entries)
            await sdk.files.write_file(self._ready_mark, b"", mode=600)
            if _denies_network(spec):
                _check_egress(await self._connection.egress(sdk))
        await self._verify(box)
        return box

    @property
    def _ready_mark(self) -> str:
        # The name contains the key of this create: the image may contain the mark of the box that it was made from.
        return f"{self._config.box_directory.rstrip('/')}/ready-{connection.digest(self.key)}"

    async def _verify(self, box: OpenSandboxBox) -> None:
        """Make the spec's working directory, and so check that the box runs the helper: a missing program, a wrong
        processor type or an ended entry point must fail the create and not a later command."""
        unpacking = {"path": absolute(self._spec.workdir or "/"), "tar": f"{box.directory}/empty.tar"}
        try:
            result = await run_helper(box, "unpack", await request_argument(box, unpacking))
        except SandboxLostError as error:
            info = await box.info()
            state = "gone" if info is None else f"{info.status.state}: {info.status.message}"
            raise SandboxCreateVerificationError(
                f"opensandbox: the new box does not run {box.tool} (it is {state}); its image "
                f"'{self._image}' must have /bin/sh, its entry point must go on, and box_architecture be right"
            ) from error
        if result["outcome"] != "exited":
            raise SandboxCreateVerificationError(f"opensandbox: the new box is not usable: {result.get('error')}")

    async def _adopt(self, sandbox_id: str) -> OpenSandboxBox:
        """Use a box that another create made. Wait only `_ADOPT_S` for that create's ready mark, because its process
        may have died; then make the box ready here."""
        patience = time.monotonic() + min(_ADOPT_S, self._left_s())
        box = OpenSandboxBox(self._connection, sandbox_id, self._config.box_directory.rstrip("/"))
        while True:
            try:
                sdk = await box.sdk(timeout_s=self._left_s())
                await sdk.files.get_file_info([self._ready_mark])
                return await self._install_helper(sandbox_id, files=False)
            except sdk_errors() as error:
                async with errors_translated(f"waiting for box {sandbox_id}", kind=SandboxCreateError):
                    ended = has_ended(await box.info())
                if ended:
                    raise translate(error, f"waiting for box {sandbox_id}", kind=SandboxCreateError) from error
            if time.monotonic() > patience:
                return await self._install_helper(sandbox_id, files=True)
            await asyncio.sleep(0.1)

    async def discard(self) -> None:
        """Destroy the box that this object created. If the server's response was lost, search for the box by its key
        until the time in which it can appear is over.

        Raises:
            SandboxError: the box could not be destroyed; it ends with its lease.
        """
        if self.created is not None:
            await self._connection.kill(self.created)
            self.created = None
        if self._late_s is None or self._spec.idempotency_key:
            # Another create may use a box with an idempotency key by now, so let its lease end it.
            return
        deadline = time.monotonic() + self._late_s
        last_error: SandboxError | None = None
        while True:
            try:
                boxes = await self._boxes()
                for info in boxes:
                    await self._connection.kill(info.id)
                last_error = None
                if boxes:
                    return
            except sdk_errors() as error:
                last_error = translate(error, "looking for a box that was not wanted any more")
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.5)
        if last_error is not None:
            raise last_error


def _check_egress(sidecar: Mapping[str, Any]) -> None:
    """Raise `SandboxCreateVerificationError` if a box's egress sidecar lets any traffic out."""
    policy = sidecar.get("policy") or {}
    if str(policy.get("defaultAction")).lower() != "deny" or policy.get("egress"):
        raise SandboxCreateVerificationError(
            "opensandbox: the box's egress sidecar does not deny everything, as network: none asks for"
        )
    mode = str(sidecar.get("enforcementMode") or "unknown")
    if "nft" not in mode:
        raise SandboxCreateVerificationError(
            f"opensandbox: the box's egress sidecar denies names alone (its mode is '{mode}'), not addresses; "
            'set mode = "dns+nft" in the server\'s [egress]'
        )


def _denies_network(spec: SandboxSpec) -> bool:
    return spec.network == NetworkPolicy.NONE.value


def helper_program(architecture: str | None) -> bytes:
    """The helper program for boxes. Raises `SandboxCreateError` if there is none for ``architecture``."""
    try:
        from nemo_gym_boxtool import program

        return program(architecture)
    except ModuleNotFoundError as error:
        raise SandboxCreateError(
            "opensandbox: the program that works inside boxes is missing: pip install 'nemo-gym-suite[opensandbox]',"
            " or scripts/setup and scripts/build-boxtool in a clone"
        ) from error
    except FileNotFoundError as error:
        raise SandboxCreateError(f"opensandbox: {error} (box_architecture)") from error
