"""SGLang: token ids in and out over its native ``/generate``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from nemo_gym.gateway.engines.errors import EngineFailedError, EngineLostError
from nemo_gym.gateway.engines.http import HttpEngine
from nemo_gym.gateway.engines.types import FinishReason, Generation, TokenDelta, TokenRequest, prompt_of

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_ROUTE = "/generate"


class SglangEngine(HttpEngine):
    """Streams in both of SGLang's forms: each event holding all tokens so far, or only the new ones."""

    async def generate(self, request: TokenRequest) -> Generation:
        first = self.weights_version
        answer = await self.post_json(_ROUTE, self._body(request, stream=False))
        with self.reading():
            meta = answer["meta_info"]
            pairs = _pairs(meta)
            self._check(answer.get("output_ids"), pairs, meta)
            return self._generation(pairs, meta, first)

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta | Generation, None]:
        first = self.weights_version
        pairs: list[tuple[int, float]] = []
        meta: dict[str, Any] = {}
        events = self.post_events(_ROUTE, self._body(request, stream=True))
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    with self.reading():
                        meta = event["meta_info"]
                        seen, total = _pairs(meta), int(meta["completion_tokens"])
                        if len(pairs) + len(seen) == total:
                            fresh = seen
                        elif len(seen) == total and seen[: len(pairs)] == pairs:
                            fresh = seen[len(pairs) :]
                        else:
                            raise ValueError(f"{len(seen)} logprobs after {len(pairs)} of {total} tokens")
                    pairs += fresh
                    if fresh:
                        yield TokenDelta(tuple(token for token, _ in fresh), tuple(logprob for _, logprob in fresh))
        except EngineLostError:
            # All tokens are there once the engine has said why it stopped.
            if not meta.get("finish_reason"):
                raise
        with self.reading():
            whole = self._generation(pairs, meta, first)
        yield whole

    def _body(self, request: TokenRequest, *, stream: bool) -> dict[str, Any]:
        sampling = {
            **request.sampling.given(),
            "max_new_tokens": request.sampling.max_tokens,
            # The trajectory keeps what was sampled, end-of-sequence token and matched stop string included.
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if request.sampling.seed is not None:
            sampling["sampling_seed"] = request.sampling.seed
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": prompt_of(request),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # of sampled tokens only
            "stream": stream,
        }
        if request.image_data:
            body["image_data"] = list(request.image_data)
        return body

    def _generation(self, pairs: list[tuple[int, float]], meta: dict[str, Any], first: str | None) -> Generation:
        finish = meta["finish_reason"]
        kind = finish["type"]
        if kind == "abort" and finish.get("status_code"):
            raise EngineFailedError(
                f"engine '{self.name}' aborted the request: {str(finish.get('message'))[:200]}",
                retryable=True,
                engine=self.name,
                upstream_status=finish["status_code"],
            )
        if (version := meta.get("weight_version")) is not None:
            self.weights_version = str(version)
        cached = meta.get("cached_tokens")
        return Generation(
            tuple(token for token, _ in pairs),
            tuple(logprob for _, logprob in pairs),
            _FINISH[kind],
            self.name,
            finish.get("matched"),
            self.span(first),
            int(cached) if cached is not None else None,
        )

    def _check(self, output_ids: list[int] | None, pairs: list[tuple[int, float]], meta: dict[str, Any]) -> None:
        if output_ids is not None and output_ids != [token for token, _ in pairs]:
            raise ValueError(f"{len(output_ids)} output ids that are not the {len(pairs)} ids of its logprobs")
        if int(meta["completion_tokens"]) != len(pairs):
            raise ValueError(f"{len(pairs)} logprobs for {meta['completion_tokens']} tokens")


def _pairs(meta: dict[str, Any]) -> list[tuple[int, float]]:
    """Token id and logprob of each sampled token; SGLang lists them the other way round, with the text third."""
    return [(int(entry[1]), float(entry[0])) for entry in meta.get("output_token_logprobs") or ()]
