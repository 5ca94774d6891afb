"""The agent server of Claude Code.

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
from nemo_gym.agent.harness.events import MAIN, JsonEventReader
from nemo_gym.contract.session import AgentOutcome

BUILD = "@anthropic-ai/claude-code-linux-x64"
INTEGRITY = "sha512-+n4lu1ubYAp02Y0X/MAUnxw9yY6SHHZ77F+IoW+V0wVoFuiI9opdH6gofjf14gXJCEYMTNpks7Gn1i8XZTKAWA=="

PACKAGE = CliPackage(
    name="claude-code",
    version="2.1.329",
    command=f"node_modules/{BUILD}/claude",
    runtime="elf-glibc",
    box_commands=("bash",),  # the CLI needs it to run the model's commands
    npm={BUILD: "2.1.329"},
    integrity={BUILD: INTEGRITY},
)


class ClaudeCodeOptions(HarnessOptions):
    bare: bool = False
    """Use the smallest prompt, and only the tools Bash, Edit and Read beside the environment's."""
    tools: list[str] | None = None
    """The built-in tools that the model is offered; all by default, none for an empty list."""
    context_tokens: int | None = Field(None, gt=0)
    """The model's context length. By default, the CLI assumes a million for a model that it does not know."""
    compaction: bool = True
    """Whether the CLI summarizes a conversation that nears ``context_tokens``."""
    max_retries: int = Field(10, ge=0)
    """Retries of one model request, after 429, 5xx, or a broken connection."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long the CLI waits for the start of a response."""


class ClaudeCodeReader(JsonEventReader):
    """Reads stream-json. A run may have several ``init`` and ``result`` events, because it continues when sub-agents
    in the background end."""

    def __init__(self) -> None:
        super().__init__()
        self.result: dict[str, Any] | None = None
        """The last ``result`` event."""
        self.mcp_status: dict[str, str] = {}
        """MCP server → its last reported status."""
        self._answers: set[str] = set()

    @property
    def failed_mcp(self) -> list[str]:
        """The MCP servers that cannot be used. Servers that are still connecting are not included."""
        return sorted(name for name, status in self.mcp_status.items() if status in ("failed", "needs-auth"))

    def event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "system":
                self._system(event)
            case "assistant":
                self._assistant(event)
            case "user":
                self._user(event)
            case "result":
                self.result = event
                self._usage(event.get("modelUsage") or {})

    def _system(self, event: dict[str, Any]) -> None:
        match event.get("subtype"):
            case "init":
                for server in event.get("mcp_servers") or ():
                    self.mcp_status[str(server["name"])] = str(server["status"])
            case "compact_boundary":
                metadata = event.get("compact_metadata") or {}
                self.transcript.compacts(trigger=metadata.get("trigger"), tokens_before=metadata.get("pre_tokens"))

    def _assistant(self, event: dict[str, Any]) -> None:
        message, parent = event["message"], event.get("parent_tool_use_id")
        if message.get("model") == "<synthetic>":
            return  # the CLI's own error message, not an answer of the model
        invocation = str(parent) if parent else MAIN
        if parent:
            self.transcript.invokes(invocation, by_call=invocation)
        # Each block of an answer arrives as a separate event with the same message id.
        if message["id"] not in self._answers:
            self._answers.add(message["id"])
            tokens = _tokens(message.get("usage") or {}, "input_tokens", "cache_read_input_tokens", "output_tokens")
            if parent:
                self.transcript.add_usage(**tokens)
            else:
                self.transcript.turn(**tokens)
        for block in message["content"]:
            match block["type"]:
                case "text":
                    self.transcript.says(block["text"], invocation=invocation)
                case "thinking":
                    self.transcript.thinks(block["thinking"], invocation=invocation)
                case "tool_use":
                    self.transcript.calls(block["id"], block["name"], block["input"], invocation=invocation)

    def _user(self, event: dict[str, Any]) -> None:
        content = event["message"]["content"]
        for block in content if isinstance(content, list) else ():
            if block["type"] == "tool_result":
                output = _text(block.get("content"))
                self.transcript.returns(block["tool_use_id"], output, failed=bool(block.get("is_error")))

    def _usage(self, models: dict[str, dict[str, Any]]) -> None:
        """Set the usage of the whole session, including sub-agents and summaries."""
        totals = [_tokens(usage, "inputTokens", "cacheReadInputTokens", "outputTokens") for usage in models.values()]
        if totals:
            self.transcript.set_usage(**{name: sum(total[name] for total in totals) for name in totals[0]})


