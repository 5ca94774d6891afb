"""The `local` sandbox provider: boxes of bubblewrap, overlayfs, cgroups and namespaces, with no daemon to install.

One supervisor process per state directory holds the boxes and enforces their leases. Clients start the supervisor when
they need it, and it exits when it has neither boxes nor clients. The supervisor runs isolated from all installed
packages, so its half of this package uses only the standard library, and the client's half is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.local.provider import LocalProvider

__all__ = ["LocalProvider"]


def __getattr__(name: str) -> Any:
    if name == "LocalProvider":
        from nemo_gym.sandbox.providers.local.provider import LocalProvider

        return LocalProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
