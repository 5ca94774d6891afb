"""opencode's events: one JSON object a line, each with a ``part`` of the conversation."""

from __future__ import annotations

from typing import Any

from nemo_gym.agent.harness.events import JsonEventReader


class OpencodeReader(JsonEventReader):
    """Reads ``opencode run --format json``."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        """Why the last step ended (``stop``, ``tool-calls``, ``length``); nothing while in one."""
        self.error: str | None = None
        """Of the session, which ends it."""

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
                said = (error.get("data") or {}).get("message")
                self.error = ": ".join(str(word) for word in (error.get("name"), said) if word)

    def _tool(self, part: dict[str, Any]) -> None:
        """A call that has ended already: it is printed once, with its times."""
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
