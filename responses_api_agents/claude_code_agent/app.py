"""The agent server of Claude Code."""

from __future__ import annotations

import json

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.claude_code_agent.events import ClaudeCodeReader
from responses_api_agents.claude_code_agent.options import PACKAGE, ClaudeCodeOptions


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
        if options.bare:
            argv.append("--bare")
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
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Requests as any server of the dialect takes them, and the same prompt for every sample.
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "ENABLE_TOOL_SEARCH": "false",
            "IS_SANDBOX": "1",  # as root it refuses to skip permissions otherwise
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
        """An API error is a ``success`` with ``is_error``, and an interrupt exits with 0 and no result."""
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
            said = result.get("result") or result.get("errors") or result.get("subtype")
            status = f"API status {result['api_error_status']}: " if result.get("api_error_status") else ""
            return AgentOutcome.CRASHED, f"{status}{str(said)[:500]}"
        return (AgentOutcome.COMPLETED, None) if ended.ok else (AgentOutcome.CRASHED, ended.how)


class ClaudeCodeAgent(CliAgent):
    harness_class = ClaudeCode


if __name__ == "__main__":
    ClaudeCodeAgent.run_webserver()
