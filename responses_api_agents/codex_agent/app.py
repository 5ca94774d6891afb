"""The agent server of Codex."""

from __future__ import annotations

import json
import re
from typing import Any

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.codex_agent.events import CodexReader
from responses_api_agents.codex_agent.options import PACKAGE, CodexOptions

MCP_WORDS = re.compile(r"required MCP servers? failed|MCP (server|client).{0,80}(failed|timed out)", re.IGNORECASE)


class Codex(CliHarness):
    name = "codex"
    package = PACKAGE
    options_class = CodexOptions
    options: CodexOptions

    def command(self, context: HarnessContext) -> HarnessCommand:
        argv = (context.executable, "exec", "--json", "--skip-git-repo-check")
        directory = f"{context.home}/.codex"
        return HarnessCommand(
            # The box is the sandbox: Codex's own would need a namespace that it may not make.
            argv=(*argv, "--dangerously-bypass-approvals-and-sandbox", "-"),
            env={"CODEX_HOME": directory, "POLICY_KEY": context.api_key},
            files={f"{directory}/config.toml": self._config(context).encode()},
            stdin=context.prompt.encode(),
        )

    def _config(self, context: HarnessContext) -> str:
        options = self.options
        lines = [
            *_entry("model", context.model),
            *_entry("developer_instructions", context.system or None),
            *_entry("model_context_window", options.context_tokens),
            *_entry("model_auto_compact_token_limit", options.compact_at_tokens),
            *_entry("model_reasoning_effort", options.reasoning_effort),
            *('model_provider = "policy"', 'web_search = "disabled"', "check_for_update_on_startup = false"),
            "allow_login_shell = false",  # a login shell takes the box's PATH away
            *("[analytics]", "enabled = false", "[features]", "plugins = false", "apps = false"),
            *("[model_providers.policy]", 'name = "policy"', 'env_key = "POLICY_KEY"', 'wire_api = "responses"'),
            *_entry("base_url", f"{context.model_url}/v1"),
            *_entry("request_max_retries", options.max_retries),
            *_entry("stream_max_retries", options.max_retries),
            *_entry("stream_idle_timeout_ms", int(options.idle_timeout_s * 1000)),
        ]
        for server in context.mcp:
            # Without `required`, a server that cannot be reached is only missing.
            lines += [f"[mcp_servers.{_string(server.name)}]", *_entry("url", server.url), "required = true"]
            lines += _entry("tool_timeout_sec", options.tool_timeout_s)
        return "\n".join(lines) + "\n"

    def reader(self) -> CodexReader:
        return CodexReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        assert isinstance(ended.reader, CodexReader)
        reader = ended.reader
        if ended.ok and reader.ended == "turn.completed":
            return AgentOutcome.COMPLETED, None
        said = reader.error or ended.how
        if not reader.transcript.turns and (failure := MCP_WORDS.search(f"{reader.error}\n{ended.stderr}")):
            return AgentOutcome.MCP_FAILED, f"{failure.group()}; {said[:500]}"
        return AgentOutcome.CRASHED, said[:500]


def _entry(key: str, value: Any) -> list[str]:
    """One line of TOML, none without a value."""
    return [] if value is None else [f"{key} = {_string(value) if isinstance(value, str) else value}"]


def _string(text: str) -> str:
    """A TOML string: JSON's but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


class CodexAgent(CliAgent):
    harness_class = Codex


if __name__ == "__main__":
    CodexAgent.run_webserver()
