"""NeMo Gym's module name for the provider contract; new code imports from `nemo_gym.sandbox`."""

from nemo_gym.contract.errors import SandboxCreateError, SandboxCreateVerificationError
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import Connectable as ConnectableProvider
from nemo_gym.sandbox.base import SandboxExecResult, SandboxHandle, SandboxProvider, SandboxStatus
from nemo_gym.sandbox.base import SupportsEndpoint as SupportsSandboxEndpoint

__all__ = [
    "ConnectableProvider",
    "SandboxCreateError",
    "SandboxCreateVerificationError",
    "SandboxExecResult",
    "SandboxHandle",
    "SandboxProvider",
    "SandboxResources",
    "SandboxSpec",
    "SandboxStatus",
    "SupportsSandboxEndpoint",
]
