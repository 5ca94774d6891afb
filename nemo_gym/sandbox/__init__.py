"""Sandboxes: one interface, many backends. Names are exported lazily so that importing this package stays cheap."""

# ruff: noqa: F401  the imports below only tell type checkers what __getattr__ returns

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.config.sandbox_blocks import list_providers, resolve_provider_config, resolve_provider_metadata
    from nemo_gym.contract.errors import (
        SandboxArchiveError,
        SandboxCapabilityError,
        SandboxCreateError,
        SandboxCreateVerificationError,
        SandboxError,
        SandboxLostError,
    )
    from nemo_gym.contract.sandbox import Door, Mount, NetworkPolicy, SandboxResources, SandboxRole, SandboxSpec
    from nemo_gym.sandbox.base import (
        Connectable,
        ExecEnd,
        ExecOutcome,
        ExecOutput,
        ExecProcess,
        ExecRequest,
        SandboxCapabilities,
        SandboxEndpoint,
        SandboxExecResult,
        SandboxHandle,
        SandboxInfo,
        SandboxProvider,
        SandboxStatus,
        SupportsEndpoint,
        SupportsLoopbackDoor,
        SupportsSnapshot,
    )
    from nemo_gym.sandbox.facade import (
        AsyncSandbox,
        Sandbox,
        create_provider,
        get_provider_class,
        keep_renewed,
        register_provider,
    )
    from nemo_gym.sandbox.utils import cpu_cap_env, rewrite_image

    # NeMo Gym's names for the same classes.
    ConnectableProvider = Connectable
    SupportsSandboxEndpoint = SupportsEndpoint
    ExecResult = SandboxExecResult

_MODULES: dict[str, tuple[str, ...]] = {
    "nemo_gym.contract.errors": (
        "SandboxArchiveError",
        "SandboxCapabilityError",
        "SandboxCreateError",
        "SandboxCreateVerificationError",
        "SandboxError",
        "SandboxLostError",
    ),
    "nemo_gym.contract.sandbox": (
        "Door",
        "Mount",
        "NetworkPolicy",
        "SandboxResources",
        "SandboxRole",
        "SandboxSpec",
    ),
    "nemo_gym.sandbox.base": (
        "Connectable",
        "ExecEnd",
        "ExecOutcome",
        "ExecOutput",
        "ExecProcess",
        "ExecRequest",
        "SandboxCapabilities",
        "SandboxEndpoint",
        "SandboxExecResult",
        "SandboxHandle",
        "SandboxInfo",
        "SandboxProvider",
        "SandboxStatus",
        "SupportsEndpoint",
        "SupportsLoopbackDoor",
        "SupportsSnapshot",
    ),
    "nemo_gym.config.sandbox_blocks": ("list_providers", "resolve_provider_config", "resolve_provider_metadata"),
    "nemo_gym.sandbox.facade": (
        "AsyncSandbox",
        "Sandbox",
        "create_provider",
        "get_provider_class",
        "keep_renewed",
        "register_provider",
    ),
    "nemo_gym.sandbox.utils": ("cpu_cap_env", "rewrite_image"),
}
_ALIASES = {
    "ConnectableProvider": "Connectable",
    "SupportsSandboxEndpoint": "SupportsEndpoint",
    "ExecResult": "SandboxExecResult",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_HOME, *_ALIASES]  # noqa: PLE0604  all of them are strings


def __getattr__(name: str) -> Any:
    canonical = _ALIASES.get(name, name)
    if canonical not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[canonical]), canonical)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
