"""A fake OpenAI-compatible endpoint: chat completions with logprobs, words for tokens."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from nemo_gym_testing.gateway.engine import Answer, CallLog, FakeEngine


class FakeOpenAIEngine(FakeEngine):
    ROUTES = ("/v1/chat/completions",)
    HEALTH = "/v1/models"

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    async def _probe(self, request: web.Request) -> web.Response:
        self.probes += 1
        if not self.healthy:
            return web.Response(status=503)
        return web.json_response({"object": "list", "data": []})

    def answer(self, call: CallLog) -> Answer:
        body = call.body
        prompt = [ord(char) for message in body["messages"] for char in str(message.get("content"))]
        finish = self.sample(call, prompt, body.get("max_tokens") or 16)
        words = [f"w{token} " for token in call.token_ids]
        content = [
            {"token": word, "bytes": list(word.encode()), "logprob": logprob, "top_logprobs": []}
            for word, logprob in zip(words, call.logprobs, strict=True)
        ]
        head = {"id": f"chatcmpl-{len(self.calls)}", "created": 0, "model": body.get("model")}
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(words),
            "total_tokens": len(prompt) + len(words),
        }
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(words)},
            "finish_reason": finish,
            "logprobs": {"content": content} if body.get("logprobs") else None,
        }
        chunk = {**head, "object": "chat.completion.chunk"}
        events: list[dict[str, Any]] = [
            {
                **chunk,
                "choices": [{"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": None}],
            }
            for word in words
        ]
        events.append({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**chunk, "choices": [], "usage": usage})
        return Answer({**head, "object": "chat.completion", "choices": [choice], "usage": usage}, events)
