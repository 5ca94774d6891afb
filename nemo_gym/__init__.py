"""Compose agent × environment × sandbox × topology × model, and turn dataset rows into trustworthy rollouts.

The names below are the public API. They are imported on first use, so that ``import nemo_gym`` costs nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gym.agent.server import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from nemo_gym.cli.program import RunResult, run, run_async, start, start_async
    from nemo_gym.contract.errors import NemoGymError
    from nemo_gym.contract.session import (
        ActRequest,
        ActResponse,
        AgentOutcome,
        Artifact,
        InferenceEndpoint,
        RolloutIdentity,
        SessionDescriptor,
        Topology,
    )
    from nemo_gym.contract.verdict import FailureKind, Finding, Verdict
    from nemo_gym.environment.server import BaseResourcesServerConfig, SimpleResourcesServer
    from nemo_gym.gateway.model_server import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
    from nemo_gym.server_utils import ServerClient

_MODULES: dict[str, tuple[str, ...]] = {
    "nemo_gym.cli.program": ("RunResult", "run", "run_async", "start", "start_async"),
    "nemo_gym.environment.server": ("BaseResourcesServerConfig", "SimpleResourcesServer"),
    "nemo_gym.agent.server": ("BaseResponsesAPIAgentConfig", "SimpleResponsesAPIAgent"),
    "nemo_gym.gateway.model_server": ("BaseResponsesAPIModelConfig", "SimpleResponsesAPIModel"),
    "nemo_gym.contract.errors": ("NemoGymError",),
    "nemo_gym.server_utils": ("ServerClient",),
    "nemo_gym.contract.session": (
        "ActRequest",
        "ActResponse",
        "AgentOutcome",
        "Artifact",
        "InferenceEndpoint",
        "RolloutIdentity",
        "SessionDescriptor",
        "Topology",
    ),
    "nemo_gym.contract.verdict": ("FailureKind", "Finding", "Verdict"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

# Folders, under the names NeMo Gym plugins import. Without its source tree, the suite uses the current directory.
ROOT_DIR = Path(__file__).resolve().parent
PARENT_DIR = ROOT_DIR.parent
WORKING_DIR = PARENT_DIR if (PARENT_DIR / "pyproject.toml").exists() else Path.cwd()
CACHE_DIR = WORKING_DIR / "cache"
RESULTS_DIR = WORKING_DIR / "results"
NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME = "NEMO_GYM_EXTRA_ROOTS"

__all__ = [
    "CACHE_DIR",
    "PARENT_DIR",
    "RESULTS_DIR",
    "ROOT_DIR",
    "WORKING_DIR",
    "ActRequest",
    "ActResponse",
    "AgentOutcome",
    "Artifact",
    "BaseResourcesServerConfig",
    "BaseResponsesAPIAgentConfig",
    "BaseResponsesAPIModelConfig",
    "FailureKind",
    "Finding",
    "InferenceEndpoint",
    "NemoGymError",
    "RolloutIdentity",
    "RunResult",
    "ServerClient",
    "SessionDescriptor",
    "SimpleResourcesServer",
    "SimpleResponsesAPIAgent",
    "SimpleResponsesAPIModel",
    "Topology",
    "Verdict",
    "run",
    "run_async",
    "start",
    "start_async",
]


def _resolve_under_cwd_or_install(path: str | Path) -> Path:
    """NeMo Gym's name for finding a configuration's relative path: under ``NEMO_GYM_EXTRA_ROOTS``, the working
    directory, the installation. A path that does not exist is taken relative to the working directory."""
    from nemo_gym.config.files import plugin_roots

    relative = Path(path).expanduser()
    if relative.is_absolute():
        return relative
    candidates = (root / relative for root in plugin_roots())
    return next((candidate for candidate in candidates if candidate.exists()), Path.cwd() / relative)


def component_search_roots() -> list[Path]:
    """NeMo Gym's name for `nemo_gym.config.files.plugin_roots`."""
    from nemo_gym.config.files import plugin_roots

    return plugin_roots()


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]
