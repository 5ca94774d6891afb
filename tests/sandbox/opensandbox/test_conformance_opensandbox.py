"""The opensandbox provider passes the conformance suite: on the double of the server, and on a real one."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.sandbox.conformance import SandboxConformance
from tests.sandbox.opensandbox.double import API_KEY
from tests.sandbox.opensandbox.server import Server


class TestDoubleConformance(SandboxConformance):
    """The double over local boxes, which do not see their control groups (so no command is known to have run out of
    memory), and have no right to switch users."""

    @pytest.fixture
    def provider_config(self, double_url: str) -> dict[str, Any]:
        return {
            "opensandbox": {
                "url": double_url,
                "api_key": API_KEY,
                "default_image": "host",
                "use_server_proxy": True,
                "egress_policy": True,
                "limits": ["cpu"],
                "exec_user": False,
            }
        }

    @pytest.fixture
    def image(self) -> str | None:
        return None


@pytest.mark.full
class TestOpenSandboxConformance(SandboxConformance):
    """Boxes reached at the addresses that the server publishes, kept from the network by a sidecar."""

    none_is_filtered = True

    @pytest.fixture
    def provider_config(self, real_server: Server) -> dict[str, Any]:
        return real_server.provider()

    @pytest.fixture
    def image(self) -> str | None:
        return None


@pytest.mark.full
class TestProxiedOpenSandboxConformance(SandboxConformance):
    """Boxes reached through the server, with a network."""

    @pytest.fixture
    def provider_config(self, real_server: Server) -> dict[str, Any]:
        return real_server.provider(use_server_proxy=True, egress_policy=False)

    @pytest.fixture
    def image(self) -> str | None:
        return None
