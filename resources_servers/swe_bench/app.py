"""The swe_bench environment and its configuration: tasks are SWE-bench instances, verified in fresh boxes by the
official harness's rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym.agent.world import BROKER_CLIENT
from nemo_gym.base_resources_server import BaseResourcesServerConfig, ReverifyMode, SimpleResourcesServer
from nemo_gym.config_types import CommandPath
from nemo_gym.contract.sandbox import SandboxResources, SandboxRole
from nemo_gym.contract.session import (
    Artifact,
    Egress,
    EgressPolicy,
    GitDiffHarvest,
    Limits,
    Placement,
    ResourcesModel,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.owned_boxes import OwnedBoxes
from nemo_gym.sandbox.base import box_labels
from resources_servers.swe_bench.confirm.controls import ControlStore, RowControls
from resources_servers.swe_bench.confirm.runs import close_comparers
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.grading import close_readers
from resources_servers.swe_bench.row import (
    TESTBED,
    PreparedImage,
    SweBenchRow,
    dataset_row,
    prompt_params,
    resolve_image,
)
from resources_servers.swe_bench.verdicts import judge

log = structlog.get_logger(__name__)

DEFAULT_PROMPT = """\
The repository {repo} is checked out in {workdir}. Please resolve this issue in its source code:

{problem_statement}

Change whatever the issue needs, and keep everything else working. The tests that decide are not in the repository;
changes to the project's own tests are not counted. Leave your changes in the working tree."""


class BoxResources(BaseModel):
    """The limits of one box. A limit of ``None`` means the provider's default."""

    model_config = ConfigDict(extra="forbid")

    cpu: float | None = Field(None, gt=0)
    memory_mib: int | None = Field(None, gt=0)
    disk_gib: float | None = Field(None, gt=0)
    pids: int | None = Field(None, gt=0)
    unlimited: tuple[Literal["cpu", "memory_mib", "disk_gib", "pids"], ...] = ()
    """The limits that are switched off for the box, so that the provider's defaults do not apply either."""

    def to_resources(self) -> SandboxResources:
        return SandboxResources(**self.model_dump())


class SweBenchConfig(BaseResourcesServerConfig):
    """Where tasks and evaluations run, and how strictly attempts are judged."""

    sandbox_provider: str | dict[str, Any]
    """The name of a sandbox block, or ``{provider: settings}``. The provider holds the prepared images."""
    topology: Topology = Topology.AGENT_IN_ENV
    """The default topology of the descriptors. ``env_sandboxed`` and ``whole_interaction`` are supported too."""
    prompt_template: str = DEFAULT_PROMPT
    """The prompt for rows without one. It may use ``{problem_statement}``, ``{repo}`` and ``{workdir}``."""
    work_resources: BoxResources = BoxResources()
    eval_resources: BoxResources = BoxResources()
    """With ``unlimited: [memory_mib]``, an evaluation that runs out of memory is the host's failure, not the
    patch's."""
    provider_options: dict[str, Any] = Field(default_factory=dict)
    agent_wall_clock_s: float | None = Field(3600.0, gt=0)
    """The time limit of one attempt in seconds; ``null`` means the agent's own configuration decides."""
    agent_max_turns: int | None = Field(None, gt=0)
    work_lease_s: float = Field(120.0, gt=0)
    """How long a working box lives if the pipeline does not renew it. It applies to boxes that this server makes
    (behind a broker)."""
    eval_timeout_s: float = Field(1800.0, gt=0)
    """The time limit of one evaluation in seconds; by default the official harness's."""
    eval_lease_s: float = Field(120.0, gt=0)
    """How long evaluation boxes live after this server was killed."""
    max_concurrent_verifications: int = Field(8, ge=1)
    """The number of attempts judged concurrently. Each uses one box at a time."""
    max_patch_bytes: int = Field(64 * 1024 * 1024, gt=0)
    tamper_control: Literal["auto", "always", "off"] = "auto"
    """When to make the control runs that check whether the tests caused the verdict: after an official run that
    resolves the instance (``auto``), after every run, or never."""
    require_controls: Literal["strong", "weak", "none"] = "none"
    """The minimum control strength of every test to be fixed. Attempts at rows below it end without a verdict
    (``controls_weak``)."""
    controls_dir: CommandPath | None = None
    """Where ``ng_prepare`` put the controls; ``null`` means ``~/.local/state/nemo-gym/swe-bench/controls``."""
    logs_dir: CommandPath | None = None
    """Where to keep every official run's log, as ``<instance_id>/<rollout_id>-a<attempt>/test_output.txt``, for
    ``regrade``."""


