"""The agent server of Codex.

From top to bottom: the package it is mounted from, its options, the reader of its event log, its harness.
"""

from __future__ import annotations

import json
import re
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
from nemo_gym.agent.harness.events import JsonEventReader
from nemo_gym.contract.session import AgentOutcome

BUILD = "@openai/codex-linux-x64"
INTEGRITY = "sha512-o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww=="

PACKAGE = CliPackage(
    name="codex",
    version="0.169.0",
    command=f"node_modules/{BUILD}/vendor/x86_64-unknown-linux-musl/bin/codex",
    runtime="elf-static",
    npm={BUILD: "npm:@openai/codex@0.169.0-linux-x64"},
    integrity={BUILD: INTEGRITY},
)


class CodexOptions(HarnessOptions):
    context_tokens: int | None = Field(None, gt=0)
    """The model's context length. By default, Codex guesses it for a model that it does not know."""
    compact_at_tokens: int | None = Field(None, gt=0)
    """The length at which Codex summarizes the conversation."""
    reasoning_effort: str | None = None
    """``minimal``, ``low``, ``medium``, ``high`` or another value that the model accepts; not sent by default."""
    max_retries: int = Field(4, ge=0)
    """Retries of one request, and also of one broken stream: together up to (1 + max_retries)² tries."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """How long a stream may be silent before Codex requests it again."""
    tool_timeout_s: float = Field(300.0, gt=0)
    """The time limit of one MCP tool call."""


class CodexReader(JsonEventReader):
    """Reads the events of ``codex exec --json``. Codex calls a whole run a turn and does not mark where an answer of
    the model ends. So the first message or call after a tool result counts as the start of a new answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: str | None = None
        """The last ``turn.completed`` or ``turn.failed``."""
        self.error = ""
        """Codex's last error message, even if Codex recovered from the error."""
        self._answering = False
        self.transcript.gap("turns_inferred", "Codex does not report answers; parallel calls may count as several")

    def event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "item.started":
                self._started(event["item"])
            case "item.completed":
                self._completed(event["item"])
            case "turn.completed":
                self.ended = "turn.completed"
                usage = event.get("usage") or {}
                self.transcript.set_usage(
                    input_tokens=int(usage.get("input_tokens") or 0),
                    cached_tokens=int(usage.get("cached_input_tokens") or 0),
                    output_tokens=int(usage.get("output_tokens") or 0),
                )
            case "turn.failed":
                self.ended, self.error = "turn.failed", str(event["error"]["message"])
            case "error":
                self.error = str(event["message"])

    def _started(self, item: dict[str, Any]) -> None:
        name, arguments = _call(item)
        if name:
            self._answer()
            self.transcript.calls(item["id"], name, arguments)

    def _completed(self, item: dict[str, Any]) -> None:
        match item["type"]:
            case "agent_message":
                self._answer()
                self.transcript.says(item["text"])
            case "reasoning":
                self._answer()
                self.transcript.thinks(item["text"])
            case "error":
                self.transcript.gap("codex_notice", str(item["message"]))
            case _:
                self._started(item)  # some items have no `item.started` event
                if _call(item)[0]:
                    self._answering = False
                    failed = item.get("status") in ("failed", "declined")
                    self.transcript.returns(item["id"], _output(item), failed=failed)

    def _answer(self) -> None:
        if not self._answering:
            self._answering = True
            self.transcript.turn()


def _call(item: dict[str, Any]) -> tuple[str | None, Any]:
    """Return the tool and its arguments, or ``(None, None)`` for an item that is not a call."""
    match item["type"]:
        case "command_execution":
            return "exec_command", {"cmd": item["command"]}
        case "mcp_tool_call":
            return f"mcp__{item['server']}__{item['tool']}", item.get("arguments") or {}
        case "file_change":
            return "apply_patch", {"changes": item.get("changes")}
        case "web_search":
            return "web_search", {"query": item.get("query")}
        case "collab_tool_call":
            return str(item["tool"]), {"prompt": item.get("prompt")}
    return None, None


def _output(item: dict[str, Any]) -> str:
    match item["type"]:
        case "command_execution":
            return str(item.get("aggregated_output") or "")
        case "mcp_tool_call" if item.get("error"):
            return str(item["error"].get("message"))
        case "mcp_tool_call":
            parts = (item.get("result") or {}).get("content") or []
            return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
        case "collab_tool_call":
            return json.dumps(item.get("agents_states"))
    return str(item.get("status") or "")


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
            # The box is the sandbox. Codex's own sandbox needs a namespace, which it may not create in the box.
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
            "allow_login_shell = false",  # a login shell resets the box's PATH
            *("[analytics]", "enabled = false", "[features]", "plugins = false", "apps = false"),
            *("[model_providers.policy]", 'name = "policy"', 'env_key = "POLICY_KEY"', 'wire_api = "responses"'),
            *_entry("base_url", f"{context.model_url}/v1"),
            *_entry("request_max_retries", options.max_retries),
            *_entry("stream_max_retries", options.max_retries),
            *_entry("stream_idle_timeout_ms", int(options.idle_timeout_s * 1000)),
        ]
        for server in context.mcp:
            # Without `required`, Codex silently runs without a server that it cannot reach.
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
        error = reader.error or ended.how
        if not reader.transcript.turns and (failure := MCP_WORDS.search(f"{reader.error}\n{ended.stderr}")):
            return AgentOutcome.MCP_FAILED, f"{failure.group()}; {error[:500]}"
        return AgentOutcome.CRASHED, error[:500]


def _entry(key: str, value: Any) -> list[str]:
    """Return one line of TOML, or no line if ``value`` is ``None``."""
    return [] if value is None else [f"{key} = {_string(value) if isinstance(value, str) else value}"]


def _string(text: str) -> str:
    """Return a TOML string. It equals the JSON string, except that TOML escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


class CodexAgent(CliAgent):
    harness_class = Codex


if __name__ == "__main__":
    CodexAgent.run_webserver()
