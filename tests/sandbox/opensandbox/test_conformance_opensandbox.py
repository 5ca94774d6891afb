"""The opensandbox provider passes the conformance suite on a real server with a real Docker Engine."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.sandbox.conformance import SandboxConformance
from tests.sandbox.opensandbox.server import Server


@pytest.mark.full
class TestOpenSandboxConformance(SandboxConformance):
    """Boxes reached at the addresses that the server publishes."""

    @pytest.fixture
    def provider_config(self, real_server: Server) -> dict[str, Any]:
        return real_server.provider()

    @pytest.fixture
    def image(self) -> str | None:
        return None


@pytest.mark.full
class TestProxiedOpenSandboxConformance(SandboxConformance):
    """Boxes reached through the server."""

    @pytest.fixture
    def provider_config(self, real_server: Server) -> dict[str, Any]:
        return real_server.provider(use_server_proxy=True)

    @pytest.fixture
    def image(self) -> str | None:
        return None
