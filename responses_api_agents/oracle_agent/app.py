"""The oracle: applies the known solution, or nothing, to check that an environment grades correctly.

It is the only agent that sees private data. It gets them only in the explicit validation mode (``validation`` of the
run configuration), and all its responses are marked as validation.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from nemo_gym.agent.bindings import response_object, text_message
from nemo_gym.agent.world import HarnessRun, World, act_in_world
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.errors import AgentError, ConfigError
from nemo_gym.contract.session import ActRequest, ActResponse, AgentOutcome, Topology
from nemo_gym.sandbox.facade import SandboxOwner


class OracleAgentConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef | None = None
    sandbox_provider: str | dict[str, Any] | None = None
    mode: Literal["gold", "nothing"]
    """Apply the environment's solution, or leave the world unchanged."""
    row_access: Literal["validation"] = "validation"


class OracleAgent(SimpleResponsesAPIAgent):
    """Supports topologies A–C. It answers with text if there is no box, and applies a patch if there is one."""

    config: OracleAgentConfig
    topologies = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.NONE)
    tool_access: ClassVar[tuple[str, ...]] = ("exec", "mcp", "http")
    """The oracle calls no tools, so it supports every kind of access."""
    needs_prompt: ClassVar[bool] = False

    _owner: SandboxOwner | None = PrivateAttr(default=None)

    async def act(self, request: ActRequest) -> ActResponse:
        if request.validation is None:
            raise ConfigError(
                "the oracle agent works in validation mode only; run it with oracle=gold or oracle=nothing",
                key="validation",
            )
        solution = request.validation if self.config.mode == "gold" else {}
        if self.config.mode == "gold" and not solution:
            raise AgentError(f"environment '{request.descriptor.environment}' knows no gold solution for this task")
        patch = solution.get("git_patch")
        if request.descriptor.sandbox is None:
            if patch is not None:
                raise AgentError(
                    f"environment '{request.descriptor.environment}' has a patch as its gold solution, and no box"
                )
            return ActResponse(response=_answer(solution.get("text", "")), validation=True)

        async def harness(world: World, run: HarnessRun) -> None:
            if patch is not None:
                await _apply(world, patch["path"], patch["patch"])
            run.response = _answer(f"validation mode: applied {self.config.mode}")
            run.outcome = AgentOutcome.COMPLETED

        answer = await act_in_world(request, self._sandboxes().provider(), harness, topologies=self.topologies)
        return answer.model_copy(update={"validation": True})

    def _sandboxes(self) -> SandboxOwner:
        if self.config.sandbox_provider is None:
            raise ConfigError(
                "the oracle agent needs 'sandbox_provider' for an environment with a world", key="sandbox_provider"
            )
        if self._owner is None:
            self._owner = SandboxOwner(self.config.sandbox_provider, self.server_client)
        return self._owner

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._owner is not None:
            await self._owner.aclose()


async def _apply(world: World, path: str, patch: str) -> None:
    """Apply a git patch in the box."""
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    result = await world.exec(command, cwd=path, stdin=patch.encode(), timeout_s=120)
    if not result.ok:
        raise AgentError(f"the gold patch does not apply in {path}: {(result.stderr or '')[-500:]}")


def _answer(text: str) -> dict[str, Any]:
    return response_object([text_message(text)], model="oracle")


if __name__ == "__main__":
    OracleAgent.run_webserver()
