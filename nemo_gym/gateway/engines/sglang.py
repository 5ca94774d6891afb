"""SGLang: token ids in and out over its native ``/generate``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec

from nemo_gym.gateway.engines.http import EngineEndpoint, HttpEngine
from nemo_gym.gateway.engines.types import (
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Segment,
    TokenDelta,
    TokenRequest,
    WeightsSpan,
    one_token,
    prompt_of,
)
from nemo_gym.gateway.policy_request import tokens_counted
from nemo_gym.http.connections import Connections, Reply

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_ROUTE = "/generate"
STREAM_INTERVAL = 128
"""Tokens per event. By default each of SGLang's events repeats all tokens before it, so that one event per token would
cost gigabytes for a long answer. Tokens that a broken stream loses are sampled again."""


_TOO_LONG = re.compile(r"context length of (?P<limit>\d{1,12}) tokens.*?: (?P<prompt>\d{1,12}) tokens from the input")
_UNNAMED = "default"
"""The version that a server reports if nobody named one."""


class _Token(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token_id: int  # the token's text may follow


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: dict[str, Any]
    output_token_logprobs: list[_Token] | None = None
    cached_tokens: int | None = None
    weight_version: Any = None
    weight_versions: list[dict[str, Any]] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)
"""Reads the needed parts of a whole answer, and skips its texts."""


class SglangEngine(HttpEngine):
    """Reads both forms of SGLang's streams: each event has all tokens so far, or only the new ones (a server started
    with ``--incremental-streaming-output``, which costs less). ``stream_interval``: tokens per event to ask for, after
    the first event."""

    tokenize_route = "/tokenize"

    def __init__(
        self,
        endpoint: EngineEndpoint,
        http: Connections,
        *,
        stream_interval: int = STREAM_INTERVAL,
        weights_version: str | None = None,
    ) -> None:
        """``weights_version``: the version to assume until the server or the trainer says another."""
        super().__init__(endpoint, http)
        self._stream_interval = stream_interval
        self.weights_version = self._assumed_version = weights_version

    async def generate(self, request: TokenRequest) -> Generation:
        try:
            return await self._generate(request)
        except EngineRefusedError as error:
            return await self._generate(_fitting(request, error))

    async def sample_one(self) -> None:
        await self.generate(one_token())

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta | Generation, None]:
        try:
            async with contextlib.aclosing(self._stream(request)) as items:
                async for item in items:
                    yield item
            return
        except EngineRefusedError as error:  # before the first token
            request = _fitting(request, error)
        async with contextlib.aclosing(self._stream(request)) as items:
            async for item in items:
                yield item

    async def _generate(self, request: TokenRequest) -> Generation:
        first = self.weights_version
        raw, _ = await self.post(_ROUTE, self._body(request, stream=False), max_tokens=request.sampling.max_tokens)
        with self.reading():
            answer = _ANSWERS.decode(raw)
            pairs = [(token.token_id, token.logprob) for token in answer.meta_info.output_token_logprobs or ()]
            meta = msgspec.structs.asdict(answer.meta_info)
            self._check(answer.output_ids, pairs, meta)
            self.check_tokens(len(pairs), request.sampling.max_tokens)
            return self._generation(pairs, meta, first)

    async def _stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta | Generation, None]:
        first = self.weights_version
        pairs: list[tuple[int, float]] = []
        meta: dict[str, Any] = {}
        budget = request.sampling.max_tokens
        # Each event may repeat all tokens before it.
        events = self.post_events(
            _ROUTE, self._body(request, stream=True), max_tokens=budget, answers=budget // self._stream_interval + 2
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    with self.reading():
                        meta = event["meta_info"]
                        if not pairs and self._is_updated(meta):
                            first = self.weights_version  # newer than the version of the last answer
                        event_pairs, total = _pairs(meta), int(meta["completion_tokens"])
                        if len(pairs) + len(event_pairs) == total:
                            fresh = event_pairs
                        elif len(event_pairs) == total and event_pairs[: len(pairs)] == pairs:
                            fresh = event_pairs[len(pairs) :]
                        else:
                            raise ValueError(f"{len(event_pairs)} logprobs after {len(pairs)} of {total} tokens")
                    pairs += fresh
                    self.check_tokens(len(pairs), budget)
                    if fresh:
                        yield TokenDelta(tuple(token for token, _ in fresh), tuple(logprob for _, logprob in fresh))
        except EngineLostError:
            # After the finish reason no tokens follow.
            if not meta.get("finish_reason"):
                raise
        with self.reading():
            whole = self._generation(pairs, meta, first)
        yield whole

    def _body(self, request: TokenRequest, *, stream: bool) -> dict[str, Any]:
        sampling = {
            **request.sampling.given(),
            "max_new_tokens": request.sampling.max_tokens,
            # The trajectory keeps all sampled tokens, including an end-of-sequence token or a matched stop string.
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if request.sampling.seed is not None:
            sampling["sampling_seed"] = request.sampling.seed
        if stream:
            sampling["stream_interval"] = self._stream_interval
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
            raise self._aborted(int(finish["status_code"]), str(finish.get("message"))[:200])
        self._is_updated(meta)
        weights, segments = self.span(first), self._segments(meta.get("weight_versions"))
        if len(segments) > 1 or (segments and segments[0].weights.last == self.weights_version):
            weights = WeightsSpan(segments[0].weights.first, segments[-1].weights.last)
        cached = meta.get("cached_tokens")
        return Generation(
            tuple(token for token, _ in pairs),
            tuple(logprob for _, logprob in pairs),
            _FINISH[kind],
            self.name,
            finish.get("matched"),
            weights,
            tokens_counted(cached) if cached is not None else None,
            segments if len(segments) > 1 else (),
        )

    def _is_updated(self, meta: dict[str, Any]) -> bool:
        """Adopt the version that the server reports, if it is news, and return whether it is. A server reports its
        version with every answer, but an update changes it only if it names one; the trainer's word is newer then."""
        if (report := meta.get("weight_version")) is None:
            return False
        version, before = str(report), self.reported_version
        self.reported_version = version
        told_by_trainer = self.weights_version not in (None, self._assumed_version)
        known = self.weights_version is not None
        # Only a restart takes a name away that the server has reported.
        if version == before or (before is None and (told_by_trainer or (known and version == _UNNAMED))):
            return False
        self.weights_version = version
        return True

    def _segments(self, spans: list[dict[str, Any]] | None) -> tuple[Segment, ...]:
        """Return which weights sampled which tokens, if the server reports it."""
        return tuple(
            Segment(
                self.name, tokens_counted(span["end"]) - tokens_counted(span["start"]), WeightsSpan(version, version)
            )
            for span in spans or ()
            if (version := str(span["version"]))
        )

    def _aborted(self, status: int, message: str) -> EngineError:
        """Return the error for a request that the scheduler aborted. The HTTP status of a stream is 200 even then."""
        details: dict[str, Any] = {"engine": self.name, "upstream_status": status}
        if status == 503:
            return self._overloaded(message)
        if 400 <= status < 500:
            return EngineRefusedError(f"engine '{self.name}' refused the request ({status}): {message}", **details)
        return EngineFailedError(f"engine '{self.name}' aborted the request: {message}", retryable=True, **details)

    def _overloaded(self, message: str) -> EngineRateLimitedError:
        # The queue is full, or the request waited there for too long. The engine is healthy: if these counted as
        # failures, one loaded engine after the other would go out of service.
        return EngineRateLimitedError(
            f"engine '{self.name}' asks to wait: {message}", engine=self.name, upstream_status=503
        )

    def _status_error(self, reply: Reply, body: bytes, *, probe: bool = False) -> EngineError:
        if reply.status == 503 and not probe:
            return self._overloaded(self._quoted(body))
        return super()._status_error(reply, body, probe=probe)

    def _check(self, output_ids: list[int] | None, pairs: list[tuple[int, float]], meta: dict[str, Any]) -> None:
        if output_ids is not None and output_ids != [token for token, _ in pairs]:
            raise ValueError(f"{len(output_ids)} output ids that are not the {len(pairs)} ids of its logprobs")
        if int(meta["completion_tokens"]) != len(pairs):
            raise ValueError(f"{len(pairs)} logprobs for {meta['completion_tokens']} tokens")


def _fitting(request: TokenRequest, error: EngineRefusedError) -> TokenRequest:
    """Return the request with the room that the server has for the answer. It counts more tokens in the prompt: an
    image is one of ours and many of its own, and speculative decoding reserves some. Raises ``error`` for any other
    refusal."""
    if (match := _TOO_LONG.search(error.message)) is None:
        raise error
    room = int(match["limit"]) - int(match["prompt"])
    if not 1 <= room < request.sampling.max_tokens:
        raise error
    return replace(request, sampling=replace(request.sampling, max_tokens=room))


def _pairs(meta: dict[str, Any]) -> list[tuple[int, float]]:
    """Return token id and logprob of each sampled token; SGLang's entries are logprob, token id and text."""
    return [(int(entry[1]), float(entry[0])) for entry in meta.get("output_token_logprobs") or ()]
