"""Configuration of the swe_bench environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.config_types import CommandPath
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.contract.session import Topology

DEFAULT_PROMPT = """\
The repository {repo} is checked out in {workdir}. Please resolve this issue in its source code:

{problem_statement}

Change whatever the issue needs, and keep everything else working. The tests that decide are not in the repository;
changes to the project's own tests are not counted. Leave your changes in the working tree."""


class BoxResources(BaseModel):
    """Limits of one box; what is not given is the provider's default."""

    model_config = ConfigDict(extra="forbid")

    cpu: float | None = Field(None, gt=0)
    memory_mib: int | None = Field(None, gt=0)
    disk_gib: float | None = Field(None, gt=0)
    pids: int | None = Field(None, gt=0)
    unlimited: tuple[Literal["cpu", "memory_mib", "disk_gib", "pids"], ...] = ()
    """Limits that the box shall not have, not by default either."""

    def to_resources(self) -> SandboxResources:
        return SandboxResources(**self.model_dump())


class SweBenchConfig(BaseResourcesServerConfig):
    """Where tasks and evaluations run, and how strictly attempts are judged."""

    sandbox_provider: str | dict[str, Any]
    """A sandbox block's name, or ``{provider: settings}``; holds the prepared images."""
    topology: Topology = Topology.AGENT_IN_ENV
    """Default of the descriptors; ``env_sandboxed`` and ``whole_interaction`` are served too."""
    prompt_template: str = DEFAULT_PROMPT
    """With ``{problem_statement}``, ``{repo}`` and ``{workdir}``; used where a row brings no prompt of its own."""
    work_resources: BoxResources = BoxResources()
    eval_resources: BoxResources = BoxResources()
    """With ``unlimited: [memory_mib]`` an evaluation out of memory is the host's failure, not the patch's."""
    provider_options: dict[str, Any] = Field(default_factory=dict)
    agent_wall_clock_s: float | None = Field(3600.0, gt=0)
    """Seconds an agent may work on one attempt; ``null`` leaves it to the agent's own configuration."""
    agent_max_turns: int | None = Field(None, gt=0)
    work_lease_s: float = Field(120.0, gt=0)
    """How long a working box lives without a word from the pipeline, where this server makes it (behind a broker)."""
    eval_timeout_s: float = Field(1800.0, gt=0)
    """Seconds one evaluation may take; the official harness's default."""
    eval_lease_s: float = Field(120.0, gt=0)
    """How long evaluation boxes outlive this server when it is killed."""
    max_concurrent_verifications: int = Field(8, ge=1)
    """Attempts judged at once; each has one box at a time."""
    max_patch_bytes: int = Field(64 * 1024 * 1024, gt=0)
    tamper_control: Literal["auto", "always", "off"] = "auto"
    """When to make the control runs that tell whether the tests caused the verdict: after an official run that
    resolves the instance, after every run, or never."""
    require_controls: Literal["strong", "weak", "none"] = "none"
    """How well every test to be fixed must be controlled; attempts at other rows end without a verdict
    (``controls_weak``)."""
    controls_dir: CommandPath | None = None
    """Where ``ng_prepare`` put the controls; ``null`` is ``~/.local/state/nemo-gym/swe-bench/controls``."""
    logs_dir: CommandPath | None = None
    """Keeps every official run's log as ``<logs_dir>/<instance_id>/<rollout_id>-a<attempt>/test_output.txt``, where
    ``regrade`` finds it."""
