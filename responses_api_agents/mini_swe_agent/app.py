"""The mini-swe-agent server: runs the package's loop on the world that the session descriptor names."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from nemo_gym.agent.acts import PolicyClient
from nemo_gym.agent.bindings import prompt_text
from nemo_gym.agent.harness.agent import BoxAgent, BoxAgentConfig
from nemo_gym.agent.world import HarnessRun, World
from nemo_gym.contract.session import ActRequest, ActResponse, Topology
from nemo_gym.sandbox.egress import HarnessNeeds


class MiniSWEAgentConfig(BoxAgentConfig):
    """Configuration; the templates are Jinja, with ``task``, ``cwd`` and mini-swe-agent's own variables."""

    system_template: str
    instance_template: str
    observation_template: str
    format_error_template: str
    step_limit: int = 100
    """Model calls per attempt; 0 sets no limit. The descriptor's ``limits.max_turns`` can lower it; the run's limit
    overrides both."""
    command_timeout_s: float = 60.0
    command_env: dict[str, str] = Field(
        default_factory=lambda: {"PAGER": "cat", "MANPAGER": "cat", "LESS": "-R", "PIP_PROGRESS_BAR": "off"}
    )
    model_max_tries: int = 4
    max_output_tokens: int | None = None


class MiniSWEAgent(BoxAgent):
    """Runs the loop in this server, in every topology. Only its commands run in the attempt's box."""

    config: MiniSWEAgentConfig
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.NONE)
    """Not ``whole_interaction``, which requires the harness to run in the box as well."""
    box_topologies: ClassVar[tuple[Topology, ...]] = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.NONE)
    tool_access: ClassVar[tuple[str, ...]] = ("exec",)
    enforce_row_sampling: ClassVar[bool] = True

    async def act(self, request: ActRequest) -> ActResponse:
        # Import the package at the first attempt: starting, composing and health checks do not need it.
        from responses_api_agents.mini_swe_agent import loop

        config, params = self.config, request.responses_create_params
        system, task = prompt_text(params)
        agent = {
            "system_template": loop.ROW_SYSTEM if system else config.system_template,
            "instance_template": config.instance_template,
            "step_limit": request.turns(config.step_limit or None) or 0,
            "cost_limit": 0.0,
        }
        model = loop.PolicyModelConfig(
            model_name=request.inference.model,
            observation_template=config.observation_template,
            format_error_template=config.format_error_template,
        )
        client = PolicyClient(request.inference, max_tries=config.model_max_tries)
        policy = loop.PolicyModel(client, model, _sampling(params, config.max_output_tokens))

        async def harness(world: World, run: HarnessRun) -> None:
            run.model = client.statistics
            environment = loop.BoxEnvironment(world, timeout_s=config.command_timeout_s, env=config.command_env)
            await loop.drive(run, {"task": task, "row_system": system}, policy, environment, agent)

        return await self.act_in_box(request, harness, HarnessNeeds.of(await self.box_needs()))


def _sampling(params: dict[str, Any], max_output_tokens: int | None) -> dict[str, Any]:
    """Return the Responses parameters under their Chat Completions names."""
    sampling = {key: params[key] for key in ("temperature", "top_p") if params.get(key) is not None}
    if (limit := params.get("max_output_tokens") or max_output_tokens) is not None:
        sampling["max_tokens"] = limit
    return sampling


if __name__ == "__main__":
    MiniSWEAgent.run_webserver()
