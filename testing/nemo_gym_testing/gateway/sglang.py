"""A fake SGLang server: its native route, streaming cumulatively or incrementally."""

from __future__ import annotations

from typing import Any

from nemo_gym_testing.gateway.asked import Asked
from nemo_gym_testing.gateway.engine import CallLog, FakeTokenEngine
from nemo_gym_testing.gateway.sampler import Sampler


class FakeSglangEngine(FakeTokenEngine):
    ROUTES = ("/generate",)

    def __init__(
        self,
        sampler: Sampler | None = None,
        *,
        weights_version: str = "w0",
        port: int = 0,
        incremental: bool = False,
    ) -> None:
        super().__init__(sampler, weights_version=weights_version, port=port)
        self.incremental = incremental

    def asked(self, call: CallLog) -> Asked:
        body, given = call.body, call.body["sampling_params"]
        tokens = given.get("max_new_tokens", 16)
        seed = given.get("sampling_seed")
        return Asked.read(given, body["input_ids"], tokens, seed, body.get("rid"), bool(body.get("stream")))

    def whole(self, call: CallLog, asked: Asked) -> dict[str, Any]:
        return self._part(call, asked, 0, len(call.token_ids), last=True)

    def event(self, call: CallLog, asked: Asked, start: int, end: int, *, last: bool) -> dict[str, Any]:
        return self._part(call, asked, start if self.incremental else 0, end, last=last)

    def _part(self, call: CallLog, asked: Asked, start: int, end: int, *, last: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": call.body.get("rid"),
            "finish_reason": self._finish(call) if last else None,
            "prompt_tokens": len(asked.prompt_ids),
            "completion_tokens": end,
            "cached_tokens": call.cached_tokens or 0,
            "weight_version": self.weights_version,
        }
        if call.body.get("return_logprob"):
            meta["output_token_logprobs"] = [[call.logprobs[i], call.token_ids[i], None] for i in range(start, end)]
        return {"text": "", "output_ids": list(call.token_ids[start:end]), "meta_info": meta}

    def _finish(self, call: CallLog) -> dict[str, Any]:
        finish: dict[str, Any] = {"type": call.finish_reason}
        if call.finish_reason == "stop":
            finish["matched"] = call.token_ids[-1] if call.stop_reason is None else call.stop_reason
        elif call.finish_reason == "length":
            finish["length"] = len(call.token_ids)
        return finish
