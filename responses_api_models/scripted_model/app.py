"""A model that replays a script, for tests, demonstrations and benchmarks. No real model is behind it.

It acts only through the harness: it reads the conversation and answers with text and tool calls, like any policy.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import orjson
from fastapi import FastAPI
from pydantic import PrivateAttr
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.base_responses_api_model import (
    BaseResponsesAPIModelConfig,
    InferenceCall,
    RateLimitedError,
    SimpleResponsesAPIModel,
)
from nemo_gym.contract.errors import ConfigError, ModelError
from nemo_gym.gateway.dialects.adapters import ADAPTERS, EVENT_STREAM
from nemo_gym.gateway.model_server import reply_of_completion
from nemo_gym.prompt import resolve_path
from responses_api_models.scripted_model.script import Answer, Fault, HarnessTools, Script

CHARS_PER_TOKEN = 4


class ScriptedModelConfig(BaseResponsesAPIModelConfig):
    """Configuration."""

    script: str
    """A YAML or JSON file; see the README for its format."""
    tools: str | None = None
    """A `HarnessTools` file for the agent's harness. It is read only if the script needs it."""
    mcp_server: str | None = None
    """The name of the environment's MCP server, for harnesses that prefix tool names with it."""


class ScriptedFaultError(ModelError):
    """An error status that a script asked for."""

    code = "scripted_fault"

    def __init__(self, status: int) -> None:
        super().__init__(f"the script answers {status} here", retryable=status >= 500)
        self.status = status  # type: ignore[misc]


class ScriptedModel(SimpleResponsesAPIModel):
    """Replays a script."""

    config: ScriptedModelConfig

    _script: Script | None = PrivateAttr(default=None)
    _faults: dict[tuple[str, str, int], int] = PrivateAttr(default_factory=dict)

    @property
    def script(self) -> Script:
        if self._script is None:
            self._script = self._translated(Script.load(resolve_path(self.config.script)))
        return self._script

    def _translated(self, script: Script) -> Script:
        if script.is_spelled:
            return script
        if self.config.tools is None:
            raise ConfigError(
                f"script '{self.config.script}' names actions, but no tool calls of a harness; set 'tools' to the"
                " agent's data/scripted_tools.yaml",
                key="tools",
            )
        return script.spelled(HarnessTools.load(resolve_path(self.config.tools)), self.config.mcp_server)

    def model_name(self) -> str:
        return self.script.model

    def setup_webserver(self) -> FastAPI:
        _ = self.script  # an invalid script must fail at startup, not at the first rollout
        return super().setup_webserver()

    async def infer(self, call: InferenceCall) -> Response:
        messages = [dict(message) for message in ADAPTERS[call.dialect].lower(call.body).messages]
        answer = self.script.answer(messages, call.session.rollout.sample_index if call.session is not None else 0)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        seed = hashlib.sha256(orjson.dumps(messages)).hexdigest()[:24]
        if answer.fault is not None and self._fault_happens(call, answer, answer.fault, seed):
            fault_response = await _fail(answer.fault, stream=call.stream)
            if fault_response is not None:
                return fault_response
        return reply_of_completion(call, _completion(answer, messages, self.script.model, seed))

    def _fault_happens(self, call: InferenceCall, answer: Answer, fault: Fault, seed: str) -> bool:
        """Whether the fault still happens: at most ``fault.times`` times per session (or conversation) and turn."""
        conversation = call.session.session_id if call.session is not None else seed
        key = (conversation, answer.task, answer.turn)
        count = self._faults.get(key, 0)
        self._faults[key] = count + 1
        return count < fault.times


def _tokens(value: Any) -> int:
    return max(1, len(orjson.dumps(value)) // CHARS_PER_TOKEN)


def _completion(answer: Answer, messages: list[dict[str, Any]], model: str, seed: str) -> dict[str, Any]:
    """Return the answer as a chat completion, with ids and token counts derived from the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{seed[:12]}_{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if isinstance(call.arguments, str)
                    else orjson.dumps(call.arguments).decode(),
                },
            }
            for number, call in enumerate(answer.tool_calls)
        ]
    prompt, output = _tokens(messages), _tokens(message)
    return {
        "id": f"chatcmpl-{seed}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.tool_calls else "stop"},
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


async def _fail(fault: Fault, *, stream: bool) -> Response | None:
    """Apply the fault. Return ``None`` if the normal answer follows after all."""
    if fault.hang_s is not None:
        await asyncio.sleep(fault.hang_s)
        return None
    if fault.disconnect:
        return _BrokenResponse(stream=stream)
    if fault.malformed:
        return Response(b'{"choices": [', media_type="application/json")
    assert fault.status is not None
    if fault.status == 429:
        raise RateLimitedError("the script answers 429 here", retryable=True, retry_after_s=fault.retry_after_s)
    raise ScriptedFaultError(fault.status)


class _BrokenResponse(Response):
    """Starts a response and does not finish it, so that the server closes the connection."""

    def __init__(self, *, stream: bool) -> None:
        super().__init__(b"", status_code=502)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        media_type, first_chunk = (
            (EVENT_STREAM, b": working\n\n") if self._stream else ("application/json", b'{"id": "ch')
        )
        # An event stream is sent in chunks, and the final chunk is missing.
        length_headers = [] if self._stream else [(b"content-length", b"4096")]
        headers = [(b"content-type", media_type.encode()), *length_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first_chunk, "more_body": True})


if __name__ == "__main__":
    ScriptedModel.run_webserver()
