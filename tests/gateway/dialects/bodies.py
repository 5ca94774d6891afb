"""Requests as the agent CLIs send them (their shapes, shortened), and answers to give them."""

from __future__ import annotations

from typing import Any

from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerTokens, AnswerUsage

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
PIXEL_URL = f"data:image/png;base64,{PIXEL}"
IMAGE_PART = {"type": "image_url", "image_url": {"url": PIXEL_URL}}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(
    text: str | None = None,
    *calls: dict[str, Any],
    reasoning: str | None = None,
    end: AnswerEnd | None = None,
    stop: str | None = None,
    tokens: AnswerTokens | None = None,
) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [*calls]
    if reasoning:
        message["reasoning_content"] = reasoning
    return Answer(
        answer_id="0123456789abcdef0123456789abcdef",
        created_at=1_700_000_000.5,
        model="policy",
        message=message,
        end=end or (AnswerEnd.TOOL_CALLS if calls else AnswerEnd.STOP),
        usage=AnswerUsage(prompt_tokens=100, completion_tokens=7, cached_tokens=60, reasoning_tokens=2),
        stop=stop,
        tokens=tokens,
    )


def chat_body(**fields: Any) -> dict[str, Any]:
    """As opencode and qwen-code ask."""
    function = {"name": "bash", "description": "Run a command.", "parameters": SCHEMA}
    return {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "max_tokens": 32000,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def claude_body(**fields: Any) -> dict[str, Any]:
    """As Claude Code asks in its newest shape: a system message amid the messages, thinking, deferred tools."""
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "claude-opus-5-5",
        "max_tokens": 128000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.329; cch=1a2b3;"},
            {"type": "text", "text": "You are a Claude agent.", **cached},
            {"type": "text", "text": "Work in /repo.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                    {"type": "text", "text": "fix it", **cached},
                ],
            },
            {"role": "system", "content": "ToolSearch finds: mcp__weather__get"},
        ],
        "tools": [
            {"name": "Bash", "description": "Run.", "input_schema": SCHEMA},
            {"name": "ToolSearch", "description": "Find.", "input_schema": SCHEMA},
            {"name": "mcp__weather__get", "description": "W.", "input_schema": SCHEMA, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"},
        **fields,
    }


def codex_body(*history: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """As Codex asks: no instructions, developer items, namespaces, free-text and hosted tools."""
    weather = {"type": "function", "name": "get_weather", "description": "W.", "strict": False, "parameters": SCHEMA}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    return {
        "model": "policy",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            *history,
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "mcp__weather", "description": "Weather tools.", "tools": [weather]},
            {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
        **fields,
    }
