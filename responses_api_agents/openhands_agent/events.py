"""What `conversation` tells: one JSON object a line."""

from __future__ import annotations

from typing import Any

from nemo_gym.agent.harness.events import JsonEventReader

LIMIT_CODE = "MaxIterationsReached"


class OpenHandsReader(JsonEventReader):
    """Reads the lines of ``conversation.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.end: dict[str, Any] | None = None
        """Its last word: ``status`` of the conversation, and ``code`` and ``detail`` of an error."""
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
                self.end = event

    def _answer(self, event: dict[str, Any]) -> None:
        """Each tool call of an answer is an event of its own, with the same response id; the first has the text."""
        if event["response"] is None or event["response"] != self._response:
            self._response = event["response"]
            self.transcript.turn()
        self.transcript.thinks(event["reasoning"])
        self.transcript.says(event["text"])
