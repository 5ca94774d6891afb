"""Agent server of the OpenHands SDK, run in a box by a Python of its own."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.openhands_agent.events import LIMIT_CODE, OpenHandsReader
from responses_api_agents.openhands_agent.options import PACKAGE, OpenHandsOptions

PROGRAM = Path(__file__).with_name("conversation.py")
UNLIMITED_TURNS = 1_000_000
REFUSED_CODE = "LLMContentPolicyViolationError"
CONTEXT_CODES = ("LLMContextWindowExceedError", "LLMContextWindowTooSmallError")


class OpenHands(CliHarness):
    name = "openhands"
    package = PACKAGE
    options_class = OpenHandsOptions
    options: OpenHandsOptions

    def command(self, context: HarnessContext) -> HarnessCommand:
        options = self.options
        settings = {
            "llm": {
                # The prefix is litellm's, of the dialect; the model is asked for by the rest.
                "model": f"openai/{context.model}",
                "base_url": f"{context.model_url}/v1",
                "api_key": context.api_key,
                "api_mode": "chat",
                "num_retries": options.max_retries + 1,  # the SDK counts the first try
                "timeout": options.request_timeout_s,
                "max_output_tokens": context.max_output_tokens,
            },
            "mcp": {server.name: {"url": server.url, "transport": "http"} for server in context.mcp},
            "system": context.system,
            "workdir": context.workdir,
            "max_turns": context.max_turns or UNLIMITED_TURNS,
            **options.model_dump(include={"tools", "condense_after_events", "parallel_tool_calls", "stuck_detection"}),
        }
        program, given = f"{context.home}/conversation.py", f"{context.home}/settings.json"
        return HarnessCommand(
            argv=(context.executable, "-I", "-B", program, given),
            env={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the price list that it comes with
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "LOG_LEVEL": "WARNING",
            },
            files={program: PROGRAM.read_bytes(), given: json.dumps(settings).encode()},
            stdin=context.prompt.encode(),
        )

    def reader(self) -> EventReader:
        return OpenHandsReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, OpenHandsReader)
        if reader.end is None:
            return AgentOutcome.CRASHED, ended.how
        status, code, detail = reader.end["status"], reader.end.get("code"), reader.end.get("detail")
        if status == "finished":
            return AgentOutcome.COMPLETED, None
        if status == "stuck":
            return AgentOutcome.MAX_TURNS, "it repeated itself, and the SDK ended it"
        if code == LIMIT_CODE:
            return AgentOutcome.MAX_TURNS, "it used all of its turns"
        if code in CONTEXT_CODES:
            return AgentOutcome.MAX_TURNS, "the conversation no longer fits the model's context"
        if code == REFUSED_CODE:
            return AgentOutcome.REFUSED, detail
        return AgentOutcome.CRASHED, f"{code}: {detail}" if code else ended.how


class OpenHandsAgent(CliAgent):
    harness_class = OpenHands


if __name__ == "__main__":
    OpenHandsAgent.run_webserver()
