"""vLLM: token ids in and out over ``/v1/completions``, or over its token-only route if the server has it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import msgspec
import orjson

from nemo_gym.gateway.engines.http import EngineEndpoint, HttpEngine, without_echo
from nemo_gym.gateway.engines.types import (
    EngineCheck,
    EngineCredentialError,
    EngineError,
    EngineLostError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Sampling,
    TokenDelta,
    TokenRequest,
    one_token,
    prompt_of,
)
from nemo_gym.gateway.policy_request import packed, tokens_counted
from nemo_gym.http.connections import Connections, Reply

# Fast reading of a long vLLM completion: only its ids and logprobs are parsed.
#
# Most of such a body is not needed: the texts of all tokens, their offsets, and each logprob once more under its
# token's text. All of that is removed before the body is parsed:
#
#     "logprobs":{"text_offset":[…],"token_logprobs":[…],"tokens":[…],"top_logprobs":[…]},"finish_reason":…
#                └─ left out ──────┘                    └─ left out ────────────────────┘
#
# For every body that the full decoder accepts, this finds the same values. A quote after a comma begins a string,
# since a quote inside a string would be escaped; so a name found there is a key. An array without strings and braces
# ends at its first bracket. A mark replaces the removed text. The result is valid JSON only if that text began and
# ended outside strings and at the same depth, and the mark is the value of the choice's ``logprobs`` only if exactly
# these were removed. The removed text lies in one choice: every choice has a ``finish_reason``, and the one after the
# text is the first of the body. No other needed value was in the text, because all of them are found outside it.
# (Names are assumed to be written without escapes, and to appear only once in an object.)
#
# Any other body is left to the full decoder.

WORTH_IT_BYTES = 64 << 10
_LOGPROBS, _OFFSETS, _SAMPLED = b',"logprobs":{', b'"text_offset":[', b'"token_logprobs":['
_COMMA, _FINISH_KEY, _IDS_KEY = ord(","), b'"finish_reason"', b',"token_ids":['
_RARE = b"_"
_RARE_PLACE = _FINISH_KEY.index(_RARE)
_RARE_AT_MOST = 1000
_MARK = f"left-out-{uuid4().hex}"  # new in each process and never sent to anybody
_QUOTED_MARK = f'"{_MARK}"'.encode()
_NUMBERS = msgspec.json.Decoder(list[float])


class _LongChoice(msgspec.Struct):
    finish_reason: str
    stop_reason: str | int | None
    logprobs: str
    token_ids: str
    prompt_token_ids: msgspec.Raw


class _ReducedCompletion(msgspec.Struct):
    choices: tuple[_LongChoice]
    usage: dict[str, Any] | None = None


_REDUCED_COMPLETIONS = msgspec.json.Decoder(_ReducedCompletion)


@dataclass(frozen=True, slots=True)
class LongCompletion:
    """A completion with one choice; the fields are vLLM's."""

    finish_reason: str
    stop_reason: str | int | None
    token_ids: array[int]
    """int32."""
    ids_json: bytes
    """The same as a JSON array without spaces."""
    logprobs: array[float]
    """float32."""
    prompt_token_ids: msgspec.Raw
    usage: dict[str, Any] | None


def long_completion(raw: bytes | bytearray) -> LongCompletion | None:
    """Read a long completion; ``None`` for a short body, or one that the full decoder has to read."""
    if len(raw) < WORTH_IT_BYTES or (start := raw.find(_LOGPROBS)) < 0:
        return None
    at = start + len(_LOGPROBS)
    if raw.startswith(_OFFSETS, at):
        end = raw.find(b"]", at)
        if end < 0 or raw.find(b"{", at, end) >= 0 or raw[end + 1 : end + 2] != b",":
            return None
        at = end + 2
    if not raw.startswith(_SAMPLED, at):
        return None
    at += len(_SAMPLED) - 1
    end = raw.find(b"]", at) + 1
    finish = _finish_in(raw, end) - 1
    ids = raw.find(_IDS_KEY, finish) + len(_IDS_KEY) - 1
    ids_end = raw.find(b"]", ids) + 1
    if not (0 < end < finish < ids < ids_end) or raw[finish] != _COMMA or raw.find(_FINISH_KEY, 0, start) >= 0:
        return None
    with memoryview(raw) as view:
        before, between, behind = view[: start + len(_LOGPROBS) - 1], view[finish:ids], view[ids_end:]
        try:
            reduced = _REDUCED_COMPLETIONS.decode(b"".join((before, _QUOTED_MARK, between, _QUOTED_MARK, behind)))
            logprobs = packed("f", _NUMBERS.decode(view[at:end]))
        except (msgspec.DecodeError, RecursionError, OverflowError):
            return None
    (choice,) = reduced.choices
    ids_json = bytes(raw[ids:ids_end])
    token_ids = _ids_in(ids_json)
    if token_ids is None or choice.logprobs != _MARK or choice.token_ids != _MARK:
        return None
    return LongCompletion(
        choice.finish_reason,
        choice.stop_reason,
        token_ids,
        ids_json,
        logprobs,
        choice.prompt_token_ids,
        reduced.usage,
    )


