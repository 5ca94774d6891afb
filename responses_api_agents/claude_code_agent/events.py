"""Claude Code's ``stream-json`` events, one JSON object a line."""

from __future__ import annotations

from typing import Any

from nemo_gym.agent.harness.events import MAIN, JsonEventReader


class ClaudeCodeReader(JsonEventReader):
    """One run may have several ``init`` and ``result`` events: it goes on after sub-agents in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.result: dict[str, Any] | None = None
        """The last ``result`` event."""
        self.mcp_status: dict[str, str] = {}
        """MCP server → what was last said of it."""
        self._answers: set[str] = set()

    @property
    def failed_mcp(self) -> list[str]:
        """MCP servers that could not be used; one that is still being connected to is not among them."""
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
            return  # the CLI's own words about an error, in the model's place
        invocation = str(parent) if parent else MAIN
        if parent:
            self.transcript.invokes(invocation, by_call=invocation)
        # Each block of an answer is an event of its own, with the same id.
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
        """The whole session's, sub-agents and summaries included."""
        totals = [_tokens(used, "inputTokens", "cacheReadInputTokens", "outputTokens") for used in models.values()]
        if totals:
            self.transcript.set_usage(**{name: sum(total[name] for total in totals) for name in totals[0]})


def _tokens(usage: dict[str, Any], fresh: str, cached: str, output: str) -> dict[str, int]:
    """Claude counts input that came from a cache apart; here it is part of the input."""
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
