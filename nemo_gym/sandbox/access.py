"""The module name under which NeMo Gym looks for lent boxes; see `nemo_gym.contract.episodes`."""

from nemo_gym.contract.episodes import (
    DirectSandboxConnection,
    SandboxAccess,
)

__all__ = [
    "DirectSandboxConnection",
    "SandboxAccess",
]
