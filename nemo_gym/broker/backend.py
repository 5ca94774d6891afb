"""The provider behind the broker, with labels on every box so that no box is ever lost.

Every box carries the broker's identity and its own id as labels. These two suffice to find and destroy a box when
nothing else is known about it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import orjson
import structlog

from nemo_gym.contract.errors import NemoGymError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Door, SandboxSpec
from nemo_gym.sandbox.base import (
    BoxLabel,
    Connectable,
    SandboxCapabilities,
    SandboxHandle,
    SandboxInfo,
    SandboxProvider,
    SandboxStatus,
    SupportsDoorStatistics,
    SupportsLoopbackDoor,
    overrun_of,
    require,
)
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.wire.problems import BrokerError

log = structlog.get_logger(__name__)

BROKER_LABEL = "nemo_gym.broker"
"""Identity of the broker that made a box."""
SANDBOX_LABEL = "nemo_gym.sandbox"
"""The broker's id of a box; the backend has its own."""
EXEC_VARIABLE = "NEMO_GYM_BROKER_EXEC"
"""Environment variable of every command, which identifies the processes of a command that outlived its broker."""
ENDED = (SandboxStatus.STOPPED, SandboxStatus.ERROR)
_STRAYS_TIMEOUT_S = 30.0

# Stop all matching processes first, so that none forks between being listed and being killed. A process in another
# namespace, or one that cleared its environment, is not found; it ends with the box.
_KILL_STRAYS = """
for signal in STOP KILL; do
  for directory in /proc/[0-9]*; do
    while IFS= read -r line; do
      case "$line" in "$1="*) kill -$signal "${directory#/proc/}" ;; esac
    done <<EOF
$(tr '\\0' '\\n' < "$directory/environ" | grep "^$1=" | grep -E "^$1=($2)\\$")
EOF
  done
done 2>/dev/null
true
"""


class Backend:
    """One provider, with the labels of one broker."""

    def __init__(self, provider: SandboxProvider, identity: str) -> None:
        self.provider = provider
        self.identity = identity
        self._capabilities: SandboxCapabilities | None = None

    @property
    def name(self) -> str:
        return self.provider.name

    async def capabilities(self) -> SandboxCapabilities:
        """Return the provider's capabilities, cached after the first call. Raises `SandboxError` if that one fails."""
        if self._capabilities is None:
            self._capabilities = await asyncio.to_thread(lambda: self.provider.capabilities)
        return self._capabilities

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> SandboxHandle:
        """Create a box with the labels that identify it, and a key with which repeated creates yield one box."""
        metadata = {**spec.metadata, BoxLabel.MANAGED: "true", BROKER_LABEL: self.identity, SANDBOX_LABEL: sandbox_id}
        key = f"{self.identity}/{sandbox_id}"
        return await self.provider.create(spec.replace(metadata=metadata, idempotency_key=key))

    async def creates_once(self) -> bool:
        """Return whether a second create with the same key returns the same box."""
        return "idempotent_create" not in (await self.capabilities()).reasons

    async def describe(self, handle: SandboxHandle) -> bytes | None:
        """Return the descriptor with which `connect` finds the box after a restart; ``None`` if the provider cannot
        connect."""
        if not isinstance(self.provider, Connectable):
            return None
        return orjson.dumps(await self.provider.serialize_handle(handle, scope="owner"))

    async def connect(self, descriptor: bytes) -> SandboxHandle:
        """Connect to a box of an earlier process. Raises `SandboxLostError` if the box is gone."""
        require(self.provider, Connectable, why="to go on with boxes after a restart")
        assert isinstance(self.provider, Connectable)
        return await self.provider.connect(orjson.loads(descriptor))

    async def destroy(self, sandbox_id: str, handle: SandboxHandle | None, *, by_label: bool = True) -> None:
        """Destroy the box by its handle, if there is one. Without a handle, or with ``by_label``, also destroy every
        box that carries its label. Raises `SandboxError` if the box may still exist."""
        if handle is not None:
            await self.provider.close(handle)
        if handle is None or by_label:
            await self.provider.reap({BROKER_LABEL: self.identity, SANDBOX_LABEL: sandbox_id})

    async def judged(self, error: SandboxError, handle: SandboxHandle, code: str = "backend_refused") -> NemoGymError:
        """Decide whether the request caused a provider's error. A plain `SandboxError` that is not retryable, while
        the box runs, becomes `BrokerError` ``code``, which blames the request. Other errors are returned unchanged."""
        if type(error) is not SandboxError or error.retryable:
            return error
        try:
            status = await self.provider.status(handle)
        except SandboxError:
            return error
        return BrokerError(code, error.message) if status is SandboxStatus.RUNNING else error

    async def overrun(self, handle: SandboxHandle) -> str | None:
        """Return what a box exceeded so that the provider ended it; ``None`` if that is not known to be so."""
        try:
            return await overrun_of(self.provider, handle)
        except SandboxError as error:
            log.warning("overrun_not_told", sandbox_id=handle.sandbox_id, error=str(error)[:500])
            return None

    async def has_ended(self, handle: SandboxHandle) -> bool:
        """Return whether the provider reports that a box no longer runs, or that it is ending it for an overrun."""
        try:
            status = await self.provider.status(handle)
        except SandboxError:
            return False
        return status in ENDED or await self.overrun(handle) is not None

    async def inventory(self) -> dict[str, SandboxInfo]:
        """Return the broker's own id → the backend's information, for each of this broker's boxes."""
        # A provider without idempotent create may have two boxes with one id; a reap by label destroys both.
        infos = await self.provider.list({BROKER_LABEL: self.identity})
        return {info.labels.get(SANDBOX_LABEL, ""): info for info in infos}

    async def kill_strays(self, handle: SandboxHandle, exec_ids: list[str]) -> None:
        """Kill the commands that an earlier broker process left running, whose output nobody reads."""
        script = ["/bin/sh", "-c", _KILL_STRAYS, "sh", EXEC_VARIABLE, "|".join(exec_ids)]
        with contextlib.suppress(SandboxLostError):
            result = await self.provider.exec(handle, script, timeout_s=_STRAYS_TIMEOUT_S, user="root")
            if not result.ok:
                log.warning("stray_commands_left", sandbox_id=handle.sandbox_id, outcome=result.outcome)

    # -- doors ---------------------------------------------------------------------------------------------------

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        """Open a door. Raises `SandboxCapabilityError` if the provider has no doors, `SandboxError` if it fails."""
        require(self.provider, SupportsLoopbackDoor, why=f"to open the door '{door.name}'")
        assert isinstance(self.provider, SupportsLoopbackDoor)
        await self.provider.open_door(handle, door)

    async def close_door(self, handle: SandboxHandle, name: str) -> None:
        if isinstance(self.provider, SupportsLoopbackDoor):
            await self.provider.close_door(handle, name)

    @property
    def counts_doors(self) -> bool:
        return isinstance(self.provider, SupportsDoorStatistics)

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        if isinstance(self.provider, SupportsDoorStatistics):
            return self.provider.door_statistics(handle)
        return {}

    async def aclose(self) -> None:
        try:
            await self.provider.aclose()
        except SandboxError as error:
            log.warning("backend_close_failed", error=str(error))
