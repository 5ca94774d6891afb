"""Agent server of Qwen Code, run as it is in a box, with the Node.js that comes in its package."""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.qwen_code_agent.events import QwenReader
from responses_api_agents.qwen_code_agent.options import PACKAGE, SCRIPT, QwenCodeOptions

TURN_LIMIT_STATUS = 53
"""With which it exits after the last turn it is given."""
LOOP_WORDS = "Loop detection halted the run"
"""After the same call again and again; it cannot be told to let that pass."""


class QwenCode(CliHarness):
    name = "qwen_code"
    package = PACKAGE
    options_class = QwenCodeOptions
    options: QwenCodeOptions

    def command(self, context: HarnessContext) -> HarnessCommand:
        argv = [context.executable, "--expose-gc", f"{context.install_dir}/{SCRIPT}"]
        argv += ["--yolo", "--output-format", "stream-json", "--auth-type", "openai"]
        if context.max_turns:
            argv += ["--max-session-turns", str(context.max_turns)]
        if context.system:
            argv += ["--append-system-prompt", context.system]
        return HarnessCommand(
            argv=(*argv, "--session-id", context.session_uuid),
            env={
                "OPENAI_API_KEY": context.api_key,
                "OPENAI_BASE_URL": f"{context.model_url}/v1",
                "OPENAI_MODEL": context.model,
                "QWEN_SANDBOX": "false",  # the box is one
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            },
            files={f"{context.home}/.qwen/settings.json": json.dumps(self._settings(context)).encode()},
            stdin=context.prompt.encode(),
        )

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        generation: dict[str, Any] = {
            "contextWindowSize": self.options.context_tokens,
            "timeout": int(self.options.request_timeout_s * 1000),
            "maxRetries": self.options.max_retries,
        }
        if context.max_output_tokens:
            generation["samplingParams"] = {"max_tokens": context.max_output_tokens}
        return {
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": generation},
            # The environment's tools are offered, not hidden behind a search; its ripgrep comes without its exec bit.
            "tools": {"toolSearch": {"enabled": False}, "useRipgrep": False},
            "mcpServers": {server.name: {"httpUrl": server.url, "trust": True} for server in context.mcp},
        }

    def reader(self) -> EventReader:
        return QwenReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, QwenReader)
        if ended.return_code == TURN_LIMIT_STATUS:
            return AgentOutcome.MAX_TURNS, "it used all of its turns"
        if reader.error.startswith(LOOP_WORDS):
            return AgentOutcome.MAX_TURNS, reader.error
        if reader.result is None or reader.error or not ended.ok:
            return AgentOutcome.CRASHED, "; ".join(word for word in (reader.error, ended.how) if word)
        return AgentOutcome.COMPLETED, None


class QwenCodeAgent(CliAgent):
    harness_class = QwenCode


if __name__ == "__main__":
    QwenCodeAgent.run_webserver()
