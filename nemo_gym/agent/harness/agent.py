"""`BoxAgent`: an agent server whose attempts need boxes; `CliAgent`: the one around any `CliHarness`.

A new CLI agent is a folder with a harness class and

    class MyAgent(CliAgent):
        harness_class = MyHarness
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import Field, PrivateAttr, ValidationError

from nemo_gym._util.suggest import validation_problems
from nemo_gym.agent.bindings import AgentBoxes, prompt_text
from nemo_gym.agent.harness.base import CliHarness, HarnessContext
from nemo_gym.agent.harness.run import STOP_TIMEOUT_S, RunSettings, run_in_box
from nemo_gym.agent.server import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.agent.world import DEFAULT_LEASE_TTL_S, Harness, HarnessRun, World, act_in_world
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import ActRequest, ActResponse, BoxNeeds, MountModel, SandboxSpecModel, Topology
from nemo_gym.http.client import server_path
from nemo_gym.sandbox.egress import HarnessNeeds
from nemo_gym.sandbox.facade import SandboxOwner


class BoxAgentConfig(BaseResponsesAPIAgentConfig):
    """Configuration of every agent whose attempts need boxes."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    sandbox_provider: str | dict[str, Any]
    wall_clock_s: float = Field(3600.0, gt=0)
    """Time per attempt, if the descriptor sets no limit."""
    scratch: SandboxSpecModel = Field(default_factory=SandboxSpecModel)
    """The box of an attempt whose harness does not work in the task's world (topology A, and for a CLI also B)."""
    requires: list[str] = Field(default_factory=list)
    """Sandbox capabilities that this agent needs in every box."""
    max_concurrency: int = Field(64, gt=0)
    """The number of attempts that run at once; others wait."""
    sandbox_lease_s: float = Field(DEFAULT_LEASE_TTL_S, gt=0)
    """How long a box outlives this server if the server is killed."""


class BoxAgent(SimpleResponsesAPIAgent):
    """Runs each attempt in its box, a bounded number at once."""

    config: BoxAgentConfig

    _slots: asyncio.Semaphore = PrivateAttr()
    _owner: SandboxOwner = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        self._slots = asyncio.Semaphore(self.config.max_concurrency)
        self._owner = SandboxOwner(self.config.sandbox_provider, self.server_client)
        self._owner.provider()  # an unusable provider must fail here, once, before any row runs
        return super().setup_webserver()

    async def box_needs(self) -> BoxNeeds:
        return BoxNeeds(requires=tuple(self.config.requires))

    async def act_in_box(
        self,
        request: ActRequest,
        harness: Harness,
        needs: HarnessNeeds,
        *,
        outer: SandboxSpec | None = None,
        grace_s: float = 0.0,
    ) -> ActResponse:
        """`act_in_world`, once there is a free slot, with this agent's provider, boxes and limits."""
        config = self.config
        async with self._slots:
            return await act_in_world(
                request,
                self._owner.provider(),
                harness,
                needs=needs,
                boxes=AgentBoxes(scratch=config.scratch.to_spec(), outer=outer or SandboxSpec()),
                topologies=self.topologies,
                default_wall_clock_s=config.wall_clock_s,
                grace_s=grace_s,
                lease_ttl_s=config.sandbox_lease_s,
            )

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._owner.aclose()


class CliAgentConfig(BoxAgentConfig):
    """Configuration of every CLI agent."""

    harness: dict[str, Any] = Field(default_factory=dict)
    """Settings of the harness, defined by its options class."""
    max_turns: int | None = Field(None, gt=0)
    """Model answers per attempt, including those for sub-agents and side requests (titles, summaries). The model's
    door counts them and forwards no more. A descriptor's ``limits.max_turns`` lowers this; the run's overrides it."""
    max_model_failures: int | None = Field(10, gt=0)
    """Consecutive failed requests to the model (429, 5xx, no or a partial answer) before the attempt ends as
    ``model_unreachable``, even if the CLI would retry. ``None`` leaves it to the CLI and the wall clock."""
    outer: SandboxSpecModel = Field(default_factory=SandboxSpecModel)
    """What the episode's box needs beyond the environment's world (topology D)."""
    event_log_bytes: int = Field(64 * 1024, ge=0)
    """How much of the CLI's raw output the observations of each attempt keep."""


class CliAgent(BoxAgent):
    """Runs a CLI as a process in a box. Subclasses set ``harness_class``, and ``topologies`` if not all are served."""

    config: CliAgentConfig
    topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.ENV_SANDBOXED,
        Topology.NONE,
        Topology.WHOLE_INTERACTION,
    )
    box_topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.ENV_SANDBOXED,
        Topology.NONE,
        Topology.WHOLE_INTERACTION,
    )
    """Topologies in which this agent needs a box: all, because a program that runs commands never runs on the host."""
    tool_access: ClassVar[tuple[str, ...]] = ("mcp",)
    """How the harness reaches a world outside its own box."""
    enforce_row_sampling: ClassVar[bool] = True
    harness_class: ClassVar[type[CliHarness]]

    _harness: CliHarness = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        self._harness = self._configured_harness()
        self.installed()  # report a CLI that was not fetched once, before any row runs
        return super().setup_webserver()

    def _configured_harness(self) -> CliHarness:
        options_class = self.harness_class.options_class
        try:
            options = options_class.model_validate(self.config.harness)
        except ValidationError as error:
            where = f"{server_path(self.server_client.global_config_dict, self.config.name)}.harness"
            raise ConfigError(
                f"{validation_problems(error, options_class.model_fields, where=where)}; it takes:"
                f" {', '.join(options_class.model_fields) or 'nothing'}",
                key=where,
            ) from None
        return self.harness_class(options)

    async def act(self, request: ActRequest) -> ActResponse:
        needs = HarnessNeeds.of(await self.box_needs())
        context = self._context(request)
        settings = RunSettings(
            mcp_servers=tuple(server.name for server in request.descriptor.mcp),
            harvest=request.descriptor.harvest,
            event_log_bytes=self.config.event_log_bytes,
            max_model_failures=self.config.max_model_failures,
        )
        needs = dataclasses.replace(needs, model_in_box=True, max_model_answers=context.max_turns)

        async def harness(world: World, run: HarnessRun) -> None:
            await run_in_box(world, run, self._harness, context, settings)

        outer = self.config.outer.to_spec()
        return await self.act_in_box(request, harness, needs, outer=outer, grace_s=STOP_TIMEOUT_S)

    async def box_needs(self) -> BoxNeeds:
        installed = await asyncio.to_thread(self.installed)
        mount = MountModel(source=str(installed), target=self._harness.package.install_dir)
        return (await super().box_needs()).model_copy(update={"mounts": (mount,)})

    def installed(self) -> Path:
        """The package's directory on this host. Raises `ConfigError` if it was not fetched."""
        from nemo_gym.agent.harness.provision import installed

        package = self._harness.package
        return package.directory or installed(package)

    def _context(self, request: ActRequest) -> HarnessContext:
        params = request.responses_create_params
        system, prompt = prompt_text(params)
        return HarnessContext(
            prompt=prompt,
            system=system,
            model=request.inference.model,
            model_url="",
            mcp=(),
            home="",
            workdir="",
            install_dir=self._harness.package.install_dir,
            executable=self._harness.package.executable,
            session_uuid=str(uuid.uuid5(uuid.NAMESPACE_URL, request.descriptor.rollout.attempt_id)),
            max_turns=request.turns(self.config.max_turns),
            wall_clock_s=request.wall_clock_s(self.config.wall_clock_s),
            max_output_tokens=params.get("max_output_tokens"),
        )
