"""Boxes in which containers can be made: only where they were asked for, and then they can."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.sandbox.conformance.base import AbilityChecks
from nemo_gym.sandbox.conformance.lifecycle import LifecycleChecks
from nemo_gym.sandbox.providers.docker.engine import DockerConfig


class TestDockerThatNests(AbilityChecks):
    """The settings that `nested_containers` is declared for really make it possible."""

    @pytest.fixture
    def provider_config(self, docker_engine: str) -> dict[str, Any]:
        return {"docker": {"base_url": docker_engine, "capabilities": ["SYS_ADMIN"], "seccomp": "engine"}}

    @pytest.fixture
    def image(self) -> str | None:
        return None

    test_box_is_as_alive_as_any = LifecycleChecks.test_create_gives_a_running_box_that_executes


@pytest.mark.parametrize(
    ("settings", "nests"),
    [
        ({}, False),
        ({"capabilities": ["SYS_ADMIN"]}, False),
        ({"seccomp": "engine"}, False),
        ({"capabilities": ["NET_ADMIN"], "seccomp": "engine"}, False),
        ({"capabilities": ["cap_sys_admin"], "seccomp": "engine"}, True),
        ({"capabilities": ["ALL"], "seccomp": "engine"}, True),
    ],
)
def test_nesting_is_declared_for_the_settings_that_allow_it(settings: dict[str, Any], nests: bool) -> None:
    assert DockerConfig.from_mapping(settings).lets_boxes_nest is nests