def _finish_in(raw: bytes | bytearray, start: int) -> int:
    """Return ``raw.find(_FINISH_KEY, start)``; searching for one rare letter takes a tenth of the time."""
    at = start
    for _ in range(_RARE_AT_MOST):
        if (at := raw.find(_RARE, at)) < 0:
            return -1
        begin = at - _RARE_PLACE
        if begin >= start and raw.startswith(_FINISH_KEY, begin):
            return begin
        at += 1
    return raw.find(_FINISH_KEY, max(start, at - _RARE_PLACE))


def _ids_in(text: bytes) -> array[int] | None:
    """Return the ids of a JSON array without spaces; ``None`` for any other text."""
    import numpy as np

    try:
        ids = np.fromstring(text[1:-1], dtype=np.int32, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    # numpy accepts much that is no JSON, and misreads large numbers: the result must serialize to the same text.
    return array("i", ids.tobytes()) if orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY) == text else None


# The engine.

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
VllmRoute = Literal["completions", "generate"]
STREAM_INTERVAL = 32
"""Tokens per event. Events cost both ends time; tokens that a broken stream loses are sampled again."""


class _Entry(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    token_logprobs: tuple[float, ...] | None = None
    content: tuple[_Entry, ...] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    told: _Logprobs | None = msgspec.field(default=None, name="logprobs")
    stop_reason: str | int | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()

    @property
    def logprobs(self) -> tuple[float, ...]:
        if self.told is None:
            return ()
        if self.told.token_logprobs is not None:
            return self.told.token_logprobs
        return tuple(entry.logprob for entry in self.told.content or ())


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: dict[str, Any] | None = None


_COMPLETIONS = msgspec.json.Decoder(_Completion)
"""Reads the needed parts of a whole completion, and skips its texts and alternatives."""


class VllmEngine(HttpEngine):
    """Route ``completions`` posts to ``/v1/completions`` with ``return_token_ids``; ``generate`` posts to
    ``/inference/v1/generate``, which vLLM 0.32 serves with ``--enable-scale-out``. Not every version streams there, so
    the answer is one delta. ``stream_interval``: tokens per event to ask for, after the first event; versions that do
    not know it send one. Servers started with ``--enable-prompt-tokens-details`` report cached tokens."""

    tokenize_route = "/tokenize"

    def __init__(
        self,
        endpoint: EngineEndpoint,
        http: Connections,
        *,
        route: VllmRoute = "completions",
        stream_interval: int = STREAM_INTERVAL,
    ) -> None:
        super().__init__(endpoint, http)
        self._route: VllmRoute = route
        self._stream_interval = stream_interval

    async def _check_name(self, models: Mapping[str, Any]) -> EngineCheck:
        # vLLM serves only the names that it lists.
        return self.unknown_model(models) if models else EngineCheck(self.name)

    async def generate(self, request: TokenRequest) -> Generation:
        first = self.weights_version
        if self._route == "completions":
            route, body = "/v1/completions", self._completions_body(request, stream=False)
        else:
            route, body = "/inference/v1/generate", self._generate_body(request)
        raw, _ = await self.post(route, body, max_tokens=request.sampling.max_tokens)
        with self.reading():
            prompt_json = request.prompt_json or b""
            # Skipping the echoed ids costs as much as parsing them; removing them costs a copy of the other bytes.
            raw = without_echo(raw, prompt_json) if 2 * len(prompt_json) > len(raw) else raw
            if (long := long_completion(raw)) is not None:
                return self._generation(request, long, long.usage, first)
            completion = _COMPLETIONS.decode(raw)
            if len(completion.choices) != 1:
                raise ValueError(f"{len(completion.choices)} choices instead of one")
            return self._generation(request, completion.choices[0], completion.usage, first)

    def _generation(
        self, request: TokenRequest, choice: _Choice | LongCompletion, usage: dict[str, Any] | None, first: str | None
    ) -> Generation:
        prompt = bytes(choice.prompt_token_ids)
        if prompt and prompt != request.prompt_json:
            self._check_prompt(request, {"prompt_token_ids": orjson.loads(prompt)})
        token_ids, logprobs = choice.token_ids or (), choice.logprobs
        if len(token_ids) != len(logprobs):
            raise _unequal(len(token_ids), len(logprobs))
        self.check_tokens(len(token_ids), request.sampling.max_tokens)
        return Generation(
            token_ids,
            logprobs,
            _FINISH[choice.finish_reason],
            self.name,
            choice.stop_reason,
            self.span(first),
            _cached(usage or {}),
            ids_json=choice.ids_json if isinstance(choice, LongCompletion) else None,
        )

    async def sample_one(self) -> None:
        await self.generate(one_token())

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta | Generation, None]:
        if self._route == "generate":
            whole = await self.generate(request)
            yield TokenDelta(whole.token_ids, whole.logprobs)
            yield whole
            return
        first = self.weights_version
        token_ids: list[int] = []
        logprobs: list[float] = []
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        cached: int | None = None
        events = self.post_events(
            "/v1/completions",
            self._completions_body(request, stream=True),
            max_tokens=request.sampling.max_tokens,
            echoed_prompt=request.prompt_json,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    with self.reading():
                        cached = _cached(event["usage"]) if event.get("usage") else cached
                        if not event["choices"]:
                            continue
                        choice = _only_choice(event)
                        self._check_prompt(request, choice)
                        delta = TokenDelta(tuple(choice.get("token_ids") or ()), _logprobs_in(choice))
                        if len(delta.token_ids) != len(delta.logprobs):
                            raise _unequal(len(delta.token_ids), len(delta.logprobs))
                        if choice.get("finish_reason") is not None:
                            finish, stop_reason = _FINISH[choice["finish_reason"]], choice.get("stop_reason")
                    token_ids += delta.token_ids
                    logprobs += delta.logprobs
                    self.check_tokens(len(token_ids), request.sampling.max_tokens)
                    if delta.token_ids:
                        yield delta
        except EngineLostError:
            # After the finish reason no tokens follow; only the usage is missing.
            if finish is None:
                raise
        if finish is None:
            raise self.malformed("a complete stream without a finish_reason")
        yield Generation(tuple(token_ids), tuple(logprobs), finish, self.name, stop_reason, self.span(first), cached)

    def _completions_body(self, request: TokenRequest, *, stream: bool) -> dict[str, Any]:
        body = {
            **self._common(request),
            **_parameters(request.sampling),
            "prompt": prompt_of(request),
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        if stream:
            body |= {
                "stream": True,
                "stream_options": {"include_usage": True},
                "stream_interval": self._stream_interval,
            }
        return body

    def _generate_body(self, request: TokenRequest) -> dict[str, Any]:
        sampling = _parameters(request.sampling)
        return {**self._common(request), "token_ids": prompt_of(request), "sampling_params": sampling}

    def _common(self, request: TokenRequest) -> dict[str, Any]:
        """Return the fields that the bodies of both routes begin with."""
        if request.image_data:
            raise EngineRefusedError(
                f"engine '{self.name}' (vLLM) takes no images beside token ids; use an SGLang engine", engine=self.name
            )
        model = {"model": self.endpoint.model} if self.endpoint.model else {}
        return {**model, "request_id": request.request_id}

    def _status_error(self, reply: Reply, body: bytes, *, probe: bool = False) -> EngineError:
        if reply.status == 403 and self._route == "generate" and b"--enable-scale-out" in body:
            return EngineCredentialError(
                f"engine '{self.name}' does not serve /inference/v1/generate; start vLLM with --enable-scale-out, or"
                " set the engine's 'route' to completions",
                engine=self.name,
                upstream_status=reply.status,
            )
        return super()._status_error(reply, body, probe=probe)

    def _check_prompt(self, request: TokenRequest, choice: Mapping[str, Any]) -> None:
        """Raise if the engine read another prompt than it was sent: it sampled from another distribution then."""
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != list(request.prompt_ids):
            raise self.malformed(
                f"it returned {len(echoed)} prompt tokens that differ from the {len(request.prompt_ids)} sent"
            )


def _only_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer["choices"]
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices instead of one")
    choice: dict[str, Any] = choices[0]
    return choice


def _logprobs_in(choice: Mapping[str, Any]) -> tuple[float, ...]:
    told = choice.get("logprobs") or {}
    if (logprobs := told.get("token_logprobs")) is None:
        logprobs = [entry["logprob"] for entry in told.get("content") or ()]
    return tuple(logprobs)


def _unequal(ids: int, logprobs: int) -> ValueError:
    return ValueError(f"{ids} token ids with {logprobs} logprobs (does this vLLM know return_token_ids?)")


def _cached(usage: dict[str, Any]) -> int | None:
    value = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return tokens_counted(value) if value is not None else None


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's sampling parameters, for a completion's body or for ``sampling_params``."""
    parameters = sampling.given()
    parameters["max_tokens"] = sampling.max_tokens
    parameters["logprobs"] = 0  # of the sampled token, without alternatives
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    return parameters
