"""A folder of its own for each test, with plugins whose sources are real and tiny."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition

ENVIRONMENT_APP = """
from typing import ClassVar

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer


class MathConfig(BaseResourcesServerConfig):
    strictness: int = 1
    judge_model_server: dict | None = None


class MathServer(SimpleResourcesServer):
    config: MathConfig
    topologies: ClassVar = ("none", "agent_in_env")


if __name__ == "__main__":
    MathServer.run_webserver()
"""
AGENT_APP = """
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.session import Topology


class SolverConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    max_steps: int = 3
    sandbox_provider: str | None = None


class Solver(SimpleResponsesAPIAgent):
    config: SolverConfig
    topologies = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.NONE)


if __name__ == "__main__":
    Solver.run_webserver()
"""
MODEL_APP = """
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel


class EchoConfig(BaseResponsesAPIModelConfig):
    base_url: str = ""
    api_key: str = ""
    temperature: float = 1.0


class Echo(SimpleResponsesAPIModel):
    config: EchoConfig


if __name__ == "__main__":
    Echo.run_webserver()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who has one environment, one agent and one model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)
    for folder, source in (
        ("resources_servers/mathy", ENVIRONMENT_APP),
        ("responses_api_agents/solver", AGENT_APP),
        ("responses_api_models/echo", MODEL_APP),
    ):
        (tmp_path / folder / "configs").mkdir(parents=True)
        (tmp_path / folder / "app.py").write_text(source)
    write(
        tmp_path / "configs/model/echo.yaml", policy_model={"responses_api_models": {"echo": {"entrypoint": "app.py"}}}
    )
    write(
        tmp_path / "configs/environment/mathy.yaml", mathy={"resources_servers": {"mathy": {"entrypoint": "app.py"}}}
    )
    write(
        tmp_path / "configs/agent/solver.yaml",
        solver={
            "responses_api_agents": {
                "solver": {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": "${composition.environment}"},
                    "model_server": {"type": "responses_api_models", "name": "${composition.model}"},
                }
            }
        },
    )
    return tmp_path


def write(path: Path, text: str | None = None, **values: Any) -> Path:
    """A YAML file of ``values``, or of ``text``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text) if text is not None else yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def composed(root: Path) -> Callable[..., Composition]:
    """Compose with the working directory as the only root."""
    return lambda *words: compose(words, roots=[root])
