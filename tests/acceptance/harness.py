"""A harness in each dialect that keeps its own history, and keeps it as carelessly as it is told to."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

Run = Callable[[str, Mapping[str, Any]], str]
"""A tool: name and arguments to its output."""
TOOL = "run"
DESCRIPTION = "Run a command in the shell."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "options": {"type": "object"}},
    "required": ["command"],
}


def as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Carelessness:
    """What a harness does to the assistant's turns before it sends them back."""

    name: str
    text: Callable[[str], str] = as_it_is
    arguments: Callable[[str], str] = as_it_is
    call_id: Callable[[str], str] = as_it_is


def sorted_json(text: str) -> str:
    """Arguments parsed and written anew: keys sorted, indented, without escapes."""
    return json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False)


def escaped_json(text: str) -> str:
    """Arguments parsed and written anew: keys backwards, dense, everything escaped."""
    data = json.loads(text)
    return json.dumps(dict(reversed(data.items())), separators=(",", ":"), ensure_ascii=True)


CARELESS = (
    Carelessness("faithful"),
    Carelessness("strips", text=str.strip),
    Carelessness("rewraps", text=lambda text: " \n".join(text.split()) + "\n"),
    Carelessness("sorts_arguments", arguments=sorted_json),
    Carelessness("escapes_arguments", arguments=escaped_json),
    Carelessness("all_at_once", str.strip, sorted_json, lambda call_id: "renamed_" + call_id[-12:]),
)


class Harness(ABC):
    """``await harness.work("do this")`` asks and runs tools until the assistant calls none."""

    path: str

    def __init__(self, base_url: str, token: str, run: Run, careless: Carelessness) -> None:
        """``base_url`` ends in ``/v1``."""
        self._url, self._token, self._run, self.careless = base_url + self.path, token, run, careless
        self.history: list[dict[str, Any]] = []
        self.turns = 0

    @abstractmethod
    def body(self) -> dict[str, Any]: ...

    @abstractmethod
    def ask(self, text: str) -> None:
        """Put a user's message into the history."""

    @abstractmethod
    def take(self, reply: Mapping[str, Any]) -> bool:
        """Put an answer and its tools' results into the history; whether there were any tools."""

    async def work(self, text: str) -> None:
        self.ask(text)
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            more = True
            while more:
                async with http.post(self._url, json=self.body()) as reply:
                    assert reply.status == 200, await reply.text()
                    more = self.take(await reply.json())
                self.turns += 1

    def result(self, name: str, arguments: str) -> str:
        return self._run(name, json.loads(arguments))


class ChatHarness(Harness):
    path = "/chat/completions"

    def body(self) -> dict[str, Any]:
        function = {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}
        return {"model": "m", "messages": self.history, "tools": [{"type": "function", "function": function}]}

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, reply: Mapping[str, Any]) -> bool:
        said, careless = reply["choices"][0]["message"], self.careless
        calls = said.get("tool_calls") or []
        kept: dict[str, Any] = {"role": "assistant", "content": careless.text(said.get("content") or "")}
        results = []
        for call in calls:
            function, call_id = call["function"], careless.call_id(call["id"])
            spelled = {"name": function["name"], "arguments": careless.arguments(function["arguments"])}
            kept.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": spelled})
            output = self.result(function["name"], function["arguments"])
            results.append({"role": "tool", "tool_call_id": call_id, "content": output})
        self.history += [kept, *results]
        return bool(calls)


class ResponsesHarness(Harness):
    path = "/responses"

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}
        return {"model": "m", "input": self.history, "tools": [tool], "store": False}

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, reply: Mapping[str, Any]) -> bool:
        careless = self.careless
        results: list[dict[str, Any]] = []
        for item in reply["output"]:
            if item["type"] == "message":
                text = "".join(part["text"] for part in item["content"])
                part = {"type": "output_text", "text": careless.text(text), "annotations": []}
                self.history.append({**item, "content": [part]})
            elif item["type"] == "function_call":
                call_id = careless.call_id(item["call_id"])
                spelled = careless.arguments(item["arguments"])
                self.history.append({**item, "call_id": call_id, "arguments": spelled})
                output = self.result(item["name"], item["arguments"])
                results.append({"type": "function_call_output", "call_id": call_id, "output": output})
            else:
                self.history.append(dict(item))
        self.history += results
        return bool(results)


class MessagesHarness(Harness):
    path = "/messages"

    def body(self) -> dict[str, Any]:
        tool = {"name": TOOL, "description": DESCRIPTION, "input_schema": PARAMETERS}
        return {"model": "m", "max_tokens": 4096, "messages": self.history, "tools": [tool]}

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, reply: Mapping[str, Any]) -> bool:
        careless = self.careless
        kept: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for block in reply["content"]:
            if block["type"] == "text":
                kept.append({"type": "text", "text": careless.text(block["text"])})
            elif block["type"] == "tool_use":
                call_id = careless.call_id(block["id"])
                spelled = json.loads(careless.arguments(json.dumps(block["input"])))
                kept.append({**block, "id": call_id, "input": spelled})
                output = self._run(block["name"], block["input"])
                results.append({"type": "tool_result", "tool_use_id": call_id, "content": output})
            else:
                kept.append(dict(block))
        self.history.append({"role": "assistant", "content": [b for b in kept if b.get("text") != ""]})
        if results:
            self.history.append({"role": "user", "content": results})
        return bool(results)


HARNESSES: Mapping[str, type[Harness]] = {
    "chat": ChatHarness,
    "responses": ResponsesHarness,
    "messages": MessagesHarness,
}
