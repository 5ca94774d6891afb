"""Qwen Code's events: one JSON object a line, each a message or the result of the run."""

from __future__ import annotations

from typing import Any

from nemo_gym.agent.harness.events import MAIN, JsonEventReader


class QwenReader(JsonEventReader):
    """Reads ``qwen --output-format stream-json``."""

    def __init__(self) -> None:
        super().__init__()
        self.result: dict[str, Any] | None = None
        """The last event of a run that ended by its own rules, failed or not."""
        self._answering = False

    @property
    def error(self) -> str:
        """What the result says went wrong; empty when nothing did, or there is no result."""
        if self.result is None or not self.result.get("is_error"):
            return ""
        error = self.result.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        return str(said or self.result.get("result") or self.result.get("subtype"))

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
        """A sub-agent is known by the call that made it."""
        call_id = event.get("parent_tool_use_id")
        if call_id is None:
            return MAIN
        self.transcript.invokes(call_id, by_call=call_id)
        return str(call_id)

    def _answer(self, message: dict[str, Any], invocation: str) -> None:
        """Each block of an answer is an event of its own; the last one has the usage."""
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
