"""Tools as the policy sees them: functions with flat, unique names, whatever a harness calls them.

Codex groups tools in namespaces and takes free text for some; Chat Completions knows neither. The policy sees
``<namespace>__<name>`` and one string argument; `CallName` says how a call is handed back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from nemo_gym.gateway.dialects.fields import Body, json_at, object_at, optional_text, refuse, text_at
from nemo_gym.gateway.lowered import CallName

_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
CUSTOM_INPUT = "input"
"""The one argument of a tool that takes free text."""
RAW_CALL = "_raw"
"""Ends the id of a call to a free-text tool whose arguments were not ``{"input": text}``: its text is the arguments as
sampled, and the id says so when the call is sent back."""
LOCAL_SHELL = "local_shell"
_LOCAL_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
_SHELL_TYPES = {"command": list, "working_directory": str, "timeout_ms": int}


def function_tool(name: str, description: str | None, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A tool as in Chat Completions."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters if parameters else {"type": "object", "properties": {}}
    if strict is True:  # the default is no part of a prompt
        function["strict"] = True
    return {"type": "function", "function": function}


class ToolTable:
    """The tools of one request, and both directions between their names."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.names: dict[str, CallName] = {}
        self._flat: dict[tuple[str | None, str], str] = {}
        self._taken: set[str] = set()

    def add(self, tool: Body, where: str, namespace: str | None = None, about: str | None = None) -> None:
        """A function tool: ``name``, ``description``, ``parameters``, ``strict``."""
        parameters = object_at(tool, "parameters", where)
        description = optional_text(tool, "description", where) or about
        flat = self._named(CallName(_name(tool, where), namespace), where)
        self.tools.append(function_tool(flat, description, parameters, tool.get("strict")))

    def add_custom(self, tool: Body, where: str, namespace: str | None = None) -> None:
        """A tool that takes free text, in a grammar that the policy is told about but not held to."""
        about = optional_text(tool, "description", where) or ""
        grammar = object_at(tool, "format", where)
        grammar = object_at(grammar, "grammar", f"{where}.format") or grammar
        if isinstance(definition := grammar.get("definition"), str):
            about += f"\n\nThe input follows this {grammar.get('syntax')} grammar:\n{definition}"
        flat = self._named(CallName(_name(tool, where), namespace, custom=True), where)
        text = {"type": "string", "description": "The tool's input, as plain text."}
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        self.tools.append(function_tool(flat, about.strip(), parameters))

    def add_local_shell(self, where: str) -> None:
        flat = self._named(CallName(LOCAL_SHELL, local_shell=True), where)
        self.tools.append(function_tool(flat, "Runs a command on the local machine.", _LOCAL_SHELL_PARAMETERS))

    def flat_name(self, name: str, namespace: str | None = None) -> str:
        """The name the policy knows a tool by; also of tools that are no longer offered."""
        return self._flat.get((namespace, name)) or _flat(name, namespace)

    def _named(self, called: CallName, where: str) -> str:
        key = (called.namespace, called.name)
        if key in self._flat:
            refuse(f"{where}.name", f"is {called.name!r} again; names of tools must be unique")
        flat = _flat(called.name, called.namespace)
        if flat in self._taken:
            flat += "_" + hashlib.sha256(repr(key).encode("utf-8", "backslashreplace")).hexdigest()[:8]
        self._flat[key] = flat
        self._taken.add(flat)
        if called != CallName(flat):
            self.names[flat] = called
        return flat


def _name(tool: Body, where: str) -> str:
    name = text_at(tool, "name", where)
    if not name:
        refuse(f"{where}.name", "is empty")
    return name


def _flat(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    return _UNUSUAL.sub("_", f"{namespace.rstrip('_')}__{name}")


def called(flat: str, call_id: str, arguments: str) -> dict[str, Any]:
    """A call as in Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": flat, "arguments": arguments}}


def custom_arguments(text: str, call_id: str, where: str) -> str:
    """The arguments of a call to a free-text tool that a harness sends back."""
    return text if call_id.endswith(RAW_CALL) else json_at({CUSTOM_INPUT: text}, where)


def custom_input(call_id: str, arguments: str, data: Any) -> tuple[str, str]:
    """``(id, text)`` of a call to a free-text tool as it is handed out; ``data`` are its arguments, parsed."""
    if isinstance(data, Mapping) and [*data] == [CUSTOM_INPUT] and isinstance(data[CUSTOM_INPUT], str):
        return call_id, data[CUSTOM_INPUT]
    return call_id + RAW_CALL, arguments


def chosen(choice: Any, table: ToolTable, where: str = "tool_choice") -> str | dict[str, Any]:
    """``tool_choice`` of either OpenAI dialect: ``auto``, ``none``, ``required``, or ``{"name": flat name}``."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            refuse(where, f"is {choice!r}; it must be 'auto', 'none', 'required' or the tool to call")
        return choice
    if not isinstance(choice, Mapping):
        refuse(where, "must be a string or an object")
    kind = choice.get("type")
    if kind == LOCAL_SHELL:
        return {"name": LOCAL_SHELL}
    if kind not in ("function", "custom"):
        refuse(f"{where}.type", f"is {kind!r}; only a function or custom tool can be chosen")
    inner = object_at(choice, kind, where) or choice
    return {"name": table.flat_name(text_at(inner, "name", where), optional_text(inner, "namespace", where))}


def shell_action(data: Any) -> dict[str, Any] | None:
    """The action of a ``local_shell`` call with these arguments; nothing where it could not carry them unchanged, and
    the call has to be handed out as a function's."""
    if not isinstance(data, Mapping) or not isinstance(command := data.get("command"), list):
        return None
    fits = all(isinstance(word, str) for word in command) and all(
        type(value) is _SHELL_TYPES.get(key) for key, value in data.items()
    )
    return {"type": "exec", "env": {}, **data} if fits else None


def shell_arguments(action: Body, where: str) -> str:
    """The arguments of a ``local_shell`` call that a harness sends back."""
    return json_at({key: action[key] for key in _SHELL_TYPES if action.get(key) is not None}, where)