PATCH_ARTIFACT = "patch"


class SweBenchServer(SimpleResourcesServer):
    """Serves SWE-bench rows as published for harness 5 and later. Prepare their images with ``ng_prepare
    swe_bench``."""

    config: SweBenchConfig
    REVERIFY_MODE = ReverifyMode.STATELESS
    topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.ENV_SANDBOXED,
        Topology.WHOLE_INTERACTION,
    )
    tool_access: ClassVar[tuple[str, ...]] = ("exec",)

    _boxes: OwnedBoxes | None = PrivateAttr(default=None)
    _slots: asyncio.Semaphore | None = PrivateAttr(default=None)

    def task_id(self, row: dict[str, Any]) -> str:
        return str(dataset_row(row).get("instance_id") or super().task_id(row))

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]:
        public = super().public_row(row)
        return {**public, "responses_create_params": prompt_params(row, self.config.prompt_template)}

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        """Describe one attempt: a box of the row's prepared image that can reach only the model, and the patch to
        harvest from it."""
        SweBenchRow.from_mapping(dataset_row(row))  # refuses a bad row before an image is looked for
        image = await resolve_image(self.box_provider(), dataset_row(row))
        config = self.config
        return SessionDescriptor(
            environment=config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=config.topology, supported=self.topologies),
            sandbox=SandboxClause(
                spec=SandboxSpecModel(
                    image=image.name,
                    workdir=TESTBED,
                    env=dict(image.env),
                    resources=ResourcesModel(**config.work_resources.model_dump()),
                    provider_options=config.provider_options,
                )
            ),
            egress=Egress(policy=EgressPolicy.MODEL_ONLY),
            harvest=(GitDiffHarvest(name=PATCH_ARTIFACT, path=TESTBED, max_bytes=config.max_patch_bytes),),
            limits=Limits(wall_clock_s=config.agent_wall_clock_s, max_turns=config.agent_max_turns),
        )

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        task = SweBenchRow.from_mapping(dataset_row(row))
        artifact = next((found for found in artifacts if found.name == PATCH_ARTIFACT), None)
        image = await resolve_image(self.box_provider(), dataset_row(row))
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.max_concurrent_verifications)
        async with self._slots:
            judgement = await judge(
                self._site(image, rollout),
                task,
                artifact,
                await asyncio.to_thread(self._controls, task, image),
                tamper_control=self.config.tamper_control,
                require_controls=self.config.require_controls,
            )
        if self.config.logs_dir is not None:
            try:
                await asyncio.to_thread(_keep_log, self.config.logs_dir, task, rollout, judgement.log)
            except OSError as error:
                log.warning("official log not kept", attempt_id=rollout.attempt_id, error=str(error))
        return judgement.verdict

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        patch = SweBenchRow.from_mapping(dataset_row(row)).patch
        return {"git_patch": {"path": TESTBED, "patch": patch}} if patch else None

    def owned_boxes(self) -> OwnedBoxes | None:
        """The working boxes that this server makes and lends to agents behind a broker (always used in topology B).
        Without a broker, the agents make their boxes themselves."""
        if self._boxes is None and self.box_provider().name == BROKER_CLIENT:
            self._boxes = OwnedBoxes(self.box_provider(), lease_s=self.config.work_lease_s)
        return self._boxes

    async def shutdown(self) -> None:
        await super().shutdown()
        await asyncio.to_thread(close_readers)
        await asyncio.to_thread(close_comparers)

    def _controls(self, row: SweBenchRow, image: PreparedImage) -> RowControls | None:
        if self.config.tamper_control == "off":
            return None
        return ControlStore.of(self.config.controls_dir).require(row, image.content)

    def _site(self, image: PreparedImage, rollout: RolloutIdentity) -> EvalSite:
        provider, config = self.box_provider(), self.config
        return EvalSite(
            provider=provider,
            image=image.name,
            env=image.env,
            labels=box_labels(
                run=rollout.run_id, rollout=rollout.rollout_id, attempt=rollout.attempt, role=SandboxRole.EVAL
            ),
            resources=config.eval_resources.to_resources(),
            provider_options=config.provider_options,
            timeout_s=config.eval_timeout_s,
            lease_s=config.eval_lease_s,
        )


def _keep_log(directory: Path, row: SweBenchRow, rollout: RolloutIdentity, log: str) -> None:
    target = directory / row.instance_id / rollout.attempt_id
    target.mkdir(parents=True, exist_ok=True)
    (target / "test_output.txt").write_text(log, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    SweBenchServer.run_webserver()
