"""The conformance suite: tests of what every sandbox provider must do. A provider's author subclasses them.

    class TestMyProvider(SandboxConformance):
        @pytest.fixture
        def provider_config(self) -> dict:      # as in `sandbox_provider`; plain data, also used by child processes
            return {"my_provider": {"url": "..."}}

        @pytest.fixture
        def image(self) -> str | None:          # has sh, coreutils, setsid, python3
            return None

It needs pytest and pytest-asyncio. A check is skipped only if the provider's capabilities declare that an ability is
missing; the skip message shows the reason given there.
"""

from __future__ import annotations

import pytest

_PARTS = ("base", "lifecycle", "execution", "files", "network")
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from nemo_gym.sandbox.conformance.base import AbilityChecks  # noqa: E402  after the rewrite is registered
from nemo_gym.sandbox.conformance.execution import ExecChecks, LimitChecks  # noqa: E402
from nemo_gym.sandbox.conformance.files import ArchiveChecks, FileChecks  # noqa: E402
from nemo_gym.sandbox.conformance.lifecycle import LifecycleChecks, OwnershipChecks  # noqa: E402
from nemo_gym.sandbox.conformance.network import NetworkChecks  # noqa: E402


class SandboxConformance(
    LifecycleChecks,
    ExecChecks,
    LimitChecks,
    FileChecks,
    ArchiveChecks,
    NetworkChecks,
    OwnershipChecks,
    AbilityChecks,
):
    """All checks. While writing a provider, you can use each of the base classes alone."""


__all__ = ["SandboxConformance"]
