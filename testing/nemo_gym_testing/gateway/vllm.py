"""A fake vLLM server: its completions route with token ids, and its token-only route."""

from __future__ import annotations

from typing import Any

from nemo_gym_testing.gateway.asked import Asked
from nemo_gym_testing.gateway.engine import CallLog, FakeTokenEngine


class FakeVllmEngine(FakeTokenEngine):
    ROUTES = ("/v1/completions", "/inference/v1/generate")

    def asked(self, call: CallLog) -> Asked:
        body = call.body
        if _token_only(call):
            given = body["sampling_params"]
            return Asked.read(given, body["token_ids"], given["max_tokens"], given.get("seed"), body["request_id"])
        return Asked.read(
            body,
            body["prompt"],
            body.get("max_tokens", 16),
            body.get("seed"),
            body.get("request_id"),
            bool(body.get("stream")),
        )

    def whole(self, call: CallLog, asked: Asked) -> dict[str, Any]:
        if _token_only(call):
            return self._generated(call)
        choice = self._choice(call, 0, len(call.token_ids), last=True)
        if call.body.get("return_token_ids"):
            choice["prompt_token_ids"] = asked.prompt_ids
        return {**self._head(call), "choices": [choice], "usage": self._usage(call, asked)}

    def event(self, call: CallLog, asked: Asked, start: int, end: int, *, last: bool) -> dict[str, Any]:
        choice = self._choice(call, start, end, last=last)
        if start == 0 and end and call.body.get("return_token_ids"):
            choice["prompt_token_ids"] = asked.prompt_ids
        return {**self._head(call), "choices": [choice]}

    def closing(self, call: CallLog, asked: Asked) -> list[dict[str, Any]]:
        if not (call.body.get("stream_options") or {}).get("include_usage"):
            return []
        return [{**self._head(call), "choices": [], "usage": self._usage(call, asked)}]

    def _head(self, call: CallLog) -> dict[str, Any]:
        body = call.body
        return {"id": body.get("request_id", "cmpl"), "object": "text_completion", "model": body.get("model")}

    def _choice(self, call: CallLog, start: int, end: int, *, last: bool) -> dict[str, Any]:
        ids, logprobs = call.token_ids[start:end], call.logprobs[start:end]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": call.finish_reason if last else None,
            "stop_reason": call.stop_reason if last else None,
        }
        if call.body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": list(logprobs), "tokens": [f"token_id:{i}" for i in ids]}
        if call.body.get("return_token_ids"):
            choice["token_ids"] = list(ids)
        return choice

    def _usage(self, call: CallLog, asked: Asked) -> dict[str, Any]:
        prompt, answer = len(asked.prompt_ids), len(call.token_ids)
        cached = prompt // 2 if call.cached_tokens is None else call.cached_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _generated(self, call: CallLog) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(call.token_ids, call.logprobs, strict=True)
        ]
        asked_logprobs = call.body["sampling_params"].get("logprobs") is not None
        choice = {
            "index": 0,
            "token_ids": list(call.token_ids),
            "finish_reason": call.finish_reason,
            "logprobs": {"content": content} if asked_logprobs else None,
        }
        return {"request_id": call.body["request_id"], "choices": [choice], "prompt_logprobs": None}


def _token_only(call: CallLog) -> bool:
    return call.path.endswith("generate")
