"""One container as this process holds it: what `SandboxHandle.raw` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker.names import spec_env
from nemo_gym.sandbox.providers.docker.processes import BoxControl

if TYPE_CHECKING:
    from nemo_gym.sandbox.doors import DoorServer
    from nemo_gym.sandbox.egress import EgressProxy
    from nemo_gym.sandbox.providers.docker.execution import DockerExec


@dataclass
class DockerBox:
    container_id: str
    name: str
    """The container's name in the engine; changes with each renewal."""
    env: Mapping[str, str]
    """The spec's environment, added to every exec."""
    init_pid: int
    """The host's number of the box's first process; 0 when the engine's processes are not visible here."""
    control: BoxControl | None
    """``None`` where the host does not show the box's processes."""
    has_memory_limit: bool
    running: dict[str, DockerExec] = field(default_factory=dict)
    doors: dict[str, DoorServer | EgressProxy] = field(default_factory=dict)

    @classmethod
    def from_inspection(cls, found: Mapping[str, Any], *, local: bool) -> DockerBox:
        """Build from the engine's description of a running container."""
        pid = int(found["State"].get("Pid") or 0) if local else 0
        return cls(
            container_id=found["Id"],
            name=str(found["Name"]).lstrip("/"),
            env=spec_env(found["Config"].get("Labels") or {}),
            init_pid=pid,
            control=BoxControl.find(pid, found["Id"]) if pid else None,
            has_memory_limit=bool((found.get("HostConfig") or {}).get("Memory")),
        )


def box_of(handle: SandboxHandle) -> DockerBox:
    if not isinstance(handle.raw, DockerBox):
        raise SandboxError(
            f"sandbox handle {handle.sandbox_id} of '{handle.provider_name}' is not the docker provider's"
        )
    return handle.raw
