"""The mini-swe-agent server: runs the package's loop on the world that the session descriptor names."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import Field, PrivateAttr

from nemo_gym.agent.acts import PolicyClient
from nemo_gym.agent.topology.bindings import AgentBoxes, prompt_text
from nemo_gym.agent.topology.world import DEFAULT_LEASE_TTL_S, HarnessRun, World, act_in_world
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.session import ActRequest, ActResponse, BoxNeeds, SandboxSpecModel, Topology
from nemo_gym.sandbox.egress import HarnessNeeds
from nemo_gym.sandbox.facade import SandboxOwner


class MiniSWEAgentConfig(BaseResponsesAPIAgentConfig):
    """Configuration; the templates are Jinja, with ``task``, ``cwd`` and mini-swe-agent's own variables."""

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    sandbox_provider: str | dict[str, Any]
    system_template: str
    instance_template: str
    observation_template: str
    format_error_template: str
    step_limit: int = 100
    """Model calls per attempt. The descriptor's ``limits.max_turns`` can lower it; the run's limit overrides both."""
    command_timeout_s: float = 60.0
    command_env: dict[str, str] = Field(
        default_factory=lambda: {"PAGER": "cat", "MANPAGER": "cat", "LESS": "-R", "PIP_PROGRESS_BAR": "off"}
    )
    wall_clock_s: float = 3600.0
    """The time limit of an attempt, if the descriptor sets none."""
    model_max_tries: int = 4
    max_concurrency: int = 64
    """The number of concurrent attempts."""
    scratch: SandboxSpecModel = Field(default_factory=SandboxSpecModel)
    """The box for the agent's commands if the task has no world (topology A)."""
    requires: list[str] = Field(default_factory=list)
    """Sandbox capabilities this agent needs in every box."""
    max_output_tokens: int | None = None
    sandbox_lease_s: float = DEFAULT_LEASE_TTL_S
    """How long a box lives after this server was killed, in seconds."""


class MiniSWEAgent(SimpleResponsesAPIAgent):
    """Runs the loop in this server, in every topology. Only its commands run in the attempt's box."""

    config: MiniSWEAgentConfig
    topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.ENV_SANDBOXED,
        Topology.NONE,
    )
    """Not ``whole_interaction``, which requires the harness to run in the box as well."""
    box_topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.ENV_SANDBOXED,
        Topology.NONE,
    )
    tool_access: ClassVar[tuple[str, ...]] = ("exec",)

    _slots: asyncio.Semaphore = PrivateAttr()
    _owner: SandboxOwner = PrivateAttr()
    _boxes: AgentBoxes = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        self._slots = asyncio.Semaphore(self.config.max_concurrency)
        self._boxes = AgentBoxes(scratch=self.config.scratch.to_spec())
        self._owner = SandboxOwner(self.config.sandbox_provider, self.server_client)
        self._owner.provider()  # an unusable provider must fail here, once, before any row runs
        return super().setup_webserver()

    async def box_needs(self) -> BoxNeeds:
        return BoxNeeds(requires=tuple(self.config.requires))

    async def act(self, request: ActRequest) -> ActResponse:
        # Import the package at the first attempt: starting, composing and health checks do not need it.
        from responses_api_agents.mini_swe_agent import loop

        config, params = self.config, request.responses_create_params
        system, task = prompt_text(params)
        client = PolicyClient(
            request.inference,
            max_tries=config.model_max_tries,
        )

        async def harness(world: World, run: HarnessRun) -> None:
            await loop.drive(
                world,
                run,
                task=task,
                inference=request.inference,
                client=client,
                sampling=_sampling(params, config.max_output_tokens),
                model=loop.PolicyModelConfig(
                    model_name=request.inference.model,
                    observation_template=config.observation_template,
                    format_error_template=config.format_error_template,
                ),
                agent={
                    "system_template": system or config.system_template,
                    "instance_template": config.instance_template,
                    "step_limit": request.turns(config.step_limit),
                    "cost_limit": 0.0,
                },
                command_timeout_s=config.command_timeout_s,
                command_env=config.command_env,
            )

        async with self._slots:
            return await act_in_world(
                request,
                self._owner.provider(),
                harness,
                needs=HarnessNeeds.of(await self.box_needs()),
                boxes=self._boxes,
                topologies=self.topologies,
                default_wall_clock_s=config.wall_clock_s,
                lease_ttl_s=config.sandbox_lease_s,
            )

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._owner.aclose()


def _sampling(params: dict[str, Any], max_output_tokens: int | None) -> dict[str, Any]:
    """Return the Responses parameters under their Chat Completions names."""
    sampling = {key: params[key] for key in ("temperature", "top_p") if params.get(key) is not None}
    if (limit := params.get("max_output_tokens") or max_output_tokens) is not None:
        sampling["max_tokens"] = limit
    return sampling


if __name__ == "__main__":
    MiniSWEAgent.run_webserver()
