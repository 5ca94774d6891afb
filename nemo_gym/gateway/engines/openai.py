"""Any OpenAI-compatible endpoint: text in, text out, and the tokens' logprobs where it offers them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from nemo_gym.gateway.engines.http import EngineEndpoint, HttpEngine
from nemo_gym.gateway.engines.types import (
    EngineCheck,
    EngineCredentialError,
    EngineError,
    EngineFailedError,
    EngineRefusedError,
    TextReply,
)
from nemo_gym.gateway.policy_request import JsonText
from nemo_gym.http.connections import Connections


class OpenAIEngine(HttpEngine):
    """``endpoint.base_url`` ends in ``/v1``; ``endpoint.model`` replaces whatever a harness asks for. With
    ``logprobs`` every chat completion asks for those of the sampled tokens."""

    health_route = models_route = "/models"

    def __init__(self, endpoint: EngineEndpoint, http: Connections, *, logprobs: bool = False) -> None:
        super().__init__(endpoint, http)
        self._logprobs = logprobs

    async def probe(self) -> None:
        try:
            await super().probe()
        except EngineFailedError as error:
            # A server may fail at listing models and serve one all the same: `transformers serve` does where there is
            # no cache of models to list. Whether it is well is then what its own health route says.
            if error.details.get("upstream_status") != 500 or not await self._says_it_is_well():
                raise

    async def _says_it_is_well(self) -> bool:
        heads = self._heads_at(self.endpoint.base_url.removesuffix("/v1"))
        try:
            await self._whole("GET", "/health", b"", self._probe_patience, self.endpoint.max_answer_bytes, heads)
        except EngineError:
            return False
        return True

    async def complete(self, route: str, body: Mapping[str, Any]) -> TextReply:
        first = self.weights_version
        raw, headers = await self.post(route, self._body(route, body, stream=False), max_tokens=_budget(body))
        return TextReply(raw, self.name, headers, self.span(first))

    def stream_text(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        return self.post_stream(
            route, self._body(route, body, stream=True), at_most_bytes=self._answer_bytes(0, _budget(body))
        )

    async def _check_name(self, models: Mapping[str, Any]) -> EngineCheck:
        """By asking for one token: an endpoint may take names that it does not list."""
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        try:
            data = orjson.dumps(self._body("/chat/completions", asked, stream=False))
            await self._whole("POST", "/chat/completions", data, self._probe_patience, self.endpoint.max_answer_bytes)
        except EngineCredentialError as error:
            return EngineCheck(self.name, problem=error.message)
        except EngineRefusedError as error:
            # Other refusals speak of this request, which is not the harness's.
            if error.details.get("upstream_status") == 404 and b"model" in error.body.lower():
                return self.unknown_model(models)
        except EngineError:
            pass  # slow, busy or broken: the rollouts' own calls have patience and retries
        return EngineCheck(self.name)

    def _body(self, route: str, body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
        sent = {**body, "stream": stream}
        if self.endpoint.model:
            sent["model"] = self.endpoint.model
        chat = route == "/chat/completions"
        if chat and self._logprobs:
            sent.setdefault("logprobs", True)
        if not stream:
            sent.pop("stream_options", None)
        elif chat:
            # The session counts tokens, whether the harness asked for them or not.
            sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return sent


def _budget(body: Mapping[str, Any]) -> int | None:
    """Tokens that a body asks for at most."""
    asked = [body.get(key) for key in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    given = [value for value in asked if isinstance(value, int)]
    # An endpoint may obey either of them, and may be asked for several answers.
    return max(given) if given and body.get("n") in (None, 1) else None


@dataclass(frozen=True, slots=True)
class SampledText:
    """What an endpoint told about the tokens of one choice."""

    tokens: tuple[bytes, ...]
    """The bytes of each token; joined they are the sampled text."""
    logprobs: tuple[float, ...]
    token_ids: tuple[int, ...] | None = None


def sampled_text(choice: Mapping[str, Any]) -> SampledText | None:
    """The sampled tokens of a chat completion's choice, or ``None`` where the endpoint offers no logprobs."""
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, Sequence) or not content:
        return None
    ids = choice.get("token_ids")
    if ids is not None and len(ids) != len(content):
        ids = None
    return SampledText(
        tuple(_token_bytes(entry) for entry in content),
        tuple(float(entry["logprob"]) for entry in content),
        tuple(ids) if ids is not None else None,
    )


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    return bytes(raw) if raw is not None else str(entry.get("token", "")).encode()


# Chat completions of an endpoint, read only as far as somebody must: what it told about tokens stays as it came.


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: Any = None
    logprobs: _Logprobs | None = None
    token_ids: msgspec.Raw = msgspec.Raw()


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


_COMPLETIONS = msgspec.json.Decoder(_Completion)


@dataclass(frozen=True, slots=True)
class Completion:
    """The one choice of a chat completion."""

    message: Mapping[str, Any]
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    entries: JsonText
    """``logprobs.content``, a view of the whole body; false where the endpoint offers none."""
    token_ids: JsonText
    """As many as ``entries``, where the endpoint tells them."""


def completion_in(body: bytes | bytearray) -> Completion:
    """Raises `ValueError` for what is no completion."""
    try:
        found = _COMPLETIONS.decode(body)
        if not found.choices:
            raise ValueError("'choices' is empty")
        choice = found.choices[0]
        for call in choice.message.get("tool_calls") or ():
            if not isinstance(call["function"]["name"], str):
                raise TypeError("a tool call has no name")
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    logprobs = choice.logprobs or _Logprobs()
    return Completion(
        choice.message,
        choice.finish_reason if isinstance(choice.finish_reason, str) else None,
        found.usage if isinstance(found.usage, dict) else None,
        JsonText(memoryview(logprobs.content)),
        JsonText(memoryview(choice.token_ids)),
    )


def tokens_in(entries: JsonText, token_ids: JsonText | None) -> SampledText | None:
    """What `Completion.entries` and its ids say. Raises `ValueError` where they are not what the dialect makes of
    them."""
    choice = {
        "logprobs": {"content": entries.value()},
        "token_ids": token_ids.value() if token_ids else None,
    }
    try:
        return sampled_text(choice)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
