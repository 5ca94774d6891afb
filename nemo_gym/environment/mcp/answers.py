"""Extracts the tool calls and the final text from a response, whatever names the harness gives the tools.

A response is written by the harness: it is evidence for people and metrics, but a grade may use it only as far as the
policy could not have fabricated it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool call found in a response."""

    name: str
    """The environment's name of the tool."""
    arguments: str
    """JSON text, as the policy wrote it."""
    output: str | None
    """The tool's output, or ``None`` if the response has none."""


def tool_calls(response: Mapping[str, Any], server: str, tools: Collection[str]) -> list[ShownCall]:
    """The calls of an environment's ``tools`` in a Responses object, in order. ``server`` is the environment's
    instance name, which harnesses put before an MCP tool's name (``mcp__<server>__<tool>``, ``<server>_<tool>``)."""
    items = [item for item in response.get("output") or [] if isinstance(item, Mapping)]
    outputs = {
        item.get("call_id"): _text(item.get("output")) for item in items if item.get("type") == "function_call_output"
    }
    calls = []
    for item in items:
        if item.get("type") == "mcp_call":
            name, output = plain_name(str(item.get("name")), server, tools), item.get("output")
        elif item.get("type") == "function_call":
            name, output = plain_name(str(item.get("name")), server, tools), outputs.get(item.get("call_id"))
        else:
            continue
        if name is not None:
            calls.append(ShownCall(name, str(item.get("arguments") or ""), output))
    return calls


def plain_name(spelled: str, server: str, tools: Collection[str]) -> str | None:
    """Translate a harness's name for a tool to the environment's; ``None`` if it is not one of ``tools``."""
    if spelled in tools:
        return spelled
    prefix = re.sub(r"[^A-Za-z0-9]", "[^A-Za-z0-9]", server)
    match = re.fullmatch(rf"(?:mcp[_.:/-]*)?{prefix}[_.:/-]+(.+)", spelled)
    return match[1] if match and match[1] in tools else None


def answered_text(response: Mapping[str, Any]) -> str:
    """The text of the last assistant message; empty without one."""
    for item in reversed(response.get("output") or []):
        if (
            isinstance(item, Mapping)
            and item.get("type", "message") == "message"
            and (text := _text(item.get("content")))
        ):
            return text
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
