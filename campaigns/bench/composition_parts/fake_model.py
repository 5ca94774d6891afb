"""An OpenAI-compatible endpoint in a separate process that responds at once: with a tool call if the request has no
tool output yet, else with text.

    python fake_model.py FD SCRIPT        with FD a listening socket, SCRIPT {"text", "tool", "arguments"} as JSON
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from campaigns.bench.gateway_parts.engine import EngineConnection


class FakeModel:
    """Prepared responses, by route and by whether the request has a tool's output."""

    def __init__(self, script: dict[str, Any]) -> None:
        text, tool, arguments = (
            script["text"],
            script.get("tool"),
            orjson.dumps(script.get("arguments") or {}).decode(),
        )
        with_text = _response(_message(text)), _completion({"content": text}, "stop")
        with_tool = with_text
        if tool:
            call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": arguments}}
            item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool, "arguments": arguments}
            with_tool = (
                _response({**item, "status": "completed"}),
                _completion({"content": None, "tool_calls": [call]}, "tool_calls"),
            )
        self._answers = {
            (b"/v1/responses", False): with_tool[0],
            (b"/v1/responses", True): with_text[0],
            (b"/v1/chat/completions", False): with_tool[1],
            (b"/v1/chat/completions", True): with_text[1],
        }

    def answer(self, path: bytes, body: bytes) -> tuple[bytes, float]:
        if path in (b"/health", b"/v1/models"):
            return b'{"object":"list","data":[]}', 0.0
        return self._answers[path, b'"function_call_output"' in body or b'"role":"tool"' in body], 0.0


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _response(item: dict[str, Any]) -> bytes:
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 120,
    }
    return orjson.dumps(
        {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "model": "fake",
            "output": [item],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }
    )


def _completion(message: dict[str, Any], finish_reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "fake"}
    return orjson.dumps({**head, "choices": [choice], "usage": usage})


async def serve(listener: socket.socket, model: FakeModel) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: EngineConnection(model), sock=listener, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1])), FakeModel(orjson.loads(sys.argv[2]))))
