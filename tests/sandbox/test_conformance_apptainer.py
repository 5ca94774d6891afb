"""The apptainer provider passes the conformance suite with the real Apptainer, where that is installed."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.sandbox.conformance import SandboxConformance
from tests.sandbox.apptainer_program import apptainer

__all__ = ["apptainer"]


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("boxes"))


class TestApptainerConformance(SandboxConformance):
    @pytest.fixture
    def provider_config(self, apptainer: str, state_dir: str) -> dict[str, Any]:
        return {"apptainer": {"apptainer": apptainer, "state_dir": state_dir, "linger_s": 3}}

    @pytest.fixture
    def image(self) -> str | None:
        return None