def _tokens(usage: dict[str, Any], fresh: str, cached: str, output: str) -> dict[str, int]:
    """Return the token counts. Claude counts cached input separately; here it is part of the input."""
    from_cache = int(usage.get(cached) or 0)
    written = int(usage.get("cache_creation_input_tokens") or usage.get("cacheCreationInputTokens") or 0)
    return {
        "input_tokens": int(usage.get(fresh) or 0) + from_cache + written,
        "cached_tokens": from_cache,
        "output_tokens": int(usage.get(output) or 0),
    }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    return str(content or "")


class ClaudeCode(CliHarness):
    name = "claude_code"
    package = PACKAGE
    options_class = ClaudeCodeOptions
    options: ClaudeCodeOptions

    def command(self, context: HarnessContext) -> HarnessCommand:
        options, system, mcp = self.options, f"{context.home}/system.txt", f"{context.home}/mcp.json"
        servers = {server.name: {"type": "http", "url": server.url} for server in context.mcp}
        argv = [context.executable, "-p", "--output-format", "stream-json", "--verbose"]
        argv += ["--dangerously-skip-permissions", "--session-id", context.session_uuid]
        argv += ["--mcp-config", mcp, "--strict-mcp-config"]
        # Not the repository's settings: their variables would win over these, and their hooks would run. Its CLAUDE.md
        # is then read only as that of an added directory.
        argv += ["--setting-sources", "user"]
        argv += ["--bare"] if options.bare else ["--add-dir", context.workdir]
        if options.tools is not None:
            argv += ["--tools", ",".join(options.tools)]
        if context.max_turns is not None:
            argv += ["--max-turns", str(context.max_turns)]
        if context.system:
            argv += ["--append-system-prompt-file", system]
        env = {
            "ANTHROPIC_BASE_URL": context.model_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "ANTHROPIC_MODEL": context.model,
            "ANTHROPIC_SMALL_FAST_MODEL": context.model,
            "CLAUDE_CONFIG_DIR": f"{context.home}/.claude",
            "CLAUDE_CODE_TMPDIR": f"{context.home}/tmp",
            "CLAUDE_CODE_MAX_RETRIES": str(options.max_retries),
            "API_TIMEOUT_MS": str(int(options.request_timeout_s * 1000)),
            "CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Send requests that any server of the dialect accepts, and the same prompt for every sample.
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "ENABLE_TOOL_SEARCH": "false",
            "IS_SANDBOX": "1",  # otherwise the CLI refuses to skip permissions as root
        }
        if options.context_tokens is not None:
            env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(options.context_tokens)
            env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(options.context_tokens)
        if not options.compaction:
            env["DISABLE_AUTO_COMPACT"] = "1"
        if context.max_output_tokens is not None:
            env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(context.max_output_tokens)
        files = {mcp: json.dumps({"mcpServers": servers}).encode(), system: context.system.encode()}
        return HarnessCommand(argv=tuple(argv), env=env, files=files, stdin=context.prompt.encode())

    def reader(self) -> ClaudeCodeReader:
        return ClaudeCodeReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        """Judge the run. An API error is reported as ``success`` with ``is_error``; an interrupted run exits with
        status 0 and has no result."""
        assert isinstance(ended.reader, ClaudeCodeReader)
        result = ended.reader.result
        if ended.reader.failed_mcp:
            return AgentOutcome.MCP_FAILED, f"no connection to MCP server {', '.join(ended.reader.failed_mcp)}"
        if result is None:
            return AgentOutcome.CRASHED, f"it ended without a result; {ended.how}"
        if result.get("subtype") == "error_max_turns":
            return AgentOutcome.MAX_TURNS, "it used all of its turns"
        if result.get("stop_reason") == "refusal":
            return AgentOutcome.REFUSED, "the model refused the task"
        if result.get("is_error") or result.get("subtype") != "success":
            error = result.get("result") or result.get("errors") or result.get("subtype")
            status = f"API status {result['api_error_status']}: " if result.get("api_error_status") else ""
            return AgentOutcome.CRASHED, f"{status}{str(error)[:500]}"
        return (AgentOutcome.COMPLETED, None) if ended.ok else (AgentOutcome.CRASHED, ended.how)


class ClaudeCodeAgent(CliAgent):
    harness_class = ClaudeCode


if __name__ == "__main__":
    ClaudeCodeAgent.run_webserver()
