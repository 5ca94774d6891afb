"""What a client of the broker knows of one box: where it is, by which right, and what went through its doors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_gym.contract.errors import SandboxError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.wire.doors import DoorsView


@dataclass
class RemoteBox:
    """``raw`` of a handle of the remote provider."""

    broker_url: str
    sandbox_id: str
    token: str = field(repr=False)
    scope: LeaseScope
    expires_at: float
    """Of the lease, by the broker's clock, as last heard."""
    lent: set[str] = field(default_factory=set)
    """Ids of leases that were minted by this handle."""
    doors: dict[str, DoorStatistics] = field(default_factory=dict)
    """Doors that this side knows to be open, and what was last heard of them."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def url(self, path: str) -> str:
        return self.broker_url + path

    def heard(self, view: DoorsView) -> None:
        """Take over the broker's counts, in the objects that others already hold."""
        for name, model in view.doors.items():
            if model is None:
                self.doors.pop(name, None)
            else:
                known = self.doors.setdefault(name, DoorStatistics())
                known.__dict__.update(model.to_statistics().__dict__)


def box_of(handle: SandboxHandle) -> RemoteBox:
    """Raises `SandboxError` for another provider's handle."""
    if not isinstance(handle.raw, RemoteBox):
        raise SandboxError(f"sandbox {handle.sandbox_id} is not a handle of the remote provider")
    return handle.raw
