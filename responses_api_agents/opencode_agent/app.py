"""The agent server of opencode, which runs unmodified in a box as one program without an interpreter.

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
from nemo_gym.agent.harness.events import EventReader, JsonEventReader
from nemo_gym.contract.session import AgentOutcome

# This build does not need AVX2, so it runs on all x86-64 processors.
BUILD = "opencode-linux-x64-baseline"
INTEGRITY = "sha512-1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA=="
PACKAGE = CliPackage(
    name="opencode-ai",
    version="1.18.33",
    command=f"node_modules/{BUILD}/bin/opencode",
    runtime="elf-glibc",
    npm={BUILD: "1.18.33"},
    integrity={BUILD: INTEGRITY},
)


class OpencodeOptions(HarnessOptions):
    context_tokens: int = Field(131_072, gt=0)
    """The model's context length. opencode summarizes a conversation that comes near it."""
    output_tokens: int = Field(16_384, gt=0)
    """The limit of one answer, if the row sets none."""
    request_timeout_s: float = Field(600.0, gt=0)
    """The time limit of one model call, including the whole response."""


class OpencodeReader(JsonEventReader):
    """Reads ``opencode run --format json``."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        """Why the last step ended (``stop``, ``tool-calls``, ``length``); ``None`` during a step."""
        self.error: str | None = None
        """The error that ended the session."""

    def event(self, event: dict[str, Any]) -> None:
        part = event.get("part") or {}
        match event["type"]:
            case "step_start":
                self.reason = None
            case "text":
                self.transcript.says(part["text"])
            case "reasoning":
                self.transcript.thinks(part["text"])
            case "tool_use":
                self._tool(part)
            case "step_finish":
                self.reason = part["reason"]
                self._step(part.get("tokens") or {})
            case "error":
                error = event["error"]
                message = (error.get("data") or {}).get("message")
                self.error = ": ".join(str(word) for word in (error.get("name"), message) if word)

    def _tool(self, part: dict[str, Any]) -> None:
        """Record a call and its result. opencode prints each call once, when it has ended."""
        state, call_id = part["state"], part["callID"]
        failed = state["status"] == "error"
        self.transcript.calls(call_id, part["tool"], state.get("input") or {})
        self.transcript.returns(call_id, state.get("error" if failed else "output") or "", failed=failed)

    def _step(self, tokens: dict[str, Any]) -> None:
        cache = tokens.get("cache") or {}
        cached = int(cache.get("read") or 0)
        self.transcript.turn(
            input_tokens=int(tokens.get("input") or 0) + cached + int(cache.get("write") or 0),
            output_tokens=int(tokens.get("output") or 0) + int(tokens.get("reasoning") or 0),
            cached_tokens=cached,
        )


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
        # Without a title, opencode asks the model for one.
        return HarnessCommand(
            argv=(context.executable, "run", "--pure", "--format", "json", "--thinking", "--title", "task"),
            env={
                "OPENCODE_CONFIG": config,
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                # The repository's settings would win over these: its model, its permissions. opencode would also write
                # into its .opencode directory, and so into the patch.
                "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
            },
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
            # Without the project's settings, opencode does not look for this file itself; it may be missing.
            "instructions": [f"{context.workdir}/AGENTS.md", *([instructions] if context.system else [])],
        }

    def reader(self) -> EventReader:
        return OpencodeReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, OpencodeReader)
        # opencode exits with 0 whenever it leaves its loop, but the work is done only after a step without tool calls.
        if reader.error or not ended.ok or reader.reason in (None, "tool-calls"):
            return AgentOutcome.CRASHED, "; ".join(word for word in (reader.error, ended.how) if word)
        return AgentOutcome.COMPLETED, None


class OpencodeAgent(CliAgent):
    harness_class = Opencode


if __name__ == "__main__":
    OpencodeAgent.run_webserver()
