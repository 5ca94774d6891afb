"""The provider behind the broker, asked so that whatever it leaves can be found again.

Every box carries the broker's identity and its own id as labels. Both are enough to find it, and to destroy it, when
nothing else is known.
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
"""In the environment of a command, by which one that outlived its broker is found."""
_STRAYS_TIMEOUT_S = 30.0

# Stopped first, so that nothing forks between being listed and being killed. A process of another name space, or one
# that cleared its environment, is not found: the box's end is its end.
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
        """What the provider can do here; asked once. Raises `SandboxError` when the backend does not answer."""
        if self._capabilities is None:
            self._capabilities = await asyncio.to_thread(lambda: self.provider.capabilities)
        return self._capabilities

    def labelled(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """The spec as the provider gets it: found by label, and created once however often it is asked for."""
        metadata = {**spec.metadata, BoxLabel.MANAGED: "true", BROKER_LABEL: self.identity, SANDBOX_LABEL: sandbox_id}
        return spec.replace(metadata=metadata, idempotency_key=f"{self.identity}/{sandbox_id}")

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> SandboxHandle:
        return await self.provider.create(self.labelled(sandbox_id, spec))

    async def creates_once(self) -> bool:
        """Whether a second create with the same key gives the same box."""
        return "idempotent_create" not in (await self.capabilities()).reasons

    async def describe(self, handle: SandboxHandle) -> bytes | None:
        """From which `connect` finds the box after a restart; ``None`` where the provider cannot connect."""
        if not isinstance(self.provider, Connectable):
            return None
        return orjson.dumps(await self.provider.serialize_handle(handle, scope="owner"))

    async def connect(self, descriptor: bytes) -> SandboxHandle:
        """Raises `SandboxLostError` when the box is gone."""
        require(self.provider, Connectable, why="to go on with boxes after a restart")
        assert isinstance(self.provider, Connectable)
        return await self.provider.connect(orjson.loads(descriptor))

    async def destroy(self, sandbox_id: str, handle: SandboxHandle | None, *, by_label: bool = True) -> None:
        """Destroy the box: by its handle where there is one, and whatever carries its label, with ``by_label`` or
        without a handle. Raises `SandboxError` when it may still be there."""
        if handle is not None:
            await self.provider.close(handle)
        if handle is None or by_label:
            await self.provider.reap({BROKER_LABEL: self.identity, SANDBOX_LABEL: sandbox_id})

    async def judged(self, error: SandboxError, handle: SandboxHandle, code: str = "backend_refused") -> NemoGymError:
        """What an error of the provider's says of the request. One of no particular kind, while the box runs well, is
        the request's own fault."""
        if type(error) is not SandboxError or error.retryable:
            return error
        try:
            status = await self.provider.status(handle)
        except SandboxError:
            return error
        return BrokerError(code, error.message) if status is SandboxStatus.RUNNING else error

    async def inventory(self) -> dict[str, SandboxInfo]:
        """This broker's boxes by its own ids, as the backend knows them."""
        found: dict[str, SandboxInfo] = {}
        for info in await self.provider.list({BROKER_LABEL: self.identity}):
            sandbox_id = info.labels.get(SANDBOX_LABEL, "")
            # A provider without idempotent create may have two of one id; either is enough to reap both by label.
            found[sandbox_id] = info
        return found

    async def kill_strays(self, handle: SandboxHandle, exec_ids: list[str]) -> None:
        """Kill leftover commands that have no reader."""
        script = ["/bin/sh", "-c", _KILL_STRAYS, "sh", EXEC_VARIABLE, "|".join(exec_ids)]
        with contextlib.suppress(SandboxLostError):
            result = await self.provider.exec(handle, script, timeout_s=_STRAYS_TIMEOUT_S, user="root")
            if not result.ok:
                log.warning("stray_commands_left", sandbox_id=handle.sandbox_id, outcome=result.outcome)

    # -- doors ---------------------------------------------------------------------------------------------------

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        """Raises `SandboxCapabilityError` where the provider has no doors, `SandboxError` where it cannot open it."""
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
