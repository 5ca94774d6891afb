"""Agent server of opencode, run as it is in a box: one program, no interpreter."""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.opencode_agent.events import OpencodeReader
from responses_api_agents.opencode_agent.options import PACKAGE, OpencodeOptions


class Opencode(CliHarness):
    name = "opencode"
    package = PACKAGE
    options_class = OpencodeOptions
    options: OpencodeOptions

    def command(self, context: HarnessContext) -> HarnessCommand:
        config, instructions = f"{context.home}/opencode.json", f"{context.home}/instructions.md"
        files = {config: json.dumps(self._settings(context, instructions)).encode()}
        if context.system:
            files[instructions] = context.system.encode()
        # Without a title it asks the model for one.
        return HarnessCommand(
            argv=(context.executable, "run", "--pure", "--format", "json", "--thinking", "--title", "task"),
            env={"OPENCODE_CONFIG": config, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
            files=files,
            stdin=context.prompt.encode(),
        )

    def _settings(self, context: HarnessContext, instructions: str) -> dict[str, Any]:
        options, model = self.options, f"policy/{context.model}"
        limit = {"context": options.context_tokens, "output": context.max_output_tokens or options.output_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # built in; nothing is fetched
            "options": {
                "baseURL": f"{context.model_url}/v1",
                "apiKey": context.api_key,
                "timeout": int(options.request_timeout_s * 1000),
            },
            "models": {context.model: {"name": context.model, "tool_call": True, "limit": limit}},
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "model": model,
            "small_model": model,
            "provider": {"policy": provider},
            "mcp": {server.name: {"type": "remote", "url": server.url, "oauth": False} for server in context.mcp},
            **({"agent": {"build": {"steps": context.max_turns}}} if context.max_turns else {}),
            **({"instructions": [instructions]} if context.system else {}),
        }

    def reader(self) -> EventReader:
        return OpencodeReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, OpencodeReader)
        # It exits with 0 whenever its loop is left; only a step that called no tool ends the work.
        if reader.error or not ended.ok or reader.reason in (None, "tool-calls"):
            return AgentOutcome.CRASHED, "; ".join(word for word in (reader.error, ended.how) if word)
        return AgentOutcome.COMPLETED, None


class OpencodeAgent(CliAgent):
    harness_class = Opencode


if __name__ == "__main__":
    OpencodeAgent.run_webserver()
