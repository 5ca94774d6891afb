"""The agent server of the OpenHands SDK, which runs in a box with its own Python.

From top to bottom: the package it is mounted from, its options, the reader of its event log, its harness.
"""

from __future__ import annotations

import json
from pathlib import Path
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
from nemo_gym.agent.harness.events import EventReader, JsonEventReader
from nemo_gym.contract.session import AgentOutcome

PACKAGE = CliPackage(
    name="openhands",
    version="1.58.0",
    command="bin/python",
    runtime="script",
    requirements=Path(__file__).with_name("requirements.lock"),
    pythons=("3.12", "3.13", "3.14"),
    box_commands=("bash",),
)


class OpenHandsOptions(HarnessOptions):
    tools: list[str] = Field(default_factory=lambda: ["terminal", "file_editor", "task_tracker"])
    """The built-in tools that the model is offered, beside ``finish`` and ``think``."""
    condense_after_events: int | None = Field(240, gt=10)
    """The number of events after which the SDK lets the model summarize the older ones; ``null`` for never."""
    parallel_tool_calls: int = Field(1, gt=0)
    """The number of tool calls of one answer that run concurrently."""
    stuck_detection: bool = True
    """Whether the SDK ends a conversation that repeats itself."""
    max_retries: int = Field(5, ge=0)
    """Retries of one model call, after 429, 5xx, or a broken connection, with 1 to 30 seconds between them."""
    request_timeout_s: int = Field(600, gt=0)
    """The time limit of one model call."""


LIMIT_CODE = "MaxIterationsReached"


class OpenHandsReader(JsonEventReader):
    """Reads the lines of ``conversation.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.end: dict[str, str] | None = None
        """The ``end`` event: ``status`` of the conversation, ``code`` and ``detail`` of an error; else empty texts."""
        self._response: str | None = None

    def event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "action":
                self._answer(event)
                self.transcript.calls(event["call"], event["tool"], event["arguments"])
                if event["message"]:
                    self.transcript.says(event["message"])
            case "message":
                self._answer(event)
            case "observation":
                self.transcript.returns(event["call"], event["text"], failed=bool(event["failed"]))
            case "condensation":
                self.transcript.compacts(trigger="events")
            case "usage":
                tokens = ("input_tokens", "output_tokens", "cached_tokens")
                self.transcript.set_usage(**{name: int(event[name]) for name in tokens})
            case "end":
                # The policy can print one too, with any values.
                self.end = {key: str(event.get(key) or "") for key in ("status", "code", "detail")}

    def _answer(self, event: dict[str, Any]) -> None:
        """Record an answer. Its tool calls are separate events with the same response id; the first has the text."""
        if event["response"] is None or event["response"] != self._response:
            self._response = event["response"]
            self.transcript.turn()
        self.transcript.thinks(event["reasoning"])
        self.transcript.says(event["text"])


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
                # litellm reads the dialect from the prefix and requests the model by the rest.
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
        program, settings_file = f"{context.home}/conversation.py", f"{context.home}/settings.json"
        return HarnessCommand(
            argv=(context.executable, "-I", "-B", program, settings_file),
            env={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # use litellm's bundled price list, fetch nothing
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "LOG_LEVEL": "WARNING",
            },
            files={program: PROGRAM.read_bytes(), settings_file: json.dumps(settings).encode()},
            stdin=context.prompt.encode(),
        )

    def reader(self) -> EventReader:
        return OpenHandsReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, OpenHandsReader)
        if reader.end is None:
            return AgentOutcome.CRASHED, ended.how
        status, code, detail = reader.end["status"], reader.end["code"], reader.end["detail"]
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
