"""A tool loop in the agent server: asks the policy and calls the tools it names, until it names none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, PrivateAttr

from nemo_gym.agent.harness.events import Transcript
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.session import ActRequest, ActResponse, AgentOutcome, Topology


class SimpleAgentConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    max_turns: int = Field(50, gt=0)
    """Answers per attempt. The descriptor's ``limits.max_turns`` can lower it; the run's limit overrides both."""
    max_steps: int | None = Field(None, ge=0)
    """NeMo Gym's name for ``max_turns``. It takes precedence; with 0, ``max_turns`` applies."""
    count_tool_calls: bool = False
    """NeMo Gym's option: limit the tool calls, not the answers. All calls of an answer are made before it applies."""
    use_done_flag: bool = False
    """NeMo Gym's option: end the attempt if a tool returns a JSON object with a true ``done``."""
    max_parallel_tool_calls: int = Field(1, gt=0)
    """The number of tool calls of one answer that run concurrently. With 1 they run in the policy's order, which
    matters if tools change the environment."""
    wall_clock_s: float = Field(1800.0, gt=0)
    """The time limit of an attempt, if the descriptor sets none."""
    tool_timeout_s: float = Field(120.0, gt=0)
    """The time limit of one tool call. The policy receives an error if it is exceeded."""
    model_max_tries: int = Field(4, gt=0)
    max_concurrency: int = Field(256, gt=0)
    """The number of concurrent attempts."""


class SimpleAgent(SimpleResponsesAPIAgent):
    """Supports topologies A and B. It needs no box, because it only calls the model and the environment's tools."""

    config: SimpleAgentConfig
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.ENV_SANDBOXED, Topology.NONE)
    box_topologies: ClassVar[tuple[Topology, ...]] = ()
    tool_access: ClassVar[tuple[str, ...]] = ("mcp", "http")

    _slots: asyncio.Semaphore | None = PrivateAttr(default=None)

    def kept_limits(self) -> frozenset[str]:
        # This agent has no box whose memory or CPU could be limited.
        return super().kept_limits() - {"memory_mib", "cpu"}

    async def act(self, request: ActRequest) -> ActResponse:
        return await self.act_in_session(request, {})

    async def act_in_session(self, request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        if self.overrides("responses"):  # a NeMo Gym agent that subclasses this one
            return await self._act_by_responses(request, cookies)
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.max_concurrency)
        async with self._slots:
            return await self._attempt(request, cookies)

    async def _attempt(self, request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        from nemo_gym.agent.acts import PolicyClient, at_wall_clock
        from responses_api_agents.simple_agent.loop import Ended, Rules, Toolbox, ToolServerError, converse

        config, transcript = self.config, Transcript(whole=True)
        limit = config.max_steps or config.max_turns
        rules = Rules(
            max_turns=request.turns(None if config.count_tool_calls else limit),
            max_tool_calls=limit if config.count_tool_calls else None,
            max_output_bytes=request.descriptor.limits.max_output_bytes,
            parallel_calls=config.max_parallel_tool_calls,
            done_flag=config.use_done_flag,
        )
        policy = PolicyClient(request.inference, max_tries=config.model_max_tries)
        try:
            async with asyncio.timeout(request.wall_clock_s(config.wall_clock_s)), AsyncExitStack() as stack:
                toolbox = Toolbox(self.server_client, config.resources_server.name, cookies, config.tool_timeout_s)
                try:
                    await toolbox.open(
                        stack, request.descriptor.mcp, request.responses_create_params.get("tools") or []
                    )
                    ended = await converse(policy, toolbox, request.responses_create_params, transcript, rules)
                except ToolServerError as error:
                    # Catch it here: outside, the clients' task groups would have wrapped it in exception groups.
                    ended = Ended(error.outcome, str(error))
        except TimeoutError:
            ended = Ended(*at_wall_clock(policy.statistics, "the attempt reached its wall clock limit"))
        done = ended.outcome is AgentOutcome.COMPLETED
        transcript.ends("completed" if done else "incomplete", error_type=None if done else str(ended.outcome))
        return ActResponse(
            response=transcript.response(request.inference.model, incomplete=ended.incomplete),
            outcome=ended.outcome,
            outcome_detail=ended.detail,
            observations={
                "turns": transcript.turns,
                "tool_calls": transcript.tool_calls,
                **{name: count for name, count in transcript.usage.items() if count},
                "records": transcript.bundle("simple_agent").model_dump(mode="json", exclude_none=True),
            },
        )


def __getattr__(name: str) -> Any:
    """NeMo Gym's names of bodies with every field of a row, for agents that subclass this one. They are made on
    demand, because loading their bases is slow."""
    if name not in ("SimpleAgentRunRequest", "SimpleAgentVerifyRequest", "SimpleAgentVerifyResponse"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_gym.http import environment_bodies

    base = getattr(environment_bodies, name.replace("SimpleAgent", "Base"))
    body = globals()[name] = type(name, (base,), {"__module__": __name__, "model_config": ConfigDict(extra="allow")})
    return body


if __name__ == "__main__":
    SimpleAgent.run_webserver()
