"""Any OpenAI-compatible endpoint: text in, text out, and the tokens' logprobs if it returns them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    EngineLacksModelError,
    EngineRefusedError,
    TextReply,
)
from nemo_gym.gateway.policy_request import TOKEN_BUDGETS, JsonText
from nemo_gym.http.connections import Connections

_ONE_TOKEN = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class OpenAIEngine(HttpEngine):
    """``endpoint.base_url`` ends in ``/v1``; ``endpoint.model`` replaces the harness's model name. With ``logprobs``,
    every chat completion asks for the logprobs of the sampled tokens."""

    health_route = models_route = "/models"

    def __init__(self, endpoint: EngineEndpoint, http: Connections, *, logprobs: bool = False) -> None:
        super().__init__(endpoint, http)
        self._logprobs = logprobs
        self._newer_budget = False
        """Whether the endpoint has refused ``max_tokens``."""

    async def probe(self) -> None:
        try:
            await super().probe()
        except EngineRefusedError:
            pass  # not every endpoint lists its models, and one that refuses to is there
        except EngineFailedError as error:
            # A server may fail to list models and still serve one: `transformers serve` does without a model cache.
            # Its health route decides then.
            if error.details.get("upstream_status") != 500 or not await self._says_it_is_well():
                raise

    async def sample_one(self) -> None:
        await self.complete("/chat/completions", _ONE_TOKEN)

    async def _says_it_is_well(self) -> bool:
        root_request_heads = self._heads_at(self.endpoint.base_url.removesuffix("/v1"))
        try:
            await self._ask("GET", "/health", request_heads=root_request_heads)
        except EngineError:
            return False
        return True

    async def complete(self, route: str, body: Mapping[str, Any]) -> TextReply:
        first = self.weights_version
        sent, budget = self._body(route, body), _budget(body)
        try:
            raw, headers = await self.post(route, sent, max_tokens=budget)
        except EngineRefusedError as error:
            if not wants_newer_budget(sent, error.body):
                raise
            self._newer_budget = True
            raw, headers = await self.post(route, with_newer_budget(sent), max_tokens=budget)
        return TextReply(raw, self.name, headers, self.span(first))

    async def _check_name(self, models: Mapping[str, Any]) -> EngineCheck:
        """Check a model's name by asking for one token: an endpoint may accept names that it does not list."""
        try:
            await self._ask("POST", "/chat/completions", orjson.dumps(self._body("/chat/completions", _ONE_TOKEN)))
        except EngineCredentialError as error:
            return EngineCheck(self.name, problem=error.message)
        except EngineLacksModelError as error:
            if b"model" in error.body.lower():
                return self.unknown_model(models)
            return EngineCheck(self.name, warning=error.message)  # it may have the Responses API alone
        except EngineError:
            # Slow, busy or broken: the rollouts' own calls have patience and retries. Other refusals are about this
            # request, which differs from the harness's.
            pass
        return EngineCheck(self.name)

    def _body(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = {**body, "stream": False}
        sent.pop("stream_options", None)
        if self.endpoint.model:
            sent["model"] = self.endpoint.model
        if route == "/chat/completions" and self._logprobs:
            sent.setdefault("logprobs", True)
        return with_newer_budget(sent) if self._newer_budget else sent


# OpenAI's newer models refuse ``max_tokens``: "… Use 'max_completion_tokens' instead." Many other endpoints know only
# ``max_tokens``, so the refusal decides. vLLM names both in a refusal of their value, which is another matter.
_NEWER_BUDGET = re.compile(rb"\buse\W{1,4}max_completion_tokens", re.IGNORECASE)


def wants_newer_budget(sent: Mapping[str, Any], refusal: bytes) -> bool:
    """Return whether an endpoint refused a body only for the name of its token limit; see `with_newer_budget`."""
    return sent.get("max_tokens") is not None and _NEWER_BUDGET.search(refusal) is not None


def with_newer_budget(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body whose ``max_tokens`` is called ``max_completion_tokens``; of both, the lower one holds."""
    renamed = dict(body)
    if (limit := renamed.pop("max_tokens", None)) is not None:
        other = renamed.get("max_completion_tokens")
        renamed["max_completion_tokens"] = limit if other is None else min(limit, other)
    return renamed


def _budget(body: Mapping[str, Any]) -> int | None:
    """Return the token limit in a body; ``None`` if there is none that holds."""
    values = [body.get(key) for key in TOKEN_BUDGETS]
    limits = [value for value in values if isinstance(value, int)]
    # An endpoint may obey any of the keys. For several answers (``n``), the limit does not hold for the whole body.
    return max(limits) if limits and body.get("n") in (None, 1) else None


@dataclass(frozen=True, slots=True)
class SampledText:
    """The tokens of one choice, as an endpoint reported them."""

    tokens: tuple[bytes, ...]
    """The bytes of each token; joined they are the sampled text."""
    logprobs: tuple[float, ...]
    token_ids: tuple[int, ...] | None = None


def _token_bytes(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    return bytes(raw) if raw is not None else str(entry.get("token", "")).encode()


# Chat completions of an endpoint, parsed only as far as needed: the data of their tokens stays unparsed.


class _ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _ChatChoice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: Any = None
    stop_reason: Any = None
    logprobs: _ChatLogprobs | None = None
    token_ids: msgspec.Raw = msgspec.Raw()


class _ChatCompletion(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: Any = None


_COMPLETIONS = msgspec.json.Decoder(_ChatCompletion)


@dataclass(frozen=True, slots=True)
class Completion:
    """The one choice of a chat completion."""

    message: Mapping[str, Any]
    finish_reason: str | None
    stop: str | None
    """The stop string that ended the answer, if the endpoint names it (vLLM's ``stop_reason``)."""
    usage: Mapping[str, Any] | None
    entries: JsonText
    """``logprobs.content``, a view of the whole body; false if the endpoint returned none."""
    token_ids: JsonText
    """The ids, as many as ``entries``; false if the endpoint returned none."""


def completion_in(body: bytes | bytearray) -> Completion:
    """Read a chat completion. Raises `ValueError` for any other body."""
    try:
        decoded = _COMPLETIONS.decode(body)
        if not decoded.choices:
            raise ValueError("'choices' is empty")
        choice = decoded.choices[0]
        for call in choice.message.get("tool_calls") or ():
            if not isinstance(call["function"]["name"], str):
                raise TypeError("a tool call has no name")
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    logprobs = choice.logprobs or _ChatLogprobs()
    return Completion(
        choice.message,
        choice.finish_reason if isinstance(choice.finish_reason, str) else None,
        choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        decoded.usage if isinstance(decoded.usage, dict) else None,
        JsonText(memoryview(logprobs.content)),
        JsonText(bytes(choice.token_ids)),  # a view would keep the whole body when memory drops the entries
    )


def tokens_in(entries: JsonText, token_ids: JsonText | None) -> SampledText | None:
    """Parse `Completion.entries` and ids; ``None`` if the endpoint returned no logprobs. Raises `ValueError` if they
    have another form than the dialect's."""
    content, ids = entries.value() if entries else None, token_ids.value() if token_ids else None
    if not isinstance(content, Sequence) or not content:
        return None
    try:
        if ids is not None and len(ids) != len(content):
            ids = None
        return SampledText(
            tuple(_token_bytes(entry) for entry in content),
            tuple(float(entry["logprob"]) for entry in content),
            tuple(ids) if ids is not None else None,
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
