"""Reads the events that a composite agent prints, one JSON object a line. See the README for the format."""

from __future__ import annotations

from typing import Any

from nemo_gym.agent.harness.events import MAIN, JsonEventReader
from nemo_gym.contract.session import AgentOutcome
from responses_api_agents.composite_agent.options import CLAIMS

MAX_TEXT_BYTES = 64 * 1024


class CompositeReader(JsonEventReader):
    """Reads events. An event belongs to the part named in ``agent``, or to the main agent if it has no ``agent``."""

    def __init__(self) -> None:
        super().__init__()
        self.claim: AgentOutcome | None = None
        """The outcome in the last ``end`` event."""
        self.detail: str | None = None
        self._text = b""
        self._events = 0

    def feed(self, line: bytes) -> None:
        before = self.other_lines
        super().feed(line)
        if self.other_lines > before:
            self._text = (self._text + line + b"\n")[-MAX_TEXT_BYTES:]

    def finish(self) -> None:
        """If the command printed no events, take its output as its message."""
        if not self._events:
            self.transcript.says(self._text.decode("utf-8", "replace").strip())

    def event(self, event: dict[str, Any]) -> None:
        invocation = self._invocation(event)
        match event["type"]:
            case "answer":
                self._answer(event, invocation)
            case "call":
                self.transcript.calls(str(event["id"]), event["name"], event["arguments"], invocation=invocation)
            case "result":
                self.transcript.returns(str(event["id"]), event["output"], failed=bool(event.get("failed")))
            case "say":
                self.transcript.says(event["text"], invocation=invocation)
            case "end":
                claim = AgentOutcome(event["outcome"])
                if claim not in CLAIMS:
                    raise ValueError(f"'{claim}' is not the agent's to say")
                self.claim, self.detail = claim, event.get("detail") and str(event["detail"])[:500]
            case other:
                raise ValueError(f"unknown type '{other}'")
        self._events += 1

    def _invocation(self, event: dict[str, Any]) -> str:
        part = event.get("agent")
        if part is None:
            return MAIN
        parent = event.get("parent")
        self.transcript.invokes(str(part), parent=str(parent) if parent is not None else MAIN)
        return str(part)

    def _answer(self, event: dict[str, Any], invocation: str) -> None:
        usage = event.get("usage") or {}
        names = ("input_tokens", "output_tokens", "cached_tokens")
        tokens = {name: int(usage.get(name) or 0) for name in names}
        if invocation == MAIN:
            self.transcript.turn(**tokens)
        else:
            self.transcript.add_usage(**tokens)
        self.transcript.thinks(str(event.get("reasoning") or ""), invocation=invocation)
        self.transcript.says(str(event.get("text") or ""), invocation=invocation)
