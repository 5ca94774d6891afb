"""Codex's ``--json`` events, one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.agent.harness.events import JsonEventReader


class CodexReader(JsonEventReader):
    """Codex calls a whole run a turn, and does not say where one answer of the model ends. Answers are counted by
    their order: what the model says or calls after a tool has returned belongs to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: str | None = None
        """``turn.completed`` or ``turn.failed``, the last of them."""
        self.error = ""
        """The last error, as Codex says it; one that it recovered from, too."""
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
                used = event.get("usage") or {}
                self.transcript.set_usage(
                    input_tokens=int(used.get("input_tokens") or 0),
                    cached_tokens=int(used.get("cached_input_tokens") or 0),
                    output_tokens=int(used.get("output_tokens") or 0),
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
                self._started(item)  # some items come whole, without a start
                if _call(item)[0]:
                    self._answering = False
                    failed = item.get("status") in ("failed", "declined")
                    self.transcript.returns(item["id"], _output(item), failed=failed)

    def _answer(self) -> None:
        if not self._answering:
            self._answering = True
            self.transcript.turn()


def _call(item: dict[str, Any]) -> tuple[str | None, Any]:
    """The tool and its arguments; no tool for other items."""
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
